"""Parts of `runtime.checkpoint`: boxes of tensors, what a rank keeps of the state, and files."""

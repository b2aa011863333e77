"""What training keeps: weights and moments that any layout can read.

`checkpoint` saves and loads; `folder` is what others must know of a checkpoint without opening it;
`averaging` keeps averages of weights. `boxes` (parts of tensors), `owning` (what a rank keeps of
the state) and `storage` (files) are its parts.
"""

"""Outputs of a checkpoint: Hugging Face folders (`export`), and samples (`sampling`)."""

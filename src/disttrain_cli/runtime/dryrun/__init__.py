"""Dry run on fake CUDA devices: work and memory of every stage of a plan, without a GPU."""

"""Checkpoints of weights and optimizer moments, readable by any layout.

`checkpoint` saves and loads; `folder` reads a checkpoint's description without opening its tensors;
`averaging` maintains averages of weights. `boxes` (parts of tensors), `owning` (the part of the
state that a rank stores) and `storage` (files) are the parts that `checkpoint` is built from.
"""

"""Dumps of PyTorch's flight recorder: the operations that each rank of a hanging job has issued.

Start at `verdict`: the cause. `dumps` reads the files (pickles with a reader that knows no class,
or JSON), `matching` compares the operations of a group's ranks, `waiting` determines which rank
waits for which.
"""

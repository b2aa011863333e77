"""Dumps of PyTorch's flight recorder: what every rank of a job that hangs has asked its process
groups for.

Start at `verdict`: the cause. `dumps` reads the files (pickles with a reader that knows no class,
or JSON), `matching` sets what ranks did in each group side by side, `waiting` says who waits for
whom.
"""

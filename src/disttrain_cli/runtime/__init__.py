"""Running a plan: ranks, units and process groups, the broker, the DeepSpeed engine, checkpoints,
traces.

Start at `train.py` (the launcher's side) and `worker.py` (one rank's side), which enters the loop
of `steps.py`. `units/` says who is who and moves tensors between units; `engine/` computes one
stage and drives DeepSpeed; `launching/` starts ranks, here or by scripts elsewhere, and lets them
meet; `watching/` looks after them and records what they do; `checkpoints/` keeps what they learned,
`outputs/` makes folders and images of it. `messages/` proves that no order of messages can hang;
`rehearsal/` is the same runtime on emulated devices.
"""

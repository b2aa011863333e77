"""Runtime of a plan: ranks, process groups, message broker, DeepSpeed engine, checkpoints, traces.

Start at `train.py` (the launcher's side) and `worker.py` (one rank's side), which enters the loop
of `steps.py`; everything around a step is one of its hooks (`hooks.py`). `units/` maps ranks to
coordinates and moves tensors between units; `engine/` computes one stage and drives DeepSpeed;
`launching/` starts ranks, on this machine or by scripts for others, and runs their rendezvous;
`watching/` monitors the ranks and records what they do; `checkpoints/` saves and loads the training
state, `outputs/` exports it and samples from it. `messages/` proves that the order of messages
cannot deadlock; `rehearsal/` is the same runtime on emulated devices.
"""

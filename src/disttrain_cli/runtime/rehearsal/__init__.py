"""Rehearsals: the runtime on emulated devices, to run a cluster's job on a laptop.

Start reading at `rehearse.py`. Real are the processes, their groups and messages, the broker,
DeepSpeed's schedule and optimizer, ordering, checkpoints (of one number per layer) and traces.
Emulated are devices, links and preprocessing cores: each takes the time that the profile's cost
models predict for its work (`device`, `layers`, `transfers`, `feeding`). A process stands for
several GPUs of one stage (`joining`).
"""

"""Rehearsals: the runtime on emulated devices, so that a laptop carries a cluster. Start reading at
`rehearse.py`.

Real are the processes, their groups and messages, the broker, DeepSpeed's schedule and optimizer,
ordering, checkpoints (of one number per layer) and traces. Emulated are devices, links and
preprocessing cores: each takes the time that the profile's cost models give for the work at hand
(`device`, `layers`, `transfers`, `feeding`). A process stands for several GPUs of one stage
(`joining`).
"""

"""Running a plan: ranks, units and process groups, the broker, the DeepSpeed engine, checkpoints, traces.

Start at `train.py` (the launcher's side) and `worker.py` (one rank's side); then `topology.py` (who is who),
`stage.py` (one stage's computation), `broker.py` (between units) and `engine.py` (the DeepSpeed subclass). `rank.py`
is the life of one process, `launch.py` starts those of one machine, `emit/` writes scripts that start them elsewhere,
`supervise.py` looks after them. `starts.py` is what training shares with `rehearsal/`, the same runtime on emulated
devices.
"""

"""Measure the cost of layers, links, devices and data, and fit the profile's cost models.

Start at `measure.py` (the steps of `disttrain profile`) and `worker.py` (the program of each
measuring process: `links.py` and `optimizer.py`, then `trial.py` for each of its modules on top of
`compute.py`, on a GPU under the load of `sustained.py`, until the budget of `budget.py` is spent).
`processes.py` starts the processes and stores their records (`records.py`), so that an interrupted
profile can resume. `dataset.py` is the data part, with `preprocess.py` that times decoding and
`sizes.py` that draws microbatch sizes from the data's own distribution and orders them; `device.py`
detects the device and its peak; `fitting.py`, `rows.py` and `assemble.py` turn measurements into
the profile. `analytic.py` computes the profile of a device that this machine lacks, from the same
parts. `calibrate.py` corrects a profile by a run's traces: `factors.py` is the fit,
`layer_factors.py` and `link_factors.py` apply it, `recorded_data.py` replaces data statistics that
have drifted.
"""

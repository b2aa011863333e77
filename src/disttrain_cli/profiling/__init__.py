"""Measuring what layers, links, devices and data cost here, and fitting the cost models of the
profile.

Start at `measure.py` (the whole of `disttrain profile`) and `worker.py` (what each of its processes
runs: `links.py` and `optimizer.py`, then `trial.py` for each of its modules over `compute.py`,
until the budget of `budget.py` is spent). `processes.py` starts them and keeps what they found
(`kept.py`), so that an interrupted profile goes on. `dataset.py` is the data part, with
`preprocess.py` that times decoding and `sizes.py` that draws work from the data's own distribution
and orders it; `device.py` finds the device and its peak; `fitting.py`, `rows.py` and `assemble.py`
turn measurements into the profile. `analytic.py` makes a profile of a device that is not here, from
the same parts. `calibrate.py` corrects a profile by a run's traces: `factors.py` fits,
`layer_factors.py` and `link_factors.py` say to what, `seen_data.py` puts in data that have moved.
"""

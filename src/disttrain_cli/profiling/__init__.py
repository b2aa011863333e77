"""Measuring what layers, links, devices and data cost here, and fitting the cost models of the profile.

Start at `measure.py` (the whole of `disttrain profile`) and `worker.py` (what each of its processes runs: `links.py`,
then `trial.py` for each of its modules over `compute.py`). `device.py` finds the device and its peak,
`preprocess.py` times decoding, `sizes.py` draws work from the data's own distribution, `fitting.py` and
`assemble.py` turn measurements into polynomials.
"""

"""Measuring what layers, links, devices and data cost here, and fitting the cost models of the profile.

Start at `measure.py` (the whole of `disttrain profile`); `worker.py` is what each process runs: `compute.py`
(layers) and `links.py` (messages). `device.py` finds the device and its peak, `preprocess.py` times decoding,
`sizes.py` draws work from the data's own distribution, `fitting.py` turns measurements into polynomials.
"""

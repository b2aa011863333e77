"""The pipeline simulator: times of every stage, replica and slot in, a timeline out. No torch.

Start with `pipeline` (devices of their own, vectorised); `sharing` does the same for ranks that
share the cores of one machine; `timeline` is what both take and return. `step` makes a pipeline
from a layout's costs, `feeding` lets it wait for its data, `faults` makes parts of it slower,
`grouping` joins replicas into processes, as a rehearsal runs them.
"""

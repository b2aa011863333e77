"""Pipeline simulator: from times of every stage, replica and slot to a timeline. No torch.

Start with `pipeline` (separate devices, vectorised); `shared_cores` simulates ranks that share the
cores of one machine; `timeline` has the input and output of both. `step` builds a pipeline from a
layout's costs, `feeding` adds waits for data, `faults` slows parts of it, `grouping` joins replicas
into processes, as in a rehearsal.
"""

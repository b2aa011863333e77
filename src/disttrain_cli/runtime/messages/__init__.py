"""What ranks send each other: recorded as it is executed, and proven not to hang where messages
pair by order (NCCL).

`records.py` and `proof.py` know nothing of torch; `recorder.py` records a rank that runs,
`hollow.py` runs a rank's instructions and brokers without weights, data or other ranks.
"""

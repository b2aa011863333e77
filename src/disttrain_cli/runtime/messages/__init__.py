"""Messages between ranks: recorded as executed, and proven free of deadlocks under NCCL's pairing.

NCCL pairs messages by order alone. `records.py` and `proof.py` do not import torch; `recorder.py`
records a running rank, `hollow.py` runs a dry rank: its instructions and brokers without weights,
data or other ranks.
"""

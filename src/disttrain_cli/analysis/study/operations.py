"""Types of operations in the study's traces: Megatron-LM's 1F1B with a distributed optimizer."""

from __future__ import annotations

FORWARD, BACKWARD = "forward-compute", "backward-compute"
TRANSFERS = ("forward-send", "forward-recv", "backward-send", "backward-recv")
GATHER, SCATTER, SEPARATE = "params-all-gather", "grads-reduce-scatter", "separate-grads-all-reduce"
EMBEDDING = "embedding-grads-all-reduce"
NORM = "layernorm-grads-all-reduce"
CLIP = "optimizer-clip-main-grad"
#: Transfers that all replicas of a stage join; clipping is joined by all stages too.
OVER_REPLICAS = (GATHER, SCATTER, SEPARATE, CLIP)
#: Communication, whose ideal is the median; that of other operations is the mean.
COMMUNICATION = (*TRANSFERS, *OVER_REPLICAS, NORM, EMBEDDING)
#: Operations after the last pass of a stage, in this order; if gradient reduction overlaps with
#: backward passes, SEPARATE replaces SCATTER.
CLOSING = ("gc", NORM, EMBEDDING, SCATTER, SEPARATE, CLIP, "optimizer")
KNOWN = (FORWARD, BACKWARD, *COMMUNICATION, "gc", "optimizer")


def family(optype: str) -> str:
    """Return the name under which the study sums operations: both ends of a transfer are one."""
    return f"{optype.split('-')[0]}-pp-comm" if optype in TRANSFERS else optype

"""Types of operations in a trace of the study: those of Megatron-LM's 1F1B with a distributed
optimizer."""

from __future__ import annotations

FORWARD, BACKWARD = "forward-compute", "backward-compute"
TRANSFERS = ("forward-send", "forward-recv", "backward-send", "backward-recv")
GATHER, SCATTER, SEPARATE = "params-all-gather", "grads-reduce-scatter", "separate-grads-all-reduce"
EMBEDDING, NORM, CLIP = (
    "embedding-grads-all-reduce",
    "layernorm-grads-all-reduce",
    "optimizer-clip-main-grad",
)
#: Transfers in which all replicas of a stage take part; of clipping, all stages too.
OVER_REPLICAS = (GATHER, SCATTER, SEPARATE, CLIP)
#: Communication, whose ideal is the median. That of the others is the mean.
COMMUNICATION = (*TRANSFERS, *OVER_REPLICAS, NORM, EMBEDDING)
#: What follows the last pass of a stage, in this order; where gradients are reduced beside
#: backward passes, SEPARATE stands in the place of SCATTER.
CLOSING = ("gc", NORM, EMBEDDING, SCATTER, SEPARATE, CLIP, "optimizer")
KNOWN = (FORWARD, BACKWARD, *COMMUNICATION, "gc", "optimizer")


def family(optype: str) -> str:
    """The name under which the study sums operations up: both ends of a transfer are one."""
    return f"{optype.split('-')[0]}-pp-comm" if optype in TRANSFERS else optype

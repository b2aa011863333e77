"""Cross-entropy over a vocabulary, or over its shards in a TP group.

See Shoeybi et al. 2019, section 3. Logits stay in the model's precision, in which they are saved
for the backward. On a GPU one kernel reads them, and one writes their gradient over them; on a CPU
some rows at a time are in fp32, converted by the operator that needs them so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from disttrain_cli.models.fused import on_gpu
from disttrain_cli.models.kernels import into_loss_gradient, log_sum_exp
from disttrain_cli.models.parallel import all_reduced
from disttrain_cli.models.signatures import steps_of

if TYPE_CHECKING:
    from disttrain_cli.models.group import Group

#: Logits that are in fp32 at a time: 128 MiB.
CHUNK = 1 << 25


def cross_entropy(
    logits_RV: Tensor, labels_R: Tensor, first_id: int, group: Group | None
) -> Tensor:
    """Return the summed cross-entropy [] in fp32 of the rows whose label is not negative.

    A group all-reduces the largest logarithm of a row's sums of exponentials, their sum, and the
    label's logit.

    Args:
        logits_RV: of the ids from `first_id` on; the group's other ranks have the others. Without a
            group, labels outside count as if their logit were 0. On a GPU the backward overwrites
            them.
    """
    return _CrossEntropy.apply(logits_RV, labels_R, first_id, group)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_RV: Tensor, labels_R: Tensor, first_id: int, group: Group | None
    ) -> Tensor:
        local_R = labels_R - first_id
        here_R = (local_R >= 0) & (local_R < logits_RV.shape[1])
        local_R = local_R.masked_fill(~here_R, 0)
        label_R = logits_RV.gather(1, local_R[:, None]).squeeze(1).float().masked_fill(~here_R, 0.0)
        log_sum_R = (log_sum_exp if on_gpu(logits_RV) else _log_sum_exp_by_chunks)(logits_RV)
        if group is not None:
            largest_R = all_reduced(log_sum_R, group, dist.ReduceOp.MAX)
            sum_R, label_R = all_reduced(
                torch.stack([(log_sum_R - largest_R).exp(), label_R]), group
            )
            log_sum_R = largest_R + sum_R.log()
        ctx.save_for_backward(logits_RV, log_sum_R, local_R, here_R, labels_R >= 0)
        return (log_sum_R - label_R).masked_fill(labels_R < 0, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        logits_RV, log_sum_R, local_R, here_R, trained_R = ctx.saved_tensors
        scale_R = gradient * trained_R
        if on_gpu(logits_RV):
            label_R = local_R.masked_fill(~here_R, -1)
            return into_loss_gradient(logits_RV, log_sum_R, label_R, scale_R), None, None, None
        made_RV = torch.empty_like(logits_RV)
        for rows in _chunks(logits_RV):
            local = (logits_RV[rows] - log_sum_R[rows, None]).exp_()
            local.scatter_add_(1, local_R[rows, None], -here_R[rows, None].to(local.dtype))
            torch.mul(local, scale_R[rows, None], out=made_RV[rows])
        return made_RV, None, None, None


def _log_sum_exp_by_chunks(logits_RV: Tensor) -> Tensor:
    log_sum_R = logits_RV.new_empty(len(logits_RV), dtype=torch.float32)
    for rows in _chunks(logits_RV):
        largest_R1 = logits_RV[rows].amax(1, keepdim=True).float()
        sum_R1 = (logits_RV[rows] - largest_R1).exp_().sum(1, keepdim=True)
        log_sum_R[rows] = (largest_R1 + sum_R1.log()).squeeze(1)
    return log_sum_R


def _chunks(logits_RV: Tensor) -> Iterator[slice]:
    """Yield slices of rows that are in fp32 together."""
    rows, width = logits_RV.shape
    step = max(1, CHUNK // width)
    return steps_of([slice(start, start + step) for start in range(0, rows, step)], logits_RV)

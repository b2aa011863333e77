"""AdamW over the trained weights of a stage: parameter groups, and each rank's share of the norm.

Weights are grouped so that every flat partition of ZeRO lies in one bucket of layers
(`costs.buckets`) and is of one kind: one module (or the projectors), decaying or not, sharded over
the TP group or replicated on its ranks, with full or partial gradients there, or some experts of an
EP group. A tied weight whose
other copy is on another stage is a group by itself, so that both are partitioned alike. Weight
decay applies to matrices, kernels and embeddings (Loshchilov and Hutter 2019, arXiv 1711.05101,
decoupled from the gradient); not to biases, norms and other single vectors, such as a class token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from disttrain_cli.costs.buckets import buckets
from disttrain_cli.models.division import of_experts, shard_of, whole_shape
from disttrain_cli.models.layer import PipelineLayer
from disttrain_cli.models.tying import copy_of
from disttrain_cli.runtime.engine.schedule import learning_rate
from disttrain_cli.spec.runfile.train import OptimizerSpec, TrainSpec


def decays(parameter: nn.Parameter) -> bool:
    """Return True if weight decay applies: two or more dimensions of the global tensor exceed 1."""
    return sum(size > 1 for size in whole_shape(parameter)) > 1


def parameter_groups(
    layers: Sequence[PipelineLayer], optimizer: OptimizerSpec
) -> list[dict[str, Any]]:
    """Return groups of the weights that require gradients, in the layers' order.

    A weight that layers share (`models.tying`) belongs to the first of them. In addition to the
    keys that AdamW reads, a group has its "name", the "module" whose learning rate it follows,
    "initial_lr", "tp_whole" (True if every rank of a TP group holds all of these weights),
    "tp_partial" (True if each has only a part of their gradients' sum), "copy" (`copy_of`), and
    "moe" (True if they are experts that an EP group divides; DeepSpeed's key).
    """
    groups: dict[str, dict[str, Any]] = {}
    trained, known = list[list[tuple[str, nn.Parameter]]](), set[nn.Parameter]()
    for one in layers:
        own = [(n, p) for n, p in one.named_parameters() if p.requires_grad and p not in known]
        known.update(parameter for _, parameter in own)
        trained.append(own)
    numbers = [sum(p.numel() for _, p in weights) for weights in trained]
    for number, bucket in enumerate(buckets(numbers)):
        for layer, (path, parameter) in ((i, weight) for i in bucket for weight in trained[i]):
            module = layers[layer].owner_of(path)
            spec = optimizer.of(module)
            whole, decay = shard_of(parameter) is None, decays(parameter)
            partial = getattr(parameter, "partial_gradient", False)
            kind = f"{'decay' if decay else 'plain'}{'' if whole else '/divided'}"
            copy = copy_of(parameter)
            also = f"{'/partial' if partial else ''}{'/tied' if copy else ''}"
            also += "/experts" if (experts := of_experts(parameter)) else ""
            name = f"{module}/{kind}{also}/{number}"
            group = groups.setdefault(
                name,
                {
                    "params": [],
                    "name": name,
                    "module": module,
                    "tp_whole": whole,
                    "tp_partial": partial,
                    "copy": copy,
                    "moe": experts,
                    "lr": spec.lr,
                    "initial_lr": spec.lr,
                    "weight_decay": spec.weight_decay if decay else 0.0,
                },
            )
            group["params"].append(parameter)
    return list(groups.values())


def make_optimizer(
    layers: Sequence[PipelineLayer], optimizer: OptimizerSpec
) -> torch.optim.AdamW | None:
    """Return AdamW over the layers' trained weights, fused per group; None without such weights."""
    groups = parameter_groups(layers, optimizer)
    return (
        torch.optim.AdamW(groups, betas=optimizer.betas, eps=optimizer.eps, fused=True)
        if groups
        else None
    )


def set_lrs(optimizer: Any, spec: TrainSpec, step: int) -> None:
    """Set the learning rate of every parameter group of a rank for a step."""
    for group in [] if optimizer is None else optimizer.param_groups:
        group["lr"] = learning_rate(spec, group["module"], step)


def reduced_gradients(
    optimizer: Any, *, dp: int, tp: int, expert_replicas: int = 1
) -> list[tuple[str, list[Tensor], float]]:
    """Return per group (module, this rank's reduced gradients, weight in the sum of squares).

    Summed over all ranks with these weights, every gradient of the model counts once: replicas hold
    equal ones where ZeRO does not partition them (deepspeed traps 5 and 6), TP ranks hold equal
    ones of replicated weights, and two stages those of a tied weight's copies.
    """
    divided = splits(optimizer)

    def weight(group: dict[str, Any]) -> float:
        if group["copy"] == "second":
            return 0.0
        alike = 1 if divided else expert_replicas if group["moe"] else dp
        return 1.0 / (alike * tp if group["tp_whole"] else alike)

    return [(group["module"], _gradients(group), weight(group)) for group in groups_of(optimizer)]


def partial_gradients(optimizer: Any) -> list[Tensor]:
    """Return this rank's reduced gradients of TP-replicated weights that are parts of a TP sum."""
    return [
        gradient
        for group in groups_of(optimizer)
        if group["tp_partial"]
        for gradient in _gradients(group)
    ]


def tied_gradients(optimizer: Any) -> list[Tensor]:
    """Return this rank's reduced gradients of tied weights whose other copy is on another stage."""
    return [
        gradient
        for group in groups_of(optimizer)
        if group["copy"] is not None
        for gradient in _gradients(group)
    ]


def groups_of(optimizer: Any) -> list[dict[str, Any]]:
    """Return the parameter groups that torch's optimizer steps.

    They hold weights or, where ZeRO partitions them, masters of this rank's partitions.
    """
    return [] if optimizer is None else torch_optimizer(optimizer).param_groups


def torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer itself, or the one inside DeepSpeed's."""
    return optimizer.optimizer if splits(optimizer) else optimizer


def splits(optimizer: Any) -> bool:
    """Return True for DeepSpeed's optimizers.

    In these, each rank has a partition of every group (ZeRO-1).
    """
    return not isinstance(optimizer, torch.optim.Optimizer)


def _gradients(group: dict[str, Any]) -> list[Tensor]:
    return [p.grad for p in group["params"] if p.grad is not None]


def sum_of_squares(
    gradients: Iterable[tuple[str, list[Tensor], float]], device: torch.device
) -> Tensor:
    """Return this rank's share of the squared norm of all gradients, float64.

    A CPU accumulates in order, and would be off by 1e-4 with 5 million numbers in fp32.
    """
    exact = torch.float64 if device.type == "cpu" else None
    total = torch.zeros((), dtype=torch.float64, device=device)
    for _, tensors, weight in gradients:
        if tensors and weight:
            norms = torch.stack(torch._foreach_norm(tensors, 2, exact))
            total += weight * norms.double().square().sum()
    return total


def drop_gradients(optimizer: Any) -> None:
    """Clear the gradients of a step that is not taken; weights and moments do not change."""
    if optimizer is None:
        return
    optimizer.zero_grad(set_to_none=True)
    torch_optimizer(optimizer).zero_grad(set_to_none=True)

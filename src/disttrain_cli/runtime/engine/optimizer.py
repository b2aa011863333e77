"""AdamW over the trained weights of a stage: parameter groups, learning rates, and each rank's
share of the norm.

Weights are grouped so that every flat partition of ZeRO is of one kind: one module (or the
projectors), decaying or not, divided over the TP group or whole on each of its ranks. What decays
are matrices, kernels and embeddings (Loshchilov and Hutter 2019, arXiv 1711.05101, decoupled from
the gradient); biases, norms and other single vectors, such as a class token, do not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from disttrain_cli.models.division import shard_of, whole_shape
from disttrain_cli.models.layer import PipelineLayer
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.runfile.train import OptimizerSpec, TrainSpec


def decays(parameter: nn.Parameter) -> bool:
    """Whether weight decay applies: more than one dimension of the whole tensor is longer than one
    number."""
    return sum(size > 1 for size in whole_shape(parameter)) > 1


def parameter_groups(
    layers: Iterable[PipelineLayer], optimizer: OptimizerSpec
) -> list[dict[str, Any]]:
    """Groups of the weights that ask for gradients, in the order in which the layers have them.

    Beside what AdamW reads, a group says its "name", the "module" whose learning rate it follows,
    "initial_lr", and "tp_whole": whether every rank of a TP group holds all of these weights.
    """
    groups: dict[str, dict[str, Any]] = {}
    for layer in layers:
        for path, parameter in layer.named_parameters():
            if not parameter.requires_grad:
                continue
            module = layer.owner_of(path)
            spec = optimizer.of(module)
            whole, decay = shard_of(parameter) is None, decays(parameter)
            name = f"{module}/{'decay' if decay else 'plain'}{'' if whole else '/divided'}"
            group = groups.setdefault(
                name,
                {
                    "params": [],
                    "name": name,
                    "module": module,
                    "tp_whole": whole,
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
    """AdamW over the trained weights of some layers, in one fused kernel per group; None where
    there are none."""
    groups = parameter_groups(layers, optimizer)
    return (
        torch.optim.AdamW(groups, betas=optimizer.betas, eps=optimizer.eps, fused=True)
        if groups
        else None
    )


def learning_rate(train: TrainSpec, module: str, step: int) -> float:
    """Rate of a module (or "projectors") in a step: linear warm-up, then its schedule, which ends
    at `train.steps`."""
    spec = train.optimizer.of(module)
    if step < spec.warmup_steps:
        return spec.lr * (step + 1) / spec.warmup_steps
    if spec.schedule == "constant":
        return spec.lr
    done = min(1.0, (step - spec.warmup_steps) / max(1, train.steps - spec.warmup_steps))
    left = 1.0 - done if spec.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return spec.lr * (spec.min_lr_fraction + (1.0 - spec.min_lr_fraction) * left)


def lrs(run: Run, step: int) -> dict[str, float]:
    """Learning rate of every module that is trained, and of the projectors, in a step."""
    return {
        name: learning_rate(run.file.train, name, step) for name in run.file.model.trained_names
    }


def beyond_schedule(run: Run, total: int) -> list[str]:
    """Say which modules learn nothing in the last of `total` steps: their schedules end at zero, at
    `train.steps`."""
    end = run.file.train.steps
    idle = [name for name, lr in lrs(run, total - 1).items() if lr == 0.0] if total > end else []
    return (
        [
            f"warning: {', '.join(idle)}: the schedule ends at train.steps, {end}, and the"
            f" learning rate is 0 from there on. To learn in all {total} steps, set train.steps to"
            f" {total} instead of --steps."
        ]
        if idle
        else []
    )


def set_lrs(optimizer: Any, spec: TrainSpec, step: int) -> None:
    """Give every parameter group of a rank its learning rate of a step."""
    for group in [] if optimizer is None else optimizer.param_groups:
        group["lr"] = learning_rate(spec, group["module"], step)


def reduced_gradients(optimizer: Any, dp: int, tp: int) -> list[tuple[str, list[Tensor], float]]:
    """Per group (module, this rank's gradients after the reduction, their weight in the world's sum
    of squares).

    Summed over all ranks with these weights, every gradient of the model counts once: replicas hold
    equal ones where ZeRO does not split them (deepspeed traps 5 and 6), and TP ranks hold equal
    ones of whole weights.
    """
    if optimizer is None:
        return []
    gradients = []
    for index, group in enumerate(optimizer.param_groups):
        weight = 1.0 / tp if group["tp_whole"] else 1.0
        if hasattr(optimizer, "fp32_groups_gradient_flat_partition"):  # bf16, ZeRO-1
            tensors = [optimizer.fp32_groups_gradient_flat_partition[index]]
        elif hasattr(optimizer, "averaged_gradients"):  # fp32, ZeRO-1
            tensors = list(optimizer.averaged_gradients[index])
        else:
            tensors, weight = [p.grad for p in group["params"] if p.grad is not None], weight / dp
        gradients.append((group["module"], tensors, weight))
    return gradients


def partial_gradients(parameters: Iterable[nn.Parameter], optimizer: Any) -> list[Tensor]:
    """Gradients before the reduction of weights that every TP rank has, each a part of the sum over
    the group."""
    if hasattr(optimizer, "fp32_groups_gradients"):  # bf16, ZeRO-1
        pairs = [
            pair
            for gradients in zip(
                optimizer.bf16_groups, optimizer.fp32_groups_gradients, strict=True
            )
            for pair in zip(*gradients, strict=True)
        ]
    else:
        pairs = [(parameter, parameter.grad) for parameter in parameters]
    return [
        gradient
        for parameter, gradient in pairs
        if gradient is not None and getattr(parameter, "partial_gradient", False)
    ]


def sum_of_squares(
    gradients: Iterable[tuple[str, list[Tensor], float]], device: torch.device
) -> Tensor:
    """This rank's share of the squared norm of all gradients, float64."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for _, tensors, weight in gradients:
        if tensors:
            total += weight * torch.stack(torch._foreach_norm(tensors)).double().square().sum()
    return total


def step_unchecked(optimizer: Any) -> None:
    """`BF16_Optimizer.step` without its norm, for which the host would wait: ours has been taken
    and is finite."""
    with torch.no_grad():
        for partition, gradient in zip(
            optimizer.fp32_groups_flat_partition,
            optimizer.fp32_groups_gradient_flat_partition,
            strict=True,
        ):
            partition.grad = gradient
        optimizer.optimizer.step()
        optimizer._lazy_init_hp_params_optimizer_state()
        optimizer.update_lp_params()
        optimizer.clear_hp_grads()


def add_at_once(optimizer: Any) -> None:
    """bf16: add the gradient of a weight to its sum in fp32 as soon as it is made, and forget it.

    DeepSpeed keeps those of all weights to the end of a backward, when most activations are kept
    too.
    """

    def add(weight: Tensor, total: Tensor) -> None:
        assert weight.grad is not None
        total.view_as(weight).add_(weight.grad)
        weight.grad = None

    for weights, sums in zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients, strict=True):
        for weight, total in zip(weights, sums, strict=True):
            weight.register_post_accumulate_grad_hook(partial(add, total=total))


def drop_gradients(optimizer: Any) -> None:
    """Forget the gradients of a step that is not taken; weights and moments stay as they are."""
    if optimizer is None:
        return
    optimizer.zero_grad(set_to_none=True)
    if hasattr(optimizer, "averaged_gradients"):  # fp32, ZeRO-1
        for group in optimizer.averaged_gradients:
            optimizer.averaged_gradients[group] = optimizer.all_grad_tensors[group] = None

"""Clusters to buy or rent: duration and cost of training with the best plan of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from disttrain_cli.costs.hardware import lookup
from disttrain_cli.errors import SpecError
from disttrain_cli.planning.explain import idle_sentence
from disttrain_cli.planning.ranges import grounds
from disttrain_cli.spec.plan import Layout, Plan
from disttrain_cli.spec.profile import Profile


@dataclass(frozen=True)
class Offer:
    """Number of devices of one kind; if no layout fits them, only `unfit` is set."""

    device: str
    gpus: int
    price_per_gpu_hour: float | None  # None: not specified
    grounds: str  # origin of the costs that the prediction uses
    unfit: str | None = None  # the binding limit of every layout
    layout: Layout | None = None
    idle: int | None = None  # devices that the plan does not use
    idle_because: str | None = None
    step_s: float | None = None  # expected step
    range_s: tuple[float, float] | None = None  # of the step
    tokens_per_s: float | None = None  # tokens of packed sequences, without padding
    tokens_per_s_per_gpu: float | None = None  # per device of the cluster, like all that follows
    hours: float | None = None  # of all steps
    gpu_hours: float | None = None
    cost: float | None = None


def catalogue_name(device: str) -> str:
    """Return the catalogue's name of a device by torch's or its own name; others unchanged."""
    try:
        return lookup(device).name
    except SpecError:
        return device


def offer(
    profile: Profile,
    gpus: int,
    steps: int,
    prices: Mapping[str, float],
    found: Plan | str,
) -> Offer:
    """Return the figures of one cluster.

    Args:
        steps: total optimizer steps.
        prices: by device, names in lower case.
        found: its plan, with its range, or why none fits.
    """
    device = profile.device.name
    price = prices.get(device.lower(), prices.get(catalogue_name(device).lower()))
    basis = grounds(profile, gpus)
    if isinstance(found, str):
        return Offer(device, gpus, price, basis, found)
    layout, predicted = found.plan, found.predicted
    step_s = predicted.expected_s or predicted.iteration_s
    tokens = layout.global_batch_size * profile.inputs.sequence_length * profile.data.fill_fraction
    gpu_hours = gpus * steps * step_s / 3600
    return Offer(
        device,
        gpus,
        price,
        basis,
        layout=layout,
        idle=gpus - layout.gpus_used,
        idle_because=idle_sentence(layout, profile.inputs.llm, gpus),
        step_s=step_s,
        range_s=predicted.range_s,
        tokens_per_s=tokens / step_s,
        tokens_per_s_per_gpu=tokens / step_s / gpus,
        hours=gpu_hours / gpus,
        gpu_hours=gpu_hours,
        cost=None if price is None else gpu_hours * price,
    )

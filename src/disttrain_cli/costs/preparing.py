"""Preprocessing time of a stage's data at the profile's rates: images decoded, sequences packed.

A stage loads for the modules whose first layer it holds. The profile's time of a sequence includes
its images and its audio clips, so that the text's own share is a mean sequence's remainder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.spec.index import KINDS
from disttrain_cli.spec.profile import Profile

if TYPE_CHECKING:
    from disttrain_cli.costs.layout import CostedStage

Floats = NDArray[np.float64]
# share of a sequence's time below which there is no text: rates of synthetic files differ by their
# images only
ROUNDING = 1e-9


def item_s(profile: Profile, module: str) -> float:
    """Return the seconds per core to prepare one item of a module (`Work.items`); 0 if unknown."""
    inputs, rates, data = profile.inputs, profile.preprocess, profile.data
    decoding = {head.module: head.item for item in KINDS for head in inputs.decoding(item)}
    if module != inputs.llm:
        return _each_s(rates.rate(decoding[module])) if module in decoding else 0.0
    sequence_s = _each_s(rates.sequences_per_s_per_core)
    decoded = dict.fromkeys(decoding.values())
    decoded_s = sum(_each_s(rates.rate(item)) * data.count(item) for item in decoded)
    text_s = sequence_s - decoded_s / data.sequences
    return text_s if text_s > ROUNDING * sequence_s else 0.0


def prepare_s(
    profile: Profile, stage: CostedStage, loads: Mapping[str, Floats], workers: int
) -> Floats:
    """Return [n slots, DP] seconds in which `workers` cores prepare a stage's data.

    For every replica in every slot.

    Args:
        loads: by module of the stage [n, DP, 3] work (`spec.work.Work`), possibly of a part of the
            replicas.
    """
    some = stage.costs[0].module
    slots, ranks, _ = loads[some].shape
    seconds = np.zeros((slots, ranks // stage.unit.dealt_over(some)))
    for module in stage.begins:
        items = loads[module][..., 0].reshape(*seconds.shape, -1).sum(axis=2)
        seconds += items * item_s(profile, module) / workers
    return seconds


def _each_s(rate: float) -> float:
    """Return the seconds per item for a rate per second; 0 means unknown."""
    return 1.0 / rate if rate > 0 else 0.0

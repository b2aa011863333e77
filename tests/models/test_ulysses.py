"""Attention with tokens exchanged for heads is attention over all rows, and its work is level."""

import json

import numpy as np
import pytest

from disttrain_cli.runtime.launching.launch import launch
from tests.models.ulysses_worker import CASES, CP, FEATURES, GATHERED


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    folder = tmp_path_factory.mktemp("ulysses")
    launch(CP, "tests.models.ulysses_worker:ranks", {"out": str(folder)}, folder / "logs")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(CP)]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CASES, *GATHERED])
def test_own_rows_are_those_of_attention_over_all(found: list[dict[str, float]], name: str) -> None:
    assert max(rank[name] for rank in found) < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("way", ["by heads", "gathered"])
@pytest.mark.parametrize("name", FEATURES)
def test_features_of_attention_are_those_without_a_group(
    found: list[dict[str, float]], name: str, way: str
) -> None:
    apart = [rank[f"{way}, {name}"] for rank in found]
    if (way, name) == ("gathered", "spans"):
        assert apart == [-1.0] * CP  # refused
    else:
        assert min(apart) >= 0.0 and max(apart) < 2e-6


def busiest_over_mean(lengths: list[int], cp: int) -> float:
    """Where each rank attends with its own run of tokens to all before it: pairs of tokens of the
    busiest rank over the mean."""
    pairs = np.concatenate([np.arange(1, length + 1) for length in lengths])
    work = pairs.reshape(cp, -1).sum(axis=1)
    return float(work.max() / work.mean())


def test_runs_of_tokens_alone_would_not_be_level() -> None:
    """What is avoided: by heads every rank has the same pairs of every document."""
    assert busiest_over_mean([64], 2) == pytest.approx(1.49, abs=0.01)
    assert busiest_over_mean([8] * 8, 2) == 1.0
    random = np.random.default_rng(0)
    ratios = []
    for _ in range(64):
        lengths = []
        while sum(lengths) < 131_072:
            length = min(int(random.lognormal(8.0, 1.5)) + 1, 131_072 - sum(lengths))
            lengths.append(length)
        ratios.append(busiest_over_mean(lengths, 8))
    assert np.mean(ratios) > 2.0

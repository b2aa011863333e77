"""Slow ranks inside CP groups, whose passes are as long as those of the ranks that wait."""

from __future__ import annotations

import pytest

from disttrain_cli.analysis.analyze import analyze
from tests.analysis import synthetic


def found_in(folder, **spec):
    synthetic.write(folder, synthetic.Synthetic(steps=5, cp=2, **spec), segments=1)
    return analyze([folder])


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("cp_rank", [0, 1])
def test_the_slow_rank_of_a_group_is_named(tmp_path, dp, cp_rank):
    found = found_in(tmp_path, dp=dp, slow_rank={1: 3.0}, slow_cp_rank=cp_rank)
    verdict, ranks = found.verdict, 2 + 2 * dp
    assert (verdict.cause, verdict.place.rank) == ("worker", 1 + cp_rank * ranks)
    assert verdict.place.cp_rank == cp_rank
    assert f"CP rank {cp_rank}) is slower than its work explains, and the other" in verdict.headline
    assert [one.cause for one in found.causes if one.gain_pct > 1] == ["worker"]
    waited = next(one for one in verdict.evidence if "passes in which" in one.what)
    assert waited.value == pytest.approx(0.9 * (1 - 1 / 3.0), rel=1e-3)


def test_a_group_in_which_no_rank_stands_out_is_named_as_a_whole(tmp_path):
    verdict = found_in(tmp_path, slow_rank={1: 3.0}).verdict
    assert (verdict.cause, verdict.place.rank, verdict.place.replica) == ("worker", None, 0)
    assert "wait for each other" in verdict.headline

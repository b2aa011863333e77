"""Slow ranks inside CP groups, whose passes are as long as those of the ranks that wait."""

import numpy as np
import pytest

from disttrain_cli.analysis.causes import Suspect
from disttrain_cli.analysis.job.remedies.suspects import _one_per_rank
from disttrain_cli.analysis.result.verdicts import Place
from tests.analysis import synthetic


def found_in(folder, **spec):
    synthetic.write(folder, synthetic.Synthetic(steps=5, cp=2, **spec), segments=1)
    return synthetic.judged(folder)


@pytest.mark.parametrize(("dp", "cp_rank"), [(1, 0), (2, 1)])
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


def test_a_rank_that_is_slow_and_delays_its_group_is_one_suspect():
    """In an EP group a rank is a replica too: it was named twice, with two savings."""

    def suspect(rank, factor):
        place = Place(unit="llm", stage=0, rank=rank)
        return Suspect("worker", place, lambda state: (state[0] * factor,), 1.0)

    whole = Suspect("intra_microbatch", Place(unit="llm"), lambda state: state)
    both, other, work, again = _one_per_rank(
        [suspect(0, 0.5), suspect(1, 0.9), whole, suspect(0, 0.5), whole]
    )
    assert (both.place.rank, other.place.rank, work, again) == (0, 1, whole, whole)
    assert both.most_s == 2.0 and both.mend((np.ones(3),))[0] == pytest.approx(0.25)

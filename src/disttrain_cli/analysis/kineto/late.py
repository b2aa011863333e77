"""Ranks that hold up the others, found by playing the recorded collectives again without what they
take longer.

Who joins a collective last is not always who is late: it may have waited for another itself,
and who would join last next is hidden. So ranks are mended one after another, the one first that
gains most (`analysis/causes.py`). How sure it is that this is no chance follows from how often they
are last once those before them are mended: the tail of the binomial, times how many such sets of
ranks there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

import numpy as np

from disttrain_cli.analysis.causes import State, find_causes, mend
from disttrain_cli.analysis.kineto.database import KinetoDatabase
from disttrain_cli.analysis.kineto.losses import Late, tail
from disttrain_cli.analysis.kineto.replay import Collectives, read_collectives


def late_ranks(database: KinetoDatabase, steps: Sequence[int | None]) -> list[Late]:
    """Ranks that hold up others in collectives of some steps, those first that gain most if they
    are mended."""
    played = read_collectives(database, steps)
    return [] if played is None else find_late(played)


def find_late(played: Collectives) -> list[Late]:
    """The same of collectives that were read."""
    suspects = played.suspects()
    if not suspects:
        return []
    of_rank = {one.place.rank: one for one in suspects}
    state: State = (played.work,)
    late = list[Late]()
    first = played.lengths(state)
    for finding in find_causes(played.lengths, state, suspects)[0]:
        ranks = [where.rank for where in finding.places if where.rank is not None]
        of_ranks = [of_rank[rank] for rank in ranks]
        joined, last, expected = _last(played, played.last(state), ranks)
        mended = mend(state, of_ranks)
        less_s = float((state[0] - mended[0]).sum(axis=0).mean()) / len(played.ranks)
        gain_s = float(finding.gain_s.mean())
        late.append(
            Late(
                ranks=ranks,
                joined=joined,
                last=last,
                chance=min(1.0, tail(joined, last, expected) * comb(len(played.ranks), len(ranks))),
                gain_s=finding.gain_s,
                waited_s=min(gain_s, max(0.0, gain_s - less_s)),
                alone_s=[
                    float((first - played.lengths(mend((played.work,), [one]))).mean())
                    for one in of_ranks
                ],
                steps=played.steps,
            )
        )
        state = mended
    return late


def _last(played: Collectives, last: np.ndarray, ranks: list[int]) -> tuple[int, int, float]:
    """In how many collectives one of the ranks takes part, into how many one is last, and how often
    by chance."""
    indices = [index for index, rank in enumerate(played.ranks) if rank in ranks]
    joined, came, expected = 0, 0, 0.0
    for number, nodes in enumerate(played.members):
        share = float(np.isin(played.rank_of[nodes], indices).mean())
        if share:
            joined += last.shape[1]
            came += int(np.isin(last[number], indices).sum())
            expected += share * last.shape[1]
    return joined, came, expected

"""Ranks that delay the others, found by replaying the recorded collectives without their delay.

The rank that joins a collective last is not always the delayed one: it may have waited for another
itself, and the rank that would join last next is hidden. So ranks are fixed one after another, the
one first that saves most (`analysis/causes.py`). The p-value of a delay follows from how often the
ranks are last once those before them are fixed: the tail of the binomial, times the number of such
sets of ranks. A rank that is delayed once a step, before the first of many collectives, is last
into few of them, but into those that others wait long in: these are also tested separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.analysis.causes import State, find_causes, mend
from disttrain_cli.analysis.kineto.database import KinetoDatabase
from disttrain_cli.analysis.kineto.losses import Late, Turns, p_value
from disttrain_cli.analysis.kineto.replay import Collectives, read_collectives
from disttrain_cli.analysis.walk import Floats

#: Costly collectives: others wait at least this share of the mean waiting, each moment of waiting
#: weighted equally, so that many short waits do not lower it (as in `kineto/blame.sql`).
LEAST_COSTLY = 0.25


def late_ranks(database: KinetoDatabase, steps: Sequence[int | None]) -> list[Late]:
    """Return ranks that delay others in collectives of some steps, the largest savings first."""
    played = read_collectives(database, steps)
    return [] if played is None else find_late(played)


def find_late(played: Collectives) -> list[Late]:
    """Return the same for collectives that were read already."""
    suspects = played.suspects()
    if not suspects:
        return []
    of_rank = {one.place.rank: one for one in suspects}
    state: State = (played.work,)
    late = list[Late]()
    first, recorded = played.lengths(state), played.last(state)[1]
    for finding in find_causes(played.lengths, state, suspects)[0]:
        ranks = [where.rank for where in finding.places if where.rank is not None]
        of_ranks = [of_rank[rank] for rank in ranks]
        turns, costly, share = _turns(played, recorded, played.last(state), ranks)
        mended = mend(state, of_ranks)
        less_s = float((state[0] - mended[0]).sum(axis=0).mean()) / len(played.ranks)
        gain_s = float(finding.gain_s.mean())
        late.append(
            Late(
                ranks=ranks,
                turns=turns,
                costly=costly,
                share=share,
                chance=p_value(turns, costly, comb(len(played.ranks), len(ranks))),
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


def _turns(
    played: Collectives,
    recorded: Floats,
    now: tuple[NDArray[np.int64], Floats],
    ranks: Sequence[int | None],
) -> tuple[Turns, Turns, float]:
    """Return counts of collectives that the ranks join, and of the costly ones among them.

    Also return the share of all waiting that is for these ranks.

    Args:
        played: the collectives.
        recorded: seconds that others wait in each collective as recorded, which makes it costly.
        now: the last rank of each collective, and the same seconds, with the ranks before these
            fixed.
        ranks: delayed ranks.
    """
    last, waited = now
    among = np.isin(played.ranks, [rank for rank in ranks if rank is not None])
    share = np.array([among[played.rank_of[nodes]].mean() for nodes in played.members])
    are_last, joined = among[last], np.broadcast_to(share[:, None] > 0, last.shape)
    total, own = float(waited.sum()), recorded[joined]
    usual = float((own**2).sum() / own.sum()) if own.any() else 0.0

    def count(chosen: NDArray[np.bool_]) -> Turns:
        return Turns(
            int(chosen.sum()),
            int((are_last & chosen).sum()),
            float((share[:, None] * chosen).sum()),
        )

    return (
        count(joined),
        count(joined & (recorded >= LEAST_COSTLY * usual)),
        float(waited[are_last].sum()) / total if total else 0.0,
    )

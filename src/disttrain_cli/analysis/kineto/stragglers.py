"""Verdicts on stragglers: why they are delayed, the saving of fixing them, and the confidence."""

from __future__ import annotations

from statistics import fmean, median_low
from typing import Any

from disttrain_cli.analysis.confidence import exceeds
from disttrain_cli.analysis.figures import counted, name_ranks, seconds
from disttrain_cli.analysis.kineto.database import KinetoDatabase
from disttrain_cli.analysis.kineto.losses import (
    LEAST_STRAGGLER,
    Blame,
    Late,
    Losses,
    Straggler,
    recurring,
    tail,
)
from disttrain_cli.analysis.kineto.unknown import P_VALUE, of_step
from disttrain_cli.analysis.result.verdicts import Evidence, Place, Verdict

#: Most ranks that are named; the first of more.
MOST_NAMED = 8
#: Attention and other GEMMs may be longer by up to this part of the grouped GEMMs' excess.
_MOST_ELSEWHERE = 0.25
_ITS_HOST = "other processes, data loading, garbage collection, pinning."


def mended(
    losses: Losses, database: KinetoDatabase, evidence: list[Evidence], understood: bool = True
) -> Verdict:
    """Return the verdict on ranks whose delays lengthen a replay, those first that save most."""
    span_s, first = losses.step_s, losses.stragglers[0]
    others = [
        one
        for one in losses.late
        if one is not first and one.gain_s.mean() >= LEAST_STRAGGLER * span_s
    ]
    single = _single_step(first, span_s)
    gain_s = min(float(first.gain_s.mean()), span_s)
    who = name_ranks(sorted(first.ranks)).capitalize()
    one, met = len(first.ranks) == 1, _met(losses)
    alone = [
        f" Fixing rank {rank} alone saves {costs(gain, span_s)}."
        for rank, gain in zip(first.ranks, first.alone_s, strict=True)
        if not one and gain >= LEAST_STRAGGLER * span_s
    ][:MOST_NAMED]
    did = {row["is_it"]: row for row in database.query("before", rank=first.ranks[0])}
    rows = _before(first.ranks[0], did[True], did[False]) if understood and len(did) == 2 else []
    return Verdict(
        cause="worker",
        headline=(
            f"{who} {_the_straggler(first, one)} is {_last_into(first, losses)}, and fixing"
            f" {'it' if one else 'them'} saves {of_step(gain_s, span_s, losses.marked)}."
        )
        + "".join(alone)
        + "".join(_more(late, span_s) for late in others)
        + (f" Nearly all of the saving is in step {single}." if single is not None else ""),
        place=Place(rank=first.ranks[0]),
        lost_s=min(sum(float(each.gain_s.mean()) for each in losses.stragglers), span_s),
        confidence=(1 - first.chance)
        * exceeds(first.gain_s / span_s, LEAST_STRAGGLER)
        * recurring(first.gain_s / span_s, LEAST_STRAGGLER)
        * matched(database),
        evidence=[
            *evidence,
            Evidence(
                f"{met} that {who.lower()} join{'s' * one} last",
                first.turns.last / first.turns.joined,
                "share",
            ),
            Evidence(f"waiting for {who.lower()}, share of all waiting", first.share, "share"),
            Evidence(P_VALUE, first.chance, "probability"),
            *(
                Evidence(
                    f"saved by fixing {name_ranks(sorted(each.ranks))}",
                    float(each.gain_s.mean()),
                    "s",
                )
                for each in losses.stragglers
            ),
            *rows,
        ],
        advice=_why(losses, first, database, understood)
        + (" Ranks whose traces are missing may have delayed it." if losses.present < 1 else ""),
        next_command=_waits_of(first.ranks[0]),
    )


def _single_step(late: Late, span_s: float) -> int | None:
    """Return the one of several steps without which fixing the ranks would not save enough."""
    least_s, count, largest = LEAST_STRAGGLER * span_s, len(late.gain_s), int(late.gain_s.argmax())
    if (
        count < 2
        or late.gain_s.mean() < least_s
        or late.gain_s.sum() - late.gain_s[largest] >= least_s * count
    ):
        return None
    return late.steps[largest]


def unlikely(losses: Losses) -> float:
    """Return the probability that in more such steps no rank is a straggler."""
    return 1 - max(
        (exceeds(one.gain_s / losses.step_s, LEAST_STRAGGLER) for one in losses.late if one.sure),
        default=0.0,
    )


def _why(losses: Losses, late: Late, database: KinetoDatabase, understood: bool) -> str:
    """Explain why ranks are delayed, by what they do longer than the others."""
    who, one = name_ranks(sorted(late.ranks)).capitalize(), len(late.ranks) == 1
    if not understood:
        return (
            f"Between {'its' if one else 'their'} collectives {who.lower()} take{'s' * one} longer"
            " than the others; as no device work is recorded, these traces do not show whether"
            " devices, hosts or data are slow."
        )
    longer = {part: value / len(late.ranks) for part, value in losses.longer_of(late.ranks).items()}
    host_s = longer["host_works"] + longer["host_silent"] + longer["unrecorded"]
    if longer["compute"] > max(host_s, longer["data"]):
        return (
            f"In a step {who.lower()} compute{'s' * one} {seconds(longer['compute'])} longer than"
            f" the others: {_more_work(late.ranks, losses, database)}"
        )
    if longer["data"] > host_s:
        return (
            f"In a step the device{'' if one else 's'} of {who.lower()} wait{'s' * one}"
            f" {seconds(longer['data'])} longer for data than the others: check the DataLoader"
            " (workers, prefetch_factor), the storage, and other processes on the CPU."
        )
    return (
        f"{'Its device does' if one else 'Their devices do'} not compute longer than the others':"
        f" {'its host delays it' if one else 'their hosts delay them'}. Check the CPU of"
        f" {who.lower()}: {_ITS_HOST}"
    )


def _more_work(ranks: list[int], losses: Losses, database: KinetoDatabase) -> str:
    """Explain why ranks compute longer: expert load, more work or a slower device.

    It is expert load if only their grouped GEMMs are longer, while attention, which a slow device
    or more tokens would lengthen too, is not.
    """
    rows = {row["rank"]: row for row in database.query("experts")}

    def times(column: str) -> tuple[float, float]:
        """Return the mean of the ranks and the median of the others, in s per step."""
        own = [rows[rank][column] or 0.0 for rank in ranks if rank in rows]
        others = [row[column] or 0.0 for rank, row in rows.items() if rank not in ranks]
        return (fmean(own), median_low(others)) if own and others else (0.0, 0.0)

    (own_s, others_s), (_, attention_s) = times("grouped_s"), times("attention_s")
    if others_s and attention_s and own_s > others_s:
        most = 1 + _MOST_ELSEWHERE * (own_s / others_s - 1)
        longer_s = losses.longer_of(ranks)["compute"] / len(ranks)
        if own_s - others_s > 0.5 * longer_s and all(
            own <= most * others for own, others in map(times, ("attention_s", "dense_s"))
        ):
            return (
                f"expert load. Grouped GEMMs take {seconds(own_s - others_s)}"
                " longer, attention does not. The experts there receive more tokens: balance the"
                " router (auxiliary loss, bias, capacity), or place or replicate experts"
                " differently."
            )
    return (
        "it has more work (uneven data, shards or stages) or a slower device (clocks, temperature)."
    )


def _more(late: Late, span_s: float) -> str:
    """Return a sentence on further ranks that save enough once those before them are fixed."""
    who = name_ranks(sorted(late.ranks)).capitalize()
    one = len(late.ranks) == 1
    cost = costs(float(late.gain_s.mean()), span_s)
    if late.sure:
        return f" So {'is' if one else 'are'} {who.lower()}: {_last_into(late)}, {cost} more."
    return f" {who} cost{'s' * one} {cost} more, {_last_into(late)}, which may be chance."


def matched(database: KinetoDatabase) -> float:
    """Return the share of the collectives whose ranks are known; 1 if there are none."""
    totals = database.answer("totals")[0]
    count = totals["matched"] + totals["unmatched"]
    return float(totals["waited"] / count) if count else 1.0


def costs(value_s: float, span_s: float) -> str:
    """Format a time of every step and its share: "12 ms (15 %)"."""
    return f"{seconds(value_s)} ({100 * value_s / span_s:.0f} %)"


def _before(rank: int, it: dict[str, Any], others: dict[str, Any]) -> list[Evidence]:
    return [
        Evidence(f"rank {rank}: time since its previous collective or message", it["gap_s"], "s"),
        Evidence("the other ranks: the same", others["gap_s"], "s"),
        Evidence(f"rank {rank}: compute in that time", it["compute_s"], "s"),
        Evidence("the other ranks: the same", others["compute_s"], "s"),
    ]


def _waits_of(rank: int) -> str:
    return (
        'disttrain analyze --sql "SELECT step, name, index, wait_ns / 1e3 AS waits_us, is_last'
        f' FROM waits WHERE rank = {rank} ORDER BY start_ns"'
    )


def waited_for(
    losses: Losses,
    straggler: Straggler,
    costly: list[Straggler],
    database: KinetoDatabase,
    evidence: list[Evidence],
) -> Verdict:
    """Return the verdict on the worst straggler that only waiting shows, and on further ranks.

    Further ranks are named if waiting for them costs enough.
    """
    span_s, sure = (losses.step_s, [one for one in costly if one.sure] or [straggler])
    rank = straggler.rank
    did = {row["is_it"]: row for row in database.query("before", rank=straggler.rank)}
    met = _met(losses)
    it, others = did[True], did[False]
    later_s = it["gap_s"] - others["gap_s"]
    work_s = it["compute_s"] - others["compute_s"]
    when = "Before them"
    if losses.at_messages > 0.5:
        later_s = work_s = losses.longer_ns(rank) / 1e9
        when = "In a step"
    works_longer = work_s > 0.5 * later_s > 0
    advice = (
        f"{when} rank {rank} computes {seconds(work_s)} longer than the others:"
        f" {_more_work([rank], losses, database)}"
        if works_longer
        else (
            "Before them its device does not compute longer than the others': its host delays it."
            f" Check the CPU of rank {rank}: {_ITS_HOST}"
        )
    )
    return Verdict(
        cause="worker",
        headline=(
            f"Rank {rank} is the straggler: it is {_last_into(straggler, losses)}, and waiting for"
            " it costs every rank"
            f" {of_step(losses.cost_s(straggler), span_s, losses.marked)}."
        )
        + "".join(_another(losses, one) for one in costly if one != straggler),
        place=Place(rank=rank),
        lost_s=min(sum(losses.cost_s(one) for one in sure), losses.mean("exposed_wait_ns")),
        confidence=(1 - straggler.chance) * min(1.0, sum(one.share for one in sure)),
        evidence=[
            *evidence,
            Evidence(
                f"{met} that rank {rank} joins last",
                straggler.turns.last / straggler.turns.joined,
                "share",
            ),
            Evidence(
                "expected if all ranks were last equally often",
                straggler.turns.expected / straggler.turns.joined,
                "share",
            ),
            Evidence(P_VALUE, straggler.chance, "probability"),
            *(
                Evidence(f"waiting for rank {one.rank}, share of all waiting", one.share, "share")
                for one in dict.fromkeys([straggler, *costly])
            ),
            *_before(rank, it, others),
        ],
        advice=advice,
        next_command=_waits_of(rank),
    )


def _the_straggler(late: Late, one: bool) -> str:
    if late.sure:
        return "is the straggler: it" if one else "are the stragglers: one of them"
    return "may be the straggler: it" if one else "may be the stragglers: one of them"


def _last_into(one: Blame, losses: Losses | None = None) -> str:
    """Format in how many collectives a rank is last: "last into 5 of 16 collectives".

    They are all or, if that shows more, the costly ones.
    """
    turns = min(one.turns, one.costly, key=lambda turns: tail(*turns))
    if turns != one.turns:
        noun = "collectives" if losses is None else _met(losses)
        return (
            f"the last to join {turns.last} of the {turns.joined} {noun} in which others wait long"
        )
    return f"the last to join {turns.last} of " + (
        str(turns.joined) if losses is None else _met(losses, turns.joined)
    )


def _met(losses: Losses, count: int | None = None) -> str:
    """Return the noun for the operations that ranks join, after a count if any: "5 collectives"."""
    if 0 < losses.at_messages < 1:
        both = "collectives and messages"
        return both if count is None else f"{count} {both}"
    noun = "message" if losses.at_messages else "collective"
    return f"{noun}s" if count is None else counted(count, noun)


def _another(losses: Losses, one: Straggler) -> str:
    """Return a sentence on a further rank that others wait for."""
    cost = costs(losses.cost_s(one), losses.step_s)
    if one.sure:
        return f" So is rank {one.rank}: {_last_into(one)}, {cost}."
    return f" Rank {one.rank} costs {cost}, {_last_into(one)}, which may be chance."

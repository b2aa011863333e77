"""Verdict on a job with only Kineto traces: stragglers, the host, data, communication, or compute.

If the traces do not show the cause (`unknown`), nothing is blamed: no kernels, most of them of an
unknown kind, or devices that idle without a record of host-side delays.

Evidence (`analysis/confidence.py`): of stragglers, one minus the p-value, times the probability
that fixing them saves enough in more such steps (of those known by waiting alone, their share of
all waiting); of another cause, the probability that it costs enough and more than every other one,
times the share of ranks on which it is the largest loss; if either costs enough in half of the
steps or fewer, times their share; of "none", the probability that nothing costs enough. Missing
steps, ranks, kinds of kernels and reasons for idle time lower it.
"""

from __future__ import annotations

from msgspec.structs import replace

from disttrain_cli.analysis.confidence import exceeds
from disttrain_cli.analysis.figures import counted, seconds
from disttrain_cli.analysis.kineto.database import KinetoDatabase
from disttrain_cli.analysis.kineto.gaps import gap_of_each_step, gap_of_event
from disttrain_cli.analysis.kineto.losses import (
    KEY_OF,
    LEAST_STRAGGLER,
    MOST_WAITING,
    Losses,
    by_key,
    of,
    parts,
    recurring,
)
from disttrain_cli.analysis.kineto.stragglers import costs, matched, mended, unlikely, waited_for
from disttrain_cli.analysis.kineto.unknown import (
    LATEST,
    MOST_UNCLASSIFIED,
    P_VALUE,
    crowded,
    idle_without_reason,
    may_be_chance,
    may_wait_for_missing,
    no_compute,
    of_step,
    unclassified,
)
from disttrain_cli.analysis.result.verdicts import Evidence, Place, Verdict

#: Least share of a step that a cause must cost.
LEAST_SHARE = {
    "worker": LEAST_STRAGGLER,
    "data": 0.05,
    "communication": 0.1,
    "host": 0.1,
    "unexplained": 0.1,
}
#: If a larger share of communication is with missing ranks, it may be waiting as well as transfers.
MOST_INCOMPLETE = 0.5
#: Probability that kernels of unknown kind are communication, which then is exposed.
UNCLASSIFIED_TALKS = 0.5
#: Factor of the confidence in "no straggler" if the ranks of no collective are known.
UNMATCHED_CALM = 0.3
MOST_NAMED = 8  # steps
LEAST_NAMED = 0.005  # of a step, to be named


def judge(losses: Losses, database: KinetoDatabase) -> Verdict:
    """Name what costs most in a typical step, and a step that is not typical."""
    verdict, event = _of_usual_step(losses, database), losses.judged.event
    if event is None:
        return verdict
    gap = gap_of_event(event, database)
    what = (
        f"has a pause of {gap.text}"
        if gap
        else f"takes {seconds(event.longer_s)} longer than the others"
    )
    where = f" (the others wait for rank {event.rank})" if event.rank is not None else ""
    return replace(
        verdict,
        headline=(
            f"{verdict.headline} One step of {event.steps}, step {event.step}, {what}{where}; the"
            f" verdict is of the other {event.steps - 1}."
        ),
        evidence=[
            *verdict.evidence,
            Evidence(
                f"step {event.step}, left out: longer than the others by", event.longer_s, "s"
            ),
        ],
    )


def _of_usual_step(losses: Losses, database: KinetoDatabase) -> Verdict:
    """Name what costs most in a typical step.

    Stragglers go first, because the others' waiting for them hides the rest.
    """
    step_s, means = losses.step_s, losses.mean_parts()
    lost_s = by_key(means)
    large = {
        cause: lost_s[cause]
        for cause, least in LEAST_SHARE.items()
        if lost_s[cause] >= least * step_s
    }
    evidence = [
        Evidence(
            "a step" if losses.marked else "recording, from the first kernel to the last",
            step_s,
            "s",
        ),
        Evidence("compute", losses.ideal_s(), "s"),
        *(
            Evidence(_WHAT[part], lost, "s")
            for part, lost in sorted(means.items(), key=lambda item: -item[1])
            if lost > LEAST_NAMED * step_s
        ),
    ]
    if losses.at_messages > 0:
        evidence.append(
            Evidence(
                "waiting at sends and receives, share of all waiting", losses.at_messages, "share"
            )
        )
    if losses.present < 1:
        evidence.append(Evidence("ranks with traces", losses.present, "share of ranks"))
    if losses.crowded and losses.unclassified <= MOST_UNCLASSIFIED:
        return crowded(evidence)
    if losses.stragglers:
        return _with_larger(losses, mended(losses, database, evidence), means)
    sure = [one for one in losses.waited_for if one.sure]
    if "worker" in large and sure:
        costly = [
            one for one in losses.waited_for if losses.cost_s(one) >= LEAST_SHARE["worker"] * step_s
        ]
        worst = [*(one for one in costly if one in sure), *sure][0]
        verdict = waited_for(losses, worst, costly, database, evidence)
        return _with_larger(losses, verdict, means)
    if losses.unclassified > MOST_UNCLASSIFIED:
        return unclassified(losses.unclassified, database, evidence)
    if not losses.mean("compute_ns"):
        return no_compute(evidence)
    if not large:
        return _calm(losses, database, evidence)
    cause = max(large, key=lambda name: large[name])
    if cause == "unexplained":
        return idle_without_reason(
            means,
            of_step(lost_s[cause], step_s, losses.marked),
            gap_of_each_step(losses, database, lost_s[cause]),
            evidence,
            losses.repaired,
        )
    by_rank = [by_key(parts(row, 0.0)) for row in losses.ranks]
    agree = sum(
        max(LEAST_SHARE, key=lambda name: shares[name]) == cause for shares in by_rank
    ) / len(by_rank)
    largest, straggler = _largest(cause, means), losses.straggler
    sentence, advice, command = _DETAILS[largest]
    if largest == "transfers" and losses.present < 1:
        if database.query("incomplete")[0]["share"] > MOST_INCOMPLETE:
            moves_s = means[largest]
            of_all = of_step(moves_s, step_s, losses.marked)
            return may_wait_for_missing(database, of_all, command, evidence, moves_s)
        sentence = _OR_WAITING
    if largest == "others" and losses.at_messages > 0.5:
        sentence = (
            "Ranks wait for one another's messages, none longer than the warm-up and drain of the"
            " pipeline explain"
        )
    elif largest == "others" and straggler and straggler.share >= MOST_WAITING:
        return may_be_chance(
            straggler, of_step(lost_s[cause], step_s, losses.marked), lost_s[cause], evidence
        )
    elif largest == "others" and straggler:
        sentence += ", for a different rank each time"
    gap = gap_of_each_step(losses, database, lost_s[cause]) if cause == "host" else None
    if gap is not None:
        sentence = f"The devices wait for their hosts in one long gap of a step, {gap.text}"
        advice, command = _ONE_GAP, gap.command
    return Verdict(
        cause=cause,
        headline=_figured(sentence, largest, means, losses) + _seldom(losses, cause),
        place=Place(),
        lost_s=lost_s[cause],
        confidence=agree
        * _holds(losses, cause)
        * recurring(losses.shares[cause], LEAST_SHARE[cause])
        * (straggler.chance if largest == "others" and straggler else 1.0),
        evidence=[
            *evidence,
            Evidence("ranks on which this is the largest loss", agree, "share of ranks"),
            *_not_one(losses),
        ],
        advice=advice,
        next_command=command,
    )


def _with_larger(losses: Losses, verdict: Verdict, means: dict[str, float]) -> Verdict:
    """Add to the verdict on stragglers the cause that costs more than they do, if there is one."""
    lost_s = {cause: lost for cause, lost in by_key(means).items() if cause in LEAST_SHARE}
    cause = max(lost_s, key=lambda name: lost_s[name])
    if cause == "worker" or lost_s[cause] <= verdict.lost_s:
        return verdict
    if cause == "unexplained":
        sentence, advice = "The devices idle for no recorded reason", ""
    else:
        largest = _largest(cause, means)
        sentence, advice, _ = _DETAILS[largest]
        if largest == "transfers" and losses.present < 1:
            sentence = _OR_WAITING
    larger = f"{_uncapitalised(sentence)}, {costs(lost_s[cause], losses.step_s)}"
    return replace(
        verdict,
        headline=f"{verdict.headline} The larger loss is on all ranks: {larger}.",
        advice=verdict.advice + (f" For all ranks: {_uncapitalised(advice)}" if advice else ""),
    )


def _uncapitalised(text: str) -> str:
    return f"{text[:1].lower()}{text[1:]}"


def _largest(cause: str, means: dict[str, float]) -> str:
    """Return the finer kind of lost time that costs most of a cause."""
    return max((part for part in _DETAILS if KEY_OF[part] == cause), key=lambda part: means[part])


def _holds(losses: Losses, cause: str) -> float:
    """Return the probability that in more such steps a cause costs enough and most."""
    shares = losses.shares
    rivals = [shares[other] for other in LEAST_SHARE if other != cause]
    return min(
        exceeds(shares[cause], LEAST_SHARE[cause]),
        *(exceeds(shares[cause] - rival, 0.0) for rival in rivals),
    )


def _seldom(losses: Losses, cause: str) -> str:
    """Return a sentence on the steps in which a cause costs enough, if they are half or fewer."""
    shares, judged = losses.shares[cause], losses.judged
    steps = [
        step
        for step, share in zip(judged.steps, shares, strict=True)
        if share >= LEAST_SHARE[cause]
    ]
    if not steps or 2 * len(steps) > len(judged.steps):
        return ""
    named = ", ".join(map(str, steps[:MOST_NAMED])) + (", …" if len(steps) > MOST_NAMED else "")
    return f" Only in {len(steps)} of {counted(len(judged.steps), 'step')} ({named})."


def _calm(losses: Losses, database: KinetoDatabase, evidence: list[Evidence]) -> Verdict:
    calm = 0
    for row in losses.ranks:
        lost_s = by_key(parts(row, 0.0))
        calm += all(
            lost_s[cause] < least * of(row, "step_ns") for cause, least in LEAST_SHARE.items()
        )
    shares = losses.shares
    most = max(exceeds(shares[cause], least) for cause, least in LEAST_SHARE.items())
    talks = shares["communication"] + losses.unclassified
    most = max(most, UNCLASSIFIED_TALKS * exceeds(talks, LEAST_SHARE["communication"]))
    return Verdict(
        cause="none",
        headline=(
            "No straggler: the devices compute"
            f" {100 * losses.mean('compute_ns') / losses.step_s:.0f} % of the time, and nothing"
            " else costs much."
        ),
        place=Place(),
        lost_s=0.0,
        confidence=calm
        / len(losses.ranks)
        * unlikely(losses)
        * (1 - most)
        * (UNMATCHED_CALM + (1 - UNMATCHED_CALM) * matched(database)),
        evidence=[*evidence, *_not_one(losses)],
        advice="More speed needs faster kernels (lower precision, fusion, torch.compile) or more"
        " devices.",
        next_command=(
            'disttrain analyze --sql "SELECT name, kind, count(*), sum(end_ns - start_ns) / 1e6 AS'
            ' ms FROM kernels GROUP BY ALL ORDER BY ms DESC LIMIT 20"'
        ),
    )


def _not_one(losses: Losses) -> list[Evidence]:
    """Return evidence why no rank is called a straggler; empty if nothing was matched."""
    straggler = losses.straggler
    if straggler is None:
        return []
    return [
        Evidence(
            f"rank {straggler.rank} (most waited for) joins last",
            straggler.turns.last / straggler.turns.joined,
            "share of collectives"
            if not losses.at_messages
            else "share of collectives and messages",
        ),
        Evidence("waiting for it, share of all waiting", straggler.share, "share"),
        Evidence(P_VALUE, straggler.chance, "probability"),
    ]


def _figured(sentence: str, largest: str, means: dict[str, float], losses: Losses) -> str:
    """Format the largest part of a cause with its seconds, its other parts, and their sum.

    The sum is given if the named parts leave some out.
    """
    step_s, worded = losses.step_s, dict[str, float]()
    for part, (words, *_) in _DETAILS.items():
        if KEY_OF[part] == KEY_OF[largest]:
            worded[words] = worded.get(words, 0.0) + means[part]
    own_s = worded.pop(_DETAILS[largest][0])
    others = sorted(worded.items(), key=lambda item: -item[1])
    sentences = [
        f"{words}: {of_step(lost_s, step_s, losses.marked)}."
        for words, lost_s in [(sentence, own_s), *others]
        if lost_s == own_s or lost_s >= LEAST_SHARE["worker"] * step_s
    ]
    total_s = own_s + sum(worded.values())
    if total_s > own_s + LEAST_NAMED * step_s:
        sentences.append(f"In all, {KEY_OF[largest]} costs {costs(total_s, step_s)}.")
    return " ".join(sentences)


_WHAT = {
    "worker": "waiting for one rank",
    "others": "waiting for other ranks",
    "transfers": "transfers not overlapped with compute",
    "data": "idle while data is loaded",
    "host_waits": "idle while hosts wait for one another",
    "host_works": "idle while the host runs operators and calls",
    "host_silent": (
        "idle until the next kernel is launched, and the host runs nothing that was recorded"
    ),
    "host_copies": "copies between host and device not overlapped with compute",
    "device_copies": "copies and fills of device memory not overlapped with compute",
    "queued": "idle although the next kernel was launched",
    "unrecorded": "idle for no recorded reason",
}
_HOST = (
    "The devices wait for their hosts to launch work",
    (
        "Launch fewer and larger kernels: torch.compile or CUDA graphs, fused optimizers, larger"
        " batches; and avoid synchronising with the device (.item(), .cpu(), printing losses)."
    ),
    (
        'disttrain analyze --sql "SELECT name, count(*), sum(duration_ns) / 1e6 AS ms FROM events'
        " WHERE category IN ('cpu_op', 'cuda_runtime') GROUP BY ALL ORDER BY ms DESC LIMIT 20\""
    ),
)
_ONE_GAP = (
    "Fewer launches do not shorten a single gap: move the host's work in it off the training"
    " loop (another thread or process, asynchronous saving and logging), or do it in fewer steps."
)
_OR_WAITING = (
    "Communication, or waiting for ranks whose traces are missing, is not overlapped with compute"
)
#: Finer kind of lost time → headline, advice, next command.
_DETAILS = {
    "host_works": _HOST,
    "host_silent": _HOST,
    "data": (
        "The devices wait for data",
        (
            "Prefetch more: more DataLoader workers, a larger prefetch_factor, pin_memory and"
            " non_blocking copies."
        ),
        (
            'disttrain analyze --sql "SELECT rank, name, count(*), sum(duration_ns) / 1e6 AS ms'
            " FROM events WHERE name ILIKE '%dataloader%' GROUP BY ALL ORDER BY ms DESC\""
        ),
    ),
    "others": (
        "Ranks wait for one another",
        (
            "Balance what ranks do between collectives (samples of equal length on all, balanced"
            " shards and experts). If they are stages of a pipeline, more microbatches per step"
            " shorten its warm-up and drain."
        ),
        LATEST,
    ),
    "host_waits": (
        "Hosts wait for one another in host-side communication (barriers, gloo)",
        (
            "Remove barriers and object collectives from the training loop, or run them less often:"
            " the devices idle until the last host has joined."
        ),
        (
            'disttrain analyze --sql "SELECT rank, name, count(*), sum(duration_ns) / 1e6 AS ms'
            " FROM events WHERE name ILIKE '%gloo%' OR name ILIKE '%barrier%' GROUP BY ALL ORDER BY"
            ' ms DESC"'
        ),
    ),
    "transfers": (
        "Communication is not overlapped with compute",
        (
            "Overlap it (gradient buckets, prefetching of shards), send less (lower precision,"
            " larger microbatches per reduction), or place the groups with most traffic on the"
            " fastest links."
        ),
        (
            'disttrain analyze --sql "SELECT operation, process_group, count(*), sum(end_ns -'
            " start_ns) / 1e6 AS ms FROM kernels WHERE kind = 'communication' GROUP BY ALL ORDER BY"
            ' ms DESC"'
        ),
    ),
    "device_copies": (
        "Copies and fills of device memory are not overlapped with compute",
        (
            "Copy less inside the device: fewer .contiguous(), .clone(), torch.cat and zeroed"
            " buffers; write results where they are needed. Copies from device to device share the"
            " links with collectives."
        ),
        (
            'disttrain analyze --sql "SELECT name, count(*), sum(bytes) / 1e6 AS mb, sum(end_ns -'
            " start_ns) / 1e6 AS ms FROM kernels WHERE kind = 'memory' GROUP BY ALL ORDER BY ms"
            ' DESC"'
        ),
    ),
    "host_copies": (
        "Copies between host and device are not overlapped with compute",
        (
            "Pin the memory and copy with non_blocking=True on a separate stream; keep reused data"
            " on the device."
        ),
        (
            'disttrain analyze --sql "SELECT name, count(*), sum(bytes) / 1e6 AS mb, sum(end_ns -'
            " start_ns) / 1e6 AS ms FROM kernels WHERE kind = 'memory' GROUP BY ALL ORDER BY ms"
            ' DESC"'
        ),
    ),
}

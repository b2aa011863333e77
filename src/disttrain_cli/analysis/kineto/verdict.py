"""What slows a job of which only Kineto traces are known: stragglers, the host, data,
communication, or compute.

Where the traces do not tell (`unknown`), nothing is blamed: no kernels, most of them of an unknown
kind, or devices that idle without a record of a late host.

Confidence: of stragglers, how sure it is that this is no chance, times the chance that mending them
gains enough in more such steps (of those known by waiting alone, their share of all waiting); of
another cause, the share of ranks on which it is the largest loss; of "none", the share of ranks on
which nothing is large. All of it times the share of the job's ranks whose traces are there: what
the others did, and who waited for them, is not seen.
"""

from __future__ import annotations

from disttrain_cli.analysis.kineto.database import KinetoDatabase
from disttrain_cli.analysis.kineto.losses import KEY_OF, LEAST_STRAGGLER, LEAST_SURE, Losses, by_key
from disttrain_cli.analysis.kineto.stragglers import in_one_step, mended, unlikely, waited_for
from disttrain_cli.analysis.kineto.unknown import (
    MOST_UNCLASSIFIED,
    idle_without_reason,
    no_compute,
    of_step,
    unclassified,
)
from disttrain_cli.analysis.result.verdicts import Evidence, Place, Verdict

#: A cause that costs a smaller share of a step is none.
LEAST_SHARE = {
    "worker": LEAST_STRAGGLER,
    "data": 0.05,
    "communication": 0.1,
    "host": 0.1,
    "unexplained": 0.1,
}


def judge(losses: Losses, database: KinetoDatabase) -> Verdict:
    """Name what costs most; stragglers go first, because the others' waiting for them hides the
    rest."""
    span_s, parts = losses.mean("span_ns"), losses.mean_parts()
    lost_s = by_key(parts)
    large = {
        cause: lost_s[cause]
        for cause, least in LEAST_SHARE.items()
        if lost_s[cause] >= least * span_s
    }
    evidence = [
        Evidence(
            what=(
                "a step, from the first kernel to the last"
                if losses.marked
                else "recorded, from the first kernel to the last"
            ),
            value=span_s,
            unit="s",
        ),
        Evidence(what="compute", value=losses.ideal_s(), unit="s"),
        *(
            Evidence(what=_WHAT[part], value=lost, unit="s")
            for part, lost in sorted(parts.items(), key=lambda item: -item[1])
            if lost > 0.005 * span_s
        ),
    ]
    if losses.at_messages > 0:
        evidence.append(
            Evidence(
                what="waiting at sends and receives, of all waiting",
                value=losses.at_messages,
                unit="share",
            )
        )
    if losses.present < 1:
        evidence.append(
            Evidence(
                what="ranks whose traces are there", value=losses.present, unit="share of ranks"
            )
        )
    if losses.stragglers:
        return mended(losses, database, evidence)
    sure = [one for one in losses.waited_for if one.chance < LEAST_SURE]
    if "worker" in large and sure:
        costly = [
            one for one in losses.waited_for if losses.cost_s(one) >= LEAST_SHARE["worker"] * span_s
        ]
        return waited_for(
            losses, [*(one for one in costly if one in sure), *sure][0], costly, database, evidence
        )
    unknown_share = database.answer("totals")[0]["unclassified"] or 0.0
    if unknown_share > MOST_UNCLASSIFIED:
        return unclassified(unknown_share, database, evidence)
    if not losses.mean("compute_ns"):
        return no_compute(evidence)
    if not large:
        return _calm(losses, evidence)
    cause = max(large, key=lambda name: large[name])
    if cause == "unexplained":
        return idle_without_reason(parts, of_step(lost_s[cause], span_s, losses.marked), evidence)
    by_rank = [by_key(losses.parts(row, 0.0)) for row in losses.ranks]
    agree = sum(
        max(LEAST_SHARE, key=lambda name: shares[name]) == cause for shares in by_rank
    ) / len(by_rank)
    largest = max(
        (part for part in _DETAILS if KEY_OF[part] == cause), key=lambda part: parts[part]
    )
    told, advice, command = _DETAILS[largest]
    if largest == "transfers" and losses.present < 1:
        told = (
            "Communication, or waiting for ranks whose traces are missing, is not hidden behind"
            " compute"
        )
    if largest == "others" and losses.at_messages > 0.5:
        told = (
            "Ranks wait for one another's messages, no rank more than its pipeline does that fills"
            " and drains"
        )
    told, persists = (in_one_step(losses) if largest == "others" else None) or (told, 1.0)
    return Verdict(
        cause=cause,
        headline=_figured(told, largest, parts, losses),
        place=Place(),
        lost_s=lost_s[cause],
        confidence=round(agree * losses.present * persists, 3),
        evidence=[
            *evidence,
            Evidence(
                what="ranks on which this is the largest loss", value=agree, unit="share of ranks"
            ),
            *_not_one(losses),
        ],
        advice=advice,
        next_command=command,
    )


def _calm(losses: Losses, evidence: list[Evidence]) -> Verdict:
    calm = 0
    for row in losses.ranks:
        parts = by_key(losses.parts(row, 0.0))
        calm += all(
            parts[cause] < least * losses.of(row, "span_ns") for cause, least in LEAST_SHARE.items()
        )
    return Verdict(
        cause="none",
        headline=(
            "No straggler: the devices compute"
            f" {100 * losses.mean('compute_ns') / losses.mean('span_ns'):.0f} % of the time, and"
            " nothing else costs much."
        ),
        place=Place(),
        lost_s=0.0,
        confidence=round(calm / len(losses.ranks) * losses.present * unlikely(losses), 3),
        evidence=[*evidence, *_not_one(losses)],
        advice=(
            "More speed needs faster kernels (lower precision, fusion, torch.compile) or more"
            " devices."
        ),
        next_command=(
            'disttrain analyze --sql "SELECT name, kind, count(*), sum(end_ns - start_ns) / 1e6 AS'
            ' ms FROM kernels GROUP BY ALL ORDER BY ms DESC LIMIT 20"'
        ),
    )


def _not_one(losses: Losses) -> list[Evidence]:
    """Why no rank is called a straggler, where collectives or messages were matched."""
    straggler = losses.straggler
    if straggler is None:
        return []
    return [
        Evidence(
            what=f"rank {straggler.rank} is waited for most: last into",
            value=straggler.last / straggler.joined,
            unit=(
                "share of collectives"
                if not losses.at_messages
                else "share of collectives and messages"
            ),
        ),
        Evidence(what="waiting that is for it", value=straggler.share, unit="share"),
        Evidence(what="chance that this is chance", value=straggler.chance, unit="probability"),
    ]


def _figured(told: str, largest: str, parts: dict[str, float], losses: Losses) -> str:
    """What is told of the largest part of a cause, with its own seconds; then the cause's other
    parts with theirs."""
    span_s, worded = losses.mean("span_ns"), dict[str, float]()
    for part, (words, *_) in _DETAILS.items():
        if KEY_OF[part] == KEY_OF[largest]:
            worded[words] = worded.get(words, 0.0) + parts[part]
    own_s = worded.pop(_DETAILS[largest][0])
    others = sorted(worded.items(), key=lambda item: -item[1])
    return " ".join(
        f"{words}: {of_step(lost_s, span_s, losses.marked)}."
        for words, lost_s in [(told, own_s), *others]
        if lost_s == own_s or lost_s >= LEAST_SHARE["worker"] * span_s
    )


_WHAT = {
    "worker": "waiting for one rank",
    "others": "waiting for whoever joins last, now one, now another",
    "transfers": "transfers that nothing hides",
    "data": "idle while data is loaded",
    "host_works": "idle while the host runs operators and calls",
    "host_silent": (
        "idle until the next kernel is launched, and the host runs nothing that was recorded"
    ),
    "host_copies": "copies between host and device that nothing hides",
    "device_copies": "copies and fills of device memory that nothing hides",
    "queued": "idle though the next kernel was launched",
    "unrecorded": "idle, and nothing that was recorded says why",
}
_HOST = (
    "The devices wait for their hosts to launch work",
    (
        "Launch less and larger: torch.compile or CUDA graphs, fused optimizers, larger batches;"
        " and avoid what waits for the device (.item(), .cpu(), printing losses)."
    ),
    (
        'disttrain analyze --sql "SELECT name, count(*), sum(duration_ns) / 1e6 AS ms FROM events'
        " WHERE category IN ('cpu_op', 'cuda_runtime') GROUP BY ALL ORDER BY ms DESC LIMIT 20\""
    ),
)
#: Finer kind of lost time → headline, advice, next command.
_DETAILS = {
    "host_works": _HOST,
    "host_silent": _HOST,
    "data": (
        "The devices wait for data",
        (
            "Prepare more ahead: more DataLoader workers, a larger prefetch_factor, pin_memory and"
            " non_blocking copies."
        ),
        (
            'disttrain analyze --sql "SELECT rank, name, count(*), sum(duration_ns) / 1e6 AS ms'
            " FROM events WHERE name ILIKE '%dataloader%' GROUP BY ALL ORDER BY ms DESC\""
        ),
    ),
    "others": (
        "Ranks wait for one another, now for one, now for another",
        (
            "Level what ranks do between collectives (samples of equal length on all, balanced"
            " shards and experts). A pipeline that fills and drains waits less with more"
            " microbatches per step."
        ),
        (
            'disttrain analyze --sql "SELECT step, name, index, max(rank) FILTER (is_last) AS last,'
            ' max(wait_ns) / 1e6 AS ms FROM waits GROUP BY ALL ORDER BY ms DESC LIMIT 20"'
        ),
    ),
    "transfers": (
        "Communication is not hidden behind compute",
        (
            "Overlap it (gradient buckets, prefetching of shards), send less (lower precision,"
            " larger microbatches per reduction), or place the groups that talk most on the fastest"
            " links."
        ),
        (
            'disttrain analyze --sql "SELECT operation, process_group, count(*), sum(end_ns -'
            " start_ns) / 1e6 AS ms FROM kernels WHERE kind = 'communication' GROUP BY ALL ORDER BY"
            ' ms DESC"'
        ),
    ),
    "device_copies": (
        "Copies and fills of device memory are not hidden",
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
        "Copies between host and device are not hidden",
        (
            "Pin the memory and copy with non_blocking=True on a stream of its own; keep on the"
            " device what is used again."
        ),
        (
            'disttrain analyze --sql "SELECT name, count(*), sum(bytes) / 1e6 AS mb, sum(end_ns -'
            " start_ns) / 1e6 AS ms FROM kernels WHERE kind = 'memory' GROUP BY ALL ORDER BY ms"
            ' DESC"'
        ),
    ),
}

"""Verdicts without a cause: what is not understood, what is still measured, and how to find out."""

from __future__ import annotations

import re
from typing import Any

from disttrain_cli.analysis.figures import agree, counted, name_ranks, seconds
from disttrain_cli.analysis.kineto.database import KinetoDatabase
from disttrain_cli.analysis.kineto.gaps import Gap
from disttrain_cli.analysis.kineto.kernels import operation_in, users_patterns
from disttrain_cli.analysis.kineto.losses import Losses, Straggler
from disttrain_cli.analysis.kineto.ranks import TELL_RANKS_APART
from disttrain_cli.analysis.result.verdicts import Evidence, Place, Verdict

#: Above this share of unclassified kernel time, the work of the devices is unknown.
MOST_UNCLASSIFIED = 0.5
#: Above this share of kernels with impossible times, idle devices may be due to these.
MOST_REPAIRED = 0.01
MOST_NAMED, MOST_LINES, LONGEST_NAME = 5, 4, 60
P_VALUE = "p-value of being last this often by chance"
LATEST = (
    'disttrain analyze --sql "SELECT step, name, index, max(rank) FILTER (is_last) AS last,'
    ' max(wait_ns) / 1e6 AS ms FROM waits GROUP BY ALL ORDER BY ms DESC LIMIT 20"'
)
_EVENTS = (
    'disttrain analyze --sql "SELECT name, category, count(*), sum(duration_ns) / 1e6 AS ms FROM'
    ' events GROUP BY ALL ORDER BY ms DESC LIMIT 30"'
)
_KERNELS = (
    'disttrain analyze --sql "SELECT name, count(*), sum(end_ns - start_ns) / 1e6 AS ms FROM'
    " kernels WHERE kind = 'unclassified' GROUP BY ALL ORDER BY ms DESC LIMIT 30\""
)
_IDLE = 'disttrain analyze --sql "SELECT * FROM step_times ORDER BY rank, step"'
_MEASURED = (
    "Still measured, in the tables below: the ranks, the marked steps, and the time of the events."
)


def not_understood(losses: Losses, database: KinetoDatabase) -> Verdict:
    """Return the verdict if no recorded event is known as work of a device."""
    strange = database.answer("strange")
    step_s = database.answer("iterations")[0]["mean_s"]
    evidence = [
        Evidence(
            "recording, from the first event to the last, mean over the ranks",
            database.answer("totals")[0]["span_s"],
            "s",
        )
    ]
    if step_s is not None:
        evidence.insert(0, Evidence("a step, as marked", step_s, "s"))
    evidence += [
        Evidence(
            "not identified as device work, per rank: "
            f"{_short(row['family'])}, {row['count']} times",
            row["s"] / len(losses.ranks),
            "s",
        )
        for row in strange[:MOST_NAMED]
    ]
    if losses.straggler is not None:
        straggler = losses.straggler
        evidence.append(
            Evidence(
                f"host-side collectives: rank {straggler.rank} joins last",
                straggler.turns.last / straggler.turns.joined,
                "share of collectives",
            )
        )
    if not strange:
        return _unknown(
            "no recorded event can be identified as device work, and no other event has a duration",
            f"Record the devices too (ProfilerActivity.CUDA or XPU). {_MEASURED}",
            _EVENTS,
            evidence,
        )
    if all(row["operators"] for row in strange):
        lines = r'"compute ^aten::" and "communication ^(gloo|mpi):"'
        return _unknown(
            "no recorded event can be identified as device work: only CPU operators were recorded",
            "Record the devices too (activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA] or"
            f" XPU). {_MEASURED} If the CPU is the device, declare it by the lines {lines} in"
            f" {users_patterns()}.",
            _EVENTS,
            evidence,
        )
    names = ", ".join(_short(row["family"]) for row in strange[:3])
    return _unknown(
        f"no recorded event can be identified as device work. The longest events: {names}",
        "If these events are device work, classify them: add lines such as"
        f" {_lines(strange)} to {users_patterns()}, then analyse again. {_MEASURED}",
        _EVENTS,
        evidence,
    )


def unclassified(share: float, database: KinetoDatabase, evidence: list[Evidence]) -> Verdict:
    """Return the verdict if most kernels are known neither as compute nor as communication."""
    kernels = [row for row in database.answer("top") if row["kind"] == "unclassified"]
    return _unknown(
        f"{100 * share:.0f} % of the kernels' time is classified neither as compute nor as"
        " communication",
        f"Classify these kernels: add lines such as {_lines(kernels)} to {users_patterns()}, then"
        " analyse again. Until then they count as compute.",
        _KERNELS,
        [*evidence, Evidence("unclassified kernels", share, "share of the kernels' time")],
    )


def idle_without_reason(
    parts: dict[str, float],
    of_step: str,
    gap: Gap | None,
    evidence: list[Evidence],
    repaired: float,
) -> Verdict:
    """Return the verdict if the devices idle and no record shows host-side delays."""
    if repaired > MOST_REPAIRED:
        return _unknown(
            f"the devices seem to idle {of_step}, but {100 * repaired:.0f} % of the kernels had"
            " impossible times and were left out or shortened, so they may have run then",
            "Record again, with a newer profiler if there is one: the kernels' times are"
            " unreliable.",
            _IDLE,
            evidence,
            parts["queued"] + parts["unrecorded"],
        )
    if parts["queued"] > parts["unrecorded"]:
        return _unknown(
            f"the devices idle {of_step} although their next kernel was launched long before, so it"
            " waited for something other than its host",
            "Find out what kernels wait for on the device: other streams, events, memory that"
            " another device writes, or a collective that was not recorded.",
            _IDLE,
            evidence,
            parts["queued"] + parts["unrecorded"],
        )
    return _unknown(
        f"the devices idle {of_step} for no recorded reason"
        + (f": in one long gap of a step, {gap.text}" if gap else ""),
        "Record what the hosts do: ProfilerActivity.CPU, with_stack=True, or"
        " torch.profiler.record_function around data loading and everything else between steps."
        " If other events are device work, add them to"
        f" {users_patterns()}.",
        gap.command if gap else _IDLE,
        evidence,
        parts["queued"] + parts["unrecorded"],
    )


def crowded(evidence: list[Evidence]) -> Verdict:
    """Return the verdict if several ranks of a file cannot be separated and are read as one."""
    return _unknown(
        "several ranks in one file cannot be separated and are read as one, so their times add up",
        TELL_RANKS_APART,
        _EVENTS,
        evidence,
    )


def may_be_chance(
    straggler: Straggler, of_step: str, lost_s: float, evidence: list[Evidence]
) -> Verdict:
    """Return the verdict if nearly all waiting is for one rank, but in too few collectives.

    The rank being last may then be chance.
    """
    rank, often = straggler.rank, counted(straggler.costly.joined, "collective")
    return _unknown(
        f"communication costs {of_step}, and {100 * straggler.share:.0f} % of the waiting is for"
        f" rank {rank}, but others wait long in only {often}, which may be chance",
        f"Record more steps; if the others still wait for rank {rank}, check its host, its data"
        " and its compute.",
        LATEST,
        [
            *evidence,
            Evidence(f"waiting for rank {rank}, share of all waiting", straggler.share, "share"),
            Evidence(P_VALUE, straggler.chance, "probability"),
        ],
        lost_s,
        Place(rank=rank),
    )


def may_wait_for_missing(
    database: KinetoDatabase, of_step: str, command: str, evidence: list[Evidence], lost_s: float
) -> Verdict:
    """Return the verdict if most communication is with missing ranks, and takes long.

    It is not recorded how long these let the others wait.
    """
    size = database.sql("SELECT max(world_size) AS size FROM files WHERE kept")[0]["size"]
    present = {row["rank"] for row in database.sql("SELECT rank FROM times")}
    missing = [rank for rank in range(size) if rank not in present]
    who = name_ranks(missing)
    traces = agree(len(missing), "trace is", "traces are")
    return _unknown(
        f"exposed communication costs {of_step}, and may be waiting for {who}, whose"
        f" {traces} missing",
        f"Add the {agree(len(missing), 'trace', 'traces')} of {who} and analyse again: waiting"
        " can be distinguished from slow communication only with the traces of all ranks.",
        command,
        evidence,
        lost_s,
    )


def no_compute(evidence: list[Evidence]) -> Verdict:
    """Return the verdict if the devices only communicated, without any compute to compare with."""
    return _unknown(
        "only communication was recorded on the devices, and no compute that could overlap with it"
        " or delay it",
        f"Record all kernels of the devices, not only those of collectives. {_MEASURED}",
        _EVENTS,
        evidence,
    )


def _unknown(
    why: str,
    advice: str,
    command: str,
    evidence: list[Evidence],
    lost_s: float = 0.0,
    place: Place | None = None,
) -> Verdict:
    return Verdict(
        cause="unknown",
        headline=f"No verdict: {why}.",
        place=place or Place(),
        lost_s=lost_s,
        confidence=0.0,
        evidence=evidence,
        advice=advice,
        next_command=command,
    )


def _lines(rows: list[dict[str, Any]]) -> str:
    """Return lines of patterns that match the names, with any numbers.

    Their kind is a guess by the names.
    """
    lines = []
    for name in (row["name"] for row in rows):
        kind = "communication" if operation_in(name) is not None else "compute"
        start = re.sub(r"([][\\.^$*+?(){}|])", r"\\\1", name[:LONGEST_NAME])
        end = "$" if len(name) <= LONGEST_NAME else ""
        lines.append(f'"{kind} ^' + re.sub("[0-9]+", r"\\d+", start) + f'{end}"')
    return ", ".join(list(dict.fromkeys(lines))[:MOST_LINES])


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"


def of_step(value: float, step_s: float, marked: bool) -> str:
    """Format a time of every step: "12 ms of the 80 ms of a step (15 %)"."""
    return (
        f"{seconds(value)} of the {seconds(step_s)}"
        f" {'of a step' if marked else 'from the first kernel to the last'}"
        f" ({100 * value / step_s:.0f} %)"
    )

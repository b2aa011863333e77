"""What the ranks of each group did in it, collective by collective, side by side.

Ranks of a group join its collectives in one order, so those with the same sequence number must be
one: the same operation, sizes and types on every rank. Where they are not, most ranks are taken to
be right, and of two opinions that of the lowest rank.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from disttrain_cli.analysis.figures import name_ranks
from disttrain_cli.analysis.flight.dumps import Dump, Entry, ranks_of

Problem = Literal[
    "other operation", "other size", "other dtype", "missing", "not started", "not finished"
]
#: Operations that every rank may give other sizes to, and those into or out of which only one rank
#: gives or takes tensors.
UNEVEN = ("all_to_all", "all_to_all_single", "all_to_all_v_single", "alltoall_base")
FROM_ONE, TO_ONE = "scatter", "gather"


@dataclass(frozen=True)
class Group:
    """A process group."""

    name: str
    description: str
    ranks: tuple[int, ...]

    @property
    def title(self) -> str:
        """What to call it: its description where it has one."""
        return self.description or f"group {self.name}"


@dataclass(frozen=True)
class Finding:
    """The first collective of a group that not all of its ranks took part in alike."""

    group: Group
    problem: Problem
    sequence: int
    operation: str  # of most ranks
    ranks: tuple[int, ...]  # that are missing, or have another one, or have not got as far
    waiting: tuple[int, ...]  # that are in it
    detail: str
    since_ns: int  # when the first rank asked for it


@dataclass(frozen=True)
class Seen:
    """A group, and the entries of each of its ranks, of which dumps are known."""

    group: Group
    entries: Mapping[int, list[Entry]]


def groups_of(dumps: Mapping[int, Dump]) -> list[Seen]:
    """The groups in which ranks have done anything.

    Groups of one name are one only if their ranks are the same: `split_group` names them alike. A
    group whose ranks nobody says (gloo's) has those that have an entry of it; the default group has
    all.
    """
    found: dict[Group, dict[int, list[Entry]]] = defaultdict(dict)
    unknown: dict[tuple[str, str], dict[int, list[Entry]]] = defaultdict(dict)
    for rank, dump in dumps.items():
        own: dict[tuple[str, str], list[Entry]] = defaultdict(list)
        for entry in dump.entries:
            own[entry.process_group].append(entry)
        for (name, description), entries in own.items():
            config = dump.pg_config.get(name)
            ranks = ranks_of(config) if config is not None else ()
            if rank in ranks:
                found[Group(name, _plain(description), ranks)][rank] = entries
            else:
                unknown[name, description][rank] = entries
    for (name, description), of_rank in unknown.items():
        everybody = dumps if description == "default_pg" else of_rank
        found[Group(name, _plain(description), tuple(sorted(everybody)))].update(of_rank)
    for group, of_rank in found.items():
        for rank in group.ranks:
            if rank in dumps:
                of_rank.setdefault(rank, [])
    return [Seen(group, dict(sorted(of_rank.items()))) for group, of_rank in found.items()]


def _plain(description: str) -> str:
    return {"default_pg": "the world", "undefined": ""}.get(description, description)


def first_problem(seen: Seen, dumps: Mapping[int, Dump]) -> Finding | None:
    """The first collective of a group that is not in order; messages apart."""
    by_rank = {
        rank: {entry.collective_seq_id: entry for entry in entries if not entry.is_p2p}
        for rank, entries in seen.entries.items()
    }
    kept = [min(own) for rank, own in by_rank.items() if own and _overflowed(dumps[rank])]
    first = max(kept, default=0)  # what came before is not recorded everywhere
    for sequence in sorted({number for own in by_rank.values() for number in own}):
        if sequence < first:
            continue
        there = {rank: own[sequence] for rank, own in by_rank.items() if sequence in own}
        finding = _judge(seen, sequence, there)
        if finding is not None:
            return finding
    return None


def _overflowed(dump: Dump) -> bool:
    """Whether the recorder has dropped this rank's first entries."""
    return bool(dump.entries) and min(entry.record_id for entry in dump.entries) > 0


def _judge(seen: Seen, sequence: int, there: Mapping[int, Entry]) -> Finding | None:
    def finding(
        problem: Problem, ranks: list[int], usual: Entry, detail: str, waiting: list[int]
    ) -> Finding:
        return Finding(
            seen.group,
            problem,
            sequence,
            usual.operation,
            tuple(ranks),
            tuple(waiting),
            detail,
            min(entry.time_created_ns for entry in there.values()),
        )

    for problem, told in DIFFERENCES:
        values = {rank: told(entry) for rank, entry in there.items()}
        usual = _usual(values)
        others = [rank for rank, value in values.items() if value != usual]
        if others:
            right = [rank for rank in there if rank not in others]
            detail = "; ".join(
                [f"{name_ranks(right)}: {usual}"]
                + [f"rank {rank}: {values[rank]}" for rank in others[:4]]
            )
            return finding(problem, others, there[right[0]], detail, right)
    example = next(iter(there.values()))
    absent = [rank for rank in seen.entries if rank not in there]
    if absent:
        return finding("missing", absent, example, "", [*there])
    pending = [rank for rank, entry in there.items() if entry.pending]
    begun = [rank for rank, entry in there.items() if entry.state != "scheduled"]  # never gloo's
    if pending and begun and len(begun) < len(there):
        return finding(
            "not started", [rank for rank in there if rank not in begun], example, "", begun
        )
    if pending:
        return finding("not finished", pending, example, "", pending)
    return None


def _sizes(entry: Entry) -> str:
    if entry.operation in UNEVEN:
        return ""
    return _in_and_out(entry, entry.input_sizes, entry.output_sizes)


def _dtypes(entry: Entry) -> str:
    return _in_and_out(entry, entry.input_dtypes, entry.output_dtypes)


def _in_and_out(entry: Entry, given: object, taken: object) -> str:
    """What goes in and comes out, without what only one rank has."""
    parts = [f"in {given}"] * (entry.operation != FROM_ONE)
    return " ".join(parts + [f"out {taken}"] * (entry.operation != TO_ONE))


#: What must be equal on all ranks, in the order in which it is looked at.
DIFFERENCES: tuple[tuple[Problem, Callable[[Entry], str]], ...] = (
    ("other operation", lambda entry: entry.operation),
    ("other size", _sizes),
    ("other dtype", _dtypes),
)


def _usual(values: Mapping[int, str]) -> str:
    """What most ranks have; of several such, what the lowest of them has."""
    counts = Counter(values.values())
    most = max(counts.values())
    return next(value for _, value in sorted(values.items()) if counts[value] == most)

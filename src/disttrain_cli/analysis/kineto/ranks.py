"""Which ranks a file holds: one, or several that a tool has merged.

Tools that merge the traces of ranks mark them in one of these ways, all met in the wild: a label
before every process id ("[TP00-DP01] 4711", "[rank 3] Spans", "rank3_4711": SGLang and many
scripts), processes or threads named after their rank ("rank 3", "[rank 3] python3", "DP0-PP1-TP2":
MegaScan), or `args.rank` in every event (TraceLens). The first that a process has decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

#: What tells one rank from another: its number, or its places in groups, as (("DP", 1), ("TP", 0)).
Label = int | tuple[tuple[str, int], ...]
_RANK = re.compile(r"(?:^|[^a-z])(?:rank|wr)[-_ #:=[(]*(\d{1,7})(?!\d)", re.IGNORECASE)
_PLACES = re.compile(r"(?:\[|^)((?:(?:TP|DP|PP|EP|CP)-?\d{1,7}(?![a-zA-Z])[-_, ]?)+)")
_SLOWEST_FIRST = ("PP", "DP", "EP", "CP", "TP")
_PLACE = re.compile(r"([A-Z]+)-?(\d+)")


def label_in(text: str) -> Label | None:
    """What a process id or name says of its rank.

    An index in one group only is a rank. Several come in the order in which ranks are usually
    numbered: tensor parallel places change fastest, pipeline stages last.
    """
    named = _RANK.search(text)
    if named:
        return int(named.group(1))
    named = _PLACES.search(text)
    if not named:
        return None
    numbers = tuple(
        (kind, int(number))
        for kind, number in sorted(
            _PLACE.findall(named.group(1)), key=lambda match: _SLOWEST_FIRST.index(match[0])
        )
    )
    return numbers[0][1] if len(numbers) == 1 else numbers


def label_threads(
    threads: Mapping[int, str],
    process_names: Mapping[str, set[str]],
    thread_names: Mapping[int, str],
    ranks_told: Mapping[int, set[int]],
) -> dict[int, Label]:
    """The label of every thread of one file that has one.

    Args:
        threads: number of a thread → id of its process.
        process_names: id of a process → the names that metadata give to it.
        thread_names: thread → the name that metadata give to it.
        ranks_told: thread → `args.rank` of its events, −1 among them where some have none.
    """
    told = {
        thread: next(iter(ranks))
        for thread, ranks in ranks_told.items()
        if thread in threads and len(ranks) == 1
    }
    by_process: dict[str, set[Label]] = {}
    for thread, rank in told.items():
        by_process.setdefault(threads[thread], set()).add(rank)
    labels: dict[int, Label] = {}
    for thread, process in threads.items():
        label = label_in(process)
        if label is None:
            label = _only(label_in(name) for name in process_names.get(process, ()))
        if label is None:
            label = label_in(thread_names.get(thread, ""))
        if label is None:
            label = told.get(thread, _only(by_process.get(process, ())))
        if label is not None:
            labels[thread] = label
    return labels


def numbers_of(labels: Iterable[Label]) -> dict[Label, int]:
    """The rank that each label stands for: the one it names, or its place in the order of the
    labels."""
    different = set(labels)
    if all(isinstance(label, int) for label in different):
        return {label: label for label in different if isinstance(label, int)}
    ordered = sorted(
        different, key=lambda label: label if isinstance(label, tuple) else (("", label),)
    )
    return {label: number for number, label in enumerate(ordered)}


def _only(labels: Iterable[Label | None]) -> Label | None:
    """The one label, or None where there is none or they differ."""
    different = {label for label in labels if label is not None}
    return different.pop() if len(different) == 1 else None

"""Ranks in a file, by its name and contents: one, or several that a tool has merged.

Tools that merge the traces of ranks mark them in one of these ways, all seen in practice: a label
before every process id ("[TP00-DP01] 4711", "[rank 3] Spans", "rank3_4711": SGLang and many
scripts), processes or threads named after their rank ("rank 3", "[rank 3] python3", "DP0-PP1-TP2":
MegaScan), or `args.rank` in every event (TraceLens). The first that a process has decides. One
process that uses several devices is as many ranks: XLA names a process after each device
("/device:GPU:3"), Kineto gives `args.device` to kernels.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

#: Identifies a rank: its number, or its indices in groups, as (("DP", 1), ("TP", 0)).
Label = int | tuple[tuple[str, int], ...]
TELL_RANKS_APART = (
    'Analyse the ranks\' own files, or give every process the name of its rank ("rank 3") before'
    " merging."
)
_RANK = re.compile(r"(?:^|[^a-z])(?:rank|wr)[-_ #:=[(]*(\d{1,7})(?!\d)", re.IGNORECASE)
_DEVICE = re.compile(r"/device:(?!CPU)\w+:(\d{1,7})(?!\d)", re.IGNORECASE)
_PLACES = re.compile(r"(?:\[|^)((?:(?:TP|DP|PP|EP|CP)-?\d{1,7}(?![a-zA-Z])[-_, ]?)+)")
_SLOWEST_FIRST = ("PP", "DP", "EP", "CP", "TP")
_PLACE = re.compile(r"([A-Z]+)-?(\d+)")
#: Patterns of file names, the most reliable first: a rank of the job, indices in groups, and
#: numbers that may be those of a host or of its devices.
_RANK_IN_NAME = re.compile(
    r"(?<![a-z])(?<!local[-_. ])(?<!node[-_. ])rank[-_. =]?[\[(]?(\d{1,9})", re.IGNORECASE
)
_PLACES_IN_NAME = re.compile(
    r"(?:^|[^a-z])((?:(?:TP|DP|PP|EP|CP)[-_]?\d{1,7}(?![a-z])[-_, .]?)+)", re.IGNORECASE
)
_NUMBERS_IN_NAME = tuple(
    re.compile(rf"(?<![a-z])(?:{words})[-_. ]?(\d{{1,9}}){end}", re.IGNORECASE)
    for words, end in (("worker|trainer", ""), ("r", "(?![a-z0-9])"), ("gpu|device|cuda", ""))
)


def label_in(text: str) -> Label | None:
    """Return the label of the rank in a process id or name, or None.

    An index in one group only is a rank. Several are in the order in which ranks are usually
    numbered: tensor parallel indices change fastest, pipeline stages slowest.
    """
    named = _RANK.search(text)
    if named:
        return int(named.group(1))
    named = _PLACES.search(text)
    if not named:
        return None
    return _places(named.group(1))


def _places(text: str) -> Label:
    numbers = tuple(
        (kind, int(number))
        for kind, number in sorted(
            _PLACE.findall(text.upper().replace("_", "-")),
            key=lambda match: _SLOWEST_FIRST.index(match[0]),
        )
    )
    return numbers[0][1] if len(numbers) == 1 else numbers


def labels_in_names(paths: Sequence[Path]) -> list[tuple[bool, Sequence[Label | None]]]:
    """Return labels in the names of files, then in those of their folders, for each form of names.

    The most reliable form is first; each has True if it can be nothing but a rank of the job.
    """
    names, folders = [path.name for path in paths], [path.parent.name for path in paths]
    places = [_PLACES_IN_NAME.search(name) for name in names]
    return [
        *(
            (True, [_number_in(_RANK_IN_NAME, text) for text in texts])
            for texts in (names, folders)
        ),
        # a single file may be named after the size of its job
        (False, [_places(one.group(1)) if one and len(names) > 1 else None for one in places]),
        *(
            (False, [_number_in(pattern, text) for text in texts])
            for texts in (names, folders)
            for pattern in _NUMBERS_IN_NAME
        ),
    ]


def _number_in(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    return None if found is None else int(found.group(1))


def natural(path: Path) -> list[str | int]:
    """Return a sort key of names that orders numbers by value: TP-2 before TP-10."""
    parts = re.split(r"(\d+)", str(path))
    return [int(part) if part.isdecimal() else part for part in parts]


def device_threads(
    threads: Mapping[int, str], process_names: Mapping[str, set[str]]
) -> dict[int, int]:
    """Return the device of every thread whose process is named after one."""
    devices = {
        process: {int(found.group(1)) for name in names if (found := _DEVICE.search(name))}
        for process, names in process_names.items()
    }
    return {
        thread: next(iter(devices[process]))
        for thread, process in threads.items()
        if len(devices.get(process, ())) == 1
    }


def label_threads(
    threads: Mapping[int, str],
    process_names: Mapping[str, set[str]],
    thread_names: Mapping[int, str],
    recorded_ranks: Mapping[int, set[int]],
) -> dict[int, Label]:
    """Return the label of every thread of one file that has one.

    Args:
        threads: number of a thread → id of its process.
        process_names: id of a process → the names that metadata give to it.
        thread_names: thread → the name that metadata give to it.
        recorded_ranks: thread → `args.rank` of its events, with −1 if some have none.
    """
    recorded = {
        thread: next(iter(ranks))
        for thread, ranks in recorded_ranks.items()
        if thread in threads and len(ranks) == 1
    }
    by_process: dict[str, set[Label]] = {}
    for thread, rank in recorded.items():
        by_process.setdefault(threads[thread], set()).add(rank)
    labels: dict[int, Label] = {}
    for thread, process in threads.items():
        label = label_in(process)
        if label is None:
            label = _only(label_in(name) for name in process_names.get(process, ()))
        if label is None:
            label = label_in(thread_names.get(thread, ""))
        if label is None:
            label = recorded.get(thread, _only(by_process.get(process, ())))
        if label is not None:
            labels[thread] = label
    return labels


def numbers_of(labels: Iterable[Label]) -> dict[Label, int]:
    """Return the rank of each label: the number that it is, or its index in sorted order."""
    different = set(labels)
    if all(isinstance(label, int) for label in different):
        return {label: label for label in different if isinstance(label, int)}
    ordered = sorted(
        different, key=lambda label: label if isinstance(label, tuple) else (("", label),)
    )
    return {label: number for number, label in enumerate(ordered)}


def _only(labels: Iterable[Label | None]) -> Label | None:
    """Return the only label, or None if there is none or they differ."""
    different = {label for label in labels if label is not None}
    return different.pop() if len(different) == 1 else None

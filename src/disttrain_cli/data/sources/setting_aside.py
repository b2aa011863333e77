"""Files below a folder that are no shards, whatever their names.

They are remains of a program, or below a link to a folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath

from disttrain_cli.data.sources.files import join, open_file
from disttrain_cli.data.sources.samples import printable
from disttrain_cli.errors import DataError
from disttrain_cli.spec.runfile.data import is_url

STATE, STATE_BYTES = "state.json", 16 * 1024 * 1024  # of a Hugging Face dataset that was saved
TEMPORARY = "_temporary"  # folder to which a Spark job writes
SAVED = "not part of the last saved dataset, according to state.json"


def set_aside(
    path: str, files: Sequence[str], form: Callable[[str], str | None]
) -> tuple[list[str], list[tuple[list[str], str]]]:
    """Return (files that may be shards or lie next to them, others with the reason).

    Args:
        form: returns the format of a name, None if it has none.

    Raises:
        DataError: the name of a shard is not UTF-8.
    """
    kept, reasons = list[str](), dict[str, list[str]]()
    saved = {} if is_url(path) else _saved(path, files)
    for name in files:
        why = _reason(path, name, form, saved)
        (reasons.setdefault(why, []) if why else kept).append(name)
    return kept, [(names, why) for why, names in reasons.items()]


def _reason(
    path: str, name: str, form: Callable[[str], str | None], saved: dict[str, set[str]]
) -> str | None:
    if name.endswith("/"):
        return "a link to a folder, not followed"
    if (of_name := form(name)) is None:
        return None
    folder, _, file = name.rpartition("/")
    if TEMPORARY in folder.split("/"):
        return "left over from a job that did not finish"
    if of_name == "arrow" and file not in saved.get(folder, (file,)):
        return SAVED
    if is_url(path):
        return None
    if not _is_utf8(name):
        raise DataError(
            f"The name of the shard {printable(name)} is not UTF-8",
            f"in {printable(path)}",
            "Give it another name, and index the data again.",
        )
    return None


def _saved(path: str, files: Sequence[str]) -> dict[str, set[str]]:
    """Return the names of the shards in each folder that `save_to_disk` wrote."""
    saved = dict[str, set[str]]()
    for name in files:
        if PurePosixPath(name).name == STATE:
            try:
                state = json.loads(open_file(join(path, name)).read(0, STATE_BYTES))
                shards = {one["filename"] for one in state["_data_files"]}
            except (OSError, ValueError, LookupError, TypeError, RecursionError):
                continue
            saved[name.rpartition("/")[0]] = shards
    return saved


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True

"""Published models by their names on Hugging Face: `org/name`, or `org/name@revision`.

Files in the cache of huggingface_hub are used as they are, without a network, so that a name means
the same commit for all ranks and commands; missing files are downloaded once per host, the small
files when a run file is read and the weights when they are needed. Nothing but JSON, texts,
tokenizers and safetensors is downloaded.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from disttrain_cli.errors import SpecError
from disttrain_cli.spec.progress import Progress, silent

NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w.-][\w./-]*))?", re.ASCII)
#: Files that describe a model, and its weights; none in subfolders.
SMALL = ("*.json", "*.txt", "*.jinja", "*.model", "LICENSE*")
WEIGHTS = ("*.safetensors",)
_NEVER = ("*/*", "consolidated*", "*.bin.index.json")
_MIB = 1 << 20


class Snapshot(NamedTuple):
    """Named model at one commit; `path` is its folder in the cache."""

    name: str
    commit: str
    path: Path


_snapshots: dict[Path, Snapshot] = {}  # read by this process
_complete: set[Path] = set()  # of these, those with weights


def is_name(given: str, folder: Path) -> bool:
    """Return True if a folder in a run file is a name on Hugging Face.

    It must look like one, and no folder next to the run file (`folder`) may have that name.
    """
    return NAME.fullmatch(given) is not None and not (folder / given).exists()


def snapshot(given: str, field: str) -> Snapshot:
    """Return a model without its weights, from the cache or downloaded.

    Args:
        field: field of the run file that names it, for error messages.

    Raises:
        SpecError: it is not in the cache and cannot be downloaded.
    """
    matched = NAME.fullmatch(given)
    assert matched is not None
    name, revision = matched.groups()
    path = _download(name, revision, SMALL, field, silent)
    found = Snapshot(name, path.name, path)
    _snapshots[path] = found
    return found


def snapshot_of(folder: Path) -> Snapshot | None:
    """Return the named model of a cache folder, if this process has read it."""
    return _snapshots.get(folder)


def name_of(folder: Path) -> str:
    """Return a model's public name: its name on Hugging Face, or its folder."""
    found = snapshot_of(folder)
    return str(folder) if found is None else found.name


def fetch_weights(folder: Path, progress: Progress = silent) -> None:
    """Download a named model's weights to this host, if they are missing.

    Folders that are no names are ignored. One process downloads, and others wait for it.

    Raises:
        SpecError: they are not in the cache and cannot be downloaded, or are pickled only.
    """
    found = snapshot_of(folder)
    if found is None or folder in _complete:
        return
    field = f"{found.name}@{found.commit}"
    _download(found.name, found.commit, (*SMALL, *WEIGHTS), field, progress)
    if not any(folder.glob(WEIGHTS[0])):
        _ask(found, field)
        raise SpecError(
            f"{found.name} has no safetensors weights on Hugging Face",
            "pickled files are neither downloaded nor opened",
            "Name a model that has them, or set pretrained: false.",
        )
    _complete.add(folder)


def _ask(found: Snapshot, field: str) -> None:
    """Raise SpecError if the model cannot be looked up on Hugging Face, as without a network."""
    from huggingface_hub import HfApi

    try:
        HfApi().repo_info(found.name, revision=found.commit)
    except Exception as error:
        raise _not_there(found.name, found.commit, field, error) from None


def _download(
    name: str, revision: str | None, patterns: tuple[str, ...], field: str, progress: Progress
) -> Path:
    from huggingface_hub import constants, snapshot_download

    asked: dict[str, Any] = {
        "repo_id": name,
        "revision": revision,
        "allow_patterns": list(patterns),
        "ignore_patterns": list(_NEVER),
    }
    try:
        if (there := _cached(asked)) is not None:
            return there
        with _alone(Path(constants.HF_HUB_CACHE), name):
            if (there := _cached(asked)) is not None:  # downloaded by another process meanwhile
                return there
            return Path(snapshot_download(**asked, tqdm_class=_bar(name, progress)))
    except Exception as error:  # the library's errors have no common base
        raise _not_there(name, revision, field, error) from None


def _cached(asked: dict[str, Any]) -> Path | None:
    """Return the folder in the cache, if everything requested is there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import IncompleteSnapshotError, LocalEntryNotFoundError

    try:
        path = Path(snapshot_download(**asked, local_files_only=True))
    except (LocalEntryNotFoundError, IncompleteSnapshotError):
        return None
    # a cache without a list of the model's files does not show what is missing
    weights = WEIGHTS[0] in asked["allow_patterns"]
    return path if (_has_weights(path) if weights else (path / "config.json").exists()) else None


def _has_weights(folder: Path) -> bool:
    """Return True if a model's weights are there, including all shards of its index."""
    named: set[str] = set()
    for index in folder.glob(f"{WEIGHTS[0]}.index.json"):
        with suppress(ValueError, AttributeError):  # damaged: reported when weights are read
            named |= set(json.loads(index.read_text())["weight_map"].values())
    return any(folder.glob(WEIGHTS[0])) and all((folder / name).exists() for name in named)


@contextmanager
def _alone(cache: Path, name: str) -> Iterator[None]:
    """Enter a context that is exclusive among the processes of a host."""
    locks = cache / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    with (locks / f"disttrain-{name.replace('/', '--')}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _not_there(name: str, revision: str | None, field: str, error: Exception) -> SpecError:
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    again = f"Correct {field}, or download it on a machine with network access: hf download {name}"
    why = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if isinstance(error, GatedRepoError):
        why = "it is gated: its owner grants access"
        again = f"Ask for access on its page, then log in with: hf auth login ({field})"
    elif isinstance(error, RepositoryNotFoundError):
        why = "there is no such model, or it is private"
    elif isinstance(error, RevisionNotFoundError):
        why = f"there is no revision {revision}"
    elif not isinstance(error, (HfHubHTTPError, HFValidationError)):
        why = f"it is not in the cache and cannot be downloaded ({why})"
    at = "" if revision is None else f"@{revision}"
    return SpecError(
        f"{field}: there is no folder {name}{at}, and no such model can be downloaded from Hugging"
        " Face",
        why,
        again,
    )


def _bar(name: str, progress: Progress) -> Any:
    """Return a progress bar class for the library that only reports bytes to `progress`."""
    from tqdm.auto import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **fields: Any) -> None:
            fields.pop("name", None)
            nowhere = open(os.devnull, "w")  # noqa: SIM115
            super().__init__(*args, **{**fields, "file": nowhere, "disable": False})

        def display(self, *args: Any, **fields: Any) -> bool:
            if self.unit == "B" and self.total:
                done, total = int(self.n) // _MIB, int(self.total) // _MIB
                progress(f"downloading {name} (MiB)", done, total)
            return True

    return Bar

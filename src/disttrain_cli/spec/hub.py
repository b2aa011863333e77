"""Published models by their names on Hugging Face: `org/name`, or `org/name@revision`.

What is in the cache of huggingface_hub is taken as it is, without a network, so that a name means
the same commit for all ranks and commands; what is not there is downloaded once per host, the
small files where a run file is read and the weights where they are needed. Nothing but JSON, texts,
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
#: Files that a model is described by, and its weights; none of folders inside.
SMALL = ("*.json", "*.txt", "*.jinja", "*.model", "LICENSE*")
WEIGHTS = ("*.safetensors",)
_NEVER = ("*/*", "consolidated*", "*.bin.index.json")
_MIB = 1 << 20


class Snapshot(NamedTuple):
    """A model of a name at one commit; `path` is its folder in the cache."""

    name: str
    commit: str
    path: Path


_snapshots: dict[Path, Snapshot] = {}  # that this process has read
_complete: set[Path] = set()  # of these, those whose weights are there


def is_name(given: str, folder: Path) -> bool:
    """Whether a folder that a run file names is a name on Hugging Face: it looks like one, and no
    folder beside the run file (`folder`) is called so."""
    return NAME.fullmatch(given) is not None and not (folder / given).exists()


def snapshot(given: str, field: str) -> Snapshot:
    """A model without its weights, from the cache or downloaded.

    Args:
        field: what names it, as the user wrote it.

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
    """The model of a name whose folder this is, if this process read one from there."""
    return _snapshots.get(folder)


def name_of(folder: Path) -> str:
    """What others call a model: its name on Hugging Face, or its folder."""
    found = snapshot_of(folder)
    return str(folder) if found is None else found.name


def fetch_weights(folder: Path, progress: Progress = silent) -> None:
    """Have a model's weights on this host, if the folder is that of a name; one process downloads
    them, and others wait for it.

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
    """SpecError where Hugging Face cannot be asked for a model, as it is not where its cache was
    taken for want of a network."""
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
            if (there := _cached(asked)) is not None:  # another process has downloaded it meanwhile
                return there
            return Path(snapshot_download(**asked, tqdm_class=_bar(name, progress)))
    except Exception as error:  # its errors have no common base
        raise _not_there(name, revision, field, error) from None


def _cached(asked: dict[str, Any]) -> Path | None:
    """The folder in the cache, if all that is asked for is there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import IncompleteSnapshotError, LocalEntryNotFoundError

    try:
        path = Path(snapshot_download(**asked, local_files_only=True))
    except (LocalEntryNotFoundError, IncompleteSnapshotError):
        return None
    # of a cache without a list of the model's files it is not known what is missing
    weights = WEIGHTS[0] in asked["allow_patterns"]
    return path if (_has_weights(path) if weights else (path / "config.json").exists()) else None


def _has_weights(folder: Path) -> bool:
    """Whether a model's weights are there, those that its index of shards names."""
    named: set[str] = set()
    for index in folder.glob(f"{WEIGHTS[0]}.index.json"):
        with suppress(ValueError, AttributeError):  # damaged: said where weights are read
            named |= set(json.loads(index.read_text())["weight_map"].values())
    return any(folder.glob(WEIGHTS[0])) and all((folder / name).exists() for name in named)


@contextmanager
def _alone(cache: Path, name: str) -> Iterator[None]:
    """One process of a host at a time."""
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

    again = f"Correct {field}, or download it where there is a network: hf download {name}"
    why = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if isinstance(error, GatedRepoError):
        why = "it is gated: its owner grants access"
        again = f"Ask for access on its page, then log in with: hf auth login ({field})"
    elif isinstance(error, RepositoryNotFoundError):
        why = "there is no such model, or it is private"
    elif isinstance(error, RevisionNotFoundError):
        why = f"there is no revision {revision}"
    elif not isinstance(error, (HfHubHTTPError, HFValidationError)):
        why = f"it is not in the cache, and the network does not reach it ({why})"
    at = "" if revision is None else f"@{revision}"
    return SpecError(
        f"{field}: there is no folder {name}{at}, and no such model can be had from Hugging Face",
        why,
        again,
    )


def _bar(name: str, progress: Progress) -> Any:
    """A progress bar of the library's that reports bytes to `progress` and draws nothing."""
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

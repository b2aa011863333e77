"""Checkpoint folders from outside: the newest one, its description, and its match with a run.

Apart from `checkpoint.py`, which reads and writes the tensors, so that the launcher needs no torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from disttrain_cli.calls import argument, call
from disttrain_cli.errors import MismatchError, SpecError
from disttrain_cli.spec.files import parse_json
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.runfile.adapters import numbers
from disttrain_cli.spec.settings import differences

VERSION = 3
ANEW = f"start at step 0 with {argument('restart', True)}"
DESCRIPTION, TENSORS = "checkpoint.json", "tensors.json"
SHOWN, SHOWN_LETTERS = 12, 60  # changed fields, and letters of a value, that are printed


def all_of(checkpoints: Path) -> list[Path]:
    """Return the folders of all checkpoints, damaged ones too, the newest last."""
    return sorted(
        (path for path in checkpoints.glob("step-*") if path.name.removeprefix("step-").isdigit()),
        key=step_of,
    )


def step_of(folder: Path) -> int:
    """Return the number of steps that a checkpoint's weights have been trained for."""
    return int(folder.name.removeprefix("step-"))


def latest(checkpoints: Path) -> Path | None:
    """Return the folder of the newest checkpoint.

    A checkpoint has a temporary name until it is complete, so that a partial one is never returned.
    """
    return steps[-1] if (steps := all_of(checkpoints)) else None


def best_of(checkpoints: Path) -> Path | None:
    """Return the folder of the sound checkpoint with the lowest recorded held-out loss."""
    losses: dict[Path, float] = {}
    for folder in all_of(checkpoints):
        with suppress(SpecError):  # damaged
            described = describe(folder)
            if described.get("sound", True) and math.isfinite(
                described.get("held_out_loss", math.nan)
            ):
                losses[folder] = described["held_out_loss"]
    return min(losses, key=lambda folder: losses[folder], default=None)


def trained(run: Run) -> Path | None:
    """Return the checkpoint that a run results in: the newest, or with `keep_best` the best."""
    spec = run.file.train.evaluated
    best = best_of(run.dir.checkpoints) if spec and spec.keep_best else None
    return best or latest(run.dir.checkpoints)


def superseded(checkpoints: Path, keep: int, keep_best: bool = False) -> list[Path]:
    """Return the checkpoints that may be removed.

    These are all but the newest `keep` sound ones, the newest unsound one, and with `keep_best` the
    one of `best_of`. A checkpoint is unsound if the step before it was skipped: weights that led to
    bad losses must not push out earlier ones.
    """
    sound, doubtful = list[Path](), list[Path]()
    for folder in all_of(checkpoints):
        try:
            (sound if describe(folder).get("sound", True) else doubtful).append(folder)
        except SpecError:  # damaged: counted and removed like an intact one
            sound.append(folder)
    best = best_of(checkpoints) if keep_best else None
    return [folder for folder in sound[:-keep] + doubtful[:-1] if folder != best]


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold a checkpoint while it is read: `remove` leaves it where it is.

    Raises:
        SpecError: it has been removed.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        raise _gone(folder) from None
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        if not folder.exists():  # removed while this waited for the lock
            raise _gone(folder)
        yield
    finally:
        os.close(descriptor)


def _gone(folder: Path) -> SpecError:
    return SpecError(
        f"The checkpoint {folder} has been removed",
        "train.checkpoint.keep is the number of checkpoints that stay",
        "Use a newer one, or keep more.",
    )


def remove(folder: Path) -> None:
    """Remove a checkpoint; one that a process of this host holds stays until a later call."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        with suppress(OSError):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)


def sealed(description: dict[str, Any]) -> dict[str, Any]:
    """Return a description with its checksum added."""
    content = json.dumps(description, sort_keys=True).encode()
    return description | {"sha256": hashlib.sha256(content).hexdigest()}


def partial(folder: Path) -> Path:
    """Return the temporary path at which a checkpoint is written before it is renamed."""
    return folder.with_name(f".{folder.name}.partial")


def remove_leftovers(checkpoints: Path) -> None:
    """Remove partial and replaced checkpoints left by a crash."""
    for pattern in (".step-*.partial", ".step-*.replaced"):
        for left in checkpoints.glob(pattern):
            shutil.rmtree(left, ignore_errors=True)


def how_to_go_on(folder: Path) -> str:
    """Return the advice for a checkpoint that cannot be used."""
    earlier = [other for other in all_of(folder.parent) if step_of(other) < step_of(folder)]
    return (
        f"Move {folder} away to go on from {earlier[-1].name}, or {ANEW}."
        if earlier
        else f"There is none before it: {ANEW}."
    )


def describe(folder: Path) -> dict[str, Any]:
    """Read and validate the description of a checkpoint; raises SpecError."""
    value = parse_json(folder / DESCRIPTION, "checkpoint", how_to_go_on(folder))
    if not isinstance(value, dict) or not {"version", "step", "model", "files"} <= value.keys():
        raise SpecError(
            f"The checkpoint {folder} is damaged",
            f"{DESCRIPTION} lacks version, step, model or files",
            how_to_go_on(folder),
        )
    if value["version"] != VERSION:
        raise SpecError(
            f"The checkpoint {folder} has version {value['version']}",
            f"this disttrain reads {VERSION}",
            f"Go on with the disttrain that wrote it, or {ANEW}.",
        )
    plain = {key: one for key, one in value.items() if key != "sha256"}
    if sealed(plain) != value:
        raise SpecError(
            f"The checkpoint {folder} is damaged",
            f"{DESCRIPTION} has another checksum",
            how_to_go_on(folder),
        )
    return value


class Begun(NamedTuple):
    """Data mixture of a run up to a step."""

    step: int
    sources: list[str]  # as `Index.of_sources`
    phases: list[tuple[int, list[float]]]  # (first step, weight of each source)


def begun(checkpoints: Path) -> Begun:
    """Return the data mixture recorded in the newest readable checkpoint, or an empty one."""
    for folder in reversed(all_of(checkpoints)):
        with suppress(SpecError):  # damaged
            said = describe(folder)
            step = int(said["step"])
            drawn = [(first, weights) for first, weights in said["phases"] if first < step]
            return Begun(step, said["dataset"] if drawn else [], drawn)
    return Begun(0, [], [])


def made_from(run: Run, profile: Profile) -> dict[str, Any]:
    """Return the inputs that a checkpoint must share with a run that resumes from it.

    Model, data, data weights by step, seed and global batch size.
    """
    data = profile.data
    return {
        **model_of(run),
        "dataset": data.sources or profile.fingerprints.data,
        "phases": [[phase.step, phase.weights] for phase in data.phases],
        "seed": run.file.train.seed,
        "global_batch_size": run.file.train.global_batch_size,
    }


def recorded(run: Run, profile: Profile) -> dict[str, Any]:
    """Return a checkpoint's record of its run: its inputs and the run file with `--set` applied."""
    return made_from(run, profile) | {"run_file": run.file.model_dump(mode="json")}


def changed_since(checkpoints: Path, run: Run) -> list[str]:
    """Return a sentence for each run-file field that differs from the newest checkpoint's.

    Raises SpecError where the checkpoint cannot be read.
    """
    if (newest := latest(checkpoints)) is None:
        return []
    now = run.file.model_dump(mode="json")
    sentences = [
        f"{key}: {_shown(old)} up to {newest.name}, {_shown(new)} from here on."
        for key, old, new in differences(describe(newest).get("run_file", now), now)
    ]
    more = len(sentences) - SHOWN
    return sentences[:SHOWN] + ([f"{more} more fields have other values."] if more > 0 else [])


def _shown(value: Any) -> str:
    text = "none" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN_LETTERS else f"{text[: SHOWN_LETTERS - 1]}…"


def model_of(run: Run) -> dict[str, Any]:
    """Return the inputs that a checkpoint must share with the model that loads it.

    The model's fingerprint, commits of what the run file references by name on Hugging Face, and
    those settings of its adapters that cannot be derived from tensors.
    """
    adapters = numbers(run)
    revisions = run.revisions
    return {
        **({"revisions": revisions} if revisions else {}),
        "model": run.file.model_fingerprint(),
        **({"adapters": adapters} if adapters else {}),
    }


REMEDIES = {
    "model": ("another model", "restore the model section of the run file"),
    "revisions": (
        "other revisions of published models",
        "pin them in the run file: NAME@REVISION",
    ),
    "adapters": (
        "other adapters",
        "give r, lora_alpha and use_rslora of the adapters their old values",
    ),
    "dataset": ("another dataset", "bring the data back as it was"),
    "phases": (
        "data with other weights",
        "profile and plan again, which keeps those of the steps before the newest checkpoint:"
        f" {call('profile')} && {call('plan')}",
    ),
    "seed": ("another seed", "give train.seed its old value"),
    "global_batch_size": (
        "another global batch size",
        "give train.global_batch_size its old value",
    ),
}


def check_belongs(folder: Path, here: Mapping[str, Any]) -> int:
    """Return the step of a checkpoint whose inputs equal `here` (`made_from`).

    Raises:
        MismatchError: an input differs; the message shows both values.
        SpecError: its description cannot be read.
    """
    described = describe(folder)
    step = int(described["step"])
    for what, ours in here.items():
        theirs = described.get(what, ours)
        if what == "phases":
            theirs, ours = ([one for one in phases if one[0] < step] for phases in (theirs, ours))
        more = what == "dataset" and isinstance(theirs, list) and isinstance(ours, list)
        if theirs != (ours[: len(theirs)] if more else ours):
            other, remedy = REMEDIES[what]
            raise MismatchError(
                f"The checkpoint {folder} was made from {other}",
                f"{what} of the checkpoint: {theirs}; here: {ours}",
                f"To go on from it, {remedy}; or {ANEW}.",
            )
    return step


def check_tied(folder: Path, shared: Iterable[str]) -> None:
    """Refuse a checkpoint with separate weights where this run ties them to another layer's.

    Args:
        shared: LAYER/PARAMETER of the model's parameters that are tied to another layer's.

    Raises:
        SpecError: the checkpoint holds one of them, trained separately.
    """
    stored = parse_json(folder / TENSORS, "list of a checkpoint's tensors", how_to_go_on(folder))
    apart = [name for name in shared if f"weight/{name}" in stored["tensors"]]
    if apart:
        raise SpecError(
            f"The checkpoint {folder} has a head that was trained apart from its embedding",
            f"it holds {', '.join(apart)}; tie_word_embeddings: true makes them one weight",
            "Set tie_word_embeddings: false in the LLM's config, and start a run from its weights:"
            f" {call('train', origin=folder)}",
        )


def newly_trained(folder: Path, trained: Iterable[str]) -> list[str]:
    """Return the names in `trained` that a checkpoint has no moments of, being frozen up to it."""
    return [name for name in trained if name not in describe(folder)["updates"]]


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

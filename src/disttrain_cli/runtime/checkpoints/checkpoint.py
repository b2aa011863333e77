"""Checkpoints: per-parameter tensors keyed GROUP/LAYER/PARAMETER, which any layout and strategy can
read.

Groups are `weight` (fp32 masters where there are any), `exp_avg`, `exp_avg_sq`, and `ema`
(`averaging`). Each rank keeps a part of them (`checkpoints.owning`): copied to the host while
training stands still, and written by a thread while it goes on, through
torch.distributed.checkpoint and files of our own (`checkpoints.storage`). Reading, a rank fills its
own weights and partitions in place, whoever wrote them. Of random state there is none but the seed:
noise, dropout and the order of the data are functions of it and the step.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from disttrain_cli.calls import argument, call
from disttrain_cli.errors import DisttrainError, SpecError
from disttrain_cli.runtime.checkpoints.boxes import Pieces
from disttrain_cli.runtime.checkpoints.folder import (
    TENSORS,
    check_belongs,
    describe,
    how_to_go_on,
    latest,
    remove_leftovers,
    superseded,
)
from disttrain_cli.runtime.checkpoints.owning import (
    AVERAGE,
    WEIGHT,
    allocate_moments,
    named_parameters,
    staged,
    wanted,
)
from disttrain_cli.runtime.checkpoints.storage import (
    LoadPieces,
    Reader,
    SavePieces,
    Writer,
    damaged,
    read_metadata,
)

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

    from disttrain_cli.runtime.checkpoints.averaging import Average
    from disttrain_cli.runtime.engine.engine import UnitEngine

__all__ = ["Opened", "Saver", "load", "named_parameters", "read_tensors", "resume", "save"]


class Saver:
    """Writes checkpoints beside training, one at a time; every rank makes one and saves at the same
    steps.

    Args:
        about: what the checkpoints say of the run (`folder.recorded`).
        keep: newest sound checkpoints that stay (`folder.superseded`).
        keep_best: the one of the lowest held-out loss stays, too.
    """

    def __init__(
        self,
        checkpoints: Path,
        about: Mapping[str, Any],
        engine: UnitEngine,
        keep: int,
        average: Average | None = None,
        keep_best: bool = False,
    ) -> None:
        self._checkpoints, self._about, self._keep = checkpoints, dict(about), keep
        self._keep_best = keep_best
        self._engine, self._average = engine, average
        # its own, so that the thread's messages meet no others
        self._group = dist.new_group(backend="gloo")
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        self._host: dict[str, Tensor] = {}
        if dist.get_rank() == 0:
            remove_leftovers(checkpoints)
        dist.barrier(self._group)

    def save(
        self, step: int, sound: bool = True, held_out: Mapping[str, Any] | None = None
    ) -> None:
        """Copy the state to the host, and begin to write it; it is not sound where the step before
        it was skipped. `held_out` is what it says of held-out losses."""
        self.wait()
        pieces = self._copy()
        about = {
            "step": step,
            "skipped_steps": self._engine.skipped_steps,
            "updates": self._engine.updates,
            "sound": sound,
            **(held_out or {}),
            **self._about,
        }
        self._writing = self._thread.submit(self._write, step, about, pieces)

    def check(self) -> None:
        """Raise what went wrong since, if anything; does not wait."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint is in its place.

        Raises:
            DisttrainError: it could not be written; the ones before it are as they were.
        """
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: Any
    ) -> None:
        """Finish what is being written, whatever went wrong meanwhile; the first thing that did is
        what is raised."""
        try:
            self.wait()
        except Exception:
            if kind is None:
                raise
        finally:
            self._thread.shutdown(wait=False)
        if kind is None:  # else the others may not be here
            dist.destroy_process_group(self._group)

    def _copy(self) -> dict[str, Pieces]:
        self._engine.settle()
        allocate_moments(self._engine)
        kept = list(staged(self._engine))
        kept += (
            [(f"{AVERAGE}/{part.name}", part, values) for part, values in self._average.values()]
            if self._average
            else []
        )
        on_gpu = self._engine.device.type == "cuda"
        pieces = {}
        for key, part, values in kept:
            if key not in self._host:
                self._host[key] = torch.empty(values.shape, dtype=values.dtype, pin_memory=on_gpu)
            pieces[key] = part.pieces(self._host[key].copy_(values, non_blocking=True))
        if on_gpu:
            torch.cuda.synchronize(self._engine.device)
        return pieces

    def _write(self, step: int, about: dict[str, Any], pieces: dict[str, Pieces]) -> None:
        from torch.distributed import checkpoint as dcp
        from torch.distributed.checkpoint.api import CheckpointException

        rank = dist.get_rank()
        folder = self._checkpoints / f"step-{step:06d}"
        writer = Writer(folder, rank, about)
        try:
            dcp.save(pieces, storage_writer=writer, planner=SavePieces(), process_group=self._group)
        except CheckpointException as error:
            if rank == 0:  # all have ended writing
                remove_leftovers(self._checkpoints)
            ranks: dict[str, list[int]] = {}
            for number, failure in sorted(error.failures.items()):
                ranks.setdefault(str(failure[0]), []).append(number)
            reasons = [
                f"{reason} (rank {', '.join(_shown(numbers))})" for reason, numbers in ranks.items()
            ]
            newest = latest(self._checkpoints)
            failed = DisttrainError(
                f"The checkpoint of step {step} could not be written",
                "\n".join(_shown(reasons)),
                f"See that there is room in {self._checkpoints}; then "
                + (
                    f"go on from {newest.name} with {argument('resume', True)}."
                    if newest
                    else "start again."
                ),
            )
            failed.on_every_rank = True
            raise failed from None
        if rank == 0:
            for old in superseded(self._checkpoints, self._keep, self._keep_best):
                shutil.rmtree(old, ignore_errors=True)


def save(
    checkpoints: Path, step: int, about: Mapping[str, Any], engine: UnitEngine, keep: int
) -> Path:
    """Write one checkpoint and wait for it; every rank calls this. Returns its folder."""
    with Saver(checkpoints, about, engine, keep) as saver:
        saver.save(step)
    return checkpoints / f"step-{step:06d}"


def resume(
    checkpoints: Path, here: Mapping[str, Any], engine: UnitEngine, average: Average | None = None
) -> int:
    """Load the newest checkpoint, if there is one; returns its step. Raises what `load` raises."""
    newest = latest(checkpoints)
    return load(newest, here, engine, average) if newest else 0


def load(
    folder: Path, here: Mapping[str, Any], engine: UnitEngine, average: Average | None = None
) -> int:
    """Set weights, optimizer state and averages of this rank from a checkpoint of any layout;
    returns its step.

    Every rank calls this. Each checks the checksums of some of the files, so that all are read
    once. A checkpoint without averages leaves them at its weights, and one in which other modules
    were frozen the moments of those that are trained now at zero (`newly_trained`).

    Raises:
        MismatchError: it was made from something else than `here` says.
        SpecError: it is damaged, or lacks a tensor.
    """
    step = check_belongs(folder, here)
    described = describe(folder)
    _verify(folder, described["files"])
    metadata = read_metadata(folder)
    engine.settle()
    engine.skipped_steps = described["skipped_steps"]
    engine.updates = {name: described["updates"].get(name, 0) for name in engine.updates}
    allocate_moments(engine, restart=True)
    with torch.no_grad():
        _fill(folder, metadata, wanted(engine, described["updates"].keys()))
        if average is not None:
            average.start()
            if any(key.startswith(f"{AVERAGE}/") for key in metadata.state_dict_metadata):
                _fill(
                    folder,
                    metadata,
                    {
                        f"{AVERAGE}/{part.name}": part.pieces(values)
                        for part, values in average.values()
                    },
                )
    dist.barrier()
    return step


def load_weights(folder: Path, pieces: dict[str, Pieces]) -> None:
    """Fill pieces of weights from a checkpoint of any layout and model; every rank calls this, as
    it does `load`.

    Raises:
        SpecError: the checkpoint is damaged, or lacks a tensor.
    """
    _verify(folder, describe(folder)["files"])
    with torch.no_grad():
        _fill(folder, read_metadata(folder), pieces)
    dist.barrier()


def read_tensors(
    folder: Path, layers: Collection[str] | None = None, groups: Sequence[str] = ("weight",)
) -> dict[str, Tensor]:
    """Whole tensors of some layers (None = all) and groups, by GROUP/LAYER/PARAMETER; files are
    checked.

    Raises:
        SpecError: a layer is not in it, or a file is damaged.
    """
    return Opened(folder, layers).read(layers, groups)


class Opened:
    """A checkpoint whose files were checked once, to be read layer by layer in one process.

    Args:
        layers: those that will be read, whose files are checked; None = all.

    Raises:
        SpecError: a file is damaged.
    """

    def __init__(self, folder: Path, layers: Collection[str] | None = None) -> None:
        files = describe(folder)["files"]
        _refuse(folder, damaged(folder, {TENSORS: files[TENSORS]}))
        self._folder, self._metadata = folder, read_metadata(folder)
        used = {
            name
            for index, name in self._metadata.storage_data.items()
            if layers is None or index.fqn.split("/", 2)[1] in layers
        }
        _refuse(folder, damaged(folder, {name: files[name] for name in sorted(used)}))

    def layers(self, group: str) -> set[str]:
        """Names of the layers that have tensors of a group."""
        return {
            key.split("/", 2)[1]
            for key in self._metadata.state_dict_metadata
            if key.startswith(f"{group}/")
        }

    def names(self) -> set[str]:
        """LAYER/PARAMETER of all weights."""
        weights = f"{WEIGHT}/"
        return {
            key.removeprefix(weights)
            for key in self._metadata.state_dict_metadata
            if key.startswith(weights)
        }

    def read(
        self, layers: Collection[str] | None = None, groups: Sequence[str] = ("weight",)
    ) -> dict[str, Tensor]:
        """What `read_tensors` gives."""
        tensors = self._metadata.state_dict_metadata
        keys = [
            key
            for key in tensors
            if key.split("/", 1)[0] in groups and (layers is None or key.split("/", 2)[1] in layers)
        ]
        lacking = set(layers or ()) - {key.split("/", 2)[1] for key in keys}
        if lacking:
            raise SpecError(
                f"The checkpoint {self._folder} lacks the layers {', '.join(sorted(lacking))}",
                next_step=(
                    f"Go on from a checkpoint of this model, or start anew:"
                    f" {call('train', restart=True)}"
                ),
            )
        read = {
            key: torch.empty(tensors[key].size, dtype=tensors[key].properties.dtype) for key in keys
        }
        _fill(
            self._folder,
            self._metadata,
            {
                key: Pieces(value.shape, value.dtype, [((0,) * value.ndim, value)])
                for key, value in read.items()
            },
        )
        return read


def _fill(folder: Path, metadata: Metadata, pieces: dict[str, Pieces]) -> None:
    from torch.distributed import checkpoint as dcp

    lacking = [key for key in pieces if key not in metadata.state_dict_metadata]
    if lacking:
        raise SpecError(
            f"The checkpoint {folder} lacks {len(lacking)} tensors of this model",
            ", ".join(_shown(lacking)),
            how_to_go_on(folder),
        )
    stored = {key: metadata.state_dict_metadata[key].size for key in pieces}
    other = [
        f"{key}: {tuple(stored[key])} in the checkpoint, {tuple(one.shape)} in the model"
        for key, one in pieces.items()
        if stored[key] != one.shape
    ]
    if other:
        raise SpecError(
            f"{len(other)} tensors of the checkpoint {folder} have another shape",
            "\n".join(_shown(other)),
            how_to_go_on(folder),
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(
            dict(pieces),
            storage_reader=Reader(folder, metadata),
            planner=LoadPieces(),
            no_dist=True,
        )


def _verify(folder: Path, files: Mapping[str, Any]) -> None:
    """Check every file once, by some rank; all ranks learn of what is wrong."""
    rank, world = dist.get_rank(), dist.get_world_size()
    local = {name: files[name] for name in sorted(files)[rank::world]}
    problems: list[list[str]] = [[] for _ in range(world)]
    dist.all_gather_object(problems, damaged(folder, local))
    _refuse(folder, [one for each in problems for one in each])


def _refuse(folder: Path, problems: list[str]) -> None:
    if problems:
        raise SpecError(
            f"The checkpoint {folder} is damaged", "\n".join(_shown(problems)), how_to_go_on(folder)
        )


def _shown(items: Iterable[object], most: int = 8) -> list[str]:
    listed = list(map(str, items))
    return listed[:most] + ([f"and {len(listed) - most} more"] if len(listed) > most else [])

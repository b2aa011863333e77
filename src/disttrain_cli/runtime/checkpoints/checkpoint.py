"""Checkpoints: per-parameter tensors keyed GROUP/LAYER/PARAMETER, readable by any layout.

Groups are `weight` (fp32 masters where there are any), `exp_avg`, `exp_avg_sq`, and `ema`
(`averaging`). Each rank stores a part of them (`checkpoints.owning`): copied to the host while
training is paused, and written by a thread while it continues, through
torch.distributed.checkpoint and this package's file format (`checkpoints.storage`). When loading, a
rank fills its weights and partitions in place, whatever layout wrote them. No random state is
stored but the seed: noise, dropout and the order of the data are functions of the seed and the
step.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
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
    held,
    how_to_go_on,
    latest,
    remove,
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
from disttrain_cli.runtime.hooks import Hook, Step

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

    from disttrain_cli.runtime.checkpoints.averaging import Average
    from disttrain_cli.runtime.engine.engine import UnitEngine

__all__ = [
    "Opened",
    "Saver",
    "load",
    "load_weights",
    "named_parameters",
    "opened",
    "read_tensors",
    "resume",
    "save",
]


class Saver(Hook):
    """Asynchronous writer of checkpoints, one at a time; every rank saves at the same steps.

    Args:
        about: description of the run for the checkpoints (`folder.recorded`).
        keep: number of newest sound checkpoints to retain (`folder.superseded`).
        keep_best: also retain the checkpoint with the lowest held-out loss.
        every: steps between checkpoints; 0: only those that other hooks request, and the last one.
    """

    def __init__(
        self,
        checkpoints: Path,
        about: Mapping[str, Any],
        engine: UnitEngine,
        keep: int,
        average: Average | None = None,
        keep_best: bool = False,
        every: int = 0,
    ) -> None:
        self._checkpoints, self._about, self._keep = checkpoints, dict(about), keep
        self._keep_best, self._every = keep_best, every
        self._engine, self._average = engine, average
        # separate, so that the thread's messages are never matched with those of training
        self._group = dist.new_group(backend="gloo")
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        self._host: dict[str, Tensor] = {}
        if dist.get_rank() == 0:
            remove_leftovers(checkpoints)
        dist.barrier(self._group)

    def ended(self, step: Step) -> None:
        step.saves |= self._every > 0 and (step.number + 1) % self._every == 0

    def reported(self, step: Step) -> None:
        """Save, if a hook or the end of training requests it.

        Raises:
            DisttrainError: an earlier checkpoint could not be written.
        """
        if self._writing is not None and self._writing.done():
            self.wait()
        if step.saves:
            tracer = self._engine.tracer
            begun = tracer.mark()
            tracer.begin("checkpoint")
            self.save(step.number + 1, step.updated, step.about)
            tracer.anchor()
            tracer.record("checkpoint", begun)

    def save(
        self, step: int, sound: bool = True, held_out: Mapping[str, Any] | None = None
    ) -> None:
        """Copy the state to the host and start writing it in a thread.

        Args:
            sound: False if the step before the checkpoint was skipped.
            held_out: held-out losses for the checkpoint's description.
        """
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

    def wait(self) -> None:
        """Wait until the checkpoint is complete under its final name.

        Raises:
            DisttrainError: it could not be written; earlier checkpoints are unchanged.
        """
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: Any
    ) -> None:
        """Finish a pending write, even after an error; the first error is the one raised."""
        try:
            self.wait()
        except Exception:
            if kind is None:
                raise
        finally:
            self._thread.shutdown(wait=False)
        if kind is None:  # after an error, other ranks may never reach this collective call
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
            if rank == 0:  # dcp.save raises only after every rank has finished writing
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
                remove(old)


def save(
    checkpoints: Path, step: int, about: Mapping[str, Any], engine: UnitEngine, keep: int
) -> Path:
    """Write one checkpoint, wait for it and return its folder; every rank calls this."""
    with Saver(checkpoints, about, engine, keep) as saver:
        saver.save(step)
    return checkpoints / f"step-{step:06d}"


def resume(
    checkpoints: Path, here: Mapping[str, Any], engine: UnitEngine, average: Average | None = None
) -> int:
    """Load the newest checkpoint, if there is one, and return its step, else 0.

    Raises what `load` raises.
    """
    newest = latest(checkpoints)
    return load(newest, here, engine, average) if newest else 0


def load(
    folder: Path, here: Mapping[str, Any], engine: UnitEngine, average: Average | None = None
) -> int:
    """Load this rank's weights, optimizer state and averages; return the checkpoint's step.

    The checkpoint may come from any layout; every rank calls this. Each rank verifies the checksums
    of some of the files, so that together they verify all. From a checkpoint without averages, the
    averages start at its weights; moments of parameters that were frozen in it and are trained now
    start at zero (`newly_trained`).

    Raises:
        MismatchError: its inputs differ from `here` (`folder.made_from`).
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
    """Fill `pieces` with weights from a checkpoint of any layout and model; every rank calls this.

    Raises:
        SpecError: the checkpoint is damaged, or lacks a tensor.
    """
    with held(folder):
        _verify(folder, describe(folder)["files"])
        with torch.no_grad():
            _fill(folder, read_metadata(folder), pieces)
    dist.barrier()


def read_tensors(
    folder: Path, layers: Collection[str] | None = None, groups: Sequence[str] = ("weight",)
) -> dict[str, Tensor]:
    """Return global tensors by GROUP/LAYER/PARAMETER, after verifying the files that hold them.

    Args:
        layers: names of the layers to read; None = all.
        groups: names of the groups to read.

    Raises:
        SpecError: a layer is not in the checkpoint, or a file is damaged.
    """
    with opened(folder, layers) as checkpoint:
        return checkpoint.read(layers, groups)


@contextmanager
def opened(folder: Path, layers: Collection[str] | None = None) -> Iterator[Opened]:
    """Provide a checkpoint to read, which a training that goes on does not remove meanwhile.

    Args:
        layers: names of the layers that will be read, whose files are verified; None = all.

    Raises:
        SpecError: it has been removed, or a file is damaged.
    """
    with held(folder):
        yield Opened(folder, layers)


class Opened:
    """Checkpoint whose files were verified once, to be read layer by layer (`opened`)."""

    def __init__(self, folder: Path, layers: Collection[str] | None) -> None:
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
        """Return the names of the layers that have tensors of a group."""
        return {
            key.split("/", 2)[1]
            for key in self._metadata.state_dict_metadata
            if key.startswith(f"{group}/")
        }

    def names(self) -> set[str]:
        """Return LAYER/PARAMETER of all weights."""
        weights = f"{WEIGHT}/"
        return {
            key.removeprefix(weights)
            for key in self._metadata.state_dict_metadata
            if key.startswith(weights)
        }

    def read(
        self, layers: Collection[str] | None = None, groups: Sequence[str] = ("weight",)
    ) -> dict[str, Tensor]:
        """Return the tensors as `read_tensors` does."""
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
                    f"Go on from a checkpoint of this model, or start at step 0:"
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
    """Verify every file once, split among the ranks; every rank raises the problems of all."""
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

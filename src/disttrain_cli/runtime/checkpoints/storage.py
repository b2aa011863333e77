"""Checkpoint files behind torch.distributed.checkpoint's planning: safetensors and JSON, no pickle.

    step-000060/rank-00003.safetensors   tensors of a rank: GROUP/LAYER/PARAMETER@OFFSETS, each a
                                         box of the global tensor
    step-000060/tensors.json             shape, dtype and boxes of every tensor, each with its file
    step-000060/checkpoint.json          step, fingerprints, size and SHA-256 of every file and of
                                         its own text

The folder has a temporary name until it is complete. Files are written tensor by tensor rather than
by the safetensors library, whose writer first copies all tensors and computes no checksum.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from disttrain_cli.runtime.checkpoints.boxes import Pieces
from disttrain_cli.runtime.checkpoints.folder import (
    DESCRIPTION,
    TENSORS,
    VERSION,
    digest_of,
    partial,
    sealed,
)
from disttrain_cli.spec.files import parse_json
from disttrain_cli.spec.whole import write_whole

#: Names of dtypes in the safetensors format.
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Written:
    """A file that a rank wrote."""

    name: str
    size_bytes: int
    sha256: str


class Writer(StorageWriter):
    """Writer of one checkpoint; the coordinator renames the folder once every rank has written."""

    def __init__(self, folder: Path, rank: int, description: Mapping[str, Any]) -> None:
        self._folder, self._rank, self._description = folder, rank, dict(description)

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator:
            shutil.rmtree(partial(self._folder), ignore_errors=True)
            partial(self._folder).mkdir(parents=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        done: Future[list[WriteResult]] = Future()
        tensors = {
            _box_name(item.index.fqn, item.index.offset or ()): planner.resolve_data(item)
            for item in plan.items
        }
        written = (
            write_tensors(partial(self._folder) / f"rank-{self._rank:05d}.safetensors", tensors)
            if tensors
            else None
        )
        done.set_result([WriteResult(item.index, 0, written) for item in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        folder = partial(self._folder)
        files = sorted(
            {result.storage_data for written in results for result in written},
            key=lambda file: file.name,
        )
        numbers = {file.name: number for number, file in enumerate(files)}
        file_of = {
            result.index: numbers[result.storage_data.name]
            for written in results
            for result in written
        }
        tensors = {
            key: {
                "dtype": DTYPES[one.properties.dtype],
                "shape": list(one.size),
                "boxes": [
                    [
                        file_of[MetadataIndex(key, chunk.offsets)],
                        list(chunk.offsets),
                        list(chunk.sizes),
                    ]
                    for chunk in one.chunks
                ],
            }
            for key, one in metadata.state_dict_metadata.items()
        }
        content = json.dumps({"files": list(numbers), "tensors": tensors}).encode()
        write_whole(folder / TENSORS, content)
        listed = [*files, Written(TENSORS, len(content), hashlib.sha256(content).hexdigest())]
        write_whole(
            folder / DESCRIPTION,
            json.dumps(
                sealed(
                    {
                        "version": VERSION,
                        **self._description,
                        "files": {
                            file.name: {"bytes": file.size_bytes, "sha256": file.sha256}
                            for file in listed
                        },
                    }
                ),
                indent=1,
            ),
        )
        replace_folder(folder, self._folder)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Written:
    """Write a safetensors file, one tensor after the other, and flush it to disk."""
    header, at = {}, 0
    for name, values in tensors.items():
        size = values.numel() * values.element_size()
        header[name] = {
            "dtype": DTYPES[values.dtype],
            "shape": list(values.shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    checksum, total = hashlib.sha256(), 0
    with path.open("wb") as file:
        for content in (len(text).to_bytes(8, "little"), text, *map(_bytes_of, tensors.values())):
            file.write(content)
            checksum.update(content)
            total += len(content)
        file.flush()
        os.fsync(file.fileno())
    return Written(path.name, total, checksum.hexdigest())


def _bytes_of(values: Tensor) -> Any:
    return values.contiguous().view(-1).view(torch.uint8).numpy().data


def replace_folder(temporary: Path, final: Path) -> None:
    """Rename a folder to its final name; an existing one is removed only after that."""
    old = final.with_name(f".{final.name}.replaced")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        os.replace(final, old)
    os.replace(temporary, final)
    shutil.rmtree(old, ignore_errors=True)
    descriptor = os.open(final.parent, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _box_name(key: str, offsets: Any) -> str:
    return f"{key}@{','.join(map(str, offsets))}"


def read_metadata(folder: Path) -> Metadata:
    """Read the tensors of a checkpoint and the file of each of their boxes; raises SpecError."""
    stored = parse_json(folder / TENSORS, "list of a checkpoint's tensors", f"Move {folder} away.")
    dtypes = {name: dtype for dtype, name in DTYPES.items()}
    tensors: dict[str, Any] = {}
    files: dict[MetadataIndex, str] = {}
    for key, one in stored["tensors"].items():
        chunks = [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for _, offsets, sizes in one["boxes"]
        ]
        tensors[key] = TensorStorageMetadata(
            TensorProperties(dtype=dtypes[one["dtype"]]), torch.Size(one["shape"]), chunks
        )
        files |= {
            MetadataIndex(key, offsets): stored["files"][file] for file, offsets, _ in one["boxes"]
        }
    return Metadata(tensors, storage_data=files)


class Reader(StorageReader):
    """Reader of tensor boxes from the files of a checkpoint."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        self._folder, self._metadata = folder, metadata

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        from safetensors import safe_open

        by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            by_file[self._metadata.storage_data[item.storage_index]].append(item)
        for name, items in by_file.items():
            with safe_open(self._folder / name, framework="pt") as file:
                for item in items:
                    stored = file.get_slice(
                        _box_name(item.storage_index.fqn, item.storage_index.offset or ())
                    )
                    part = tuple(
                        slice(start, start + size)
                        for start, size in zip(item.storage_offsets, item.lengths, strict=True)
                    )
                    planner.resolve_tensor(item).copy_(stored[part] if part else stored[...])
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class SavePieces(DefaultSavePlanner):
    """Planner that writes `Pieces`; rejects a plan whose boxes overlap or leave gaps."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        pieces: Pieces = self.state_dict[index.fqn]
        return pieces.at(index.offset or ())

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        return object


class LoadPieces(LoadPlanner):
    """Planner that reads `Pieces` in place."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self._pieces, self._metadata = state_dict, metadata

    def create_local_plan(self) -> LoadPlan:
        assert self._metadata is not None
        return create_default_local_load_plan(self._pieces, self._metadata)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise AssertionError("a checkpoint holds tensors only")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        assert read_item.dest_index.index is not None
        _, values = self._pieces[read_item.dest_index.fqn].boxes[read_item.dest_index.index]
        for dim, (start, size) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            values = values.narrow(dim, start, size)
        return values

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


def damaged(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the problems of files that differ from what was written."""
    problems = []
    for name, expected in files.items():
        wrong = misfits(folder, {name: expected})
        if not wrong and digest_of(folder / name) != expected["sha256"]:
            wrong = [f"{name} has another checksum"]
        problems += wrong
    return problems


def misfits(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the problems of files that are missing or of another size, without reading them."""
    problems = []
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{name} is missing" if not path.exists() else f"{name} is not a file")
        elif path.stat().st_size != expected["bytes"]:
            problems.append(f"{name} has {path.stat().st_size} of {expected['bytes']} bytes")
    return problems

"""Wire format: JSON requests, and answers of Arrow record batches with the tensors' raw bytes.

The schema is one column of bytes. The first batch with metadata has no rows and states the names,
types and shapes of the tensors, and the other contents of the answer; then every tensor follows in
pieces of at most `PIECE_BYTES`. Batches without rows or metadata only show that the worker is
alive. A tensor of one piece is read from gRPC's buffer, without a copy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from disttrain_cli.data.checking import Broken
from disttrain_cli.data.preparing import Prepared, Request
from disttrain_cli.data.slots import Assignment, flat_arrays, of_flat_arrays
from disttrain_cli.data.sources import Skipped

SCHEMA = pa.schema([("bytes", pa.uint8())])
EMPTY = pa.record_batch([pa.array([], pa.uint8())], schema=SCHEMA)
PIECE_BYTES = 128 * 2**20
REQUEST_BYTES = 2**16

Message = Any  # a record batch, or one with its metadata


def request_bytes(request: Request | int, identity: str) -> bytes:
    """Encode a request for a slot, or a step's assignment, with an identity's fingerprint."""
    asked = (
        {"step": request}
        if isinstance(request, int)
        else request._asdict() | {"fields": sorted(request.fields)}
    )
    return json.dumps(asked | {"identity": identity}).encode()


def read_request(data: bytes) -> tuple[Request | int, str]:
    """Return the request and the fingerprint in it; ValueError if it is malformed."""
    if len(data) > REQUEST_BYTES:
        raise ValueError(f"{len(data)} bytes, a request has at most {REQUEST_BYTES}")
    try:
        message = json.loads(data)
    except RecursionError:
        raise ValueError("not a request") from None
    match message:
        case {"step": int(step), "identity": str(identity), **others} if not others:
            return step, identity
        case {
            "step": int(step),
            "slot": int(slot),
            "unit": str(unit),
            "replica": int(replica),
            "fields": list(fields),
            "identity": str(identity),
        }:
            return Request(step, slot, unit, replica, frozenset(map(str, fields))), identity
    raise ValueError("not a request")


def beating(chunks: Iterable[Any], beat: Callable[[], None]) -> Iterator[Any]:
    """Yield the chunks of a stream; `beat` is called at those that only show a live worker."""
    for chunk in chunks:
        if chunk.app_metadata is None and not chunk.data.num_rows:
            beat()
        yield chunk


def slot_messages(prepared: Prepared) -> Iterator[Message]:
    """Yield a worker's messages for a slot."""
    return _messages(
        flat_arrays(prepared.batch),
        {"broken": [[broken.segment, *broken.what] for broken in prepared.broken]},
    )


def read_slot(chunks: Iterator[Any]) -> Prepared:
    """Return the slot in the chunks of a Flight stream; its arrays are read-only.

    Raises:
        EOFError: the stream ends too early.
    """
    fields, about = _read_messages(chunks)
    return Prepared(
        of_flat_arrays(fields),
        [Broken(segment, Skipped(*what)) for segment, *what in about["broken"]],
    )


def assignment_messages(assignment: Assignment) -> Iterator[Message]:
    """Yield a worker's messages for the assignment of a step."""
    return _messages({"positions": assignment.positions}, {"carry": assignment.carry})


def read_assignment(chunks: Iterator[Any]) -> Assignment:
    """Return the assignment in the chunks of a Flight stream; EOFError if it ends too early."""
    fields, about = _read_messages(chunks)
    # a copy is aligned, for computation
    return Assignment(fields["positions"].copy(), bool(about["carry"]))


def _messages(fields: dict[str, Any], about: dict[str, Any]) -> Iterator[Message]:
    header = {"tensors": {name: _described(value) for name, value in fields.items()}} | about
    yield EMPTY, pa.py_buffer(json.dumps(header).encode())
    for value in fields.values():
        for array in value if isinstance(value, list) else [value]:
            whole = pa.py_buffer(np.ascontiguousarray(array))
            for start in range(0, whole.size, PIECE_BYTES):
                piece = whole.slice(start, min(PIECE_BYTES, whole.size - start))
                yield pa.record_batch(
                    [pa.Array.from_buffers(pa.uint8(), piece.size, [None, piece])], schema=SCHEMA
                )


def _read_messages(chunks: Iterator[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tensors by name, and the header."""
    header = next((chunk.app_metadata for chunk in chunks if chunk.app_metadata is not None), None)
    if header is None:
        raise EOFError("the worker's answer has no header")
    about = json.loads(header.to_pybytes())

    def read(described: Any) -> Any:
        if isinstance(described, list):
            return [_read(one, chunks) for one in described]
        return _read(described, chunks)

    fields = {name: read(described) for name, described in about["tensors"].items()}
    for _ in chunks:
        pass  # to the end, which raises an error of the worker
    return fields, about


def _described(value: Any) -> Any:
    if isinstance(value, list):
        return [_described(array) for array in value]
    return {"dtype": value.dtype.str, "shape": value.shape}


def _read(about: dict[str, Any], chunks: Iterator[Any]) -> Any:
    dtype, shape, pieces = np.dtype(about["dtype"]), tuple(about["shape"]), []
    missing = dtype.itemsize * math.prod(shape)
    while missing:
        chunk = next(chunks, None)
        if chunk is None:
            raise EOFError("the worker's answer is truncated within a tensor")
        pieces.append(chunk.data.column(0).to_numpy(zero_copy_only=True))
        missing -= len(pieces[-1])
    if not pieces:
        return np.zeros(shape, dtype)
    return (pieces[0] if len(pieces) == 1 else np.concatenate(pieces)).view(dtype).reshape(shape)

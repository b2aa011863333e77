"""Dumps of the flight recorder as torch 2.13 writes them (format 2.10), built by hand."""

import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def entry(
    sequence: int,
    operation: str = "all_reduce",
    *,
    group: tuple[str, str] = ("0", "default_pg"),
    sizes: Sequence[int] = (4,),
    output: Sequence[int] | None = None,
    dtype: str = "Float",
    state: str = "completed",
    backend: str = "nccl",
    **more: Any,
) -> dict[str, Any]:
    """An entry with all the fields of one, `record_id` apart."""
    return {
        "frames": [
            {"name": "wrapper", "filename": "/env/torch/distributed/c10d_logger.py", "line": 83},
            {"name": "train", "filename": "/home/me/train.py", "line": 40 + sequence},
        ],
        "pg_id": int(group[0]),
        "process_group": group,
        "thread_name": "python",
        "thread_id": "1",
        "collective_seq_id": sequence,
        "p2p_seq_id": 0,
        "op_id": sequence,
        "profiling_name": f"{backend}:{operation}",
        "time_created_ns": 1_000_000 * sequence,
        "input_sizes": [list(sizes)],
        "input_dtypes": [dtype],
        "output_sizes": [list(sizes if output is None else output)],
        "output_dtypes": [dtype],
        "state": state,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": state == "completed",
        "timeout_ms": 600_000,
        "is_p2p": False,
    } | more


def message(sequence: int, operation: str, **more: Any) -> dict[str, Any]:
    """A send or receive: `send 0->1`, `recv 1<-0`."""
    return entry(0, operation, p2p_seq_id=sequence, is_p2p=True, state="started", **more)


def dump(
    entries: Sequence[dict[str, Any]], groups: dict[str, tuple[str, Sequence[int]]], first: int = 0
) -> dict[str, Any]:
    """A rank's dump; `first` is the record that the ring buffer begins with."""
    return {
        "version": "2.10",
        "pg_config": {
            name: {"name": name, "desc": description, "ranks": json.dumps(list(ranks))}
            for name, (description, ranks) in groups.items()
        },
        "pg_status": {},
        "comm_lib_version": "2.27.3",
        "entries": [one | {"record_id": first + number} for number, one in enumerate(entries)],
    }


def write(
    folder: Path,
    ranks: Sequence[Sequence[dict[str, Any]]],
    groups: dict[str, tuple[str, Sequence[int]]] | None = None,
    *,
    form: str = "pickle",
    first: Sequence[int] | None = None,
) -> list[Path]:
    """A dump per rank, in its own groups; by default all are in one."""
    groups = groups or {"0": ("default_pg", range(len(ranks)))}
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for rank, entries in enumerate(ranks):
        own = {name: of for name, of in groups.items() if rank in of[1]}
        content = dump(entries, own, 0 if first is None else first[rank])
        file = folder / f"nccl_trace_rank_{rank}"
        file.write_bytes(
            pickle.dumps(content, protocol=2)
            if form == "pickle"
            else json.dumps(content, sort_keys=True).encode()
        )
        files.append(file)
    return files


def batch(sequence: int, rank: int, operations: str, **more: Any) -> list[dict[str, Any]]:
    """A rank's batch of messages, `>1 <1` for a send to 1 and a receive from it; only the entry
    that closes it has the state, as torch leaves it (pytorch/pytorch#137969)."""
    names = [
        f"send {rank}->{one[1:]}" if one.startswith(">") else f"recv {rank}<-{one[1:]}"
        for one in operations.split()
    ]
    about: dict[str, Any] = {"p2p_seq_id": sequence, "is_p2p": True}
    member = {"state": "scheduled", "retired": False}
    return [
        *(entry(0, name, **(about | more | member)) for name in names),
        _closing(0, **(about | more)),
    ]


def coalesced(sequence: int, operations: Sequence[str], **more: Any) -> list[dict[str, Any]]:
    """Collectives of a rank that it asked for as one."""
    member = {"state": "scheduled", "retired": False}
    closing = {key: value for key, value in more.items() if key not in ("sizes", "output")}
    return [
        *(entry(sequence, name, **(more | member)) for name in operations),
        _closing(sequence, **closing),
    ]


def _closing(sequence: int, **more: Any) -> dict[str, Any]:
    nothing: dict[str, Any] = {name: [] for name in ("input_sizes", "input_dtypes")}
    nothing |= {name: [] for name in ("output_sizes", "output_dtypes")}
    return entry(sequence, "coalesced", **more) | nothing

"""The trace schema: one row per operation of a rank, in Parquet segments that DuckDB can read.

Layout of `runs/NAME/traces/`:

    job.json                              `Job`: plan, FLOP models and peak, written before step 0
    rank-00003/segment-00000.parquet      rows of `TRACE_COLUMNS`, written atomically
    rank-00003/segment-00001.arrows       rows since then, appended after every step (Arrow's stream
                                          format); becomes segment-00001.parquet, unless its process
                                          ends before
    steps/segment-00000.parquet           rows of `STEP_COLUMNS`, written by rank 0
    sizes/segment-00000.parquet           rows of `SIZE_COLUMNS` of a few sequences of every step,
                                          written by rank 0
    samples/segment-00000.parquet         rows of `SAMPLE_COLUMNS`: the samples of every slot,
                                          written by rank 0
    experts/segment-00000.parquet         rows of `EXPERT_COLUMNS`: how many rows chose each expert,
                                          written by rank 0
    kineto/rank-00003-start-000.json.gz   torch's profile of the steps of `train --profile-steps`

Segments carry a run number in their name when a run is resumed, so nothing is overwritten.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from disttrain_cli.calls import call
from disttrain_cli.spec.files import Strict, parse_json, validate
from disttrain_cli.spec.plan import Layout
from disttrain_cli.spec.prediction import Prediction
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.runfile.rehearse import FaultSpec

if TYPE_CHECKING:
    import pyarrow as pa

# Operations of a row. `receive_*` lasts from request to arrival, waiting included; `wait` is the
# time until earlier sends have completed, and on an emulated device until its first forward may
# begin while weights are being gathered; `load` is the wait for data; forward, backward and weights
# (the weight gradients of a split backward) have one row per module of a stage and slot. For
# deferred weight gradients computed layer by layer at the end, a row is as long as the computation
# took, and rows are consecutive, slot by slot (`watching.turns`). On a GPU, whose host runs ahead,
# all times are those at which its stream reaches a row's ends (`watching.device_clock`).
COMPUTE = ("forward", "backward", "weights")
FORWARD, BACKWARD, WEIGHTS = range(len(COMPUTE))
TRANSFERS = ("send_activation", "receive_activation", "send_gradient", "receive_gradient")
# `memory` is an instant: bytes are the most that the rank has held on its device for its stage so
# far (CPU: growth of its process since the stage was built). On a GPU there are two more after the
# first step of a start: with `module` "device", what the driver says is in use there, of all
# processes, and with "allocator", what torch's allocator holds of it.
OPERATIONS = (
    "load",
    *COMPUTE,
    *TRANSFERS,
    "wait",
    "reduce",
    "step",
    "memory",
    "evaluation",
    "checkpoint",
)

# Column → Arrow type. `slot`, `stage` are -1 where they do not apply; `stage` counts inside the
# unit; tokens, images, sum_length_sq are the amounts of `Work` of the row's module (images = items
# for encoder and generator, images read for the LLM); bytes of a transfer; peer is the other rank,
# -1 for several or none; late_ns is the part of a rehearsal's `receive_*` by which its message was
# delayed by the host, not by the emulated link; exchange_ns is the part of a forward or backward in
# which the rank communicated with its TP, CP or EP group, waiting included; null without any;
# sm_mhz, power_w and throttle (bits of `THROTTLES`) are the state of the rank's GPU late in a step,
# while the host waits for it, on the row of its optimizer; null elsewhere and where unknown.
TRACE_COLUMNS: dict[str, str] = {
    "run": "string",
    "step": "int32",
    "slot": "int32",
    "unit": "string",
    "module": "string",
    "stage": "int32",
    "replica": "int32",
    "tp_rank": "int32",
    "cp_rank": "int32",
    "rank": "int32",
    "host": "string",
    "operation": "string",
    "start_ns": "int64",
    "end_ns": "int64",
    "tokens": "int64",
    "images": "int64",
    "sequences": "int64",
    "sum_length_sq": "int64",
    "bytes": "int64",
    "peer": "int32",
    "late_ns": "int64",
    "exchange_ns": "int64",
    "sm_mhz": "int32",
    "power_w": "int32",
    "throttle": "int32",
}
#: Reasons for which a GPU lowers its clock, by NVML's bit (nvmlClocksEventReasons). That it is idle
#: (1) is none.
THROTTLES = {
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal limit",
    0x40: "thermal limit",
    0x80: "power brake",
    0x100: "display clocks",
}

STEP_COLUMNS: dict[str, str] = {
    "run": "string",
    "step": "int32",
    "loss": "float64",
    "loss_text": "float64",
    "loss_image": "float64",  # null without a generator
    "grad_norm": "float64",
    "learning_rate": "float64",
    "learning_rates": "map<string,float64>",
    "iteration_s": "float64",
    "sequences_per_s": "float64",
    "mfu": "float64",
    "data_wait_s": "float64",
    "tokens": "int64",
    "images": "int64",
    "targets": "int64",
    "model_flops": "float64",
    "end_ns": "int64",
    "skipped_steps": "int32",  # since the start, up to this step
    "evaluation_loss": "float64",
    "evaluation_loss_text": "float64",
    "evaluation_loss_image": "float64",  # or null
    "generator_losses": "map<string,float64>",  # if there are several; loss_image is their mean
    # longest time that a rank's main thread was runnable without a core; null if unknown
    "core_wait_s": "float64",
}


# Sizes of the first `SIZES_PER_STEP` sequences of each global batch in the order of the data, which
# is shuffled: input of a new profile from data that the run has processed. The fields are those of
# `SizeSample`.
SIZE_COLUMNS: dict[str, str] = {
    "run": "string",
    "step": "int32",
    "tokens": "int64",
    "length_sq": "int64",
    "images": "list<int64>",
    "targets": "int64",
    "clips": "int64",
}
SIZES_PER_STEP = 32

# Samples processed by the replicas of the LLM's unit: one row per packed sequence of a step.
# `samples` are rows of the index (`spec.index`), `names` their keys in their shards, in the order
# of the sequence.
SAMPLE_COLUMNS: dict[str, str] = {
    "run": "string",
    "step": "int32",
    "slot": "int32",
    "unit": "string",
    "replica": "int32",
    "sequence": "int64",
    "tokens": "int64",
    "samples": "list<int64>",
    "names": "list<string>",
}


# Rows that chose each expert of a layer in a step, over all ranks: tokens times experts per token.
# `layer` is its index in the model, `rows` are in the order of the experts.
EXPERT_COLUMNS: dict[str, str] = {
    "run": "string",
    "step": "int32",
    "module": "string",
    "layer": "int32",
    "rows": "list<int64>",
}

#: Rank 0's tables next to the ranks' traces: columns by the name of the folder.
TABLES = {
    "steps": STEP_COLUMNS,
    "sizes": SIZE_COLUMNS,
    "samples": SAMPLE_COLUMNS,
    "experts": EXPERT_COLUMNS,
}


def throttle_reasons(bits: int) -> list[str]:
    """Return the reasons of the column `throttle` in words, each once."""
    return list(dict.fromkeys(name for bit, name in THROTTLES.items() if bits & bit))


def arrow_schema(columns: dict[str, str]) -> pa.Schema:
    """Return the columns' types in Arrow."""
    import pyarrow as pa

    kinds = {
        "string": pa.string(),
        "int32": pa.int32(),
        "int64": pa.int64(),
        "float64": pa.float64(),
        "list<int64>": pa.list_(pa.int64()),
        "list<string>": pa.list_(pa.string()),
        "map<string,float64>": pa.map_(pa.string(), pa.float64()),
    }
    return pa.schema([(name, kinds[kind]) for name, kind in columns.items()])


#: Suffix of a segment that is being recorded.
OPEN_SEGMENT = ".arrows"


def segments_of(folders: Iterable[Path]) -> tuple[list[Path], list[Path]]:
    """Return the completed segments in these folders, and open ones not yet replaced by such."""
    segments = sorted(file for folder in folders for file in folder.glob("segment-*"))
    complete = [file for file in segments if file.suffix == ".parquet"]
    replaced = set(complete)
    return complete, [
        file
        for file in segments
        if file.suffix == OPEN_SEGMENT and file.with_suffix(".parquet") not in replaced
    ]


class Rehearsed(Strict):
    """Settings of the rehearsal that emulated the cluster."""

    processes: int
    time_scale: float = Field(
        description="Seconds of the rehearsal per second of the trace, whose times are those of"
        " the cluster."
    )
    messages: Literal["scaled", "real"]
    noise: float
    faults: list[FaultSpec]
    distribution: str | None = Field(
        None, description="Sizes of different data than the plan is for."
    )


class Job(Strict):
    """Facts about a run that the analysis needs in addition to its rows."""

    version: Literal[1] = 1
    run: str
    strategy: str
    layout: Layout
    predicted: Prediction
    profile: Profile = Field(description="Device peak, and FLOP and time models of every module.")
    gpus_per_node: int = Field(8, ge=1)
    rehearsed: Rehearsed | None = Field(
        None, description="Set if devices were emulated (train --rehearse)."
    )


def profile_file(traces: Path, rank: int, start: str) -> Path:
    """Return the file of torch's profile of a rank, for one start of the run."""
    return traces / "kineto" / f"rank-{rank:05d}-{start}.json.gz"


_MARK = re.compile(r"disttrain (\w+) step (\d+) slot (-?\d+)(?: (.+))?")


def mark(operation: str, step: int, slot: int, module: str) -> str:
    """Return the name of an operation's annotation in torch's profile."""
    return f"disttrain {operation} step {step} slot {slot} {module}".rstrip()


def read_mark(name: str) -> tuple[str, int, int, str] | None:
    """Return (operation, step, slot, module) of an annotation; None if it is not ours."""
    match = _MARK.fullmatch(name)
    return (match[1], int(match[2]), int(match[3]), match[4] or "") if match else None


def read_job(path: Path) -> Job:
    """Read and check `job.json`; raise SpecError."""
    value: Any = parse_json(path, "job description", f"Record a run with: {call('train')}")
    return validate(Job, value, path, "job description")

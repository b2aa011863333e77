"""The order of an epoch: making it, opening it, resuming in it, and how samples are mixed.

Samples have lengths of a lognormal distribution (median 330 tokens, mean 500) and, every second
one, an image; they are of four sources, and sequences have 8,192 tokens. Of 2 million samples: CPU
time of packing, how full sequences are, and how samples are mixed. Of 100 million samples: seconds
and memory of the process that makes an epoch's order, and of new processes that open index and
order, as a rank does, and take a batch of 1,920 sequences, at the beginning and at epoch 3, or
continue from there with other weights. Files lie in a temporary folder (15 GB) and in the page
cache. Run from the repository with the `dev` extra installed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import Tables, main
from disttrain_cli.data.columns import ColumnWriter, open_columns, writing_columns
from disttrain_cli.data.epochs.mixture import Mixture, Phase
from disttrain_cli.data.index.sample_index import DERIVED, FIELDS, Index, Keys
from disttrain_cli.data.packing import Packing, SequenceStream, pack
from disttrain_cli.spec.heads import ImageInput
from disttrain_cli.spec.index import IMAGE, TEXT
from disttrain_cli.spec.inputs import ModelInputs

INPUTS = ModelInputs(
    llm="llm",
    vocabulary=32_000,
    sequence_length=8192,
    heads=[ImageInput(module="encoder", patch_px=14, merge=2, max_pixels=1 << 20)],
)
SAMPLES, COMPARED, SMALL = 100_000_000, 2_000_000, 20_000
BATCH, SEED, RESUMED = 1920, 0, 3
SIDE = 16  # patches
CHUNK = 1 << 20
WEIGHTS, LATER_WEIGHTS = (1.0, 1.0, 1.0, 1.0), (2.0, 1.0, 0.5, 0.0)  # by source


def measure(small: bool) -> Tables:
    samples, compared = (SMALL, SMALL) if small else (SAMPLES, COMPARED)
    with tempfile.TemporaryDirectory() as folder:
        few, many = Path(folder) / "few", Path(folder) / "many"
        for path, count in ((few, compared), (many, samples)):
            with writing_columns(path / "index") as writer:
                write_index(writer, count)
        return {
            f"Packing {compared:,} samples": [_packed(few)],
            f"How they are mixed, steps of {BATCH if not small else 16} sequences": [
                mixed(pack(Mixture(opened(few), SEED), 0), small)
            ],
            f"Orders of {samples:,} samples, a process each": _processes(many),
        }


def write_index(writer: ColumnWriter, samples: int) -> None:
    """Columns of an index that has no files: a text each, and an image every second one."""
    random = np.random.default_rng(SEED)
    image_tokens = (SIDE // 2) ** 2
    for first in range(0, samples, CHUNK):
        count = min(CHUNK, samples - first)
        texts = np.clip(random.lognormal(5.8, 0.9, count), 1, 8000).astype(np.int32)
        with_image = np.arange(first, first + count) % 2 == 1
        start = np.concatenate([[0], np.cumsum(1 + with_image)])
        kinds = np.full(start[-1], IMAGE, np.int8)
        kinds[start[:-1]] = TEXT
        tokens = np.full(len(kinds), image_tokens, np.int32)
        tokens[start[:-1]] = texts
        zeros, image = np.zeros(len(kinds), np.int8), kinds == IMAGE
        grids = np.where(image[:, None], np.int32(SIDE), np.int32(0)).repeat(2, axis=1)
        columns = {
            "source": (len(WEIGHTS) * np.arange(first, first + count) // samples).astype(np.int32),
            "shard": np.zeros(count, np.int32),
            "kinds": kinds,
            "tokens": tokens,
            "trained": ~image,
            "ended": zeros.astype(bool),
            "offsets": zeros,
            "sizes": zeros,
            "grids": grids,
            "lengths": texts + 2 + image_tokens * with_image.astype(np.int32),
            "label_tokens": texts + 1,
            "end_trained": np.ones(count, bool),
            "own_texts": ~image,
            "files": image,
        }
        writer.add_starts("segment_start", start)
        writer.add_starts("key_start", np.zeros(count + 1, np.int64))
        for name, values in columns.items():
            writer.add(name, values)
    writer.add("keys", np.zeros(0, np.uint8))
    writer.close({})


def opened(folder: Path) -> Index:
    found = open_columns(folder / "index")
    assert found is not None
    columns = found[1]
    fields: dict[str, Any] = {name: columns[name] for name in FIELDS}
    return Index(
        fingerprint="benchmark",
        inputs=INPUTS,
        weights=list(WEIGHTS),
        shards=[],
        skipped=[],
        keys=Keys(columns["keys"], columns["key_start"]),
        orders=folder / "orders",
        known={name: columns[name] for name in DERIVED},
        **fields,
    )


def _packed(folder: Path) -> dict[str, Any]:
    begun = time.process_time()
    packing = pack(Mixture(opened(folder), SEED), 0)
    seconds = time.process_time() - begun
    return {
        "CPU s": seconds,
        "µs per sample": 1e6 * seconds / len(packing.samples),
        "filled %": 100 * packing.fill_fraction,
    }


def mixed(packing: Packing, small: bool) -> dict[str, Any]:
    """How unlike sequences are, and how alike steps.

    `like in a sequence`: the share of the variance of log lengths that lies between sequences
    instead of inside them; 0 where samples meet at random. The spread of steps is over that of as
    many sequences drawn by chance: 1 where sequences follow each other at random.
    """
    counts = np.diff(packing.sample_start)
    log = np.log(packing.index.lengths[packing.samples])
    totals = np.add.reduceat(log, packing.sample_start[:-1])
    between = float((counts * (totals / counts - log.mean()) ** 2).sum() / len(log))
    per_step = 16 if small else BATCH
    quantities = {
        "samples": counts.astype(float),
        "images": packing.items["image"].counts.astype(float),
        "Σ length²": packing.length_sq.astype(float),
    }
    row: dict[str, Any] = {
        "sequences": len(packing),
        "samples p5 / p50 / p95": " / ".join(
            f"{value:.0f}" for value in np.percentile(counts, [5, 50, 95])
        ),
        "like in a sequence": between / float(log.var()),
    }
    for name, values in quantities.items():
        steps = values[: len(values) // per_step * per_step].reshape(-1, per_step).mean(axis=1)
        row[f"spread of steps, {name}"] = float(steps.std() / (values.std() / np.sqrt(per_step)))
        row[f"next to it, {name}"] = float(np.corrcoef(values[1:], values[:-1])[0, 1])
    return row


def _processes(folder: Path) -> list[dict[str, Any]]:
    def process(what: str, call: str) -> dict[str, Any]:
        code = f"from benchmarks.epoch_order import *; {call}(Path({str(folder)!r}))"
        begun = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True
        )
        return {"process": what, **json.loads(done.stdout), "whole s": time.monotonic() - begun}

    return [
        process("makes epoch 0", "make"),
        process("opens it", "begin"),
        process(f"makes epochs 1 to {RESUMED}", "make_more"),
        process(f"resumes at epoch {RESUMED}", "resume"),
        process("makes an epoch of other weights from there on", "go_on"),
    ]


def make(folder: Path) -> None:
    _report(folder, lambda stream: stream.range_of(0, 0))


def make_more(folder: Path) -> None:
    _report(folder, lambda stream: stream.range_of(0, RESUMED))


def begin(folder: Path) -> None:
    _report(folder, lambda stream: stream.batch(0, 1), 0)


def resume(folder: Path) -> None:
    first = _amid(folder)
    _report(folder, lambda stream: stream.batch(first, 1), first)


def go_on(folder: Path) -> None:
    first = _amid(folder)
    _report(folder, lambda stream: stream.epoch_of(first), first, Phase(first, LATER_WEIGHTS))


def _amid(folder: Path) -> int:
    """A sequence of the epoch at which a run is resumed."""
    begin, end = SequenceStream(Mixture(opened(folder), SEED)).range_of(0, RESUMED)
    return begin + (end - begin) // 4


def _report(folder: Path, what: Any, then: int | None = None, *phases: Phase) -> None:
    """Seconds and memory beyond the imports; `then` is where a batch is taken afterwards."""
    before, begun = _memory_mib(), (time.monotonic(), time.process_time())
    index = opened(folder)
    stream = SequenceStream(Mixture(index, SEED, phases=(Phase(0, index.weights), *phases)))
    what(stream)
    row: dict[str, Any] = {
        "s": time.monotonic() - begun[0],
        "CPU s": time.process_time() - begun[1],
    }
    batch_s: float | str = "–"
    if then is not None:
        begun_s = time.monotonic()
        batch = stream.batch(then, BATCH)
        batch_s = time.monotonic() - begun_s
        assert batch.tokens.max() <= INPUTS.sequence_length
    row["then a batch s"] = batch_s
    now = _memory_mib()
    for name, key in (("own MiB", "RssAnon"), ("with files MiB", "VmRSS"), ("peak MiB", "VmHWM")):
        row[name] = now[key] - before["VmRSS" if key == "VmHWM" else key]
    print(json.dumps(row))


def _memory_mib() -> dict[str, float]:
    lines = Path("/proc/self/status").read_text().splitlines()
    return {
        name: int(value.split()[0]) / 1024
        for name, value in (line.split(":", 1) for line in lines)
        if value.endswith("kB")
    }


if __name__ == "__main__":
    main(__doc__, measure)

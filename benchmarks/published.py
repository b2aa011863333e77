"""Published throughputs of mixtures of experts on H100, and our predictions for the same layouts.

    python -m benchmarks.published          each layout, with even and with the stated routing
    python -m benchmarks.published --small  the first one

Text of 4,096 tokens, computed profiles, nothing fitted to the published figures. TFLOP/s count the
lower triangle of causal attention. Megatron Bridge's benchmarks balance the gating, so even routing
is what compares. Layouts are those of its performance recipes, with their virtual stages. Two more
of its options are not ours: exchanges of one microbatch behind the computing of another
(`moe_a2a_overlap`, Qwen3-235B-A22B) and a fused dispatcher (Qwen3-30B-A3B). Predicted; nothing here
was measured on a GPU.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.common import Tables, main
from disttrain_cli.api.presets import preset_text
from disttrain_cli.costs.routing import balanced
from disttrain_cli.planning.draws import Draws
from disttrain_cli.planning.interleaved import cut_into
from disttrain_cli.planning.layouts import layout_with
from disttrain_cli.planning.predict import predict
from disttrain_cli.planning.solve import cluster_of, ranked_as
from disttrain_cli.planning.units import groupings
from disttrain_cli.profiling.analytic import analytic_profile
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.runfile import Run, read_run
from disttrain_cli.spec.shape import ParallelShape
from disttrain_cli.spec.work import Work

LENGTH = 4096
UNBOUNDED_GIB = 1e4  # recipes save memory in ways that prices do not know


@dataclass(frozen=True)
class Published:
    """Layout and throughput of one device, as published (Megatron Bridge, performance summary)."""

    name: str
    preset: str  # whose LLM it is
    gpus: int
    batch: int  # sequences
    shape: ParallelShape
    tflops: float
    chunks: int = 1  # stages per rank


LAYOUTS = (
    Published(
        "Qwen3-30B-A3B", "qwen3-vl-30b-a3b", 16, 1024, ParallelShape(tp=1, ep=16, dp=16), 240.5
    ),
    Published(
        "Qwen3-235B-A22B",
        "qwen3-vl-235b-a22b",
        256,
        2048,
        ParallelShape(tp=2, ep=32, dp=16, pp=8),
        302.0,
        chunks=4,
    ),
)


def run_of(one: Published, folder: Path) -> Run:
    """The run of a preset's LLM on text alone."""
    content = yaml.safe_load(preset_text(one.preset))
    content["model"]["modules"] = {"llm": content["model"]["modules"]["llm"]}
    content["data"] |= {
        "distribution": {"images_per_sequence": 0, "generated_per_sequence": 0},
        "sequence_length": LENGTH,
    }
    content["cluster"] |= {"nodes": one.gpus // 8, "gpus_per_node": 8}
    content["train"]["global_batch_size"] = one.batch
    path = folder / f"{one.name}.yaml"
    path.write_text(yaml.safe_dump(content))
    return read_run(path)


def profile_of(run: Run) -> Profile:
    """The computed profile, with sequences that are one document each."""
    profile = analytic_profile(run, "H100")
    llm, sample = profile.modules["llm"], profile.data.sample
    work = Work(1.0, LENGTH, float(LENGTH**2))
    llm = llm.model_copy(update={"work_per_sequence": work, "max_work_per_sequence": work})
    count = len(sample.tokens)
    whole = {"tokens": [LENGTH] * count, "length_sq": [LENGTH**2] * count}
    data = profile.data.model_copy(update={"sample": sample.model_copy(update=whole)})
    return profile.model_copy(update={"modules": {"llm": llm}, "data": data})


def row(one: Published, run: Run, profile: Profile, routing: str) -> dict[str, Any]:
    """Our prediction for a published layout."""
    cluster = replace(ranked_as(cluster_of(run.file, profile, one.gpus)), memory_gib=UNBOUNDED_GIB)
    units = groupings(profile, cluster, "megatron")[0]
    layout = layout_with(units, cluster, [one.shape], one.shape.dp, "megatron")
    if layout is not None and one.chunks > 1:
        layout = cut_into(profile, layout, one.chunks)
    assert layout is not None
    predicted = predict(units, layout, cluster, Draws(profile, cluster))
    assert predicted.mfu_causal is not None
    ours = predicted.mfu_causal * profile.device.peak_tflops
    return {
        "model": one.name,
        "GPUs": one.gpus,
        "batch": one.batch,
        "layout": layout.describe(),
        "routing": routing,
        "published": one.tflops,
        "ours": ours,
        "off, %": 100.0 * (ours / one.tflops - 1.0),
        "step, s": predicted.iteration_s,
    }


def measure(small: bool = False) -> Tables:
    """One row per layout and routing."""
    rows = []
    for one in LAYOUTS[: 1 if small else None]:
        with tempfile.TemporaryDirectory() as folder:
            run = run_of(one, Path(folder))
            profile = profile_of(run)
            rows.append(row(one, run, balanced(profile), "even"))
            rows.append(row(one, run, profile, "stated"))
    return {"Published mixtures of experts on H100, TFLOP/s per device": rows}


if __name__ == "__main__":
    main(__doc__, measure)

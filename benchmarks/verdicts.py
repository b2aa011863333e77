"""Verdicts on rehearsals with faults that are known: 20 kinds and places, and 5 clean runs.

    python -m benchmarks.verdicts            all 25, one after the other (25 minutes on two cores)
    python -m benchmarks.verdicts --out DIR  keep the traces; those that are there already are only
    analysed again

MLLM-9B (costs of an A800 from the catalogue) under layouts that share their devices evenly on data
of which every sequence holds the same, so that nothing is slow unless it is put in. Put in are
faults of the run file's section `rehearse`, uneven data (the distribution `laion-like`, unordered),
and layouts that give a unit too few devices. A case is right when cause and place are; of clean
runs "none" is. Operations vary by 2 % (standard deviation). One kind no rehearsal makes, since
images are levelled one by one even without an ordering: uneven replicas of the LLM are written as a
trace by the tests' simulator.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from benchmarks.common import Tables, table
from benchmarks.rehearsal import RUN_FILE, edit
from benchmarks.strategies import disttrain
from disttrain_cli.analysis.analyze import analyze
from disttrain_cli.planning.predict import predict
from disttrain_cli.planning.solve import cluster_of
from disttrain_cli.planning.units import units_of
from disttrain_cli.spec.files import fingerprint
from disttrain_cli.spec.plan import Layout, Plan, Search, UnitPlan, read_plan, write_plan
from disttrain_cli.spec.profile import read_profile
from disttrain_cli.spec.runfile import read_run
from tests.analysis import synthetic

Row = dict[str, Any]
IMAGES, TARGETS, WORDS, DOCUMENTS = 7, 9, 840, 256  # of a document, which is one sequence
STEPS, SLOTS, NOISE, STEP_S = 4, 12, 0.02, 4.0  # the first step is left out
ENCODER, LLM, GENERATOR = "image_encoder", "llm", "image_generator"
#: By name, DP of encoder, LLM and generator, TP of the LLM.
LAYOUTS = {
    "two": (2, 2, 2, 2),
    "one": (1, 1, 1, 2),
    "few encoders": (1, 2, 2, 2),
    "few generators": (2, 2, 1, 2),
    "small llm": (3, 2, 3, 1),
}
LLM_STAGES = [12, 11, 11]


@dataclass(frozen=True)
class Case:
    """What is put in, and what must be found."""

    name: str
    cause: str
    place: Row = field(default_factory=dict)  # keys of a verdict's place that must be right
    layout: str = "two"
    faults: tuple[Row, ...] = ()
    uneven: bool = False
    # a trace of the tests' simulator with these settings, instead of a rehearsal
    written: Row | None = None


def fault(slow: str, unit: str, factor: float, **place: int) -> tuple[Row, ...]:
    """One fault of the run file's section `rehearse`."""
    return ({"slow": slow, "unit": unit, "factor": factor, **place},)


CASES = (
    Case(
        "stage 0 of the LLM",
        "stage",
        {"unit": LLM, "stage": 0},
        faults=fault("stage", LLM, 1.5, stage=0),
    ),
    Case(
        "stage 1 of the LLM",
        "stage",
        {"unit": LLM, "stage": 1},
        faults=fault("stage", LLM, 1.5, stage=1),
    ),
    Case(
        "stage 2 of the LLM",
        "stage",
        {"unit": LLM, "stage": 2},
        "one",
        fault("stage", LLM, 1.6, stage=2),
    ),
    Case(
        "rank in the LLM's stage 0",
        "worker",
        {"unit": LLM, "stage": 0, "replica": 1},
        faults=fault("rank", LLM, 1.6, stage=0, replica=1),
    ),
    Case(
        "rank in the LLM's stage 2",
        "worker",
        {"unit": LLM, "stage": 2, "replica": 0},
        faults=fault("rank", LLM, 1.5, stage=2, replica=0),
    ),
    Case(
        "rank of the encoder",
        "worker",
        {"unit": ENCODER, "replica": 1},
        faults=fault("rank", ENCODER, 1.6, replica=1),
    ),
    Case(
        "rank of the generator",
        "worker",
        {"unit": GENERATOR, "replica": 0},
        faults=fault("rank", GENERATOR, 1.6, replica=0),
    ),
    Case(
        "link from the encoder",
        "communication",
        {"unit": ENCODER},
        faults=fault("link", ENCODER, 600.0),
    ),
    Case(
        "link inside the LLM",
        "communication",
        {"unit": LLM, "stage": 0},
        faults=fault("link", LLM, 500.0, stage=0),
    ),
    Case(
        "link to the generator",
        "communication",
        {"unit": LLM, "stage": 2},
        "one",
        fault("link", LLM, 900.0, stage=2),
    ),
    Case("data of the encoder", "data", {"unit": ENCODER}, faults=fault("worker", ENCODER, 200.0)),
    Case(
        "data of an encoder's replica",
        "data",
        {"unit": ENCODER, "replica": 1},
        faults=fault("worker", ENCODER, 200.0, replica=1),
    ),
    Case(
        "data of the generator",
        "data",
        {"unit": GENERATOR},
        "one",
        fault("worker", GENERATOR, 140.0),
    ),
    Case("too few devices: encoder", "unit", {"unit": ENCODER}, "few encoders"),
    Case("too few devices: generator", "unit", {"unit": GENERATOR}, "few generators"),
    Case("too few devices: LLM", "unit", {"unit": LLM}, "small llm"),
    Case("uneven replicas", "intra_microbatch", {"unit": LLM}, written={"skew": 0.4}),
    Case("uneven slots", "inter_microbatch", {}, "one", uneven=True),
    Case(
        "host in the LLM's stage 1",
        "host",
        {"unit": LLM, "stage": 1, "replica": 1},
        faults=fault("host", LLM, 1.5, stage=1, replica=1),
    ),
    Case(
        "host of the encoder",
        "host",
        {"unit": ENCODER, "replica": 0},
        faults=fault("host", ENCODER, 1.5, replica=0),
    ),
    *(
        Case(f"clean {number}", "none", {}, layout)
        for number, layout in enumerate(("two", "one", "two", "one", "two"))
    ),
)


def prepare(folder: Path) -> None:
    """A profiled run in `folder` whose data are even, and a plan for each layout."""
    disttrain(folder, "init", ".", "--preset", "mllm-9b")
    write_even(folder / "even.tar")
    edit(
        folder,
        cluster={"nodes": 2},
        data={"distribution": None, "sources": [{"path": "even.tar"}]},
        train={"global_batch_size": 2 * SLOTS},
        preprocess={"workers": 8},
    )
    disttrain(folder, "profile")


def write_even(path: Path) -> None:
    """Documents of the same words and images, each as long as a sequence."""
    from PIL import Image

    picture = io.BytesIO()
    Image.new("RGB", (512, 512), (90, 120, 150)).save(picture, "JPEG")
    with tarfile.open(path, "w") as tar:
        for number in range(DOCUMENTS):
            key = f"{number:06d}"
            segments: list[Row] = [{"type": "text", "value": "words " * WORDS}]
            for image in range(IMAGES + TARGETS):
                segments.append(
                    {"type": "image", "file": f"{key}.{image}.jpg", "generate": image >= IMAGES}
                )
                segments.append({"type": "text", "value": "a picture"})
                _add(tar, f"{key}.{image}.jpg", picture.getvalue())
            _add(tar, f"{key}.json", json.dumps({"segments": segments}).encode())


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def plan_of(folder: Path, name: str) -> Path:
    """The plan of a layout, for the batch that its run file says."""
    run = read_run(folder / RUN_FILE)
    profile = read_profile(run.dir.profile)
    encoders, llms, generators, tp = LAYOUTS[name]
    layers = {module: len(profile.modules[module].layers) for module in (ENCODER, GENERATOR)}
    units = [
        UnitPlan(
            name=ENCODER,
            modules=[ENCODER],
            dp=encoders,
            gpus=encoders,
            layers_per_stage=[layers[ENCODER]],
            checkpointing=True,
        ),
        UnitPlan(
            name=LLM,
            modules=[LLM],
            tp=tp,
            dp=llms,
            pp=3,
            gpus=tp * llms * 3,
            layers_per_stage=LLM_STAGES,
        ),
        UnitPlan(
            name=GENERATOR,
            modules=[GENERATOR],
            dp=generators,
            gpus=generators,
            layers_per_stage=[layers[GENERATOR]],
        ),
    ]
    layout = Layout(
        global_batch_size=llms * SLOTS,
        microbatch_size=1,
        microbatches=SLOTS,
        gpus_used=sum(unit.gpus for unit in units),
        units=units,
    )
    cluster = cluster_of(run.file, profile, 16)
    plan = Plan(
        fingerprints=profile.fingerprints.model_copy(update={"profile": fingerprint(profile)}),
        plan=layout,
        predicted=predict(units_of(profile, cluster, layout), layout, cluster),
        search=Search(solve_s=0.0, candidates=1, exact=False),
    )
    path = folder / f"{name.replace(' ', '-')}.yaml"
    write_plan(path, plan)
    return path


def rehearse(folder: Path, case: Case, seed: int, traces: Path) -> None:
    """Rehearse a case in a prepared folder and keep its traces."""
    skewed = {
        "name": "laion-like",
        "images_per_sequence": IMAGES,
        "generated_per_sequence": TARGETS,
    }
    edit(
        folder,
        train={
            "global_batch_size": LAYOUTS[case.layout][1] * SLOTS,
            "seed": seed,
            "ordering": "none" if case.uneven else "paper",
        },
    )
    path = plan_of(folder, case.layout)
    edit(
        folder,
        rehearse={
            "faults": list(case.faults),
            "distribution": skewed if case.uneven else None,
            "noise": NOISE,
            "time_scale": STEP_S / read_plan(path).predicted.iteration_s,
        },
    )
    disttrain(folder, "train", "--rehearse", "--plan", path, "--steps", STEPS)
    shutil.copytree(folder / "runs" / "mllm-9b" / "rehearsal" / "traces", traces)


def judged(case: Case, traces: Path) -> Row:
    """What the analysis says of a case's traces, and whether it is right."""
    found = analyze([traces])
    place = {key: value for key, value in asdict(found.verdict.place).items() if value is not None}
    right = found.verdict.cause == case.cause and case.place.items() <= place.items()
    lost = found.stragglers.lost_s or {}
    measured = found.job.iteration_s or 1.0
    return {
        "case": case.name,
        "right": right,
        "verdict": found.verdict.cause,
        "place": " ".join(f"{key} {value}" for key, value in place.items() if key != "host") or "-",
        "sure": found.verdict.confidence,
        "lost %": 100 * found.verdict.lost_s / measured,
        "unexplained %": 100 * lost.get("unexplained", 0.0) / measured,
        "all %": " ".join(f"{key[:5]} {100 * value / measured:.1f}" for key, value in lost.items()),
    }


@contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        yield out
    else:
        with tempfile.TemporaryDirectory() as name:
            yield Path(name)


def measure(out: Path | None = None, seed: int = 0, only: str = "") -> Tables:
    """A row per case with `only` in its name; traces that are in `out` already are not rehearsed
    again."""
    rows = []
    with _folder(out) as folder:
        run = folder / "run"
        for number, case in enumerate(CASES):
            traces = folder / f"{case.name.replace(' ', '-').replace(':', '')}-{seed}"
            if only not in case.name:
                continue
            if not traces.is_dir() and case.written is not None:
                synthetic.write(traces, synthetic.Synthetic(**case.written))
            elif not traces.is_dir():
                if not (run / RUN_FILE).is_file():
                    run.mkdir(parents=True)
                    prepare(run)
                rehearse(run, case, seed + number, traces)
            rows.append(judged(case, traces))
            print(json.dumps(rows[-1]), flush=True)
    right = sum(row["right"] for row in rows)
    return {f"Verdicts: {right} of {len(rows)} right": rows}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep the traces here")
    parser.add_argument(
        "--seed", type=int, default=0, help="another order of the data and other noise"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with TEXT in their names")
    options = parser.parse_args()
    print(
        "\n\n".join(
            table(title, rows)
            for title, rows in measure(options.out, options.seed, options.only).items()
        )
    )

"""Whole commands on one device: the chain, two ranks that share it, a model of a billion weights,
no memory left, an encoder, an LLM and a generator together."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import yaml

from benchmarks.gpu.setting import Figures, Setting
from benchmarks.gpu.surroundings import ROOT, environment
from disttrain_cli.data.sample_data import write_shard
from disttrain_cli.spec.trace import throttle_reasons
from disttrain_cli.spec.whole import write_whole

TAIL = 3000  # characters kept of what a command said
#: `disttrain` whose ranks count synchronisations, or save nothing (`benchmarks.gpu.rank`).
WATCHED, UNSAVED = (
    f"import disttrain_cli.runtime.train as train; train.TRAIN = 'benchmarks.gpu.rank:{main}'; "
    "from disttrain_cli.__main__ import main; main()"
    for main in ("main", "unsaved")
)
#: About a billion weights.
BILLION = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 5632,
    "tie_word_embeddings": False,
}
#: Layers of that LLM beside ViT-Huge and Stable Diffusion 2.1, with which it fits into 80 GB.
LAYERS_BESIDE = 14
LITTLE = {
    "vocab_size": 272,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "tie_word_embeddings": False,
}


def disttrain(setting: Setting, *words: str, program: str | None = None) -> Figures:
    """Run a command in the part's folder: seconds, exit code, and its JSON or what it said."""
    started = ["-m", "disttrain_cli"] if program is None else ["-c", program]
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *started, *words, "--json"],
        cwd=setting.folder,
        capture_output=True,
        text=True,
        env=environment(),
    )
    figures: Figures = {
        "command": " ".join(words),
        "seconds": time.perf_counter() - start,
        "code": done.returncode,
    }
    try:
        figures["said"] = json.loads(done.stdout)
    except ValueError:
        figures["error"] = (done.stdout + done.stderr)[-TAIL:]
    return figures


class Failed(Exception):
    """A command of a part did not do what it was to do."""


def _must(setting: Setting, name: str, done: Figures, told: Figures) -> None:
    """Keep what a command told; Failed where it did not work."""
    setting.tell(name, {key: done[key] for key in ("command", "seconds", "code")} | told)
    if done["code"]:
        said = done.get("said", {}).get("error", done.get("error"))
        raise Failed(f"disttrain {done['command']} ended with {done['code']}: {json.dumps(said)}")


def _trained(done: Figures) -> Figures:
    """The steps' figures, of which the first is left out of the means."""
    steps = done.get("said", {}).get("steps", [])
    if not steps:
        return {}
    later = steps[1:] or steps
    means = {
        key: sum(step[key] for step in later) / len(later)
        for key in ("iteration_s", "mfu", "tokens_per_s", "data_wait_s")
    }
    return means | {
        "steps": len(steps),
        "memory_gib": max(step["memory_gib"] for step in steps),
        "first_loss": steps[0]["loss"],
        "last_loss": steps[-1]["loss"],
    }


def _planned(folder: Path, name: str) -> Figures:
    plan = yaml.safe_load((folder / "runs" / name / "plan.yaml").read_text())
    predicted = plan["predicted"]
    return {
        "gpus": plan["plan"]["gpus_used"],
        "units": [unit["name"] for unit in plan["plan"]["units"]],
        "iteration_s": predicted["iteration_s"],
        "mfu": predicted["mfu"],
        "peak_gib": [stage["peak_gib"] for stage in predicted["memory"]],
    }


def chain(setting: Setting) -> None:
    """profile, plan, train with torch's profile of two steps, save, resume, analyze.

    Of the tiny preset; without scikit-learn (its data) or OpenCV an LLM on texts, without duckdb no
    `analyze`.
    """
    pictures = all(find_spec(name) for name in ("sklearn", "cv2", "simplejpeg"))
    setting.tell("pictures", pictures)
    if pictures:
        _must(
            setting,
            "init",
            disttrain(setting, "init", ".", "--preset", "tiny", "--sample-data"),
            {},
        )
        setting.run_of(
            "tiny",
            {
                "cluster": {"device": setting.kind, "gpus_per_node": 1},
                "samples": {"images": 10, "read": 10, "denoising_steps": 5},
            },
        )
    else:
        texts(setting, LITTLE, 256, {})
    steps = 6 if setting.small else 20
    _steps(setting, steps, "--profile-steps", "2:4", program=WATCHED)
    counted = {
        "synchronisations": synchronisations(setting.folder),
        "allocators": allocators(setting.folder),
    }
    setting.tell("train", setting.figures["train"] | counted)
    done = disttrain(setting, "train", "--resume", "--steps", str(steps + 2))
    resumed = _trained(done) | {"from": done.get("said", {}).get("resumed_from_step")}
    _must(setting, "resume", done, resumed)
    if not find_spec("duckdb"):
        setting.tell("analyze", "left out: duckdb is not installed")
        return
    found = disttrain(setting, "analyze")
    _must(setting, "analyze", found, {"verdict": found.get("said", {}).get("verdict")})


def _steps(setting: Setting, steps: int, *more: str, program: str) -> None:
    """profile, plan, train: the step as planned from the device's own profile, and as measured."""
    for command in ("profile", "plan"):
        _must(setting, command, disttrain(setting, command), {})
    name = yaml.safe_load((setting.folder / "disttrain.yaml").read_text())["name"]
    run = setting.folder / "runs" / name
    device = json.loads((run / "profile.json").read_text())["device"]
    planned = _planned(setting.folder, name)
    setting.tell("profiled", {key: device[key] for key in PROFILED})
    setting.tell("planned", planned)
    done = disttrain(setting, "train", "--steps", str(steps), *more, program=program)
    trained = _trained(done)
    _must(setting, "train", done, trained | {"clocks": _clocks(run / "traces")})
    predicted_s, measured_s = planned["iteration_s"], trained["iteration_s"]
    setting.tell(
        "prediction",
        {
            "predicted_s": predicted_s,
            "measured_s": measured_s,
            "error": measured_s / predicted_s - 1,
        },
    )


PROFILED = ("sm_mhz", "power_w", "throttle", "optimizer_ns_per_parameter")


def _clocks(traces: Path) -> Figures:
    """The devices' state in the steps after the first: mean clock and power, all reasons."""
    import pyarrow.parquet as pq

    rows = [
        row
        for segment in traces.glob("rank-*/segment-*.parquet")
        for row in pq.read_table(
            segment, columns=["step", "sm_mhz", "power_w", "throttle"]
        ).to_pylist()
        if row["sm_mhz"] and row["step"]
    ]
    return {key: mean(row[key] for row in rows) for key in ("sm_mhz", "power_w") if rows} | {
        "throttle": sorted({name for row in rows for name in throttle_reasons(row["throttle"])})
    }


def _explained(setting: Setting) -> None:
    """Where prediction and measurement differ, by operation, as `analyze` has it."""
    if not find_spec("duckdb"):
        setting.tell("analyze", "left out: duckdb is not installed")
        return
    found = disttrain(setting, "analyze")
    said = found.get("said", {})
    rows = {key: said.get(key) for key in ("predicted_vs_measured", "operations")}
    _must(setting, "analyze", found, rows | {"verdict": said.get("verdict")})


def texts(
    setting: Setting, model: Mapping[str, Any], length: int, changes: Mapping[str, Any]
) -> None:
    """A run file of an LLM alone and 400 documents of random words."""
    draw = random.Random(0)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 9))) for _ in range(500)]
    documents = [" ".join(draw.choices(words, k=draw.randint(20, length // 2))) for _ in range(400)]
    data = setting.folder / "texts"
    data.mkdir()
    (data / "texts.jsonl").write_text(
        "".join(json.dumps({"text": one}) + "\n" for one in documents)
    )
    run = {
        "version": 1,
        "name": "texts",
        "model": {
            "modules": {"llm": {"kind": "llm", "architecture": "llama", "config": dict(model)}}
        },
        "data": {"sources": [{"path": "texts"}], "tokenizer": "bytes", "sequence_length": length},
        "cluster": {"nodes": 1, "gpus_per_node": 1, "device": setting.kind},
        "train": {
            "global_batch_size": 4,
            "steps": 1000,
            "precision": "fp32" if setting.small else "bf16",
            "optimizer": {"lr": 1e-4},
            **changes,
        },
    }
    write_whole(setting.folder / "disttrain.yaml", yaml.safe_dump(run, sort_keys=False))


def shared(setting: Setting) -> None:
    """Two ranks on one device, over NCCL, by the usual commands."""
    texts(setting, LITTLE, 256, {})
    path = setting.folder / "disttrain.yaml"
    shared = "gpus_per_node: 2" + "\n  ranks_per_gpu: 2" * (setting.kind == "cuda")
    path.write_text(path.read_text().replace("gpus_per_node: 1", shared))
    _must(setting, "profile", disttrain(setting, "profile"), {})
    _must(setting, "plan", disttrain(setting, "plan"), {})
    setting.tell("planned", _planned(setting.folder, "texts"))
    done = disttrain(setting, "train", "--steps", "4")
    _must(setting, "train", done, _trained(done))


def large(setting: Setting) -> None:
    """A model of a billion weights in bf16: step, memory and MFU beside the plan's, without saving;
    then the same with most of the device's memory taken, which must end with a message.
    """
    size, length = (LITTLE, 256) if setting.small else (BILLION, 4096)
    texts(setting, size, length, {"global_batch_size": 4 if setting.small else 16})
    _steps(setting, 4 if setting.small else 16, program=UNSAVED)
    _explained(setting)
    if setting.kind == "cuda":
        setting.tell("out_of_memory", out_of_memory(setting))


def multimodal(setting: Setting) -> None:
    """An encoder, an LLM and a generator on one device: step and memory beside the plan's."""
    if not find_spec("cv2"):
        setting.tell("left_out", "OpenCV is not installed")
        return
    preset = "tiny" if setting.small else "mllm-9b"
    text = (files("disttrain_cli") / "templates" / "presets" / f"{preset}.yaml").read_text()
    model, side = yaml.safe_load(text)["model"], 64 if setting.small else 512
    if not setting.small:
        model["modules"]["llm"]["config"] = BILLION | {"num_hidden_layers": LAYERS_BESIDE}
    write_shard(setting.folder / "pictures" / "00000.tar", _pictures(48, side))
    run = {
        "version": 1,
        "name": "multimodal",
        "model": model,
        "data": {
            "sources": [{"path": "pictures"}],
            "tokenizer": "bytes",
            "sequence_length": 512 if setting.small else 2048,
            "max_image_pixels": side * side,
        },
        "cluster": {"nodes": 1, "gpus_per_node": 1, "device": setting.kind},
        "train": {
            "global_batch_size": 4 if setting.small else 16,
            "steps": 1000,
            "precision": "fp32" if setting.small else "bf16",
            "optimizer": {"lr": 1e-4},
        },
    }
    write_whole(setting.folder / "disttrain.yaml", yaml.safe_dump(run, sort_keys=False))
    _steps(setting, 4 if setting.small else 12, program=UNSAVED)
    _explained(setting)


def _pictures(count: int, side: int) -> list[list[tuple[str, bytes]]]:
    """Samples of two to four square pictures to be read, and one to be drawn."""
    import cv2
    import numpy as np

    random = np.random.default_rng(0)
    samples = []
    for number in range(count):
        names = [f"{number:06d}.{index}.jpg" for index in range(random.integers(3, 6))]
        colours = random.integers(0, 256, (len(names), 16, 16, 3), dtype=np.uint8)
        pictures = [
            cv2.imencode(".jpg", cv2.resize(one, (side, side)))[1].tobytes() for one in colours
        ]
        segments = [
            {"type": "image", "file": name, "generate": name == names[-1]} for name in names
        ]
        words = {"type": "text", "value": "a picture of colours " * 4}
        record = {"segments": [*segments[:-1], words, segments[-1]]}
        samples.append(
            [
                (f"{number:06d}.json", json.dumps(record).encode()),
                *zip(names, pictures, strict=True),
            ]
        )
    return samples


def out_of_memory(setting: Setting, left_gib: float = 6.0) -> Figures:
    """What training says when this process holds all of the device's memory but some."""
    free, _ = torch.cuda.mem_get_info()
    held = torch.empty(max(0, free - int(left_gib * 2**30)), dtype=torch.uint8, device="cuda")
    done = disttrain(setting, "train", "--restart", "--steps", "2")
    del held
    return {key: done[key] for key in ("seconds", "code", "error") if key in done} | {
        "message": done.get("said", {}).get("error")
    }


def synchronisations(folder: Path) -> list[Figures]:
    """What `benchmarks.gpu.rank` counted, of all ranks: where the host waited for the device, and
    how often."""
    counted: dict[str, int] = {}
    for path in sorted(folder.glob("synchronisations-*.json")):
        for where, count in json.loads(path.read_text()).items():
            counted[where] = counted.get(where, 0) + count
    return [
        {"where": where, "count": count}
        for where, count in sorted(counted.items(), key=lambda pair: -pair[1])
    ]


def allocators(folder: Path) -> list[Figures]:
    """Allocated and reserved peaks of each rank, as `benchmarks.gpu.rank` left them."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("allocator-*.json"))]


def pytest(setting: Setting) -> None:
    """The tests that are marked as needing a CUDA device."""
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    marked = [str(path) for path in tests if "pytest.mark.gpu" in path.read_text()]
    setting.tell("files", [str(Path(path).relative_to(ROOT)) for path in marked])
    done = _pytest([*marked, "-q", "-m", "gpu", "-rfE"])
    setting.tell("code", done.returncode)
    setting.tell("said", done.stdout[-TAIL:] + done.stderr[-TAIL:])
    if done.returncode:
        raise Failed(f"pytest ended with {done.returncode}")


def _pytest(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=environment(),
    )

"""Whole commands on one device: the chain, two ranks that share it, a model of a billion weights,
no memory left."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.gpu.setting import Figures, Setting
from benchmarks.gpu.surroundings import ROOT, environment
from disttrain_cli.spec.whole import write_whole

TAIL = 3000  # characters kept of what a command said
#: `disttrain` whose ranks count synchronisations (`benchmarks.gpu.rank`).
WATCHED = (
    "import disttrain_cli.runtime.train as train; train.TRAIN = 'benchmarks.gpu.rank:main'; "
    "from disttrain_cli.__main__ import main; main()"
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
LITTLE = {
    "vocab_size": 272,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "tie_word_embeddings": False,
}


def disttrain(setting: Setting, *words: str, watched: bool = False) -> Figures:
    """Run a command in the part's folder: seconds, exit code, and its JSON or what it said."""
    program = ["-c", WATCHED] if watched else ["-m", "disttrain_cli"]
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *program, *words, "--json"],
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
    """profile, plan, train with torch's profile of two steps, analyze.

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
    _steps(setting, "6" if setting.small else "20", "--profile-steps", "2:4")
    if not find_spec("duckdb"):
        setting.tell("analyze", "left out: duckdb is not installed")
        return
    found = disttrain(setting, "analyze")
    _must(setting, "analyze", found, {"verdict": found.get("said", {}).get("verdict")})


def _steps(setting: Setting, steps: str, *more: str) -> None:
    for command in ("profile", "plan"):
        _must(setting, command, disttrain(setting, command), {})
    name = yaml.safe_load((setting.folder / "disttrain.yaml").read_text())["name"]
    setting.tell("planned", _planned(setting.folder, name))
    done = disttrain(setting, "train", "--steps", steps, *more, watched=True)
    _must(
        setting,
        "train",
        done,
        _trained(done)
        | {
            "synchronisations": synchronisations(setting.folder),
            "allocators": allocators(setting.folder),
        },
    )


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
    """A model of a billion weights in bf16: MFU, memory beside the plan's, synchronisations, save,
    resume; then the same with most of the device's memory taken, which must end with a message.
    """
    size, length = (LITTLE, 256) if setting.small else (BILLION, 4096)
    texts(setting, size, length, {"global_batch_size": 4 if setting.small else 16})
    _steps(setting, "4" if setting.small else "8")
    done = disttrain(setting, "train", "--resume", "--steps", "6" if setting.small else "10")
    _must(
        setting,
        "resume",
        done,
        _trained(done) | {"from": done.get("said", {}).get("resumed_from_step")},
    )
    if setting.kind == "cuda":
        setting.tell("out_of_memory", out_of_memory(setting))


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

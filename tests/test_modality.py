"""A modality that the package does not know, from a package of its own, through the whole chain."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.data.dataset import encoded, image, interleaved, text, write_tar
from tests.runtime.factory import MODEL

ROOT = Path(__file__).parents[1]
CURVES = Path(__file__).with_name("curves")
ENCODER = {"kind": "encoder", "architecture": "curve", "merge": 2, "config": {"points": 4}}
Call = Callable[..., Any]

pytestmark = pytest.mark.slow


def write_samples(path: Path) -> None:
    """Texts with images and curves in any order, one with a curve that is none and one too long."""
    random, files = np.random.default_rng(3), []

    def curve(points: int) -> bytes:
        return b"\n".join(b"%.3f" % value for value in random.normal(size=points))

    for number in range(80):
        key = f"{number:03d}"
        segments = [text(f"Sample {number}. ")]
        for place in range(int(random.integers(0, 4))):
            name = f"{key}.{place}." + ("curve" if random.random() < 0.5 else "jpg")
            if name.endswith("curve"):
                files.append((name, curve(int(random.integers(1, 64)))))
                segments.append({"type": "curve", "file": name})
            else:
                sides = random.integers(16, 60, size=2).tolist()
                files.append((name, encoded(*sides, shade=number)))
                segments.append(image(name))
            segments.append(text(f"after {place}"))
        files.append(interleaved(key, *segments))
    for key, content in (("none", b"no number"), ("long", curve(65))):
        files.append((f"{key}.curve", content))
        files.append(interleaved(key, text(key), {"type": "curve", "file": f"{key}.curve"}))
    write_tar(path, files)


@pytest.fixture(scope="module")
def call(tmp_path_factory: pytest.TempPathFactory) -> Call:
    """Runs a command in the folder of a run with an encoder of curves, which is profiled."""
    folder = tmp_path_factory.mktemp("curves")
    write_samples(folder / "a.tar")
    modules = {"curve_encoder": ENCODER}
    modules |= {name: MODEL["modules"][name] for name in ("image_encoder", "llm")}
    content = {
        "name": "curves",
        "model": {"modules": modules},
        "data": {
            "sources": [{"path": "a.tar"}],
            "sequence_length": 256,
            "max_image_pixels": 2048,
            "max_bad_fraction": 0.05,
        },
        "cluster": {"gpus_per_node": 4, "device": "cpu"},
        "train": {
            "global_batch_size": 4,
            "steps": 3,
            "precision": "fp32",
            "optimizer": {"lr": 1e-3},
        },
    }
    (folder / "disttrain.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    paths = [str(CURVES), os.environ.get("PYTHONPATH", str(ROOT / "src"))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}

    def run(*arguments: str) -> Any:
        done = subprocess.run(
            [sys.executable, "-m", "disttrain_cli", *arguments, "--json"],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    profile = run("profile")
    assert profile["modules"]["curve_encoder"]["tp"]["1"]["forward_ms"] > 0
    return run


def test_it_is_planned_trained_and_analysed(call: Call, tmp_path: Path) -> None:
    plan = call("plan", "--strategy", "disaggregated")
    assert "curve_encoder" in [unit["name"] for unit in plan["plan"]["units"]]
    apart = call("train", "--restart")
    skipped = {one["sample"]: one["reason"] for one in apart["skipped_samples"]}
    assert skipped == {
        "a.tar/long": "a curve of 65 points",
        "a.tar/none": "none.curve: no curve: not a list of numbers",
    }
    analysed = call("analyze")
    assert "curve_encoder" in [unit["name"] for unit in analysed["units"]]
    call("export", "--to", str(tmp_path / "exported"))
    saved = json.loads((tmp_path / "exported" / "curve_encoder" / "config.json").read_text())
    assert (saved["architectures"], saved["points"]) == (["CurveModel"], 4)
    call("plan", "--gpus", "1")
    whole = call("train", "--restart")
    for key in ("loss", "grad_norm"):
        want = [step[key] for step in whole["steps"]]
        assert [step[key] for step in apart["steps"]] == pytest.approx(want, rel=1e-5)


def test_its_plan_fits_on_devices_that_are_not_there(call: Call) -> None:
    call("plan")
    tried = call("train", "--dry-run", "--device", "cuda")
    assert not tried["problems"]

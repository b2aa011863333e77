"""The chain as a user runs it: init, profile, plan, train, analyze as processes, on the sample data."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
SCRIPT = Path(sys.executable).parent / "disttrain"
STEPS = 3


def disttrain(folder, *words):
    """Exit code, stdout and stderr of one command, run in `folder`."""
    done = subprocess.run([SCRIPT, *map(str, words)], cwd=folder, capture_output=True, text=True,
                          stdin=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1", "DISTTRAIN_DEBUG": "0"})
    return done.returncode, done.stdout, done.stderr


def document(folder, *words):
    """The JSON document of a command that must succeed."""
    code, out, err = disttrain(folder, *words, "--json")
    assert code == 0, out + err
    return json.loads(out)


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """A folder in which the whole chain was run once, and what each command said."""
    home = tmp_path_factory.mktemp("chain")
    said = {"init": document(home, "init", "demo", "--preset", "tiny", "--sample-data")}
    demo = home / "demo"
    said["profile"] = document(demo, "profile", "--device", "cpu")
    said["plan"] = document(demo, "plan")
    said["train"] = document(demo, "train", "--steps", STEPS)
    said["analyze"] = document(demo, "analyze")
    return demo, said


def test_profile_measured_every_module_on_real_data(chain):
    profile = chain[1]["profile"]
    assert set(profile["modules"]) == {"image_encoder", "llm", "image_generator"}
    for module in profile["modules"].values():
        assert module["tp"]["1"]["forward_ms"] > 0 and module["tp"]["1"]["backward_ms"] > 0
    assert profile["data"]["samples"] > 500 and profile["data"]["skipped"] == 0 and profile["data"]["sequences"] >= 256


def test_the_planner_finds_three_units(chain):
    plan = chain[1]["plan"]["plan"]
    assert [unit["modules"] for unit in plan["units"]] == [["image_encoder"], ["llm"], ["image_generator"]]
    assert len({unit["dp"] for unit in plan["units"]}) > 1 and 4 <= plan["gpus_used"] <= 6
    assert chain[1]["plan"]["baselines"]["megatron"]["iteration_s"] > 0


def test_training_reports_both_losses_and_writes_what_it_says(chain):
    train = chain[1]["train"]
    assert len(train["steps"]) == STEPS
    for step in train["steps"]:
        assert step["losses"]["text"] > 0 and step["losses"]["image"] > 0 and step["grad_norm"] > 0
        assert 0 < step["mfu"] < 1
    assert train["skipped_samples"] == [] and train["resumed_from_step"] is None
    assert Path(train["checkpoint"]).is_dir() and Path(train["trace"]).is_dir()
    assert train["images"] and all(Path(image).stat().st_size > 0 for image in train["images"])


def test_analysis_finds_the_same_layout_and_steps(chain):
    demo, said = chain
    assert said["analyze"]["job"]["ranks"] == said["plan"]["plan"]["gpus_used"]
    assert said["analyze"]["job"]["steps"] == STEPS
    compared = {row["what"] for row in said["analyze"]["predicted_vs_measured"]}
    assert compared >= {"iteration_s", "mfu", "bubble_fraction"}
    assert Path(said["analyze"]["report"]).stat().st_size > 10_000
    rows = document(demo, "analyze", "--sql", "SELECT sum(images) FROM trace WHERE operation = 'forward' AND unit = "
                                             "'image_generator' AND module = 'image_generator'")["rows"]
    assert rows[0][0] > 0


def test_resuming_goes_on_and_refuses_to_go_nowhere(chain):
    train = document(chain[0], "train", "--steps", STEPS + 1, "--resume")
    assert train["resumed_from_step"] == STEPS and len(train["steps"]) == 1
    code, _, err = disttrain(chain[0], "train", "--steps", STEPS, "--resume")
    assert code == 1 and "--steps" in err


def test_data_that_changed_is_refused(chain, tmp_path):
    demo = tmp_path / "demo"
    shutil.copytree(chain[0], demo, ignore=shutil.ignore_patterns("checkpoints", "traces", "images", "earlier"))
    shard = next((demo / "data" / "interleaved").glob("*.tar"))
    shard.unlink()
    code, out, err = disttrain(demo, "train", "--steps", 1)
    assert code in (1, 4) and out == "" and "Traceback" not in err
    assert shard.name in err or "data" in err


def test_a_plan_edited_wrongly_is_refused_before_anything_starts(chain, tmp_path):
    text = (chain[0] / "runs" / "tiny" / "plan.yaml").read_text()
    broken = tmp_path / "plan.yaml"
    broken.write_text(text.replace("microbatches: ", "microbatches: 1"))
    code, out, err = disttrain(chain[0], "train", "--plan", broken)
    assert code == 1 and out == "" and "microbatches" in err

"""`disttrain plan` and `disttrain train --dry-run` on a profile made by hand."""

import json
import subprocess
import sys

import pytest

from disttrain_cli.app import main
from disttrain_cli.spec.plan import read_plan


def call(words, capsys):
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    shown = capsys.readouterr()
    return left.value.code, shown.out, shown.err


def test_plan_shows_layout_prediction_memory_and_baselines(run_folder, capsys, monkeypatch):
    monkeypatch.chdir(run_folder)
    code, out, err = call(["plan", "--top", 2], capsys)
    plan = read_plan(run_folder / "runs" / "tiny" / "plan.yaml")
    assert code == 0
    for unit in plan.plan.units:
        assert unit.name in out
    for word in ("s per step", "Memory predicted", "megatron", "Runner-up plans", f"{plan.predicted.iteration_s:.3f}"):
        assert word in out
    assert len(plan.alternatives) <= 2
    assert err.endswith("\nNext: disttrain train\n") and "Wrote runs/tiny/plan.yaml" in err


def test_json_has_the_promised_keys_and_nothing_else_on_stdout(run_folder, capsys):
    code, out, _ = call(["plan", run_folder / "disttrain.yaml", "--json"], capsys)
    document = json.loads(out)
    assert code == 0
    assert {"plan", "predicted", "baselines", "alternatives", "search", "path"} <= set(document)
    assert {"strategy", "global_batch_size", "microbatch_size", "microbatches", "gpus_used",
            "units"} <= set(document["plan"])
    assert {"name", "modules", "tp", "dp", "pp", "gpus", "layers_per_stage"} <= set(document["plan"]["units"][0])
    assert {"iteration_s", "sequences_per_s", "mfu", "warmup_s", "steady_s", "bubble_fraction",
            "memory"} <= set(document["predicted"])
    assert {"solve_s", "candidates", "exact"} <= set(document["search"])


def test_quiet_prints_the_path_only_and_a_folder_stands_for_its_run_file(run_folder, capsys):
    path = run_folder / "other.yaml"
    assert call(["plan", run_folder, "--quiet", "--out", path], capsys) == (0, f"{path}\n", "")
    assert read_plan(path).plan.gpus_used <= 6


def test_the_hint_carries_the_users_own_arguments(run_folder, capsys):
    _, _, err = call(["plan", run_folder / "disttrain.yaml", "--out", run_folder / "b.yaml"], capsys)
    assert err.endswith(f"Next: disttrain train {run_folder / 'disttrain.yaml'} --plan {run_folder / 'b.yaml'}\n")


def test_gpus_bounds_the_devices(run_folder, capsys):
    code, out, _ = call(["plan", run_folder, "--gpus", 1, "--json"], capsys)
    layout = json.loads(out)["plan"]
    assert code == 0 and layout["gpus_used"] == 1 and len(layout["units"]) == 1


def test_no_room_in_memory_is_exit_3_and_names_what_binds(run_folder, capsys):
    path = run_folder / "runs" / "tiny" / "profile.json"
    profile = json.loads(path.read_text())
    profile["device"]["memory_gib"] = 1e-4
    path.write_text(json.dumps(profile))
    code, out, err = call(["plan", run_folder], capsys)
    assert code == 3 and out == "" and "memory" in err.lower() and "Next:" in err


def test_without_a_profile_the_next_command_is_named(run_folder, capsys):
    (run_folder / "runs" / "tiny" / "profile.json").unlink()
    code, _, err = call(["plan", run_folder], capsys)
    assert code == 1 and "profile.json" in err and "disttrain profile" in err


def test_a_profile_of_another_model_is_refused_with_both_fingerprints(run_folder, capsys):
    path = run_folder / "runs" / "tiny" / "profile.json"
    profile = json.loads(path.read_text())
    mine = profile["fingerprints"]["model"]
    profile["fingerprints"]["model"] = "feedfacefeedface"
    path.write_text(json.dumps(profile))
    code, _, err = call(["plan", run_folder], capsys)
    assert code == 1 and mine in err and "feedfacefeedface" in err


@pytest.mark.parametrize(("old", "new", "named"), [
    ("  steps: ", "  stepz: ", "train.stepz: unknown key"),
    ("  global_batch_size: 12", "  global_batch_size: 0", "train.global_batch_size"),
    ("  precision: fp32", "  precision: fp8", "'fp32' or 'bf16'"),
    ("name: tiny", "name: [", "not valid YAML")])
def test_a_bad_run_file_is_reported_by_field(run_folder, old, new, named, capsys):
    file = run_folder / "disttrain.yaml"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    code, out, err = call(["plan", run_folder], capsys)
    assert code == 1 and out == "" and named in err and "Traceback" not in err


def test_dry_run_shows_every_rank_and_starts_nothing(run_folder, capsys):
    call(["plan", run_folder], capsys)
    code, out, err = call(["train", run_folder, "--dry-run", "--json"], capsys)
    document = json.loads(out)
    ranks = [rank for stage in document["stages"] for rank in stage["ranks"]]
    assert code == 0 and ranks == list(range(document["ranks"])) == list(range(document["plan"]["gpus_used"]))
    code, out, err = call(["train", run_folder, "--dry-run"], capsys)
    assert code == 0 and "Nothing was started" in out and "peak GiB" in out
    assert err.endswith(f"disttrain train {run_folder}\n")
    assert not (run_folder / "runs" / "tiny" / "traces").exists()


def test_plan_loads_no_torch(run_folder):
    code = ("import sys\nfrom disttrain_cli.app import main\ntry:\n    main(['plan', sys.argv[1], '--quiet'])\n"
            "except SystemExit as left:\n    assert left.code == 0\n"
            "print('LOADED', sorted({'torch', 'transformers', 'diffusers', 'deepspeed'} & set(sys.modules)))")
    done = subprocess.run([sys.executable, "-c", code, str(run_folder)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "LOADED []"

"""`disttrain plan` and `disttrain train --dry-run` on a profile made by hand."""

import json
import os
import subprocess
import sys
import threading
import xml.etree.ElementTree as ET

import pytest
import yaml

from disttrain_cli.api.presets import preset_text
from disttrain_cli.costs.hardware import RULES
from disttrain_cli.planning.purchase import offer
from disttrain_cli.spec.plan import read_plan
from disttrain_cli.spec.prices import read_prices
from disttrain_cli.spec.profile import read_profile
from disttrain_cli.spec.runfile import read_run
from tests.cases import mostly_slow
from tests.commands.calling import call


@pytest.mark.slow
def test_plan_shows_layout_prediction_memory_and_baselines(run_folder, capsys, monkeypatch):
    monkeypatch.chdir(run_folder)
    code, out, err = call(["plan", "--top", 2], capsys)
    plan = read_plan(run_folder / "runs" / "tiny" / "plan.yaml")
    assert code == 0
    for unit in plan.plan.units:
        assert unit.name in out
    for word in (
        "Units, in pipeline order",
        "peak / limit GiB",
        "megatron",
        "Next best layouts",
        "What if",
        "images doubled",
        "text only",
        f"{plan.predicted.iteration_s:.3f}",
    ):
        assert word in out
    head = " ".join(out.splitlines()[:2])
    assert "per step expected, " in head and "from measured kernels and links" in head
    for heading in ("Time ", "Slowest ", "Memory ", "Waiting ", "Range ", "Decoding "):
        assert f"\n{heading}" in out
    assert "One more device" in out
    assert len(plan.alternatives) <= 2
    assert err.endswith("\nNext: disttrain train\n")
    assert "Wrote runs/tiny/plan.yaml and runs/tiny/plan.svg" in err


@pytest.mark.slow
def test_a_pipe_takes_the_plan_and_nothing_is_written_beside_it(run_folder, capsys):
    pipe, heard = run_folder / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: heard.append(pipe.read_bytes()))
    reader.start()
    code, out, _ = call(["plan", run_folder, "--json", "--top", 0, "--out", pipe], capsys)
    reader.join()
    assert (
        code == 0 and json.loads(out)["picture"] is None and b"plan:" in heard[0] and pipe.is_fifo()
    )
    assert [path.name for path in run_folder.glob("pipe*")] == ["pipe"]


@pytest.mark.slow
def test_every_strategy_has_the_same_screen(run_folder, capsys):
    code, out, _ = call(["plan", run_folder, "--strategy", "megatron", "--top", 1], capsys)
    assert code == 0 and out.startswith("Plan of megatron on ")
    assert "Comparison with other strategies" in out and "modules" in out


@pytest.mark.slow
def test_json_has_the_promised_keys_and_nothing_else_on_stdout(run_folder, capsys):
    words = [run_folder / "disttrain.yaml", "--out", run_folder / "b.yaml"]
    code, out, err = call(["plan", *words, "--json"], capsys)
    document = json.loads(out)
    assert code == 0 and document["picture"] == str(run_folder / "b.svg")
    ET.parse(run_folder / "b.svg")
    assert err.endswith(f"Next: disttrain train {words[0]} --plan {words[2]}\n")
    assert {"plan", "predicted", "baselines", "alternatives", "search", "path"} <= set(document)
    assert {
        "strategy",
        "global_batch_size",
        "microbatch_size",
        "microbatches",
        "gpus_used",
        "units",
    } <= set(document["plan"])
    assert {"name", "modules", "tp", "dp", "pp", "gpus", "layers_per_stage"} <= set(
        document["plan"]["units"][0]
    )
    assert {
        "iteration_s",
        "sequences_per_s",
        "mfu",
        "warmup_s",
        "steady_s",
        "bubble_fraction",
        "memory",
        "expected_s",
        "range_s",
        "doubts",
        "mfu_causal",
    } <= set(document["predicted"])
    low_s, high_s = document["predicted"]["range_s"]
    assert low_s <= document["predicted"]["expected_s"] <= high_s
    assert set(document["predicted"]["doubts"].values()) <= {"measured", "stated", "assumed"}
    assert {"solve_s", "candidates", "exact"} <= set(document["search"])
    explanation = document["explanation"]
    assert {"units", "binding_unit", "memory_unit", "time", "runners_up", "baselines"} <= set(
        explanation
    )
    assert sum(part["seconds"] for part in explanation["time"]) == pytest.approx(
        document["predicted"]["iteration_s"]
    )
    changes = [change["what"] for change in document["sensitivity"]["changes"]]
    assert changes[:3] == ["images doubled", "images halved", "text only"]
    assert document["not_run"] == [] and document["changes"] is None


@pytest.mark.slow
def test_quiet_prints_the_path_only_and_gpus_bounds_the_devices(run_folder, capsys):
    path = run_folder / "other.yaml"
    words = ["plan", run_folder, "--quiet", "--gpus", 1, "--out", path]
    assert call(words, capsys) == (0, f"{path}\n", "")
    layout = read_plan(path).plan
    assert layout.gpus_used == 1 and len(layout.units) == 1


@pytest.mark.slow
def test_a_plan_for_more_devices_than_there_are_says_so(run_folder, capsys):
    code, out, err = call(["plan", run_folder, "--gpus", 12, "--top", 0, "--json"], capsys)
    used = json.loads(out)["plan"]["gpus_used"]
    assert code == 0 and f"The cluster has 6 of this plan's {used} devices" in err
    assert f"training needs cluster.nodes: {-(-used // 6)}." in err


def test_no_room_in_memory_is_exit_3_and_names_the_limit(run_folder, capsys):
    path = run_folder / "runs" / "tiny" / "profile.json"
    profile = json.loads(path.read_text())
    profile["device"]["memory_gib"] = 1e-4
    path.write_text(json.dumps(profile))
    code, out, err = call(["plan", run_folder], capsys)
    assert code == 3 and out == "" and "memory" in err.lower() and "Next:" in err


@pytest.mark.slow
def test_a_margin_needs_no_other_profile_but_another_plan(planned, capsys):
    path = planned / "disttrain.yaml"
    text = path.read_text()
    path.write_text(text.replace("cluster:", "cluster:\n  memory_margin_gib: 0.25", 1))
    code, _, err = call(["train", path, "--dry-run"], capsys)
    assert code == 1 and "made for another cluster" in err
    code, out, _ = call(["plan", path, "--json", "--top", 0], capsys)
    memory = json.loads(out)["predicted"]["memory"]
    assert code == 0 and {stage["limit_gib"] for stage in memory} == {3.75}
    path.write_text(text.replace("cluster:", "cluster:\n  memory_margin_gib: 4", 1))
    code, _, err = call(["plan", path], capsys)
    assert code == 1 and "cluster.memory_margin_gib leaves no memory" in err


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


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("  steps: ", "  stepz: ", "train.stepz: unknown key"),
        ("  global_batch_size: 6", "  global_batch_size: 0", "train.global_batch_size"),
        ("  precision: fp32", "  precision: fp8", "'fp32' or 'bf16'"),
        ("name: tiny", "name: [", "not valid YAML"),
    ],
)
def test_a_bad_run_file_is_reported_by_field(run_folder, old, new, named, capsys):
    file = run_folder / "disttrain.yaml"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    code, out, err = call(["plan", run_folder], capsys)
    assert code == 1 and out == "" and named in err and "Traceback" not in err


def edit_run(run_folder, old, new):
    file = run_folder / "disttrain.yaml"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def edit_profile(run_folder, change):
    path = run_folder / "runs" / "tiny" / "profile.json"
    profile = json.loads(path.read_text())
    run = read_run(run_folder / "disttrain.yaml").file
    profile["fingerprints"].update(model=run.model_fingerprint(), cluster=run.cluster_fingerprint())
    profile["cluster"] = run.cluster.model_dump(mode="json")
    change(profile)
    path.write_text(json.dumps(profile))


@pytest.mark.slow
def test_devices_that_no_layout_needs_are_said_to_be_left_over(run_folder, capsys):
    edit_run(run_folder, "global_batch_size: 6", "global_batch_size: 1")
    edit_run(run_folder, "gpus_per_node: 6", "gpus_per_node: 12")
    edit_run(run_folder, "train:", "train:\n  ordering: none")
    edit_profile(run_folder, lambda profile: profile["device"].update(count=12, kind="cuda"))
    code, out, _ = call(["plan", run_folder, "--top", 0], capsys)
    used = read_plan(run_folder / "runs" / "tiny" / "plan.yaml").plan.gpus_used
    assert code == 0 and used < 11
    assert f"on {used} of 12 devices" in out
    assert f"Idle      {12 - used} of 12 devices: no faster layout that uses more was found." in out
    assert "has DP 1, which must divide the batch of 1: none is larger" in " ".join(out.split())


def slow_llm(profile):
    for cost in profile["modules"]["llm"]["costs"].values():
        for shard in cost["tp"].values():
            for times in ("forward_ms", "backward_ms"):
                shard[times] = {name: 4 * value for name, value in shard[times].items()}


@pytest.mark.slow
def test_planning_again_says_that_the_plan_in_place_is_still_good(planned, capsys):
    code, out, err = call(["plan", planned, "--strategy", "disaggregated", "--top", 0], capsys)
    assert code == 0 and "Not compared" not in err
    assert "The plan in place is still good: this one is the same" in out


@pytest.mark.slow
def test_a_moved_profile_shows_what_the_new_plan_changes_and_its_gain(planned, capsys):
    first = read_plan(planned / "runs" / "tiny" / "plan.yaml").model_dump()
    edit_profile(planned, slow_llm)
    other = planned / "other.yaml"  # beside the plan in place, which stays
    apart = ["plan", planned, "--strategy", "disaggregated"]
    code, out, _ = call([*apart, "--json", "--out", other], capsys)
    found = json.loads(out)
    changes = found["changes"]
    assert code == 0 and changes["old_iteration_s"] == pytest.approx(
        first["predicted"]["iteration_s"]
    )
    assert changes["new_s"] == pytest.approx(found["predicted"]["iteration_s"])
    assert changes["gain_pct"] == pytest.approx(100 * (changes["old_now_s"] / changes["new_s"] - 1))
    assert {"unit", "what", "before", "after"} == set(changes["differences"][0]) and changes[
        "unfit"
    ] is None
    code, out, _ = call(apart, capsys)
    said = " ".join(out.split())
    assert code == 0 and "Changes from the plan in place" in out
    assert f"{changes['gain_pct']:.2g} % more sequences per second." in said
    assert "its slowest stages changed in the profile, per slot: llm " in said
    assert (
        read_plan(planned / "runs" / "tiny" / "plan.yaml.before").plan.model_dump() == first["plan"]
    )


@pytest.mark.slow
def test_a_plan_in_place_that_fits_no_more_is_said_to(planned, capsys):
    code, out, _ = call(["plan", planned, "--strategy", "disaggregated", "--gpus", 3], capsys)
    assert (
        code == 0
        and "The plan in place does not fit any more. It needs 6 devices (there are 3)." in out
    )


@pytest.mark.slow
def test_a_plan_of_another_batch_or_strategy_is_not_compared(planned, capsys):
    code, out, err = call(
        ["plan", planned, "--strategy", "megatron", "--json", "--out", planned / "b.yaml"], capsys
    )
    assert code == 0 and json.loads(out)["changes"] is None
    assert "it was made for another strategy (disaggregated, now megatron)" in err
    edit_run(planned, "global_batch_size: 6", "global_batch_size: 24")
    code, out, err = call(["plan", planned], capsys)
    assert code == 0 and "in place" not in out and "another global batch (6, now 24)" in err


@pytest.mark.parametrize(
    "text",
    mostly_slow(
        ["plan: [", "just words\n", "version: 1\nplan: {}\n", "\udcff\udcfe", ""], "plan: ["
    ),
)
def test_a_damaged_plan_in_place_is_kept_and_named(run_folder, capsys, text):
    path = run_folder / "runs" / "tiny" / "plan.yaml"
    damaged = text.encode(errors="surrogateescape")
    path.write_bytes(damaged)
    code, out, err = call(["plan", run_folder, "--json", "--top", 0], capsys)
    assert code == 0 and json.loads(out)["changes"] is None
    assert "Not compared with " in err and "plan.yaml" in err and "Traceback" not in err
    assert (
        path.with_name("plan.yaml.before").read_bytes() == damaged
        and read_plan(path).plan.gpus_used <= 6
    )


@pytest.mark.slow
def test_a_plan_for_a_device_of_the_catalogue_is_shown_but_not_run(run_folder, capsys):
    edit_run(run_folder, "device: auto", "device: analytic:A800")
    edit_profile(
        run_folder,
        lambda profile: (
            profile["device"].update(kind="analytic", name="A800", shared_by=1),
            profile["provenance"].update(rules=RULES),
        ),
    )
    code, out, err = call(["plan", run_folder], capsys)
    assert code == 0 and "Training cannot run this plan yet: a device that is not here" in out
    assert "FSDP over" in out and "--strategy fsdp" not in out
    assert err.endswith(f"Next: disttrain train {run_folder} --rehearse\n")
    code, _, err = call(["train", run_folder], capsys)
    assert code == 1 and "A800" in err and "cluster.device" in err and "Traceback" not in err
    assert "disttrain train" in err and "--rehearse" in err
    code, out, _ = call(["train", run_folder, "--rehearse", "--dry-run"], capsys)
    assert code == 0 and "A rehearsal starts 6 processes, each for at most 1 GPUs" in out
    code, _, err = call(["train", run_folder, "--dry-run"], capsys)
    assert code == 0 and "A800" in err
    assert err.endswith(f"Next: disttrain train {run_folder} --rehearse\n")
    assert not (run_folder / "runs" / "tiny" / "traces").exists()


@pytest.mark.parametrize(
    ("device", "kind", "name"),
    [
        pytest.param("cpu", "cuda", "NVIDIA H200", marks=pytest.mark.slow),
        ("analytic:A800", "cpu", "EPYC"),
    ],
)
def test_a_profile_of_another_device_is_refused_by_name(run_folder, capsys, device, kind, name):
    edit_profile(run_folder, lambda profile: profile["device"].update(kind=kind, name=name))
    edit_run(run_folder, "device: auto", f"device: {device}")
    code, out, err = call(["plan", run_folder], capsys)
    assert code == 1 and out == "" and device in err and name in err and "disttrain profile" in err
    path = run_folder / "runs" / "tiny" / "profile.json"
    plan = ["plan", run_folder, "--quiet", "--top", 0, "--profile", path]
    assert call(plan, capsys)[0] == 0


@pytest.mark.slow
def test_a_plan_says_what_is_trained(run_folder, capsys):
    edit_run(run_folder, "  loss_weights:", "  trained: [llm]\n  loss_weights:")
    edit_profile(run_folder, lambda profile: None)
    code, out, _ = call(["plan", run_folder, "--top", 0], capsys)
    assert code == 0 and "trained: llm" in out
    assert "Next best layouts" not in out and "What if" in out


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        (
            "  tokenizer: bytes",
            "  distribution: {name: laion-like}\n  tokenizer: bytes",
            ["sources", "distribution"],
        ),
        (
            "  loss_weights:",
            "  trained: [audio]\n  loss_weights:",
            ["trained", "audio", "projectors"],
        ),
        ("  loss_weights:", "  trained: []\n  loss_weights:", ["trained", "at least one"]),
        (
            "      context_tokens: 1",
            "      cached_latents: true\n      context_tokens: 1",
            ["cached_latents", "vae"],
        ),
        (
            "  zero_stage: 1",
            "  activation_checkpointing: some\n  zero_stage: 1",
            ["activation_checkpointing", "'full'"],
        ),
    ],
)
def test_wrong_choices_are_refused_by_field(run_folder, old, new, named, capsys):
    edit_run(run_folder, old, new)
    code, out, err = call(["plan", run_folder], capsys)
    assert code == 1 and out == "" and "Traceback" not in err
    for word in named:
        assert word in err


def test_a_plan_made_before_the_run_file_changed_is_refused(planned, capsys):
    edit_run(planned, "  loss_weights:", "  trained: [llm]\n  loss_weights:")
    code, _, err = call(["train", planned], capsys)
    assert (
        code == 1
        and "another model.trained" in err
        and "plan: all" in err
        and "disttrain plan" in err
    )


def test_dry_run_shows_every_rank_and_starts_nothing(planned, capsys):
    code, out, err = call(["train", planned, "--dry-run", "--json"], capsys)
    document = json.loads(out)
    ranks = [rank for stage in document["stages"] for rank in stage["ranks"]]
    assert code == 0 and ranks == list(range(document["ranks"])) == list(
        range(document["plan"]["gpus_used"])
    )
    code, out, err = call(["train", planned, "--dry-run"], capsys)
    assert code == 0 and "Nothing was started" in out and "peak GiB" in out
    assert err.endswith(f"disttrain train {planned}\n")
    assert not (planned / "runs" / "tiny" / "traces").exists()


@pytest.mark.slow
def test_plan_loads_no_torch(run_folder):
    code = (
        "import sys\nfrom disttrain_cli.app import main\ntry:\n    main(['plan', sys.argv[1],"
        " '--quiet'])\nexcept SystemExit as left:\n    assert left.code == 0\nprint('LOADED',"
        " sorted({'torch', 'transformers', 'diffusers', 'deepspeed'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(run_folder)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "LOADED []"


@pytest.mark.parametrize("own", ["disttrain.yaml", "runs/tiny/profile.json"])
def test_what_is_read_is_not_written_over(run_folder, capsys, own):
    before = (run_folder / own).read_bytes()
    (run_folder / "link.yaml").symlink_to(own)
    for out in (own, "link.yaml"):
        code, _, err = call(["plan", str(run_folder), "--out", str(run_folder / out)], capsys)
        assert code == 2 and "is one of the input files" in err
    assert (run_folder / own).read_bytes() == before


@pytest.mark.slow
def test_the_phase_that_is_priced_is_named(run_folder, capsys):
    path = run_folder / "runs" / "tiny" / "profile.json"
    profile = json.loads(path.read_text())
    profile["data"] |= {"phases": [{"step": 0, "weights": [1]}, {"step": 40, "weights": [2]}]}
    profile["data"]["priced_step"] = 40
    path.write_text(json.dumps(profile))
    code, _, err = call(["plan", run_folder], capsys)
    assert code == 0 and "Priced are the data from step 40 on" in err


@pytest.mark.slow
def test_a_computed_profile_is_planned_at_another_size(run_folder, capsys):
    """`profile --device` chose the device; then the run file asks for other nodes."""
    edit_run(run_folder, "device: auto", "device: analytic:H800")
    edit_profile(
        run_folder,
        lambda profile: (
            profile["device"].update(kind="analytic", name="H100"),
            profile["provenance"].update(rules=RULES),
        ),
    )
    edit_run(run_folder, "gpus_per_node: 6", "gpus_per_node: 4")
    code, _, err = call(["plan", run_folder, "--top", 0], capsys)
    assert code == 0, err
    assert "Profiled for 1 × 6 devices, planned for 1 × 4" in err
    assert "Planned for H100" in err and "analytic:H800" in err
    profile = json.loads((run_folder / "runs" / "tiny" / "profile.json").read_text())
    assert profile["device"]["count"] == 4 and profile["cluster"]["gpus_per_node"] == 4
    assert call(["plan", run_folder, "--top", 0], capsys)[2].count("Profiled for") == 0


@pytest.fixture
def on_h100(run_folder, monkeypatch):
    """The run folder, its profile of H100; one of another device is the same under its name."""
    edit_run(run_folder, "  device: auto ", "  device: analytic:H100 ")
    edit_run(run_folder, "train:", "train:\n  ordering: none")

    def as_computed(profile):
        profile["device"] |= {"name": "H100", "kind": "analytic", "memory_gib": 79.0}
        profile["provenance"]["rules"] = RULES

    edit_profile(run_folder, as_computed)
    known = read_profile(run_folder / "runs" / "tiny" / "profile.json")

    def analytic_profile(run, name, progress):
        device = known.device.model_copy(update={"name": name})
        cluster = {"cluster": run.file.cluster_fingerprint()}
        return known.model_copy(
            update={
                "device": device,
                "cluster": run.file.cluster,
                "fingerprints": known.fingerprints.model_copy(update=cluster),
            }
        )

    monkeypatch.setattr("disttrain_cli.profiling.analytic.analytic_profile", analytic_profile)
    return run_folder


@pytest.mark.slow
def test_clusters_are_compared_in_one_table(on_h100, capsys):
    edit_run(on_h100, "cluster:", "cluster:\n  price_per_gpu_hour: {h100: 2}")
    words = ["plan", on_h100, "--gpus", "2,1", "--device", "H100,analytic:B200", "--json"]
    code, out, err = call(words, capsys)
    found = json.loads(out)["clusters"]
    assert code == 0 and "No plan was written" in err
    assert not (on_h100 / "runs" / "tiny" / "plan.yaml").exists()
    assert [(one["device"], one["gpus"]) for one in found] == [
        ("H100", 2),
        ("H100", 1),
        ("B200", 2),
        ("B200", 1),
    ]
    steps = read_run(on_h100 / "disttrain.yaml").file.train.steps
    for one in found:
        low_s, high_s = one["range_s"]
        assert low_s <= one["step_s"] <= high_s
        assert one["hours"] == pytest.approx(steps * one["step_s"] / 3600)
        assert one["gpu_hours"] == pytest.approx(one["gpus"] * one["hours"])
        assert one["idle"] == one["gpus"] - one["layout"]["gpus_used"]
        assert bool(one["idle"]) == bool(one["idle_because"])
        assert one["tokens_per_s_per_gpu"] == pytest.approx(one["tokens_per_s"] / one["gpus"])
        cost = pytest.approx(2 * one["gpu_hours"]) if one["device"] == "H100" else None
        assert one["cost"] == cost
    _, out, _ = call(["plan", on_h100, "--gpus", "2", "--top", 0, "--json"], capsys)
    plan = json.loads(out)
    assert found[0]["layout"] == plan["plan"]
    assert found[0]["step_s"] == pytest.approx(plan["predicted"]["expected_s"])
    assert found[0]["grounds"] == plan["explanation"]["grounds"]


@pytest.mark.parametrize(
    ("prices", "h100", "b200"),
    [
        ("2", 2, None),
        ("{analytic:h100: 2, B200: 5.5}", 2, 5.5),
        ("prices.yaml", None, 4),
        ("null", None, None),
    ],
)
def test_prices_are_of_the_device_or_of_a_mapping(on_h100, prices, h100, b200):
    (on_h100 / "prices.yaml").write_text("B200: 4\n")
    edit_run(on_h100, "cluster:", f"cluster:\n  price_per_gpu_hour: {prices}")
    run = read_run(on_h100 / "disttrain.yaml")
    known = read_profile(on_h100 / "runs" / "tiny" / "profile.json")
    for name, price in {"H100": h100, "NVIDIA B200": b200}.items():
        profile = known.model_copy(
            update={"device": known.device.model_copy(update={"name": name})}
        )
        found = offer(profile, 1, 10, read_prices(run, "H100"), "memory is short")
        assert found.price_per_gpu_hour == price and found.unfit


@pytest.mark.slow
def test_where_nothing_fits_a_row_says_why(on_h100, capsys):
    edit_run(on_h100, "cluster:", "cluster:\n  memory_gib: 1.0e-3")
    words = ["plan", on_h100, "--gpus", "1"]
    code, out, err = call([*words, "--device", "B200,H100"], capsys)
    said = " ".join(out.split())
    assert code == 0 and "1 × H100: memory is short" in said and "B200: memory" not in said
    assert "nothing fits" in out and "B200 has the catalogue's figures" in err
    assert "No price of B200, H100: state cluster.price_per_gpu_hour: {B200: PRICE" in said
    code, out, err = call([*words, "--device", "H100"], capsys)
    assert code == 3 and out == "" and "1 × H100: memory is short" in err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--gpus", "8,,16"], "--gpus cannot be ''"),
        (["--gpus", "8,0"], "--gpus cannot be '0'"),
        (["--gpus", "8,70000"], "--gpus cannot be '70000'"),
        (["--gpus", "2,2"], "--gpus names twice '2'"),
        (["--gpus", "8,08"], "--gpus names twice '8'"),
        (["--device", "H100,h100"], "--device names twice 'H100'"),
        (["--device", "H100,analytic:h100"], "--device names twice 'H100'"),
        (["--device", "H 100"], "--device cannot be 'H 100'"),
        (["--device", "H100", "--out", "a.yaml"], "--out is of a single plan"),
        (["--gpus", "1,2", "--top", "1"], "--top is of a single plan"),
        (["--device", "H100", "--profile", "a.json"], "--profile is of a single plan"),
    ],
)
def test_wrong_clusters_are_refused(on_h100, capsys, words, named):
    code, out, err = call(["plan", on_h100, *words], capsys)
    assert code == 2 and out == "" and named in err


@pytest.mark.parametrize(
    ("prices", "named"),
    [
        ("-1", "cluster.price_per_gpu_hour"),
        ("{H100: 0}", "cluster.price_per_gpu_hour"),
        ("yes", "cluster.price_per_gpu_hour"),
        ("{H100: yes}", "cluster.price_per_gpu_hour"),
        ("{H100: '2.5'}", "cluster.price_per_gpu_hour"),
        ("{H100: 2, analytic:h100: 3}", "two prices of analytic:h100"),
        ("none.yaml", "There is no price file (cluster.price_per_gpu_hour)"),
        ("wrong.yaml", "H100: "),
    ],
)
def test_wrong_prices_are_named(on_h100, capsys, prices, named):
    (on_h100 / "wrong.yaml").write_text("H100: much\n")
    edit_run(on_h100, "cluster:", f"cluster:\n  price_per_gpu_hour: {prices}")
    code, out, err = call(["plan", on_h100, "--gpus", "1,2"], capsys)
    assert code == 1 and out == "" and named in err


@pytest.mark.slow
def test_clusters_are_compared_without_data_or_profile(tmp_path, capsys):
    """Real profiles of devices that are not here, one of them with figures of its own."""
    value = yaml.safe_load(preset_text("tiny"))
    del value["model"]["modules"]["image_generator"]
    value["data"] = {
        "distribution": {"images_per_sequence": 2, "generated_per_sequence": 0, "sequences": 300},
        "sequence_length": 256,
        "max_image_pixels": 1024,
    }
    value["cluster"] = {"gpus_per_node": 1, "device": "analytic:mine", "peak_tflops": 100.0}
    value["cluster"] |= {"memory_gib": 24.0, "price_per_gpu_hour": {"mine": 1.5}}
    value["train"]["ordering"] = "none"
    (tmp_path / "disttrain.yaml").write_text(yaml.safe_dump(value))
    code, out, _ = call(
        ["plan", tmp_path, "--gpus", "1", "--device", "H100,mine", "--json"], capsys
    )
    found = json.loads(out)["clusters"]
    assert code == 0 and [one["price_per_gpu_hour"] for one in found] == [None, 1.5]
    assert [one["device"] for one in found] == ["H100", "mine"]
    assert found[0]["step_s"] < found[1]["step_s"]
    code, _, err = call(["plan", tmp_path, "--device", "other"], capsys)
    assert (
        code == 1 and "figures of yours in the run file, with cluster.device: analytic:other" in err
    )

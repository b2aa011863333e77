"""The chain as a user runs it: init, profile, plan, train, analyze as processes, on the sample
data."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from disttrain_cli.runtime.checkpoints.folder import sealed

pytestmark = pytest.mark.slow
SCRIPT = Path(sys.executable).parent / "disttrain"
STEPS, RESUMED_STEPS = 3, 5
#: Where this chain is smaller than the preset: four ranks, two pictures drawn and three read, and
#: so few steps that its profile ends at the least budget.
SMALLER = {
    "  gpus_per_node: 6": "  gpus_per_node: 4",
    "  steps: 240": "  steps: 24",
    "  images: 100": "  images: 2",
    "  denoising_steps: 20": "  denoising_steps: 4",
    "  read: 100": "  read: 3",
}


def disttrain(folder, *words, **variables):
    """Exit code, stdout and stderr of one command, run in `folder` with these variables."""
    done = subprocess.run(
        [SCRIPT, *map(str, words)],
        cwd=folder,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1", "DISTTRAIN_DEBUG": "0"} | variables,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


def document(folder, *words):
    """The JSON document of a command that must succeed; nothing else may stand on stdout."""
    code, out, err = disttrain(folder, *words, "--json")
    assert code == 0, out + err
    return json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """A folder in which the whole chain was run once, and what each command said."""
    home = tmp_path_factory.mktemp("chain")
    said = {"init": document(home, "init", "demo", "--preset", "tiny", "--sample-data")}
    demo = home / "demo"
    text = (demo / "disttrain.yaml").read_text()
    for old, new in SMALLER.items():
        assert old in text
        text = text.replace(old, new, 1)
    (demo / "disttrain.yaml").write_text(text)
    said["profile"] = document(demo, "profile", "--device", "cpu")
    said["plan"] = document(demo, "plan", "--strategy", "disaggregated")
    said["train"] = document(demo, "train", "--steps", STEPS)
    words = ("train", "--resume", "--steps", RESUMED_STEPS, "--json")
    code, out, said["imports"] = disttrain(demo, *words, PYTHONPROFILEIMPORTTIME="1")
    assert code == 0, out + said["imports"]
    said["resume"] = json.loads(out)
    said["analyze"] = document(demo, "analyze")
    return demo, said


def keys(value, names):
    """Assert that the mapping has these keys, at least."""
    assert set(names.split()) <= set(value), f"missing: {set(names.split()) - set(value)}"


def test_init_names_what_it_wrote(chain):
    demo, said = chain
    keys(said["init"], "path preset data")
    assert (
        (demo.parent / said["init"]["path"])
        .read_text()
        .split("\n")[1]
        .startswith("# The tiny demo")
    )
    assert all(list((demo.parent / folder).glob("*.tar")) for folder in said["init"]["data"])


def test_the_process_that_starts_ranks_imports_no_torch(chain):
    imported = set(re.findall(r"^import time:.*\| +(\w+)$", chain[1]["imports"], re.MULTILINE))
    assert "disttrain_cli" in imported
    assert not imported & {"torch", "transformers", "diffusers", "deepspeed"}


def test_profile_has_the_promised_keys_and_measured_every_module(chain):
    profile = chain[1]["profile"]
    keys(profile, "device modules links data preprocess path")
    keys(profile["device"], "name kind count memory_gib peak_tflops")
    assert profile["device"]["kind"] == "cpu" and profile["device"]["count"] == 4
    assert set(profile["modules"]) == {"image_encoder", "llm", "image_generator"}
    for module in profile["modules"].values():
        keys(module["tp"]["1"], "forward_ms backward_ms fit_error_pct")
        assert module["tp"]["1"]["forward_ms"] > 0 and module["tp"]["1"]["backward_ms"] > 0
    assert any(name.endswith("_gbps") for name in profile["links"])
    assert any(name.endswith("_us") for name in profile["links"])
    keys(profile["data"], "samples fingerprint text_tokens image_tokens images_per_sequence")
    keys(profile["data"]["images_per_sequence"], "mean p50 p95 p99 max")
    assert (
        profile["data"]["samples"] > 500
        and profile["data"]["skipped"] == 0
        and profile["data"]["sequences"] >= 256
    )
    keys(profile["preprocess"], "images_per_s_per_core sequences_per_s_per_core")
    assert profile["preprocess"]["images_per_s_per_core"] > 0
    assert json.loads(Path(profile["path"]).read_text())["data"] == profile["data"]


def test_plan_has_the_promised_keys_and_fits_its_ranks(chain):
    document = chain[1]["plan"]
    keys(document, "plan predicted baselines alternatives search path")
    plan = document["plan"]
    keys(plan, "strategy global_batch_size microbatch_size microbatches gpus_used units")
    for unit in plan["units"]:
        keys(unit, "name modules tp dp pp gpus layers_per_stage")
        assert (
            unit["gpus"] == unit["tp"] * unit["dp"] * unit["pp"]
            and len(unit["layers_per_stage"]) == unit["pp"]
        )
        of_profile = sum(
            len(chain[1]["profile"]["modules"][name]["layers"]) for name in unit["modules"]
        )
        assert sum(unit["layers_per_stage"]) == of_profile
    assert plan["gpus_used"] == sum(unit["gpus"] for unit in plan["units"]) <= 4
    assert [name for unit in plan["units"] for name in unit["modules"]] == [
        "image_encoder",
        "llm",
        "image_generator",
    ]
    llm = next(unit for unit in plan["units"] if "llm" in unit["modules"])
    assert (
        llm["dp"] * plan["microbatch_size"] * plan["microbatches"] == plan["global_batch_size"] == 6
    )
    keys(
        document["predicted"],
        "iteration_s sequences_per_s mfu warmup_s steady_s bubble_fraction memory",
    )
    for stage in document["predicted"]["memory"]:
        keys(stage, "unit stage peak_gib limit_gib")
        assert 0 < stage["peak_gib"] <= stage["limit_gib"]
    keys(document["baselines"], "disaggregated megatron")
    for baseline in document["baselines"].values():
        keys(baseline, "iteration_s sequences_per_s mfu gpus_used")
    keys(document["search"], "solve_s candidates exact")
    assert document["search"]["exact"] is True and Path(document["path"]).is_file()


@pytest.mark.parametrize(
    ("command", "first", "last"), [("train", 0, STEPS), ("resume", STEPS, RESUMED_STEPS)]
)
def test_training_has_the_promised_keys_and_writes_what_it_says(chain, command, first, last):
    train = chain[1][command]
    keys(train, "run_dir steps skipped_samples resumed_from_step checkpoint trace")
    assert [step["step"] for step in train["steps"]] == list(range(first, last))
    for step in train["steps"]:
        keys(step, "step loss losses grad_norm iteration_s sequences_per_s mfu data_wait_s")
        assert step["losses"]["text"] > 0 and step["losses"]["image"] > 0 and step["grad_norm"] > 0
        assert step["loss"] == pytest.approx(step["losses"]["text"] + step["losses"]["image"])
        assert 0 < step["mfu"] < 1
    assert train["skipped_samples"] == [] and train["resumed_from_step"] == (first or None)
    assert (
        Path(train["checkpoint"]).name == f"step-{last:06d}" and Path(train["checkpoint"]).is_dir()
    )
    assert list(Path(train["trace"]).glob("rank-*/*.parquet"))


def test_training_goes_on_where_it_stopped_and_generates_images(chain):
    first, second = chain[1]["train"], chain[1]["resume"]
    assert second["steps"][-1]["losses"]["text"] < first["steps"][0]["losses"]["text"]
    assert len(first["images"]) == len(second["images"]) == 2
    for image in [*first["images"], *second["images"]]:
        assert Path(image).read_bytes().startswith(b"\x89PNG")
    assert [one["prompt"] for one in second["samples"]["drawn"]] == ["Draw a zero.", "Draw a one."]
    assert len(second["samples"]["written"]) == 3 and second["samples"]["judge"]["accuracy"] > 0.95
    for one in second["samples"]["written"]:
        assert one["recorded"] and (Path(second["images"][0]).parent / one["image"]).is_file()


def test_any_checkpoint_of_the_run_draws_and_writes(chain):
    found = document(chain[0], "sample", "--prompt", "Draw a seven.", "--count", 2)
    folder = Path(chain[0], found["path"])
    assert (
        found["step"] == RESUMED_STEPS and [one["asked"] for one in found["drawn"]] == ["seven"] * 2
    )
    assert all((folder / one["file"]).read_bytes().startswith(b"\x89PNG") for one in found["drawn"])
    seen = chain[1]["resume"]["samples"]["written"][0]["image"]
    read = document(
        chain[0],
        "sample",
        "runs/tiny/checkpoints/step-000003",
        "--image",
        Path(chain[1]["resume"]["images"][0]).parent / seen,
    )
    assert (
        read["step"] == STEPS and read["written"][0]["image"].endswith(seen) and read["drawn"] == []
    )


def test_analysis_has_the_promised_keys_and_finds_the_same_layout_and_steps(chain):
    found = chain[1]["analyze"]
    keys(found, "job units stragglers verdict ranks what_if warnings")
    keys(found["job"], "ranks steps iteration_s mfu bubble_fraction exposed_communication_fraction")
    assert (
        found["job"]["ranks"] == chain[1]["plan"]["plan"]["gpus_used"]
        and found["job"]["steps"] == RESUMED_STEPS
    )
    for unit in found["units"]:
        keys(unit, "name mfu busy_fraction")
        assert 0 < unit["busy_fraction"] <= 1
    keys(found["stragglers"], "slowdown lost_s")
    keys(
        found["stragglers"]["lost_s"],
        "unit intra_microbatch inter_microbatch stage worker communication data host unexplained",
    )
    keys(found["verdict"], "cause place confidence evidence advice")
    keys(found["verdict"]["place"], "unit stage replica rank host")
    for rank in found["ranks"]:
        keys(rank, "rank span_us idle_us compute_us non_compute_us overlap_pct collective_wait_us")
    keys(
        found["what_if"],
        "slowdown by_stage by_replica by_operation worst_workers_share last_stage_share",
    )
    compared = {row["what"] for row in found["predicted_vs_measured"]}
    assert compared >= {"iteration_s", "mfu", "bubble_fraction"}


def test_the_report_is_one_page_that_loads_nothing(chain):
    page = Path(chain[0], chain[1]["analyze"]["report"]).read_text()
    loaded = re.findall(r"""(?:src|href)\s*=\s*["']([^"'#][^"']*)""", page) + re.findall(
        r"url\(([^)]*)\)", page
    )
    assert [place for place in loaded if not place.startswith(("data:", "#"))] == []
    assert (
        page.count("data:image/png;base64,") >= 2
        and page.count("data:image/jpeg;base64,") == 3
        and "<svg" in page
    )
    assert "Draw a zero." in page and "a judge recognises what the prompt requested" in page


def test_queries_see_the_work_of_every_module(chain):
    query = (
        "SELECT module, sum(images) AS images, sum(tokens) AS tokens FROM trace WHERE operation ="
        " 'forward' GROUP BY module"
    )
    answer = document(chain[0], "analyze", "--sql", query)
    work = {row[0]: dict(zip(answer["columns"], row, strict=True)) for row in answer["rows"]}
    assert (
        work["image_encoder"]["images"] > 0
        and work["image_generator"]["images"] > 0
        and work["llm"]["tokens"] > 0
    )


def test_conditions_and_pages_elsewhere(chain, tmp_path):
    page = tmp_path / "deep" / "page.html"
    code, out, _ = disttrain(
        chain[0], "analyze", "--json", "--html", page, "--fail-if", "job.iteration_s > 0"
    )
    assert (
        code == 5 and json.loads(out)["fail_if"]["holds"] is True and page.stat().st_size > 10_000
    )
    assert disttrain(chain[0], "analyze", "--quiet", "--fail-if", "job.iteration_s > 1e9")[0] == 0


def test_resuming_refuses_to_go_nowhere(chain):
    code, out, err = disttrain(chain[0], "train", "--steps", STEPS, "--resume")
    assert code == 1 and out == "" and "train.steps" in err


def copied(chain, tmp_path, *left_out):
    """The chain's folder, to be broken; with the times of its files, by which data are
    recognised."""
    return Path(
        shutil.copytree(
            chain[0],
            tmp_path / "demo",
            ignore=shutil.ignore_patterns("images", "earlier", *left_out),
        )
    )


@pytest.mark.parametrize("resume", [[], ["--resume"]])
def test_data_that_changed_is_refused_and_nothing_is_lost(chain, tmp_path, resume):
    demo = copied(chain, tmp_path)
    shard = next((demo / "data" / "interleaved").glob("*.tar"))
    shard.write_bytes(shard.read_bytes() + bytes(512))
    code, out, err = disttrain(demo, "train", "--steps", 9, *resume)
    assert code == 1 and out == "" and shard.name in err and "disttrain profile" in err
    root = demo / "runs" / "tiny"
    assert (root / "checkpoints" / "step-000005").is_dir() and not (root / "earlier").exists()


def test_data_indexed_again_after_the_profile_is_refused(chain, tmp_path):
    demo = copied(chain, tmp_path)
    profile = demo / "runs" / "tiny" / "profile.json"
    was, other = chain[1]["profile"]["data"]["fingerprint"], "feedfacefeedface"
    profile.write_text(profile.read_text().replace(was, other))
    assert disttrain(demo, "plan", "--quiet")[0] == 0
    code, out, err = disttrain(demo, "train", "--steps", 9)
    assert code == 1 and out == "" and was in err and other in err and "disttrain profile" in err


@pytest.mark.parametrize("what", ["model", "dataset"])
def test_a_checkpoint_of_something_else_is_refused_with_both_fingerprints(chain, tmp_path, what):
    demo = copied(chain, tmp_path, "traces")
    path = demo / "runs" / "tiny" / "checkpoints" / "step-000005" / "checkpoint.json"
    about = json.loads(path.read_text())
    was, about[what] = (
        about[what],
        ["feedfacefeedface"] if what == "dataset" else "feedfacefeedface",
    )
    about.pop("sha256")
    path.write_text(json.dumps(sealed(about)))
    code, out, err = disttrain(demo, "train", "--resume", "--steps", 9)
    assert (
        code == 1
        and out == ""
        and str(was) in err
        and "feedfacefeedface" in err
        and f"another {what}" in err
    )


def test_a_damaged_checkpoint_is_named(chain, tmp_path):
    demo = copied(chain, tmp_path, "traces")
    newest = demo / "runs" / "tiny" / "checkpoints" / "step-000005"
    part = next(newest.glob("*.safetensors"))
    part.write_bytes(part.read_bytes()[:1000])
    code, out, err = disttrain(demo, "train", "--resume", "--steps", 9)
    assert code == 4 and out == "" and part.name in err and "damaged" in err and "rank-0000" in err


def test_a_fresh_start_keeps_what_the_earlier_one_left(chain, tmp_path):
    demo = copied(chain, tmp_path)
    root = demo / "runs" / "tiny"
    shutil.rmtree(root / "traces")  # as a user frees space
    broken = root / "plan.yaml"
    broken.write_text(broken.read_text().replace("strategy: disaggregated", "strategy: megatron"))
    code, _, err = disttrain(demo, "train", "--steps", 1)
    assert (
        code == 1
        and "--resume" in err
        and "--restart" in err
        and (root / "checkpoints" / "step-000005").is_dir()
    )
    again = document(demo, "train", "--steps", 1, "--restart")
    assert again["resumed_from_step"] is None and len(again["steps"]) == 1
    assert (root / "earlier" / "000" / "checkpoints" / "step-000005" / "checkpoint.json").is_file()
    assert [path.name for path in (root / "checkpoints").iterdir()] == ["step-000001"]
    shutil.rmtree(root / "checkpoints")
    code, _, err = disttrain(demo, "train", "--resume")
    assert code == 1 and "earlier/000" in err


def test_a_run_goes_on_with_one_more_source(chain, tmp_path):
    demo = copied(chain, tmp_path)
    shutil.copytree(demo / "data" / "captions", demo / "data" / "more")
    file = demo / "disttrain.yaml"
    old = "    - {path: data/captions}"
    new = "    - {path: data/more, name: more, weight: 0.5}"
    phases = "  curriculum: [{step: 7, weights: {more: 3, data/captions: 0}}]"
    text = file.read_text()
    line = next(line for line in text.splitlines() if line.startswith(old))
    file.write_text(text.replace(line, "\n".join([line, new, phases])))
    code, out, err = disttrain(demo, "train", "--resume", "--steps", 9)
    assert code == 1 and out == "" and "a different run file" in err and "disttrain profile" in err
    data = document(demo, "profile", "--device", "cpu")["data"]
    mixed = [(0, [2, 1]), (5, [2, 1, 0.5]), (7, [2, 0, 3])]
    assert [(one["step"], one["weights"]) for one in data["phases"]] == mixed
    document(demo, "plan", "--strategy", "disaggregated")
    code, _, err = disttrain(demo, "train", "--restart", "--steps", 1)
    assert code == 1 and "checkpoint of step 5" in err and "--resume" in err
    code, out, err = disttrain(demo, "train", "--resume", "--steps", 9, "--json")
    assert code == 0, err
    said = json.loads(out)
    assert said["resumed_from_step"] == 5 and [one["step"] for one in said["steps"]] == [5, 6, 7, 8]
    assert "Data from step 5 on: data/interleaved × 2, data/captions × 1, more × 0.5" in err
    assert "Data from step 7 on: data/interleaved × 2, data/captions × 0, more × 3" in err
    about = json.loads((Path(demo, said["checkpoint"]) / "checkpoint.json").read_text())
    assert [tuple(one) for one in about["phases"]] == mixed and about["dataset"] == data["sources"]
    rows = [
        row
        for path in (demo / "runs" / "tiny" / "traces" / "samples").glob("*.parquet")
        for row in pq.read_table(path).to_pylist()
    ]
    llm = next(row["unit"] for row in rows if "llm" in row["unit"])
    steps = {}
    for row in rows:
        if row["unit"] == llm:
            steps.setdefault(row["step"], []).extend(row["samples"])
    source = pq.read_table(demo / "runs" / "tiny" / "index.parquet", columns=["source"])
    source = source["source"].to_pylist()
    assert sorted(steps) == list(range(9))
    early = [sample for step in range(5) for sample in steps[step] if source[sample] == 1]
    assert early and len(set(early)) == len(early)  # less than an epoch
    of_steps = {
        step: Counter(source[sample] for sample in samples) for step, samples in steps.items()
    }
    assert not any(of_steps[step][2] for step in range(5))
    assert any(of_steps[step][2] for step in range(5, 9))
    assert not any(of_steps[step][1] for step in (7, 8))

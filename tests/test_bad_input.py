"""What users do wrong, through the command line: a message that names it, the promised exit code,
nothing lost.

What one command or room can show by itself is tested there (`tests/commands`, `tests/data`,
`tests/planning`, `tests/analysis`); here stands what only the whole program shows.
"""

import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from disttrain_cli import api
from disttrain_cli.api.presets import preset_text
from disttrain_cli.app import main
from disttrain_cli.errors import DisttrainError
from disttrain_cli.spec.rundir import RunDir
from disttrain_cli.spec.runfile import read_run
from disttrain_cli.spec.whole import write_whole
from tests.analysis import synthetic
from tests.cases import first_fast
from tests.commands.conftest import make_profile, module_profile
from tests.data.dataset import encoded, image, interleaved, text, write_dataset, write_tar

SCRIPT = Path(sys.executable).parent / "disttrain"
SMALL = {
    "hidden_size: 128": "hidden_size: 32",
    "hidden_size: 64": "hidden_size: 32",
    "intermediate_size: 352": "intermediate_size: 64",
    "intermediate_size: 256": "intermediate_size: 64",
    "data/interleaved, weight: 2": "data/mixed",
    "held_out: 0.1": "held_out: 0.0",
    "global_batch_size: 6": "global_batch_size: 4",
    "sequence_length: 256": "sequence_length: 128",
    "max_image_pixels: 1024": "max_image_pixels: 4096",
}


def edit(path, old, new):
    content = path.read_text()
    assert old in content
    path.write_text(content.replace(old, new, 1))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Prototypes, made once: "folder", "profiled" and "planned", each with what those before it
    have."""
    root = tmp_path_factory.mktemp("made")
    content = preset_text("tiny")
    for old, new in SMALL.items():
        assert old in content
        content = content.replace(old, new, 1)
    write_whole(root / "folder" / "disttrain.yaml", content)
    write_dataset(root / "folder" / "data")
    shutil.copytree(root / "folder", root / "profiled")
    index_and_profile(root / "profiled")
    shutil.copytree(root / "profiled", root / "planned")
    with pytest.raises(SystemExit) as left:
        main(["plan", str(root / "planned"), "--strategy", "disaggregated", "--quiet"])
    assert left.value.code == 0
    return root


def copied(prototype, folder):
    """A folder as the prototype; its files are as old."""
    shutil.copytree(prototype, folder, dirs_exist_ok=True)
    return folder


@pytest.fixture
def folder(made, tmp_path):
    """A run folder over a tiny dataset of its own, not yet indexed or profiled."""
    return copied(made / "folder", tmp_path)


@pytest.fixture
def profiled(made, tmp_path):
    """The same with an index and a profile, whose layers are the model's and whose times are made
    up."""
    return copied(made / "profiled", tmp_path)


def index_and_profile(folder):
    from disttrain_cli.data.indexing.building import build_index
    from disttrain_cli.models.graph import describe, layer_table

    run = read_run(folder / "disttrain.yaml")
    inputs, profile = describe(run), make_profile(run.file)
    index = build_index(run, inputs)
    kinds = {}
    for info in layer_table(run):
        kinds.setdefault(info.module, []).append(info.kind)
    modules = {
        name: module_profile(module.kind, kinds[name], 0.01, module.work_per_sequence)
        for name, module in profile.modules.items()
    }
    fingerprints = profile.fingerprints.model_copy(update={"data": index.fingerprint})
    made = profile.model_copy(
        update={"inputs": inputs, "modules": modules, "fingerprints": fingerprints}
    )
    write_whole(run.dir.profile, made.model_dump_json())


@pytest.fixture
def refused(capsys):
    """Run a command that must fail by the user's fault: its exit code and message, the same with
    `--json`."""

    def refused(*words, code=1):
        words = [str(word) for word in words]
        codes, shown = [], []
        for extra in ([], ["--json"]):
            with pytest.raises(SystemExit) as left:
                main([*words, *extra])
            codes.append(left.value.code)
            shown.append(capsys.readouterr())
        assert codes == [code, code], shown[0].err
        assert (
            shown[0].out == ""
            and "Traceback" not in shown[0].err
            and "a bug in disttrain" not in shown[0].err
        )
        error = json.loads(shown[1].out)["error"]
        assert set(error) == {"what", "why", "next", "exit_code"} and error["exit_code"] == code
        assert shown[0].err.splitlines()[-1 - error["next"].count("\n")].startswith(
            "Next: "
        ) == bool(error["next"])
        return shown[0].err

    return refused


# The run file


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        (
            "{path: data/captions}",
            "{path: data/captions, wieght: 2}",
            ["data.sources.1.wieght", "did you mean weight?"],
        ),
        ("merge: 2", "marge: 2", ["model.modules.image_encoder.marge", "merge"]),
        ("workers: 1", "workers: many", ["preprocess.workers", "'many'"]),
        ("lr: 2.0e-3", "lr: .nan", ["train.optimizer.lr", "finite"]),
        ("name: tiny", "name: ../../tmp", ["name", "'../../tmp'"]),
        ("name: tiny", "name: 2026-13-45 #", ["not valid YAML", "month"]),
        ("  seed: 0", "  seed: 0\n  seed: 1", ["'seed' is given twice"]),
        ("version: 1", "version: " + "[" * 50_000, ["nested more than"]),
        ("version: 1", "version: !!python/object/apply:os.system [true]", ["not valid YAML"]),
    ],
)
def test_run_file_fields(folder, refused, old, new, named):
    edit(folder / "disttrain.yaml", old, new)
    said = refused("plan", folder)
    assert str(folder / "disttrain.yaml") in said
    for word in named:
        assert word in said


@pytest.mark.parametrize("content", [b"", b"[1, 2]", b"\xff\xfe\x00", b"\t- a"])
def test_run_files_that_are_none(folder, refused, content):
    (folder / "disttrain.yaml").write_bytes(content)
    for command in ("profile", "plan", "train"):
        assert str(folder / "disttrain.yaml") in refused(command, folder)


def test_a_missing_run_file(tmp_path, refused, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for command in ("profile", "plan", "train", "analyze"):
        assert "disttrain init" in refused(command)
    refused("plan", "x" * 300)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("architecture: llama", "architecture: lama", ["model.modules.llm", "'lama'", "llama"]),
        ("architecture: llama", "architecture: vit", ["model.modules.llm", "kind encoder"]),
        ("architecture: llama", "folder: ../nowhere", ["nowhere", "model.modules.llm.folder"]),
        (
            "num_hidden_layers: 4",
            "num_hiden_layers: 4",
            ["model.modules.llm.config.num_hiden_layers", "num_hidden_layers"],
        ),
        (
            "num_hidden_layers: 4",
            "num_hidden_layers: 0",
            ["num_hidden_layers", "given: 0", "1 or more"],
        ),
        (
            "num_hidden_layers: 4",
            "num_hidden_layers: four",
            ["model.modules.llm.config", "num_hidden_layers"],
        ),
        ("num_key_value_heads: 4", "num_key_value_heads: 3", ["num_key_value_heads", "given: 3"]),
        ("vocab_size: 272", "vocab_size: 100", ["vocab_size", "given: 100", "261"]),
        ("patch_size: 8", "patch_size: 0", ["model.modules.image_encoder.config", "patch_size"]),
        (
            "num_key_value_heads: 4",
            "num_key_value_heads: 4, head_dim: 0",
            ["config.head_dim", "given: 0", "1 or more"],
        ),
        (
            "layers_per_block: 1",
            "layers_per_block: 0",
            ["config.layers_per_block", "given: 0", "1 or more"],
        ),
        (
            "norm_num_groups: 8",
            "norm_num_groups: -8",
            ["config.norm_num_groups", "given: -8", "1 or more"],
        ),
        ("norm_num_groups: 8", "norm_num_groups: 7", ["model.modules.image_generator.config", "7"]),
        (
            "block_out_channels: [32, 64]",
            "block_out_channels: [32]",
            ["model.modules.image_generator.config"],
        ),
        ("tokenizer: bytes", "tokenizer: no/folder", ["data.tokenizer", "no/folder"]),
    ],
)
def test_model_configurations(folder, refused, old, new, named):
    edit(folder / "disttrain.yaml", old, new)
    said = refused("profile", folder)
    for word in named:
        assert word in said


# The dataset


@pytest.mark.parametrize(
    ("break_data", "named"),
    [
        (lambda data: shutil.rmtree(data / "captions"), ["data.sources[1].path: data/captions"]),
        (
            lambda data: (data / "captions" / "00000.tar").unlink(),
            ["data.sources[1].path: data/captions", "no *.tar"],
        ),
        (
            lambda data: (data / "mixed" / "00000.tar").write_bytes(b"no tar" * 999),
            ["data/mixed/00000.tar", "not a complete tar"],
        ),
        (lambda data: [write_tar(tar, []) for tar in data.rglob("*.tar")], ["no usable sample"]),
        (
            lambda data: [
                write_tar(tar, [interleaved("a", image("none.jpg"))]) for tar in data.rglob("*.tar")
            ],
            ["data/captions/00000.tar/a", "none.jpg is missing"],
        ),
    ],
)
def test_datasets_that_cannot_be_used(folder, refused, break_data, named):
    break_data(folder / "data")
    said = refused("profile", folder)
    for word in named:
        assert word in said
    assert not (folder / "runs" / "tiny" / "index.parquet").exists()


def test_an_index_and_a_profile_survive_a_failed_indexing(profiled, refused):
    root = profiled / "runs" / "tiny"
    before = {name: (root / name).read_bytes() for name in ("index.parquet", "profile.json")}
    shard = profiled / "data" / "mixed" / "00001.tar"
    shard.write_bytes(shard.read_bytes()[:1000])
    said = refused("profile", profiled)
    assert "00001.tar: was" in said and f"disttrain profile {profiled} --reindex" in said
    assert "data/mixed/00001.tar" in refused("profile", profiled, "--reindex")
    assert {name: (root / name).read_bytes() for name in before} == before


# The profile


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda p: p["modules"]["llm"]["costs"].pop("block"), "missing: block"),
        (lambda p: p["modules"].pop("llm"), "inputs.llm"),
        (lambda p: p["device"].update(count=0), "device.count"),
        (lambda p: p["links"].update(p2p_gbps=0), "links.p2p_gbps"),
        (lambda p: p.update(version=9), "version"),
    ],
)
def test_profiles_edited_wrongly(profiled, refused, change, named):
    path = profiled / "runs" / "tiny" / "profile.json"
    profile = json.loads(path.read_text())
    change(profile)
    path.write_text(json.dumps(profile))
    said = refused("plan", profiled)
    assert named in said and "disttrain profile" in said


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 100_000])
def test_profiles_that_are_none(profiled, refused, content):
    path = profiled / "runs" / "tiny" / "profile.json"
    path.write_text(content)
    assert "disttrain profile" in refused("plan", profiled)
    assert str(profiled) in refused("plan", profiled, "--profile", profiled)


# The plan


@pytest.fixture
def planned(made, tmp_path):
    """The same with a plan."""
    return copied(made / "planned", tmp_path)


def edit_plan(folder, change):
    path = folder / "runs" / "tiny" / "plan.yaml"
    plan = yaml.safe_load(path.read_text())
    change(plan)
    path.write_text(yaml.safe_dump(plan))


def unit(plan, module):
    return next(unit for unit in plan["plan"]["units"] if module in unit["modules"])


def widen(plan, module, dp):
    """Give a unit another DP, with every sum kept right."""
    changed = unit(plan, module)
    changed.update(dp=dp, gpus=dp * changed["tp"] * changed["pp"])
    plan["plan"]["gpus_used"] = sum(unit["gpus"] for unit in plan["plan"]["units"])


@pytest.mark.parametrize(
    ("change", "named"),
    first_fast(
        [
            (
                lambda p: p["plan"].update(microbatches=7),
                ["microbatches", "7", "global_batch_size = 4"],
            ),
            (lambda p: widen(p, "llm", 3), ["dp of llm", "3", "global_batch_size = 4"]),
            (lambda p: p["plan"].update(gpus_used=99), ["gpus_used", "99"]),
            (lambda p: unit(p, "llm").update(pp=7), ["plan.units", "gpus must be tp × dp × pp"]),
            (lambda p: widen(p, "image_encoder", 64), ["more ranks than the cluster has", "64"]),
            (
                lambda p: unit(p, "llm")["layers_per_stage"].__setitem__(0, 40),
                ["layers_per_stage", "llm", "40"],
            ),
            (
                lambda p: unit(p, "llm").update(modules=["llm", "audio"]),
                ["audio", "every module once"],
            ),
            (lambda p: p["plan"]["units"].reverse(), ["pipeline order"]),
            (lambda p: p["plan"].pop("units"), ["plan.units", "required"]),
            (lambda p: p["plan"].update(gpus=4), ["plan.gpus: unknown key"]),
            (
                lambda p: p["fingerprints"].update(model="feedfacefeedface"),
                ["another model", "feedfacefeedface"],
            ),
            (
                lambda p: p["fingerprints"].update(data="feedfacefeedface"),
                ["another dataset", "feedfacefeedface"],
            ),
            (
                lambda p: p["fingerprints"].update(cluster="feedfacefeedface"),
                ["another cluster", "feedfacefeedface"],
            ),
            (
                lambda p: p["fingerprints"].update(profile="feedfacefeedface"),
                ["another profile", "feedfacefeedface"],
            ),
        ],
        6,
    ),
)
def test_plans_that_do_not_fit(planned, refused, change, named):
    edit_plan(planned, change)
    said = refused("train", planned)
    for word in [*named, "disttrain plan"]:
        assert word in said
    assert not (planned / "runs" / "tiny" / "traces").exists()


@pytest.mark.slow
def test_every_batch_has_a_plan(profiled, capsys):
    """A prime batch leaves the LLM one replica or as many as sequences; the plan says which."""
    edit(profiled / "disttrain.yaml", "global_batch_size: 4", "global_batch_size: 7")
    with pytest.raises(SystemExit):
        main(["plan", str(profiled), "--json", "--quiet"])
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert 7 % next(unit["dp"] for unit in plan["units"] if "llm" in unit["modules"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("strategy", first_fast(["disaggregated", "megatron"]))
def test_too_little_memory_names_what_binds_and_what_would_do(profiled, refused, capsys, strategy):
    path = profiled / "runs" / "tiny" / "profile.json"
    profile = json.loads(path.read_text())
    profile["device"]["memory_gib"] = 0.004
    path.write_text(json.dumps(profile))
    said = refused("plan", profiled, "--strategy", strategy, code=3)
    assert "memory is short: stage" in said and "of unit" in said and "0.004 GiB" in said
    enough = float(said.split("Devices with ")[1].split(" GiB")[0])
    profile["device"]["memory_gib"] = 1.01 * enough
    path.write_text(json.dumps(profile))
    with pytest.raises(SystemExit) as left:
        main(["plan", str(profiled), "--strategy", strategy, "--quiet"])
    assert left.value.code == 0


# Commands


def test_wrong_usage(planned, refused):
    for words in (
        ["train", planned, "--steps", 0],
        ["train", planned, "--steps", "few"],
        ["plan", planned, "--gpus", 0],
        ["plan", planned, "--strategy", "best"],
        ["profile", planned, "--device", "tpu"],
        ["init", planned / "new", "--preset", "huge"],
        ["plan", planned, "--gpu", 2],
        ["trian"],
    ):
        refused(*words, code=2)
    assert not (planned / "new").exists()


def test_resuming_without_a_checkpoint(planned, refused):
    assert "checkpoints" in refused("train", planned, "--resume")
    (planned / "runs" / "tiny" / "earlier" / "002" / "checkpoints" / "step-000009").mkdir(
        parents=True
    )
    assert str(planned / "runs" / "tiny" / "earlier" / "002") in refused(
        "train", planned, "--resume"
    )


def test_two_trainings_of_one_run(planned, refused):
    root = planned / "runs" / "tiny"
    with (root / ".training").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "Another training" in refused("train", planned)
        (root / "plan.yaml").write_text("not read before the lock is taken")
        with pytest.raises(DisttrainError, match="Another training"):
            api.train(planned)
    assert not (root / "traces").exists() and not (root / "earlier").exists()


def test_every_start_has_a_name_of_its_own(tmp_path):
    """Also after one that ended before its first step: its reports must not count as the next
    one's."""
    from disttrain_cli.runtime.launching.starts import next_start

    root = RunDir(tmp_path)
    assert next_start(root) == "start-000"
    write_whole(root.traces / "steps" / "segment-start-000-00000.parquet", b"")
    write_whole(root.logs / "start-001-steps.jsonl", b"")
    assert next_start(root) == "start-002"


def test_data_changed_after_the_profile(planned, refused):
    root, shard = planned / "runs" / "tiny", planned / "data" / "mixed" / "00000.tar"
    (root / "traces").mkdir()
    was = shard.read_bytes()
    for break_data in (lambda: shard.write_bytes(was + bytes(512)), shard.unlink):
        break_data()
        said = refused("train", planned)
        assert (
            "00000.tar" in said
            and "changed since it was indexed" in said
            and "disttrain profile" in said
        )
    assert (root / "traces").is_dir() and not (root / "earlier").exists()


def test_data_indexed_again_after_the_profile(planned, refused):
    from disttrain_cli.data.indexing.building import build_index
    from disttrain_cli.models.graph import describe

    run = read_run(planned / "disttrain.yaml")
    write_dataset(planned / "data", samples=30)
    said = refused("train", planned)
    assert "changed since it was indexed" in said
    index = build_index(run, describe(run))
    said = refused("train", planned)
    was = json.loads(run.dir.profile.read_text())["fingerprints"]["data"]
    assert index.fingerprint in said and was in said and "disttrain profile" in said


@pytest.mark.slow
def test_folders_that_cannot_be_written(profiled, refused, tmp_path):
    assert "runs/tiny" in refused("plan", profiled, "--out", profiled / "runs" / "tiny")
    assert "disttrain.yaml" in refused(
        "plan", profiled, "--out", profiled / "disttrain.yaml" / "plan.yaml"
    )
    shutil.rmtree(profiled / "runs")
    (profiled / "runs").write_text("a file where the folder belongs")
    for command in ("profile", "plan", "train", "analyze"):
        assert "runs" in refused(
            command, *([profiled] if command != "analyze" else [profiled / "runs"])
        )


@pytest.mark.slow
def test_init_overwrites_nothing(tmp_path, refused):
    mine = tmp_path / "data" / "captions" / "00000.tar"
    write_tar(mine, [("1.txt", b"mine")])
    before = mine.read_bytes()
    assert str(mine) in refused("init", tmp_path, "--sample-data")
    assert mine.read_bytes() == before
    (tmp_path / "taken" / "disttrain.yaml").mkdir(parents=True)
    assert "exists" in refused("init", tmp_path / "taken")


def test_a_broken_trace_segment_is_named_and_the_rest_analysed(tmp_path, capsys):
    synthetic.write(tmp_path / "traces", synthetic.Synthetic())
    segment = next((tmp_path / "traces" / "rank-00002").glob("*.parquet"))
    segment.write_bytes(segment.read_bytes()[:200])
    with pytest.raises(SystemExit) as left:
        main(["analyze", str(tmp_path), "--json"])
    document = json.loads(capsys.readouterr().out)
    assert left.value.code == 0 and document["job"]["ranks"] > 0
    assert any("rank-00002/" + segment.name in warning for warning in document["warnings"])


# With ranks


@pytest.mark.slow
def test_broken_samples_are_skipped_counted_and_named_and_training_goes_on(folder):
    edit(
        folder / "disttrain.yaml",
        "max_image_pixels: 4096",
        "max_image_pixels: 4096\n  max_bad_fraction: 0.3",
    )
    edit(folder / "disttrain.yaml", "  images: 100", "  images: 0")
    mixed, cut = folder / "data" / "mixed", folder / "data" / "mixed" / "00001.tar"
    write_tar(
        mixed / "00002.tar",
        [
            interleaved("fine", text("fine")),
            interleaved("no-image", image("gone.jpg")),
            ("not-json.json", b"{"),
            interleaved("header", image("header.jpg")),
            ("header.jpg", b"\xff\xd8 no picture at all"),
            *(
                (name, data)
                for number in range(3)
                for name, data in (
                    interleaved(f"pixels{number}", text("see"), image(f"pixels{number}.jpg")),
                    (f"pixels{number}.jpg", without_pixels(encoded(40, 40))),
                )
            ),
        ],
    )
    whole = cut.stat().st_size
    cut.write_bytes(cut.read_bytes()[: whole // 2])
    index_and_profile(folder)
    for words in (["plan"], ["train", "--steps", "5", "--json"]):
        done = subprocess.run(
            [SCRIPT, words[0], folder, *words[1:]],
            capture_output=True,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    result = json.loads(done.stdout)
    skipped = {entry["sample"]: entry["reason"] for entry in result["skipped_samples"]}
    shard = "data/mixed/00002.tar"
    assert {f"{shard}/no-image", f"{shard}/not-json", f"{shard}/header"} <= set(skipped)
    assert any(name.startswith(f"{shard}/pixels") for name in skipped)
    assert "truncated tar" in skipped["data/mixed/00001.tar"]
    assert [step["step"] for step in result["steps"]] == list(range(5))


def without_pixels(jpeg):
    """A JPEG whose header can be read and whose pixels cannot."""
    place = jpeg.index(b"\xff\xda")
    return jpeg[:place] + b"\xff\xd9" + jpeg[place + 2 :]

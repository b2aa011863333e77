"""What will be run on a GPU runs here, tiny: every part, its limits, and what is kept of a part
that fails."""

import json
import subprocess
import sys
import tarfile
import warnings
import zipfile
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as runner
from benchmarks.gpu import jobs, rank, wheels
from benchmarks.gpu.aims import aims
from benchmarks.gpu.nccl import UNORDERED
from benchmarks.gpu.parts import PARTS, run_part
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.surroundings import environment
from disttrain_cli.errors import SpecError
from tests.gpu_on_fake_cuda import figures_of
from tests.runtime.dryrun.on_fake_cuda import on_fake_cuda

ROOT = Path(__file__).parent.parent


@pytest.fixture
def setting(tmp_path):
    (tmp_path / "work").mkdir()
    return Setting("cpu", tmp_path / "work", tmp_path / "figures.json")


def test_the_limits_fit_into_the_time_of_all():
    assert sum(runner.LIMITS_S.values()) <= 60 * runner.MINUTES
    assert list(runner.LIMITS_S) == list(PARTS)


@pytest.mark.slow
def test_a_block_of_the_llm(setting):
    figures = run_part("block_7b", setting)
    assert json.loads(setting.out.read_text()) == figures
    for name in ("packed", "one_document"):
        found = figures[name]
        assert found["kept_mib"] == pytest.approx(found["priced_kept_mib"], rel=0.01)
        assert (
            min(
                found[key]
                for key in ("first_call_ms", "second_call_ms", "forward_ms", "backward_ms")
            )
            > 0
        )
        assert found["model_tflops"] > 0 < found["tflops_that_run"]
    assert figures["attention"] == "grouped" and figures["kernels"][0]["ms"] > 0


@pytest.mark.benchmark
def test_a_block_of_70b_on_a_fake_device_of_its_size(tmp_path):
    """Each kernel call is said to take 20 ms, so a forward and backward take 40."""
    figures = on_fake_cuda(figures_of, "block_70b", str(tmp_path))
    block = figures["one_document"]
    assert figures["attention"] == "varlen" and figures["documents"] == [[4096, 2048, 2048]]
    assert block["priced_kept_mib"] > 2000 and block["reserved_over_allocated_mib"] == 0
    # 6 FLOPs per weight and token of 8192·(2·8192 + 2·1024 + 3·28672) weights; attention unmasked
    weights, tokens = 8192 * (2 * 8192 + 2 * 1024 + 3 * 28672), 8192
    expected = 6 * tokens * weights + 12 * 8192 * tokens**2
    assert block["model_tflop"] == pytest.approx(expected / 1e12, rel=0.01)
    assert block["mfu"] == pytest.approx(block["model_tflop"] / 0.040 / 989.4)


def test_out_of_memory_keeps_the_message_and_frees_the_device(setting, monkeypatch):
    held = []

    def command(setting, *words):
        assert words == ("train", "--restart", "--steps", "2") and held == [3 << 30]
        return {"seconds": 1.0, "code": 4, "said": {"error": "Out of memory in the backward"}}

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (9 << 30, 80 << 30))
    monkeypatch.setattr(torch, "empty", lambda size, **_: held.append(size))
    monkeypatch.setattr(jobs, "disttrain", command)
    assert jobs.out_of_memory(setting) == {
        "seconds": 1.0,
        "code": 4,
        "message": "Out of memory in the backward",
    }


def test_aims_are_stated_with_what_was_measured():
    parts = {
        "block_7b": {"figures": {"one_document": {"mfu": 0.6}}},
        "block_70b": {"error": "not finished", "figures": {}},
        "large": {
            "figures": {
                "planned": {"peak_gib": [40.0]},
                "train": {"mfu": 0.49, "memory_gib": 38.5},
                "prediction": {"error": -0.06},
            }
        },
    }
    assert [(aim["part"], aim["aim"], aim["reached"]) for aim in aims(parts)] == [
        ("block_7b", "at least 0.55", True),
        ("block_70b", "at least 0.55", None),
        ("large", "at least 0.5", False),
        ("large", "at most 0.05", True),
        ("large", "at most 0.05", False),
        ("multimodal", "at most 0.05", None),
        ("multimodal", "at most 0.05", None),
    ]
    assert not any(aim["reached"] is not None for aim in aims({}))


@pytest.mark.slow
def test_the_head(setting):
    assert run_part("head", setting)["head"]["kept_mib"] > 0


@pytest.mark.slow
def test_images_of_two_shapes(setting):
    figures = run_part("vit", setting)
    assert figures["square"]["kept_mib"] == pytest.approx(figures["wide"]["kept_mib"], rel=0.01)


@pytest.mark.slow
def test_the_generator(setting):
    assert run_part("unet", setting)["generator"]["backward_ms"] > 0


@pytest.mark.benchmark
def test_the_curve_is_proposed_as_the_catalogue_writes_it(setting):
    assert run_part("curve", setting)["proposed"][1].startswith("    product: ")


def test_a_part_that_takes_too_long_loses_only_itself():
    assert runner._run("head", "cpu", 1.2)["error"].startswith("not finished after 1 s")


def test_what_would_start_too_late_is_not_started(tmp_path):
    results = runner.measure(["head"], "cpu", tmp_path / "gpu.json", minutes=0.0)
    assert json.loads((tmp_path / "gpu.json").read_text()) == results
    assert results["parts"]["head"] == {"error": "no time was left"}


def test_what_a_part_leaves_of_its_time_goes_to_those_after_it(tmp_path, monkeypatch):
    given = {}

    def run(name, device, limit_s):
        given[name] = limit_s
        return {"seconds": 0.0, "figures": {}}

    monkeypatch.setattr(runner, "_run", run)
    monkeypatch.setattr(runner, "_host", lambda device: {})
    runner.measure(list(runner.LIMITS_S), "cuda", tmp_path / "gpu.json")
    assert all(given[name] >= limit_s for name, limit_s in runner.LIMITS_S.items())
    assert given["curve"] == pytest.approx(60 * runner.MINUTES, abs=1)
    # too little for both
    runner.measure(["large", "curve"], "cuda", tmp_path / "gpu.json", minutes=1.0)
    assert given["large"] == pytest.approx(60, abs=1)


def test_a_file_that_cannot_be_written_is_known_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "_run", None)
    (tmp_path / "file").touch()
    with pytest.raises(SpecError, match="Cannot write"):
        runner.measure(["head"], "cpu", tmp_path / "file" / "gpu.json")


def test_libraries_beside_the_program_are_found_from_any_folder(tmp_path, monkeypatch):
    """`PYTHONPATH=src:site` names folders of the repository; commands run in folders of their
    own."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", "src:site")
    assert environment()["PYTHONPATH"].split(":") == [
        str(ROOT / "src"),
        str(ROOT),
        str(ROOT / "site"),
    ]


def test_a_rank_counts_where_its_host_waits(tmp_path, monkeypatch):
    def train(payload):
        for _ in range(3):
            warnings.warn(
                "called a synchronizing CUDA operation (Triggered internally)", stacklevel=2
            )
        warnings.warn("something else", stacklevel=2)

    monkeypatch.setattr(rank.worker, "main", train)
    monkeypatch.setenv("RANK", "0")
    with pytest.warns(UserWarning, match="something else"):
        rank.main({"run": [str(tmp_path / "disttrain.yaml")]})
    assert jobs.synchronisations(tmp_path) == [{"where": "elsewhere", "count": 3}]


@pytest.mark.benchmark
def test_what_a_part_said_before_it_failed_is_kept(tmp_path, monkeypatch):
    monkeypatch.setitem(runner.LIMITS_S, "nothing", 60.0)
    found = runner.measure(["nothing"], "cpu", tmp_path / "gpu.json")["parts"]["nothing"]
    assert found["error"] == "exit code 1: KeyError: 'nothing'" and "Traceback" in found["output"]


def test_an_unknown_part_is_refused_with_those_that_there_are(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--parts", "head,nothing"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (
        done.returncode == 2
        and "unknown parts: nothing; there are tests, collectives" in done.stderr
    )


def test_what_a_bare_machine_needs_is_pinned_and_holds_nothing_that_only_torch_needs():
    names = wheels.needed()
    assert {"deepspeed", "transformers", "diffusers", "pyarrow", "numpy", "pytest"} <= set(names)
    assert {"typing-extensions", "fsspec", "filelock"} <= set(names)  # torch's own may be too old
    assert not {"torch", "sympy", "disttrain", "hf-xet", "ruff", "playwright"} & set(names)


def test_a_wheel_is_laid_out_trimmed_and_packed_as_tar_reads_it(tmp_path):
    held = {
        "one/lib.py": "",
        "one/tests/test_lib.py": "",
        "one-1.data/purelib/two.py": "",
        "one/lib.pyi": "",
    }
    with zipfile.ZipFile(tmp_path / "one-1-py3-none-any.whl", "w") as whole:
        for name, text in held.items():
            whole.writestr(name, text)
    wheels.unpack(tmp_path / "one-1-py3-none-any.whl", tmp_path / "site")
    wheels.trim(tmp_path / "site")
    assert wheels.pack(tmp_path / "site", tmp_path / "site.tar.xz") > 0
    with tarfile.open(tmp_path / "site.tar.xz") as packed:
        assert {one.name for one in packed if one.isfile()} == {"one/lib.py", "two.py"}


def test_scipy_is_no_distribution_without_what_goes_with_pictures(tmp_path):
    """diffusers imports scipy.stats wherever scipy is installed, as its metadata tell."""
    with zipfile.ZipFile(tmp_path / "scipy-1-py3-none-any.whl", "w") as whole:
        for name in (
            "scipy/__init__.py",
            "scipy/optimize/nnls.py",
            "scipy/stats/t.py",
            "scipy-1.dist-info/METADATA",
        ):
            whole.writestr(name, "")
    wheels.lay_out([tmp_path / "scipy-1-py3-none-any.whl"], tmp_path)
    held = {
        name: {
            str(path.relative_to(tmp_path / name))
            for path in (tmp_path / name).rglob("*")
            if path.is_file()
        }
        for name in ("core", "pictures")
    }
    assert held == {
        "core": {"scipy/__init__.py", "scipy/optimize/nnls.py"},
        "pictures": {"scipy/stats/t.py", "scipy-1.dist-info/METADATA"},
    }


@pytest.mark.benchmark
def test_collectives_between_two_ranks(setting):
    figures = run_part("collectives", setting)
    assert figures["joined"]["ranks"] == 2 and len(figures) == 6
    assert all(one["bus_gbytes_s"] > 0 for name, one in figures.items() if name != "joined")


@pytest.mark.benchmark
def test_layouts_of_six_ranks_next_to_one(setting):
    figures = run_part("nccl", setting)
    compared = [one for one in figures.values() if isinstance(one, dict)]
    assert len(compared) == 2 * len(UNORDERED) and all(one["equal"] for one in compared)


@pytest.mark.benchmark
@pytest.mark.parametrize("part", ["chain", "shared", "large", "multimodal"])
def test_whole_commands(part, setting, monkeypatch):
    """On texts alone, as without OpenCV; ranks are watched for synchronisations, of which a CPU
    knows none."""
    there = {"duckdb", "cv2"} if part == "multimodal" else {"duckdb"}
    monkeypatch.setattr(jobs, "find_spec", lambda name: name in there)
    figures = run_part(part, setting)
    assert figures["train"]["code"] == 0 and figures["train"]["memory_gib"] > 0
    assert figures["planned"]["gpus"] == (2 if part == "shared" else 1)
    if part == "chain":
        assert (setting.folder / "synchronisations-0.json").read_text() == "{}"
        assert (
            figures["analyze"]["verdict"]["headline"] and figures["train"]["synchronisations"] == []
        )
        assert figures["resume"]["from"] == 6 and figures["resume"]["steps"] == 2
    if part in ("large", "multimodal"):
        assert not list(setting.folder.glob("runs/*/checkpoints/*"))
        measured, predicted = (
            figures["prediction"][f"{name}_s"] for name in ("measured", "predicted")
        )
        assert figures["prediction"]["error"] == pytest.approx(measured / predicted - 1)
        assert figures["analyze"]["operations"] and figures["train"]["clocks"] == {"throttle": []}

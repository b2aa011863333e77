"""`disttrain doctor`: what is reported, and what ends it with 1."""

import json

import pytest

from disttrain_cli.api import environment
from disttrain_cli.app import main
from disttrain_cli.spec.extras import EXTRAS

DOCTOR = "disttrain_cli.api.environment"
TORCH = {"cuda": None, "nccl": None, "gloo": True, "devices": []}


@pytest.fixture
def call(capsys, monkeypatch):
    monkeypatch.setattr(environment, "_torch", lambda: TORCH)
    monkeypatch.setattr(environment, "cuda_devices", lambda: 0)

    def called(*words):
        with pytest.raises(SystemExit) as left:
            main(["doctor", *words])
        shown = capsys.readouterr()
        return left.value.code, shown.out, shown.err

    return called


def test_an_environment_that_serves(call):
    code, out, _ = call("--json")
    said = json.loads(out)
    assert code == 0 and said["problems"] == []
    whats = {one["what"] for one in said["findings"]}
    assert {
        "python",
        "torch",
        "deepspeed",
        "GPUs",
        "NCCL",
        "C++ compiler",
        "shared memory",
    } <= whats
    assert said["extras"].keys() == EXTRAS.keys()
    assert all(one["gives"] and "pip install" in one["install"] for one in said["extras"].values())
    code, out, err = call()
    assert code == 0 and "shared memory" in out and "Extras" in out and "disttrain init" in err


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        (f"{DOCTOR}._torch", lambda: {"error": "ImportError: no libtorch"}, "torch"),
        (f"{DOCTOR}.cuda_devices", lambda: 8, "GPUs"),
        (f"{DOCTOR}._torch", lambda: TORCH | {"devices": [["H100", 79.1]], "cuda": "12.8"}, "NCCL"),
        ("importlib.metadata.requires", lambda name: ["torch>=99", "typer"], "torch"),
        ("importlib.metadata.requires", lambda name: ["no-such-package>=1"], "no-such-package"),
    ],
)
def test_what_every_run_needs_ends_it_with_1(call, monkeypatch, name, value, what):
    monkeypatch.setattr(name, value)
    code, out, _ = call("--json")
    assert code == 1 and [one["what"] for one in json.loads(out)["problems"]] == [what]
    code, out, err = call()
    assert code == 1 and f"\n{what}: " in out and "Next" not in err


def test_small_shared_memory_and_few_files_are_advice(call, monkeypatch):
    usage = environment.shutil.disk_usage("/")._replace(total=64 << 20)
    monkeypatch.setattr(environment.shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(environment.resource, "getrlimit", lambda kind: (1024, 1024))
    code, out, _ = call()
    assert code == 0 and "--shm-size" in out and "ulimit -n 65536" in out


@pytest.mark.slow
def test_torch_is_asked_in_a_process_of_its_own():
    assert set(environment._torch()) == set(TORCH)


def test_what_other_packages_print_is_no_answer_of_torch(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("print('hello')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(environment, "ASK_TORCH", "print('{\"devices\": []}')")
    assert environment._torch() == {"devices": []}
    monkeypatch.setattr(environment, "ASK_TORCH", "")
    assert "hello" in environment._torch()["error"]

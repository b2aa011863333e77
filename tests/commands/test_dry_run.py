"""`disttrain train --dry-run --device cuda`: what is found of a plan's stages, and what stands in
its way."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from disttrain_cli.api.presets import preset_text
from disttrain_cli.errors import RankLostError
from disttrain_cli.models.graph import describe, layer_table
from disttrain_cli.runtime.dryrun import dryrun, shim
from disttrain_cli.runtime.dryrun.dryrun import DryRun, StageReport, problems
from disttrain_cli.runtime.dryrun.stages import (
    PROGRESS,
    Failure,
    Message,
    OrderSeen,
    StageSeen,
    Wait,
)
from disttrain_cli.spec.files import fingerprint
from disttrain_cli.spec.plan import write_plan
from disttrain_cli.spec.runfile import read_run
from disttrain_cli.spec.whole import write_whole
from tests.commands.conftest import make_profile
from tests.commands.test_train import call
from tests.runtime.factory import plan_of, unit

DRY = ("--dry-run", "--device", "cuda")


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny preset in bf16, with a profile and a plan made by hand: two stages of the LLM, two
    replicas of each."""
    folder = tmp_path_factory.mktemp("planned")
    write_whole(
        folder / "disttrain.yaml", preset_text("tiny").replace("precision: fp32", "precision: bf16")
    )
    run = read_run(folder / "disttrain.yaml")
    profile = make_profile(run.file)
    modules, layers = {}, {}
    for name, module in profile.modules.items():
        kinds = [info.kind for info in layer_table(run) if info.module == name]
        cost = next(iter(module.costs.values()))
        layers[name] = [len(kinds)] if name != "llm" else [2, len(kinds) - 2]
        modules[name] = module.model_copy(
            update={
                "layers": kinds,
                "costs": dict.fromkeys(kinds, cost),
                "cut_bytes_per_sequence": [1e4] * len(kinds),
            }
        )
    profile = profile.model_copy(update={"inputs": describe(run), "modules": modules})
    write_whole(run.dir.profile, profile.model_dump_json())
    plan = plan_of(
        run,
        [unit(name, [name], layers[name], dp=1 + (name != "llm")) for name in modules],
        2,
        overlap=True,
    )
    write_plan(
        run.dir.plan,
        plan.model_copy(
            update={
                "fingerprints": profile.fingerprints.model_copy(
                    update={"profile": fingerprint(profile)}
                )
            }
        ),
    )
    return folder


def call_quietly(command: str, folder: Path) -> int:
    from disttrain_cli.app import main

    with pytest.raises(SystemExit) as stopped:
        main([command, str(folder / "disttrain.yaml"), "--quiet"])
    return int(stopped.value.code or 0)


@pytest.mark.slow
def test_every_distinct_stage_takes_a_step(planned: Path, capsys: Any) -> None:
    code, out, err = call(["train", planned, *DRY, "--json"], capsys)
    report = json.loads(out)
    assert code == 0 and not report["problems"], err
    assert (
        report["ranks"] == 6
        and report["order"]["faults"] == []
        and report["order"]["operations"] > 50
    )
    assert [
        (stage["unit"], stage["unit_stages"], stage["seen"]["slots_in_flight"])
        for stage in report["stages"]
    ] == [("image_encoder", [0], 3), ("llm", [0], 3), ("llm", [1], 2), ("image_generator", [0], 1)]
    for stage in report["stages"]:
        seen = stage["seen"]
        assert seen["devices"] == ["cuda:0"] and seen["failure"] is None and seen["kernels"] > 50
        assert all(wait["instruction"] == "" for wait in seen["waits"])
        assert sum(wait["times"] for wait in seen["waits"]) == 1, seen["waits"]  # for the norm
        assert 0 < seen["kept_gib"] < seen["peak_gib"] < stage["limit_gib"]
    _messages_agree(report["stages"])


def _messages_agree(stages: list[dict[str, Any]]) -> None:
    """What is sent is received: as many tensors, and gradients come back for what was sent."""
    by_kind: dict[str, set[str]] = {}
    for stage in stages:
        for one in stage["seen"]["messages"]:
            by_kind.setdefault(one["instruction"], set()).add(one["tensor"])
            assert one["dtype"] == "bfloat16"
    assert by_kind["send_activation"] == by_kind["receive_activation"]
    assert by_kind["send_gradient"] == by_kind["receive_gradient"] <= by_kind["send_activation"]


@pytest.mark.parametrize(
    "words", [("--device", "cuda"), (*DRY, "--rehearse"), (*DRY, "--emit", "slurm")]
)
def test_the_device_goes_with_a_dry_run_alone(
    planned: Path, capsys: Any, words: tuple[str, ...]
) -> None:
    code, _, err = call(["train", planned, *words], capsys)
    assert (
        code == 2
        and "--device can only be combined with --dry-run" in err
        and "--dry-run --device cuda" in err
    )


def test_there_is_one_kind_of_device(planned: Path, capsys: Any) -> None:
    code, _, err = call(["train", planned, "--dry-run", "--device", "rocm"], capsys)
    assert code == 2 and "rocm" in err


def test_no_compiler(
    planned: Path, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, err = call(["train", planned, *DRY], capsys)
    assert (
        code == 1
        and "no C++ compiler" in err
        and "apt-get install g++" in err
        and "disttrain train" in err
    )


def test_a_compiler_that_fails(
    planned: Path, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "bin" / "c++"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\necho 'unrecognised option -std=c++20' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{compiler.parent}:/bin:/usr/bin")
    code, _, err = call(["train", planned, *DRY], capsys)
    assert (
        code == 1
        and "could not compile" in err
        and "unrecognised option" in err
        and "g++ 11" in err
    )
    assert not list((tmp_path / "disttrain").iterdir())


@pytest.mark.slow
def test_folders_that_cannot_be_written(
    planned: Path, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = tmp_path / "taken"
    taken.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(taken))
    code, _, err = call(["train", planned, *DRY], capsys)
    assert code == 1 and "Cannot write into" in err and "XDG_CACHE_HOME" in err
    monkeypatch.undo()
    logs = planned / "runs" / "tiny" / "logs"
    shutil.rmtree(logs, ignore_errors=True)  # of tests before this one
    logs.touch()
    code, _, err = call(["train", planned, *DRY], capsys)
    logs.unlink()
    assert code == 1 and f"Cannot write into {logs}" in err


def test_a_build_of_torch_for_cuda(
    planned: Path, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "torch" / "lib" / "libtorch_cuda.so"
    library.parent.mkdir(parents=True)
    library.touch()
    (tmp_path / "torch" / "__init__.py").touch()
    spec = shim.importlib.util.spec_from_file_location("torch", tmp_path / "torch" / "__init__.py")
    monkeypatch.setattr(shim.importlib.util, "find_spec", lambda name: spec)
    code, _, err = call(["train", planned, *DRY], capsys)
    assert code == 1 and "CPU build" in err and "download.pytorch.org/whl/cpu" in err


def found(**seen: Any) -> DryRun:
    """A dry run of one stage."""
    stage = StageReport(
        unit="llm",
        unit_stages=[0],
        layers=[(0, 3)],
        seen=StageSeen(stages=[0], rank=0, slots_in_flight=1, slots=2, **seen),
        priced_kept_gib=1.0,
        priced_gib=2.0,
        unseen_gib=1.0,
        planned_gib=3.0,
        limit_gib=80.0,
    )
    return DryRun(
        device="A800",
        capability=(8, 0),
        memory_gib=80.0,
        ranks=1,
        microbatches=2,
        stages=[stage],
        order=OrderSeen(slots=1, operations=1, faults=[]),
        problems=problems(stage),
    )


@pytest.mark.parametrize("flags", [(), ("--quiet",)])
@pytest.mark.parametrize(
    "seen, says",
    [
        (
            {"failure": Failure(what="ValueError: planted", where="models/x.py:7")},
            "planted (models/x.py:7)",
        ),
        ({"peak_gib": 80.5}, "81.50 GiB do not fit into 80 GiB"),
        (
            {
                "messages": [
                    Message(
                        instruction="send_activation",
                        tensor="hidden",
                        shape=[8, 4],
                        dtype="float32",
                    ),
                    Message(
                        instruction="receive_gradient",
                        tensor="hidden",
                        shape=[8, 4],
                        dtype="bfloat16",
                    ),
                ]
            },
            (
                "hidden crosses a cut as [8, 4] float32 (send activation), and its gradient as [8,"
                " 4] bfloat16"
            ),
        ),
        ({"leaked_gib": 0.5}, "0.500 GiB more are held after a step"),
        (
            {
                "waits": [
                    Wait(instruction="forward", what="aten::item", where="models/x.py:7 f", times=2)
                ]
            },
            "models/x.py:7 f",
        ),
    ],
)
def test_problems_are_told_whatever_the_flags(
    planned: Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
    flags: tuple[str, ...],
    seen: dict[str, Any],
    says: str,
) -> None:
    monkeypatch.setattr(dryrun, "dry_run", lambda *given: found(**seen))
    code, _, err = call(["train", planned, *DRY, *flags], capsys)
    assert code == 1 and "unit llm, stage 0: " in err and says in err and "logs/dry-run" in err


def test_a_process_that_ends_is_told_by_its_stage(
    planned: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(*given: Any, **named: Any) -> None:
        raise RankLostError("Rank 2 was killed by SIGKILL", "log: rank-00002.log")

    monkeypatch.setattr(dryrun, "environment", dict)
    monkeypatch.setattr(dryrun, "launch", launch)
    code, _, err = call(["train", planned, *DRY], capsys)
    assert code == 4 and "Rank 2 was killed" in err
    assert (
        "0 the order of messages, 1 image_generator stage 0, 2 image_encoder stage 0, 3 llm stage"
        " 1, 4 llm stage 0" in err
    )


@pytest.mark.parametrize("flags", [(), ("--quiet",)])
def test_progress_counts_the_processes_and_their_shares(
    planned: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    clock_s = [100.0]

    def launch(
        processes: int, target: str, payload: dict[str, Any], *given: Any, **named: Any
    ) -> None:
        for done, now_s in ((0.0, 100.0), (0.1, 150.0), (0.6, 160.0), (1.0, 170.0)):
            np.full(processes, done).tofile(Path(payload["folder"], PROGRESS))
            clock_s[0] = now_s
            named["on_poll"]()
        raise RankLostError("Rank 2 was killed by SIGKILL", "log: rank-00002.log")

    monkeypatch.setattr(dryrun, "environment", dict)
    monkeypatch.setattr(dryrun, "launch", launch)
    monkeypatch.setattr("disttrain_cli.console.time.monotonic", lambda: clock_s[0])
    _, _, err = call(["train", planned, *DRY, *flags], capsys)
    what = "steps of distinct stages, and the order of all messages"
    assert [line for line in err.splitlines() if line.startswith(("importing", what))] == (
        []
        if flags
        else [
            "importing the model's classes",
            f"{what}  0/5",
            f"{what}  3/5, 15/min, 8 s left",
            f"{what}  5/5",
        ]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "llm", "batch"),
    [
        ("vlm-8b", "hidden_size: 4096, num_hidden_layers: 32", 256),
        ("qwen2.5-vl-7b-lora", "hidden_size: 3584, num_hidden_layers: 28", 64),  # a frozen tower
    ],
)
def test_a_preset_keeps_what_it_is_priced_at(
    preset: str, llm: str, batch: int, tmp_path: Path, capsys: Any
) -> None:
    """Fewer layers and devices than the preset, so that it takes a minute; as wide."""
    whole = preset_text(preset)
    assert llm in whole
    text = whole.replace(llm, f"{llm[:-2]}6").replace("  nodes: 4", "  nodes: 1")
    text = text.replace(f"batch_size: {batch}", "batch_size: 32")
    (tmp_path / "disttrain.yaml").write_text(text)
    for command in ("profile", "plan"):
        assert call_quietly(command, tmp_path) == 0
    capsys.readouterr()
    code, out, err = call(["train", tmp_path, *DRY, "--json"], capsys)
    assert code == 0, err
    for stage in json.loads(out)["stages"]:
        assert stage["seen"]["kept_gib"] == pytest.approx(
            stage["priced_kept_gib"], rel=0.03, abs=2**-20
        )
        assert stage["seen"]["peak_gib"] == pytest.approx(stage["priced_gib"], rel=0.03)

"""`disttrain train --dry-run`, `--emit`, `--preflight` and stopping: what is shown and written, and
the exit codes."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from disttrain_cli.api.presets import preset_text
from disttrain_cli.runtime import train as training
from disttrain_cli.runtime.launching.supervise import Planned
from disttrain_cli.spec.files import fingerprint
from disttrain_cli.spec.plan import UnitPlan, read_plan, write_plan
from disttrain_cli.spec.runfile import read_run
from disttrain_cli.spec.whole import write_whole
from tests.commands.conftest import MODULES, make_profile
from tests.commands.test_train import STEPS, call
from tests.runtime.factory import plan_of, unit

LARGE = {
    "image_encoder": (1, 108, 1),
    "llm": (8, 18, 6),
    "image_generator": (4, 81, 1),
}  # TP, DP, PP


@pytest.fixture(scope="module")
def planned_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny preset's run folder, profiled and planned."""
    folder = tmp_path_factory.mktemp("planned")
    write_whole(folder / "disttrain.yaml", preset_text("tiny"))
    for name in ("interleaved", "captions"):
        (folder / "data" / name).mkdir(parents=True)
    run = read_run(folder / "disttrain.yaml")
    profile = make_profile(run.file)
    write_whole(run.dir.profile, profile.model_dump_json())
    plan = plan_of(run, [unit(name, [name], [len(MODULES[name][1])], dp=2) for name in MODULES], 1)
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


@pytest.fixture
def planned(planned_once: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(planned_once, tmp_path / "run"))


@pytest.fixture
def large(planned: Path) -> Path:
    """A run folder with a plan of 1,296 ranks on 162 nodes."""
    file = planned / "disttrain.yaml"
    text = (
        file.read_text()
        .replace("  nodes: 1", "  nodes: 162")
        .replace("  gpus_per_node: 6", "  gpus_per_node: 8")
    )
    file.write_text(text.replace("  global_batch_size: 6", "  global_batch_size: 36"))
    run = read_run(file)
    profile = make_profile(run.file)
    write_whole(run.dir.profile, profile.model_dump_json())
    units = []
    for name, (tp, dp, pp) in LARGE.items():
        layers = len(MODULES[name][1])
        units.append(
            UnitPlan(
                name=name,
                modules=[name],
                tp=tp,
                ep=2 * tp if name == "llm" else 1,
                dp=dp,
                pp=pp,
                gpus=tp * dp * pp,
                layers_per_stage=[layers - pp + 1] + [1] * (pp - 1),
            )
        )
    plan = read_plan(run.dir.plan)
    layout = plan.plan.model_copy(
        update={
            "units": units,
            "gpus_used": 1296,
            "global_batch_size": 36,
            "microbatch_size": 1,
            "microbatches": 2,
        }
    )
    write_plan(
        run.dir.plan,
        plan.model_copy(
            update={
                "plan": layout,
                "fingerprints": profile.fingerprints.model_copy(
                    update={"profile": fingerprint(profile)}
                ),
            }
        ),
    )
    return planned


def test_1296_ranks_are_shown_with_groups_and_hosts(
    large: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # of interest is the shape
    monkeypatch.setattr("disttrain_cli.planning.check.check_layout", lambda *about: None)
    code, out, err = call(["train", large, "--dry-run", "--json", "--quiet"], capsys)
    assert code == 0, err
    document = json.loads(out)
    assert document["ranks"] == 1296 and len(document["hosts"]) == 162
    assert sorted(rank for host in document["hosts"] for rank in host["ranks"]) == list(range(1296))
    where = {rank: host["host"] for host in document["hosts"] for rank in host["ranks"]}
    for what, sizes in (("tp", {1: 108, 8: 108, 4: 81}), ("dp", {108: 1, 18: 48, 81: 4})):
        groups = document["groups"][what]
        assert sorted(rank for group in groups for rank in group) == list(range(1296))
        assert {size: sum(len(group) == size for group in groups) for size in sizes} == sizes
    assert all(len({where[rank] for rank in group}) == 1 for group in document["groups"]["tp"])
    assert [len(group) for group in document["groups"]["ep"]] == [16] * 54
    assert [stage["ep"] for stage in document["stages"]] == [1, *[16] * 6, 1]

    code, out, err = call(["train", large, "--dry-run"], capsys)
    assert code == 0, err
    assert "1296 ranks on 162 host(s)" in out and "Nothing was started" in out
    assert (
        "Expert-parallel groups:" in out
        and "Tensor-parallel groups:" in out
        and "and 150 more" in out
        and "--emit slurm" in err
    )


def test_too_few_slots_are_refused(planned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (planned / "hosts").write_text("worker-1 slots=1\n")
    file = planned / "disttrain.yaml"
    file.write_text(file.read_text().replace("  nodes: 1", "  nodes: 1\n  hostfile: hosts"))
    code, out, err = call(["train", planned, "--dry-run"], capsys)
    assert (
        code == 1
        and out == ""
        and "do not fit on 1 host(s) with 1 slot(s)" in err
        and "cluster.hostfile" in err
    )


def test_scripts_are_written_and_named(
    planned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = call(
        ["train", planned, "--emit", "torchrun", "--out", tmp_path / "out", "--steps", "7"], capsys
    )
    assert code == 0 and f"bash {(tmp_path / 'out' / 'node-0.sh').resolve()}" in out
    assert json.loads((tmp_path / "out" / "job.json").read_text())["payload"]["steps"] == 7
    code, out, _ = call(["train", planned, "--emit", "slurm", "--json", "--quiet"], capsys)
    document = json.loads(out)
    assert code == 0 and document["commands"] == [f"sbatch {document['scripts'][0]}"]
    assert Path(document["scripts"][0]).parent == planned / "runs" / "tiny" / "launch"
    code, _, err = call(["train", planned, "--emit", "slurm"], capsys)
    assert code == 0 and "the plan is for CPUs" in err and "asks for 6 GPUs per node" in err
    code, _, err = call(["train", planned, "--emit", "kubernetes"], capsys)
    assert code == 2 and "torchrun" in err


@pytest.mark.slow
def test_a_job_that_cannot_start_is_refused_before_anything_is_imported(planned: Path) -> None:
    """Errors come within a second: torch, numpy and what reads data are not loaded for them."""
    command = ["train", str(planned / "disttrain.yaml"), "--emit", "slurm"]
    command += ["--set", "cluster.slurm.setup=missing.sh"]
    program = (
        f"import sys; sys.argv[1:] = {command!r}\n"
        "from disttrain_cli.__main__ import main\n"
        "try:\n    main()\n"
        "finally:\n"
        "    print({'torch', 'numpy', 'pyarrow', 'transformers', 'duckdb'} & {*sys.modules})\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 1 and "cluster.slurm.setup: there is nothing at" in ran.stderr
    assert ran.stdout == "set()\n"


def test_a_job_that_would_find_checkpoints_is_refused(
    planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = planned / "runs" / "tiny" / "checkpoints" / "step-000003"
    checkpoint.mkdir(parents=True)
    (checkpoint / "checkpoint.json").write_text("{}")
    words = ["train", planned, "--emit", "slurm", "--steps", "7"]
    code, _, err = call(words, capsys)
    assert code == 1 and "--emit slurm --steps 7 --resume. Or" in err and "step-000003" in err
    assert call([*words, "--restart"], capsys)[0] == 0


def test_manifests_are_written_and_named(planned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = planned / "disttrain.yaml"
    before = file.read_text()
    code, _, err = call(["train", planned, "--emit", "jobset"], capsys)
    assert code == 1 and "cluster.kubernetes.image" in err and "Traceback" not in err
    spec = f"kubernetes: {{image: a/b:1, claim: runs, mount: {planned}}}"
    file.write_text(before.replace("  nodes: 1", f"  nodes: 1\n  {spec}"))
    code, out, err = call(["train", planned, "--emit", "jobset", "--json", "--quiet"], capsys)
    assert code == 0, err
    manifest = planned / "runs" / "tiny" / "launch" / "jobset.yaml"
    document = json.loads(out)
    assert document["scripts"][0] == str(manifest)
    assert document["commands"] == [f"kubectl apply --filename {manifest}"]
    code, out, _ = call(["train", planned, "--dry-run", "--emit", "jobset"], capsys)
    assert code == 0 and f"kubectl apply --filename {manifest}" in out
    code, _, err = call(["train", planned, "--emit", "skypilot"], capsys)
    assert code == 1 and "cluster.skypilot.accelerator" in err
    file.write_text(before.replace("  nodes: 1", "  nodes: 1\n  skypilot: {accelerator: H100}"))
    code, out, _ = call(["train", planned, "--emit", "skypilot"], capsys)
    assert code == 0 and "sky jobs launch" in out


def test_preflight_tells_what_rank_0_told(
    planned: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        training, "preflight", lambda *about, progress: ["rank 0's groups over gloo: ok"]
    )
    code, out, _ = call(["train", planned, "--preflight"], capsys)
    assert code == 0 and "ranks connected" in out and "rank 0's groups over gloo: ok" in out


@pytest.mark.parametrize(
    ("name", "expected"), [("SIGTERM", 143), ("SIGINT", 130), ("SIGUSR1", 143), ("stop file", 143)]
)
def test_a_stopped_run_shows_its_steps_and_ends_with_the_signals_code(
    planned: Path,
    name: str,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def train(run, plan, profile, **options):
        return training.TrainResult(
            run_dir=str(run.dir.root),
            planned=Planned(plan, profile),
            steps=STEPS,
            skipped_samples=[],
            resumed_from_step=None,
            checkpoint=str(run.dir.checkpoints / "step-000003"),
            trace=str(run.dir.traces),
            images=[],
            stopped_by=name,
            restarts=["Rank 2 was killed by SIGKILL"],
        )

    monkeypatch.setattr(training, "train", train)
    code, out, err = call(["train", planned], capsys)
    assert code == expected
    assert "Restarted: Rank 2 was killed by SIGKILL" in out and "checkpoints/step-000003" in out
    assert f"Stopped by {name} after step 3." in err and err.endswith("--resume\n")
    code, out, _ = call(["train", planned, "--json", "--quiet"], capsys)
    assert code == expected and json.loads(out)["stopped_by"] == name


def test_only_the_command_that_starts_all_ranks_plans_anew(planned, tmp_path, capsys):
    """Scripts are refused, for a run that asks for it and for a plan that leaves devices out."""
    path = planned / "disttrain.yaml"
    text = path.read_text()
    path.write_text(text.replace("\ntrain:\n", "\ntrain:\n  restarts: 1\n  on_straggler: replan\n"))
    words = ["train", planned, "--emit", "slurm", "--out", tmp_path / "out"]
    code, _, err = call(words, capsys)
    assert code == 1 and "train.on_straggler: replan" in err and "--fail-if" in err
    path.write_text(text)
    plan = planned / "runs" / "tiny" / "plan.yaml"
    before = plan.read_text()
    plan.write_text(before.replace("  left_out: []\n", "  left_out: [99]\n"))
    code, _, err = call(words, capsys)
    assert code == 1 and "left_out must name devices of the cluster" in err
    plan.write_text(before)
    assert not (tmp_path / "out").exists()

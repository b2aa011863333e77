"""Scripts that start ranks elsewhere: what they say, that shellcheck likes them, and that they do
start ranks."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain_cli.api.presets import preset_text
from disttrain_cli.data.sample_data import write_sample_data
from disttrain_cli.errors import SpecError
from disttrain_cli.runtime.launching.emit.hosts import place_ranks
from disttrain_cli.runtime.launching.emit.scripts import Start
from disttrain_cli.runtime.launching.emit.slurm import emit_slurm
from disttrain_cli.runtime.launching.emit.torchrun import emit_torchrun
from disttrain_cli.runtime.launching.rank import JobFile
from disttrain_cli.spec.files import parse_yaml
from disttrain_cli.spec.hostfile import Host, read_hostfile
from disttrain_cli.spec.plan import Layout, Plan, UnitPlan
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.rundir import stop_file
from disttrain_cli.spec.runfile import Run, RunFile, read_run
from disttrain_cli.spec.stage_graph import StageGraph, stage_graph
from tests.commands.conftest import MODULES, make_profile
from tests.runtime.factory import make_job, plan_of, unit

ROOT = Path(__file__).parents[3]
SHELLCHECK = shutil.which(
    "shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
)
PROTECTED = {
    "tls_ca": "ca.pem",
    "tls_cert": "{host}.pem",
    "tls_key": "{host}.key",
    "token_file": "token",
}


def make_run(folder: Path, cluster: dict[str, Any], **sections: Any) -> tuple[Run, Plan, Profile]:
    """The tiny preset in a folder, with two ranks for each of its modules."""
    (folder / "disttrain.yaml").write_text(preset_text("tiny"))
    value = parse_yaml(folder / "disttrain.yaml", "run file", "")
    value["cluster"] = {"gpus_per_node": 3, "device": "cpu"} | cluster
    for name, section in sections.items():
        value[name] = value[name] | section
    run = Run(path=folder / "disttrain.yaml", file=RunFile.model_validate(value))
    (folder / "disttrain.yaml").write_text(json.dumps(value))
    plan = plan_of(run, [unit(name, [name], [len(MODULES[name][1])], dp=2) for name in MODULES], 1)
    return run, plan, make_profile(run.file)


def graph_of(*shapes: tuple[int, int]) -> StageGraph:
    """One unit with one stage for every (TP, DP)."""
    units = [
        UnitPlan(
            name=f"u{number}",
            modules=[f"m{number}"],
            tp=tp,
            dp=dp,
            gpus=tp * dp,
            layers_per_stage=[1],
        )
        for number, (tp, dp) in enumerate(shapes)
    ]
    layout = Layout(
        global_batch_size=1,
        microbatch_size=1,
        microbatches=1,
        units=units,
        gpus_used=sum(each.gpus for each in units),
    )
    return stage_graph(layout, "m0")


# ---- hosts -------------------------------------------------------------------------------------
def test_a_hostfile_gives_names_and_slots(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(
        "# ours\nworker-1 slots=8\n\nworker-2   slots=4  # half\n10.0.0.3 slots=1\n"
    )
    assert read_hostfile(tmp_path / "hosts") == [("worker-1", 8), ("worker-2", 4), ("10.0.0.3", 1)]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("worker-1 slots=8\nworker-1 slots=8\n", "twice"),
        ("worker-1\n", "line 1"),
        ("a slots=0\n", "line 1"),
        ("a;reboot slots=8\n", "line 1"),
        ("a slots=8\n$(b) slots=8\n", "line 2"),
        ("-oProxy slots=8\n", "line 1"),
        ("# none\n", "no host"),
    ],
)
def test_a_wrong_hostfile_is_refused_by_line(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(SpecError, match=named):
        read_hostfile(tmp_path / "hosts")


def test_a_missing_hostfile_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot read"):
        read_hostfile(tmp_path / "none")


@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(1, 5)), min_size=1, max_size=4),
    st.lists(st.integers(1, 12), min_size=1, max_size=8),
)
def test_ranks_fill_hosts_in_order_and_no_tp_group_is_divided(
    shapes: list[tuple[int, int]], slots: list[int]
) -> None:
    placed_on, wanted = (
        [Host(f"h{number}", count) for number, count in enumerate(slots)],
        graph_of(*shapes),
    )
    try:
        nodes = place_ranks(wanted, placed_on)
    except SpecError as error:
        assert str(wanted.world_size) in error.what
        return
    assert [rank for node in nodes for rank in node.ranks] == list(range(wanted.world_size))
    assert all(len(node.ranks) <= dict(placed_on)[node.host] for node in nodes)
    where = {rank: node.host for node in nodes for rank in node.ranks}
    for stage in wanted.stages:
        for replica in range(stage.unit.dp):
            assert len({where[rank] for rank in stage.tp_groups()[replica]}) == 1


def test_a_cp_group_larger_than_a_host_lies_on_several() -> None:
    """Whole TP groups on each, hosts in order."""
    graph = graph_of((2, 3))
    unit = graph.stages[0].unit.model_copy(update={"cp": 4, "dp": 1, "gpus": 8})
    graph = StageGraph((replace(graph.stages[0], unit=unit, ranks=tuple(range(8))),))
    nodes = place_ranks(graph, [Host(name, 4) for name in "abc"])
    assert [(node.host, node.ranks) for node in nodes] == [("a", range(4)), ("b", range(4, 8))]


def test_too_few_slots_are_refused_with_both_numbers() -> None:
    with pytest.raises(SpecError, match=r"6 ranks do not fit on 2 host\(s\) with 5 slot\(s\)"):
        place_ranks(graph_of((1, 6)), [Host("a", 3), Host("b", 2)])
    with pytest.raises(SpecError) as caught:
        place_ranks(graph_of((4, 2)), [Host("a", 6), Host("b", 2)])
    assert "TP group (up to 4)" in caught.value.why


# ---- what is written ---------------------------------------------------------------------------
def shellcheck(*options: str) -> None:
    assert SHELLCHECK is not None, "shellcheck comes with the extra dev"
    found = subprocess.run([SHELLCHECK, *options], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def test_every_script_passes_shellcheck_also_with_names_that_a_shell_takes_apart(
    tmp_path: Path,
) -> None:
    strange = tmp_path / "a 'run' $(touch owned)"
    strange.mkdir()
    hosts = {"nodes": 2, "hostfile": "hosts", "interface": "eth0", "slurm": {"setup": "my env.sh"}}
    (strange / "hosts").write_text("worker-1 slots=3\nworker-2 slots=3\n")
    run, plan, profile = make_run(strange, hosts)
    written = emit_torchrun(run, plan, profile, strange / "out", Start(3))
    # the dollar of our own folder, in single quotes
    shellcheck("--exclude=SC2016", *written.scripts)
    assert (
        written.commands[1].startswith("ssh worker-2 ")
        and "--node-rank=1" in Path(written.scripts[1]).read_text()
    )
    assert not list(ROOT.glob("owned")) and not list(tmp_path.glob("**/owned"))

    plain = tmp_path / "plain"
    plain.mkdir()
    for cluster, preprocess in (
        ({"nodes": 2}, {}),
        ({"nodes": 3, "gpus_per_node": 2, "cpu_nodes": 2}, PROTECTED),
        (
            {
                "nodes": 2,
                "gpus_per_node": 4,
                "device": "auto",
                "slurm": {"options": ["--exclusive"]},
            },
            {},
        ),
    ):
        run, plan, profile = make_run(plain, cluster, preprocess=preprocess)
        written = emit_slurm(run, plan, profile, plain / "out", Start(3), plan_file=run.dir.plan)
        shellcheck(*written.scripts)


@pytest.mark.parametrize("serving", [False, True])
def test_scripts_have_no_stray_lines(tmp_path: Path, serving: bool) -> None:
    """Every option of sbatch stands before the first command, where sbatch stops reading."""
    (tmp_path / "my env.sh").write_text('PS1="$NOT_SET"\n')
    (tmp_path / "hosts").write_text("worker-1 slots=3\nworker-2 slots=3\n")
    cluster = {"nodes": 2, "hostfile": "hosts", "cpu_nodes": int(serving)}
    cluster |= {"slurm": {"setup": "my env.sh"}, "interface": "eth0"} if serving else {}
    run, plan, profile = make_run(tmp_path, cluster, preprocess=PROTECTED)
    slurm = emit_slurm(run, plan, profile, tmp_path, Start(3), plan_file=run.dir.plan)
    written = slurm.scripts
    if not serving:
        written = [*written, *emit_torchrun(run, plan, profile, tmp_path, Start(3)).scripts]
    for path in written:
        text = Path(path).read_text()
        assert subprocess.run(["bash", "-n", path]).returncode == 0
        assert "\n\n\n" not in text and not re.search(r"^ *:?$\n^ *:$", text, re.MULTILINE)
    lines = Path(slurm.scripts[0]).read_text().splitlines()
    options = [line.startswith("#SBATCH") for line in lines]
    assert options.index(True) == 2 and not any(options[2 + sum(options) :])
    setup = "\n".join(line for line in lines if "set " in line[:4] or "my env.sh" in line)
    if serving:  # its variables need not be set
        assert subprocess.run(["bash", "-c", setup]).returncode == 0
        assert lines.count("#SBATCH --mem=0") == 2


@pytest.mark.parametrize(
    ("memory", "options"), [(0, ["--mem=0"]), ("500G", ["--mem=500G"]), (None, [])]
)
def test_slurm_is_asked_for_memory(tmp_path: Path, memory: Any, options: list[str]) -> None:
    run, plan, profile = make_run(tmp_path, {"nodes": 2, "slurm": {"mem": memory}})
    written = emit_slurm(run, plan, profile, tmp_path, Start(3), plan_file=run.dir.plan)
    assert re.findall(r"--mem=\w+", Path(written.scripts[0]).read_text()) == options


def test_slurm_is_asked_for_both_components(tmp_path: Path) -> None:
    cluster = {
        "nodes": 2,
        "gpus_per_node": 3,
        "device": "auto",
        "cpu_nodes": 4,
        "cpu_node_cores": 32,
        "slurm": {
            "partition": "gpu",
            "cpu_partition": "cpu",
            "account": "me",
            "time": "1-00:00:00",
            "signal_s": 600,
            "options": ["--constraint=h200"],
        },
    }
    run, plan, profile = make_run(tmp_path, cluster, preprocess=PROTECTED)
    written = emit_slurm(run, plan, profile, tmp_path / "out", Start(3), plan_file=run.dir.plan)
    text = Path(written.scripts[0]).read_text()
    gpus, cpus = text.split("#SBATCH hetjob")
    for option in (
        "--requeue",
        "--signal=B:USR1@600",
        "--time=1-00:00:00",
        "--partition=gpu",
        "--account=me",
        "--nodes=2",
        "--ntasks-per-node=3",
        "--gpus-per-node=3",
        "--constraint=h200",
    ):
        assert f"#SBATCH {option}\n" in gpus
    for option in ("--partition=cpu", "--account=me", "--nodes=4", "--cpus-per-task=32"):
        assert f"#SBATCH {option}\n" in cpus
    assert "#SBATCH --cpus-per-task=5\n" in gpus
    assert "--het-group=0 --ntasks=6 --distribution=block:block --ntasks-per-node=3" in text
    assert written.commands == [f"sbatch {(tmp_path / 'out' / 'job.sbatch').resolve()}"]
    job = JobFile.model_validate_json(Path(written.job).read_text())
    assert job.ranks == 6 and job.payload["steps"] == 3 and job.payload["resume"] is False


@pytest.mark.parametrize(
    ("cluster", "preprocess", "cores"),
    [
        ({"device": "cpu"}, {"workers": 1}, 3),
        ({"device": "cpu"}, {"workers": 6}, 8),
        ({"device": "auto"}, {"workers": 6}, 10),
        ({"device": "auto", "node_cores": 96}, {"workers": 6}, 12),
        ({"device": "auto", "node_cores": 80}, {"workers": 6}, 10),
        ({"device": "auto", "cpu_nodes": 1}, PROTECTED | {"workers": 6}, 5),  # other nodes decode
        ({"device": "auto"}, {"addresses": ["grpc://127.0.0.1:8815"], "workers": 6}, 5),
    ],
)
def test_a_rank_gets_the_cores_that_it_needs_or_its_share(
    tmp_path: Path, cluster: dict[str, Any], preprocess: dict[str, Any], cores: int
) -> None:
    run, plan, profile = make_run(tmp_path, {"gpus_per_node": 8} | cluster, preprocess=preprocess)
    written = emit_slurm(run, plan, profile, tmp_path / "out", Start(3), plan_file=run.dir.plan)
    text = Path(written.scripts[0]).read_text()
    assert (
        f"#SBATCH --cpus-per-task={cores}\n" in text
        and f"${{SLURM_CPUS_PER_TASK:-{cores}}}" in text
    )
    shellcheck(*written.scripts)


@pytest.mark.parametrize(
    ("cores", "remedy"), [(72, "preprocess.workers: 5"), (32, "cluster.cpu_nodes")]
)
def test_a_node_with_too_few_cores_is_refused_with_what_helps(
    tmp_path: Path, cores: int, remedy: str
) -> None:
    run, plan, profile = make_run(
        tmp_path,
        {"gpus_per_node": 8, "device": "auto", "node_cores": cores},
        preprocess={"workers": 6},
    )
    with pytest.raises(
        SpecError, match=f"10 cores busy, and its share of a node is {cores // 8}"
    ) as caught:
        emit_slurm(run, plan, profile, tmp_path, Start(1), plan_file=run.dir.plan)
    assert remedy in caught.value.next_step


def test_preprocessing_nodes_without_protection_are_refused(tmp_path: Path) -> None:
    run, plan, profile = make_run(
        tmp_path, {"nodes": 2, "cpu_nodes": 1}, preprocess={"token_file": "token"}
    )
    with pytest.raises(SpecError) as caught:
        emit_slurm(run, plan, profile, tmp_path, Start(1), plan_file=run.dir.plan)
    assert "tls_ca, tls_cert, tls_key" in caught.value.why


def test_torchrun_needs_names_of_hosts(tmp_path: Path) -> None:
    run, plan, profile = make_run(tmp_path, {"nodes": 2})
    with pytest.raises(SpecError, match="hosts by name"):
        emit_torchrun(run, plan, profile, tmp_path, Start(1))
    (tmp_path / "hosts").write_text("worker-1 slots=3\nworker-2 slots=2\n")
    run, plan, profile = make_run(tmp_path, {"nodes": 2, "hostfile": "hosts"})
    with pytest.raises(SpecError, match="6 ranks do not fit"):
        emit_torchrun(run, plan, profile, tmp_path, Start(1))


# ---- that it runs ------------------------------------------------------------------------------
@pytest.fixture
def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def start_script(environment: dict[str, str]) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts a script; what is left of it at the end is ended."""
    started: list[subprocess.Popen[bytes]] = []

    def start(script: str, output: int | None = None, **more: str) -> subprocess.Popen[bytes]:
        started.append(
            subprocess.Popen(
                ["bash", script],
                env=environment | more,
                start_new_session=True,
                stdout=output,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        )  # who tests in the background ignores it
        return started[-1]

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def with_target(job: str, logs: Path, how: str) -> None:
    """Let the emitted ranks run `launch_worker.emitted`."""
    path = Path(job)
    content = json.loads(path.read_text())
    path.write_text(
        json.dumps(content | {"target": "tests.runtime.launching.launch_worker:emitted"})
    )
    logs.parent.mkdir(parents=True, exist_ok=True)
    (logs.parent / "how").write_text(how)
    for path in logs.glob("told-*.json"):
        path.unlink()


def told(logs: Path) -> dict[int, dict[str, Any]]:
    return {
        int(path.stem.removeprefix("told-")): json.loads(path.read_text())
        for path in logs.glob("told-*.json")
    }


@pytest.fixture
def cluster(tmp_path: Path, environment: dict[str, str]) -> dict[str, str]:
    """What to add to the environment, so that stand-ins for srun and scontrol know a job on two
    nodes; they write down their calls.
    """
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "srun").write_text("""#!/bin/bash
echo "$*" >> "$LOG"
tasks=1
while [[ "$1" == --* ]]; do case "$1" in --ntasks=*) tasks="${1#*=}" ;; esac; shift; done
if [[ "$1" == bash ]]; then exec sleep 600; fi
pids=()
for ((i = 0; i < tasks; i++)); do
  SLURM_PROCID=$i SLURM_LOCALID=$((i % 3)) SLURM_NTASKS=$tasks "$@" & pids+=($!)
done
code=0
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit "$code"
""")
    (tools / "scontrol").write_text("""#!/bin/bash
echo "$*" >> "$LOG"
if [[ "$1 $2" == "show hostnames" ]]; then tr , '\\n' <<< "$3"; fi
""")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    return {
        "PATH": f"{tools}:{environment['PATH']}",
        "LOG": str(tmp_path / "calls"),
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NODELIST": "127.0.0.1,127.0.0.2",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "127.0.0.1,127.0.0.2",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "cpu-1,cpu-2",
    }


@pytest.mark.slow
def test_the_slurm_script_starts_ranks_and_queues_itself_again(
    tmp_path: Path, cluster: dict[str, str], start_script: Callable[..., subprocess.Popen[bytes]]
) -> None:
    run, plan, profile = make_run(
        tmp_path,
        {"nodes": 2, "cpu_nodes": 2, "cpu_node_cores": 2, "port": free_port()},
        preprocess=PROTECTED,
        train={"restarts": 1},
    )
    written, logs, calls = (
        emit_slurm(run, plan, profile, tmp_path / "out", Start(3), plan_file=run.dir.plan),
        run.dir.logs,
        tmp_path / "calls",
    )

    def start(how: str, **more: str) -> subprocess.Popen[bytes]:
        calls.write_text("")
        with_target(written.job, logs, how)
        return start_script(written.scripts[0], **cluster | more)

    assert start("end").wait(timeout=300) == 0
    ranks = told(logs)
    assert (
        sorted(ranks) == list(range(6))
        and ranks[4]["LOCAL_RANK"] == "1"
        and ranks[4]["WORLD_SIZE"] == "6"
    )
    assert ranks[5]["DISTTRAIN_HOSTS"] == "127.0.0.1 127.0.0.2"
    assert ranks[5]["MASTER_ADDR"] == "127.0.0.1" and ranks[5]["MASTER_PORT"] == str(
        run.file.cluster.port
    )
    assert ranks[0]["DISTTRAIN_WORKERS"].split(",") == [
        f"grpc+tls://cpu-{node}:{port}" for node in (1, 2) for port in (8815, 8816)
    ]
    assert ranks[0]["start"]["resume"] is False and "requeue" not in calls.read_text()
    sruns = [call for call in calls.read_text().splitlines() if "--het-group" in call]
    assert [re.findall(r"--cpus-per-task=\d+", call) for call in sorted(sruns)] == [
        ["--cpus-per-task=3"],
        ["--cpus-per-task=2"],
    ]  # srun takes over no such option of sbatch
    assert "--het-group=1" in calls.read_text() and (
        logs / "rank-00005.log"
    ).read_text().startswith("rank 5 of 6")

    def waiting() -> subprocess.Popen[bytes]:
        process = start("wait")
        while sorted(told(logs)) != list(range(6)):
            assert process.poll() is None
            time.sleep(0.05)
        return process

    process = waiting()
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=60) == 143 and "requeue 77" in calls.read_text()
    process = waiting()
    stop_file(logs).touch()
    assert process.wait(timeout=60) == 143 and "requeue" not in calls.read_text()

    assert start("fail").wait(timeout=300) == 1 and "requeue 77" in calls.read_text()
    assert (
        start("fail", SLURM_RESTART_COUNT="1").wait(timeout=300) == 1
        and "requeue" not in calls.read_text()
    )


@pytest.mark.slow
def test_the_torchrun_scripts_start_ranks_on_every_host(
    tmp_path: Path,
    environment: dict[str, str],
    start_script: Callable[..., subprocess.Popen[bytes]],
) -> None:
    (tmp_path / "hosts").write_text("127.0.0.1 slots=3\n127.0.0.2 slots=3\n")
    port = free_port()
    run, plan, profile = make_run(
        tmp_path,
        {"nodes": 2, "hostfile": "hosts", "interface": "lo", "port": port},
        train={"restarts": 1},
    )
    written, logs = emit_torchrun(run, plan, profile, tmp_path / "out", Start(3)), run.dir.logs

    started: list[subprocess.Popen[bytes]] = []

    def start(how: str, when_waiting: Callable[[], None] | None = None) -> list[int]:
        with_target(written.job, logs, how)
        started[:] = [start_script(script) for script in written.scripts]
        while when_waiting is not None and sorted(told(logs)) != list(range(6)):
            assert all(process.poll() is None for process in started)
            time.sleep(0.05)
        if when_waiting is not None:
            when_waiting()
        return [process.wait(timeout=300) for process in started]

    assert start("wait", lambda: stop_file(logs).touch()) == [143, 143]
    assert start("wait", lambda: started[0].send_signal(signal.SIGINT)) == [130, 130]
    assert start("end") == [0, 0]
    ranks = told(logs)
    assert {rank: ranks[rank]["LOCAL_RANK"] for rank in ranks} == {
        rank: str(rank % 3) for rank in range(6)
    }
    assert {one["GLOO_SOCKET_IFNAME"] for one in ranks.values()} == {"lo"}
    assert {one["DISTTRAIN_HOSTS"] for one in ranks.values()} == {"127.0.0.1 127.0.0.2"}
    assert start("fail") == [1, 1]  # also the second time
    # torchrun ends slower ranks before they have a log
    said = [log.read_text() for log in logs.glob("rank-*.log")]
    assert any("ValueError: this rank is broken" in text for text in said)
    with socket.create_server(("", port)):
        found = subprocess.run(
            ["bash", written.scripts[0]], env=environment, capture_output=True, text=True
        )
    assert (
        found.returncode == 1
        and f"Port {port} of" in found.stderr
        and "cluster.port" in found.stderr
    )


@pytest.mark.slow
def test_a_model_trains_under_torchrun_on_two_hosts(
    tmp_path: Path, start_script: Callable[..., subprocess.Popen[bytes]]
) -> None:
    write_sample_data(tmp_path / "data")
    run, plan, profile = make_job(tmp_path, tmp_path / "data")
    content = json.loads(json.dumps(parse_yaml(run.path, "run file", "")))
    content["cluster"] |= {
        "nodes": 2,
        "gpus_per_node": 3,
        "hostfile": "hosts",
        "interface": "lo",
        "port": free_port(),
    }
    (tmp_path / "hosts").write_text("127.0.0.1 slots=3\n127.0.0.2 slots=3\n")
    run.path.write_text(json.dumps(content))
    run = read_run(run.path)
    twice = plan_of(
        run,
        [unit(each.name, each.modules, each.layers_per_stage, dp=2) for each in plan.plan.units],
        1,
    )
    written = emit_torchrun(run, twice, profile, tmp_path / "out", Start(2))
    processes = [start_script(script, output=subprocess.PIPE) for script in written.scripts]
    shown = [process.communicate(timeout=900)[0].decode() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert (
        re.search(r"^training  loss \d.* 2/2$", shown[0], re.MULTILINE)
        and "training  loss" not in shown[1]
    )
    assert "Verdict     too early to say" in shown[0] and "Verdict" not in shown[1]
    assert (run.dir.checkpoints / "step-000002").is_dir()
    steps = [
        json.loads(line)
        for line in (run.dir.logs / "start-000-steps.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in steps if "step" in row] == [0, 1]

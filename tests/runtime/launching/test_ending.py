"""A rank that fails tells why before it closes anything, and ends whatever else waits for ever."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import psutil
import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from disttrain_cli.data.sample_data import write_sample_data
from disttrain_cli.errors import DisttrainError, RankFailedError
from disttrain_cli.runtime.engine.faults import NotFiniteError
from disttrain_cli.runtime.launching import agent, ending, meeting, process
from disttrain_cli.runtime.launching.begin import begin
from disttrain_cli.runtime.launching.emit.scripts import Start
from disttrain_cli.runtime.launching.emit.torchrun import emit_torchrun
from disttrain_cli.runtime.launching.ending import Ending
from disttrain_cli.runtime.launching.launch import launch
from disttrain_cli.runtime.launching.process import abort_groups, joined
from disttrain_cli.runtime.launching.rank import JobFile, read_job_file
from disttrain_cli.runtime.watching.verdict import Verdict, publish_verdict, read_verdict
from disttrain_cli.spec.rundir import rank_log
from tests.cases import first_fast
from tests.runtime.factory import make_job, plan_of, unit
from tests.runtime.launching.fault_worker import TEXT

ROOT = Path(__file__).parents[3]
ENDING, FAULT = "tests.runtime.launching.ending_worker", "tests.runtime.launching.fault_worker"


# ---- one process -------------------------------------------------------------------------------
@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")


@pytest.mark.usefixtures("alone")
def test_a_failure_aborts_the_groups_and_destroys_none(monkeypatch: pytest.MonkeyPatch) -> None:
    called = list[str]()
    for owner, name in (
        (dist, "destroy_process_group"),
        (distributed_c10d, "_abort_process_group"),
    ):

        def real(
            *given: Any, function: Callable[..., None] = getattr(owner, name), said: str = name
        ) -> None:
            called.append(said)
            function(*given)

        monkeypatch.setattr(owner, name, real)
    with pytest.raises(ValueError, match="mine"), joined("cpu", 60.0, store=dist.HashStore()):
        raise ValueError("mine")
    assert called == ["_abort_process_group"] and not dist.is_initialized()
    with joined("cpu", 60.0, store=dist.HashStore()):
        pass
    assert called == ["_abort_process_group", "destroy_process_group"] and not dist.is_initialized()


@pytest.mark.usefixtures("alone")
def test_an_abort_that_hangs_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "ABORT_S", 0.05)
    done = list[str]()
    monkeypatch.setattr(
        distributed_c10d, "_abort_process_group", lambda: (time.sleep(0.5), done.append("late"))
    )
    abort_groups()
    assert not done


def test_of_several_verdicts_the_first_stays_and_half_of_one_is_none(tmp_path: Path) -> None:
    assert read_verdict(tmp_path) is None  # a file is there now, and empty
    publish_verdict(tmp_path, Verdict(text="rank 3: its text\n", shown_on="a"))
    publish_verdict(tmp_path, Verdict(text="rank 4: Connection closed by peer\n", shown_on="b"))
    assert read_verdict(tmp_path) == Verdict(text="rank 3: its text\n", shown_on="a")
    (tmp_path / "verdict").write_text('{"text": "ra')
    assert read_verdict(tmp_path) is None
    # jobs without states have no such folder
    publish_verdict(tmp_path / "none", Verdict(text="", shown_on=None))
    assert read_verdict(tmp_path / "none") is None and not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("shown_on", "environment", "told"),
    [
        (socket.gethostname(), {"RANK": "0"}, False),  # stands in the job log
        ("elsewhere", {"RANK": "0"}, False),
        (None, {"RANK": "0"}, True),
        (None, {"RANK": "8", "LOCAL_RANK": "0"}, False),
        ("elsewhere", {"TORCHELASTIC_RUN_ID": "none", "RANK": "8", "LOCAL_RANK": "0"}, True),
        ("elsewhere", {"TORCHELASTIC_RUN_ID": "none", "RANK": "9", "LOCAL_RANK": "1"}, False),
        (
            socket.gethostname(),
            {"TORCHELASTIC_RUN_ID": "none", "RANK": "8", "LOCAL_RANK": "0"},
            False,
        ),
    ],
)
def test_a_verdict_is_shown_once_per_terminal(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shown_on: str | None,
    environment: dict[str, str],
    told: bool,
) -> None:
    def ended(code: int) -> None:
        raise SystemExit(code)

    written = list[bytes]()
    for name in ("RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "_exit", ended)
    monkeypatch.setattr(os, "write", lambda descriptor, text: written.append(text))
    with pytest.raises(SystemExit, match="4"):
        Ending(1, tmp_path / "log", tmp_path, lambda error: None).follow(
            Verdict(text="why\n", shown_on=shown_on)
        )
    assert written == [b"why\n"] * told


def test_what_all_ranks_raise_is_told_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(ending.signal, "alarm", lambda seconds: 0)
    monkeypatch.setattr(ending.threading, "Timer", lambda seconds, function: threading.Thread())
    written = list[bytes]()
    monkeypatch.setattr(os, "write", lambda descriptor, text: written.append(text))
    for rank in ("3", "0"):
        monkeypatch.setenv("RANK", rank)
        one = Ending(int(rank), tmp_path / "log", tmp_path / "none", lambda error: None)
        one.tell(NotFiniteError("Step 3 is not finite", "text loss inf"))
        one.tell(ValueError("which follows"))
    assert written == [
        f"rank 0 ({socket.gethostname()}): Step 3 is not finite\ntext loss inf\n"
        f"log: {tmp_path / 'log'}\n".encode()
    ]


def test_names_that_are_no_unicode_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending.signal, "alarm", lambda seconds: 0)
    monkeypatch.setattr(ending.threading, "Timer", lambda seconds, function: threading.Thread())
    monkeypatch.setattr(os, "_exit", lambda code: None)
    written = list[bytes]()
    one = Ending(1, tmp_path / "log", tmp_path, lambda error: None)
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda descriptor, text: written.append(text))
        one.tell(DisttrainError("Cannot read data/\udcff.tar"))
    one.leave()
    verdict = read_verdict(tmp_path)
    assert b"Cannot read data/\\udcff.tar\n" in written[0]
    assert verdict is not None and verdict.text.encode() == written[0]


# ---- ranks -------------------------------------------------------------------------------------
@pytest.mark.parametrize("lock", first_fast(["free", "held"]))
def test_the_text_is_told_though_closing_waits_for_ever(tmp_path: Path, lock: str) -> None:
    with pytest.raises(RankFailedError) as caught:
        launch(2, f"{ENDING}:stuck", {"logs": str(tmp_path), "lock": lock}, tmp_path)
    assert (
        caught.value.what.startswith("Rank 0 ")
        and "ValueError: mine\nand more of it" in caught.value.why
    )


def test_a_wait_that_knows_no_limit_gets_one(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError) as caught:
        launch(1, f"{ENDING}:late", {}, tmp_path)
    assert caught.value.what == "Rank 0 stopped: nccl did not connect all 2 ranks"
    assert caught.value.why.startswith("a host\n") and caught.value.next_step == "Look there."


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("device", "backend"), [("cuda:3", "nccl"), ("cpu", "gloo")])
def test_the_worlds_communicator_is_made_at_once_within_a_limit_and_never_split(
    monkeypatch: pytest.MonkeyPatch, device: str, backend: str
) -> None:
    """A device bound to the world makes torch split every later group from it, by all ranks and
    without a limit."""
    asked, limited = list[tuple[str, dict[str, Any]]](), [0.0]

    @contextmanager
    def limit(limit_s: float, late: Callable[[], DisttrainError]) -> Iterator[None]:
        assert late().what == f"{backend} did not connect all 1 ranks within 60 s"
        limited.append(limit_s)
        yield
        limited.append(0.0)

    def note(name: str) -> Callable[..., None]:
        def noted(*given: Any, **named: Any) -> None:
            assert limited[-1] > 60.0
            asked.append((name, named))

        return noted

    def meet_again(**named: Any) -> None:
        raise InterruptedError

    for name in ("TORCH_GLOO_LAZY_INIT", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"):
        monkeypatch.setenv(name, "")  # so that what is set is taken back
        monkeypatch.delenv(name)
    monkeypatch.setattr(process, "within", limit)
    monkeypatch.setattr(dist, "init_process_group", note("init"))
    monkeypatch.setattr(dist, "barrier", note("barrier"))
    monkeypatch.setattr(deepspeed, "init_distributed", meet_again)
    monkeypatch.setattr(process, "abort_groups", lambda: None)
    with pytest.raises(InterruptedError), joined(device, 60.0, store=dist.HashStore()):
        pass
    assert [name for name, _ in asked] == ["init", "barrier"][: 1 + (backend == "nccl")]
    assert asked[0][1].get("device_id") is None and asked[-1][1].get("device_ids", [3]) == [3]
    assert ("TORCH_GLOO_LAZY_INIT" in os.environ) == (backend == "nccl")


@pytest.mark.parametrize(
    ("exits", "code", "told"),
    [({2: 4}, 4, ""), ({1: -9, 3: -15}, 137, "rank 1 (HOST) was killed by SIGKILL\n")],
)
def test_the_agent_of_a_host_says_only_what_no_rank_can(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    exits: dict[int, int],
    code: int,
    told: str,
) -> None:
    def failed() -> None:
        raise ChildFailedError(
            "rank",
            {
                rank: ProcessFailure(rank, 1, exit_code, "<N/A>")
                for rank, exit_code in exits.items()
            },
        )

    monkeypatch.setattr(agent, "torchrun", failed)
    with pytest.raises(SystemExit) as caught:
        agent.main()
    assert caught.value.code == code and capsys.readouterr().err == told.replace(
        "HOST", socket.gethostname()
    )


def first_of_torchruns_hosts(count: int, monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """The store of the first host's agent, once it has met the others."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that what the agent sets is taken back
    monkeypatch.delenv(process.LISTENER, raising=False)
    monkeypatch.setenv("DISTTRAIN_HOSTS", "a b c")
    try:
        return agent.Rendezvous("127.0.0.1", port, 0, count, "none", 60).next_rendezvous().store
    finally:
        listening = {
            one.laddr.ip
            for one in psutil.Process().net_connections("tcp")
            if one.laddr.port == port
        }
        assert listening == {"127.0.0.1"}


def test_torchruns_first_host_listens_at_its_address_alone_and_names_hosts_that_do_not_come(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    store = first_of_torchruns_hosts(1, monkeypatch)
    store.set("a", "b")
    assert store.get("a") == b"b"
    monkeypatch.undo()
    monkeypatch.setattr(agent, "MEETING_S", 0.5)
    monkeypatch.setattr(meeting, "NEWS_S", 0.2)
    with pytest.raises(
        DisttrainError, match=r"2 of 3 hosts did not start within 0.5 s: 1 \(b\), 2 \(c\)"
    ):
        first_of_torchruns_hosts(3, monkeypatch)
    assert "waiting for 2 of 3 hosts: 1 (b), 2 (c)\n" in capfd.readouterr().out


@contextmanager
def ranks_alone(job: Path, count: int, **more: str) -> Iterator[list[subprocess.Popen[str]]]:
    """A job's ranks as srun starts them, without anybody who would end one when another one
    fails."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    told = {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "SLURM_NTASKS": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "disttrain_cli.runtime.launching.rank", str(job)],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | told | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
        )
        for rank in range(count)
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def job_file(folder: Path, target: str, payload: dict[str, Any], ranks: int) -> Path:
    (folder / "job.json").write_text(
        JobFile(target=target, payload=payload, logs=payload["logs"], ranks=ranks).model_dump_json()
    )
    return folder / "job.json"


def test_ranks_that_nobody_ends_end_by_themselves(tmp_path: Path) -> None:
    job = job_file(tmp_path, f"{ENDING}:stuck", {"logs": str(tmp_path / "logs"), "lock": "free"}, 2)
    with ranks_alone(job, 2) as ranks:
        said = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 4]
    assert said == [
        (
            f"rank 0 ({socket.gethostname()}): ValueError: mine\nand more of it\n"
            "In the forward of slot 3: unit llm, stage 1, replica 0\n"
            f"log: {tmp_path / 'logs' / 'rank-00000.log'}\n"
        ),
        "",
    ]
    assert "in wait" in (tmp_path / "logs" / "rank-00001.log").read_text()  # its stacks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("step", r"forward of slot 0: unit \w+, stage 0, replica 0"),
        ("reducing", "backward of slot 1: unit all, stage 0, replica 1"),
        ("gathering", "step: unit all, stage 0, replica 1"),
    ],
)
def test_an_error_of_a_training_rank_ends_all_of_them_with_its_text(
    tmp_path: Path, where: str, told: str
) -> None:
    """Rank 1 fails in a step while the others wait for it in a receive, or for messages to replicas
    that are under way; it is told once, and nobody ends them."""
    write_sample_data(tmp_path / "data")
    run, plan, profile = make_job(tmp_path, tmp_path / "data", zero_stage=1)
    if where != "step":
        layers = [sum(sum(one.layers_per_stage) for one in plan.plan.units)]
        alike = plan_of(run, [unit("all", run.file.model.order, layers, 3)], 1, overlap=True)
        plan = plan.model_copy(update={"plan": alike.plan})
    job = read_job_file(Path(emit_torchrun(run, plan, profile, tmp_path / "out", Start(3)).job))
    begin(job)
    (run.dir.root / "fault.json").write_text(
        json.dumps({"rank": 1, "where": where, "how": "raise"})
    )
    with ranks_alone(job_file(tmp_path, f"{FAULT}:main", job.payload, 3), 3) as ranks:
        said = [rank.communicate(timeout=300)[0] for rank in ranks]
    log = rank_log(run.dir.logs, 1)
    assert ranks[1].returncode == 1 and {ranks[0].returncode, ranks[2].returncode} <= {1, 4}
    opening, closing = f"rank 1 ({socket.gethostname()}): RuntimeError: {TEXT}\n", f"\nlog: {log}\n"
    place = said[1].partition(opening)[2].partition(closing)[0]
    assert re.fullmatch(f"In the {told}", place), said[1]
    assert "RuntimeError" in log.read_text() and "Error" not in said[0] + said[2]

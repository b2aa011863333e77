"""Ranks that do not belong together, or cannot talk, are named before they train."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from disttrain_cli.errors import DisttrainError, MismatchError, SpecError
from disttrain_cli.runtime.launching import process
from disttrain_cli.runtime.launching.begin import check_port
from disttrain_cli.runtime.launching.meeting import Guest, check_name, meet, wait_until_built
from disttrain_cli.runtime.launching.rank import JobFile, place_in_job
from tests.runtime.watching.test_hang import graph_of

FACTS = {"program": "0.1.0", "plan": "aaaa"}
ROOT = Path(__file__).parents[3]


def start(guests: list[Guest]) -> dict[str, Any]:
    return {"name": "start-003", "hosts": len({guest.host for guest in guests})}


def meeting(
    facts: list[dict[str, str]],
    world_size: int,
    timeout_s: float = 30.0,
    hosts: Sequence[str] = (),
    decide: Callable[[list[Guest]], dict[str, Any]] = start,
) -> tuple[list[Any], list[str]]:
    """What each of the ranks that join is told, or the error that it raises; and what rank 0 says
    meanwhile."""
    store, said = dist.HashStore(), list[str]()

    def rank(number: int) -> Any:
        try:
            own = Guest(facts[number])
            return meet(
                store, number, world_size, own, decide, timeout_s, hosts=hosts, say=said.append
            )
        except DisttrainError as error:
            return error

    with ThreadPoolExecutor(len(facts)) as threads:
        return list(threads.map(rank, range(len(facts)))), said


def test_equal_ranks_are_told_the_start_by_rank_0() -> None:
    assert meeting([FACTS] * 3, 3) == ([{"name": "start-003", "hosts": 1}] * 3, [])


def test_a_host_with_another_plan_is_named_on_every_rank() -> None:
    for error in meeting([FACTS, FACTS, FACTS | {"plan": "bbbb"}], 3)[0]:
        assert isinstance(error, MismatchError) and "not equal" in error.what
        assert error.why == f"plan: bbbb on {socket.gethostname()}, aaaa on most others"


@pytest.mark.parametrize(
    ("hosts", "named"), [([], "2-5"), (["a", "a", "a", "b", "b", "c"], "2 (a), 3-4 (b), 5 (c)")]
)
def test_missing_ranks_are_named_while_they_are_waited_for_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch, hosts: list[str], named: str
) -> None:
    monkeypatch.setattr("disttrain_cli.runtime.launching.meeting.NEWS_S", 0.2)
    errors, said = meeting([FACTS] * 2, 6, timeout_s=0.5, hosts=hosts)
    for error in errors:
        assert error.what == f"4 of 6 ranks did not join within 0.5 s: {named}"
        assert socket.gethostname() in error.why
    assert set(said) == {f"waiting for 4 of 6 ranks: {named}"}


def test_a_rank_that_does_not_finish_its_stage_is_named() -> None:
    store = dist.HashStore()

    def rank(number: int) -> DisttrainError | None:
        try:
            wait_until_built(store, graph_of(dp=2), number, 0.5 if number == 0 else 60.0)
        except DisttrainError as error:
            return error
        return None

    ranks = ThreadPoolExecutor(5)
    others = [ranks.submit(rank, number) for number in (1, 2, 4)]
    error = rank(0)
    assert error is not None and error.why == "unit llm, stage 1"
    assert error.what == "1 of 5 ranks have not built their stages, 0.5 s after rank 0: 3"
    assert rank(3) is None and [other.result() for other in others] == [None] * 3


def test_what_rank_0_cannot_decide_fails_on_every_rank() -> None:
    def refuse(guests: list[Guest]) -> dict[str, Any]:
        raise DisttrainError("Several ranks have the same CUDA device", "ranks 0, 1", "Set it.")

    for error in meeting([FACTS] * 3, 3, decide=refuse)[0]:
        assert (error.what, error.why, error.next_step) == (
            "Several ranks have the same CUDA device",
            "ranks 0, 1",
            "Set it.",
        )


def test_1296_ranks_meet_with_a_number_of_operations_that_grows_as_they_do() -> None:
    """Each rank makes a handful; rank 0 none per pair of ranks."""
    counts = {}
    for world_size in (81, 1296):
        store = Counting(dist.HashStore())
        for rank in range(1, world_size):
            store.set(f"meet/{rank}", json.dumps(asdict(Guest(FACTS))))
            store.add("meet/joined", 1)
        store.operations = store.keys = 0
        assert meet(store, 0, world_size, Guest(FACTS), start, 5.0) == {
            "name": "start-003",
            "hosts": 1,
        }  # type: ignore
        counts[world_size] = store.operations
        assert store.keys <= world_size + 8
    assert counts[81] == counts[1296] <= 8


class Counting:
    """A store that counts what it is asked."""

    def __init__(self, store: dist.Store) -> None:
        self._store, self.operations, self.keys = store, 0, 0

    def __getattr__(self, name: str) -> Any:
        def asked(*given: Any) -> Any:
            self.operations += 1
            self.keys += len(given[0]) if isinstance(given[0], list) else 1
            return getattr(self._store, name)(*given)

        return asked


@pytest.fixture
def first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 of a job that srun has started."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    for name in (process.LISTENER, "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("first_rank")
def test_a_port_in_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(DisttrainError, match=f"Port {port} of 127.0.0.1 is in use") as caught:
            process.rendezvous(timedelta(seconds=5))
        with pytest.raises(DisttrainError, match=f"Port {port} of"):
            check_port(port)
    assert "cluster.port" in caught.value.next_step
    check_port(port)


@pytest.mark.slow
@pytest.mark.usefixtures("first_rank")
def test_nobody_at_the_meeting_place_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(DisttrainError, match=f"No rank 0 answers at 127.0.0.1:{port}"):
        process.rendezvous(timedelta(seconds=1))


def test_a_first_host_whose_name_nobody_knows_is_named() -> None:
    check_name("127.0.0.1")
    with pytest.raises(
        DisttrainError, match="does not know the first host by the name nowhere!"
    ) as caught:
        check_name("nowhere!")
    assert "cluster.hostfile" in caught.value.next_step


def test_a_rank_finds_its_place_under_srun_and_refuses_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = JobFile(target="a:b", payload={}, logs="logs", ranks=4)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SpecError, match="RANK, LOCAL_RANK, WORLD_SIZE"):
        place_in_job(job)
    for name, value in {
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1",
        "SLURM_NTASKS": "4",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # so that what place_in_job sets is taken back
        monkeypatch.delenv(name)
    assert place_in_job(job) == 3 and os.environ["LOCAL_RANK"] == "1"
    with pytest.raises(SpecError, match="4 ranks were started for a plan of 8"):
        place_in_job(job.model_copy(update={"ranks": 8}))


def test_a_rank_that_nobody_started_says_so(tmp_path: Path) -> None:
    job = JobFile(
        target="tests.runtime.launching.launch_worker:fail", payload={}, logs=str(tmp_path), ranks=1
    )
    (tmp_path / "job.json").write_text(job.model_dump_json())
    found = subprocess.run(
        [sys.executable, "-m", "disttrain_cli.runtime.launching.rank", str(tmp_path / "job.json")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if not key.startswith("SLURM")},
    )
    assert (
        found.returncode == 1
        and "disttrain train --emit" in found.stderr
        and "Traceback" not in found.stderr
    )

"""Groups are connected one after the other within limits; what is broken, and who is missing, is
named."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from disttrain_cli.errors import DisttrainError
from disttrain_cli.runtime.launching import groups
from disttrain_cli.runtime.launching.groups import call_roll, check_groups
from disttrain_cli.runtime.units.communicators import communicators, peers
from tests.runtime.units.test_broker import branched
from tests.runtime.watching.test_hang import graph_of

PLACE, CPU = graph_of().coords(1), torch.device("cpu")


@pytest.fixture
def grid() -> Iterator[Any]:
    """The grid of a rank that is alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield SimpleNamespace(
        groups={"world": dist.group.WORLD, "replicas of llm stage 0, TP rank 0": dist.new_group()},
        exchanges={},
        cp=None,
        ep=None,
    )
    dist.destroy_process_group()


def test_groups_that_work_are_timed(grid: Any) -> None:
    assert list(check_groups(grid, PLACE, CPU, 5.0)) == [
        "world",
        "replicas of llm stage 0, TP rank 0",
    ]


def test_a_broken_group_is_named(grid: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any, group: object = None, **more: Any) -> None:
        raise RuntimeError("Connection refused\nmore")

    monkeypatch.setattr(dist, "all_reduce", broken)
    with pytest.raises(DisttrainError) as caught:
        check_groups(grid, PLACE, CPU, 5.0)
    assert 'Rank 1 cannot reach its group "world" (1 ranks) over gloo' in caught.value.what
    assert "unit llm, stage 0" in caught.value.why and "Connection refused" in caught.value.why
    assert "cluster.interface" in caught.value.next_step


def test_a_group_whose_communicator_is_never_made_is_named(
    grid: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL makes it inside the first call on the group, which then does not return."""
    late: list[Callable[[], DisttrainError]] = []

    @contextmanager
    def limited(limit_s: float, error: Callable[[], DisttrainError]) -> Iterator[None]:
        late.append(error)
        yield
        late.pop()

    def stuck(*given: Any, **more: Any) -> None:
        raise InterruptedError(str(late[-1]()))

    monkeypatch.setattr(groups, "within", limited)
    check_groups(grid, PLACE, CPU, 5.0)
    monkeypatch.setattr(dist, "all_reduce", stuck)
    with pytest.raises(
        InterruptedError, match=r'group "world" \(1 ranks\)(.|\n)*not connected within 5 s'
    ):
        check_groups(grid, PLACE, CPU, 5.0)


def test_nobody_waits_in_a_group_for_ranks_that_do_not_come(
    grid: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda group: 4)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1, 2, 3])
    monkeypatch.setattr(
        dist, "all_reduce", lambda *given, **more: pytest.fail("NCCL would hang here")
    )
    grid.groups["world"].get_group_store().set("here/3", "")
    with pytest.raises(DisttrainError) as caught:
        check_groups(grid, PLACE, CPU, 0.2)
    assert caught.value.what == '2 of 4 ranks did not join the group "world" within 0.2 s: 0, 2'
    assert caught.value.why.startswith("rank 1 waited; unit llm, stage 0, host ")


def test_a_roll_ends_when_all_have_come() -> None:
    store, ranks = dist.HashStore(), [2, 5, 7]
    with ThreadPoolExecutor(len(ranks)) as threads:
        assert (
            list(threads.map(lambda rank: call_roll(store, ranks, rank, 30.0), ranks)) == [[]] * 3
        )


def test_messages_are_tried_between_the_ranks_that_exchange_rows(
    grid: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over all groups of a branched plan each send has its receive, in one batch of each rank."""
    graph, name = branched(), "messages"
    sent, awaited = Counter[tuple[object, ...]](), Counter[tuple[object, ...]]()

    def batched(operations: list[Any]) -> list[Any]:
        for one in operations:
            if one.op is dist.isend:
                sent[way, int(one.tensor), one.peer] += 1
            else:
                awaited[way, one.peer, rank] += 1
                one.tensor.fill_(one.peer)
        return []

    monkeypatch.setattr(dist, "batch_isend_irecv", batched)
    monkeypatch.setattr(
        dist,
        "P2POp",
        lambda op, tensor, peer, group: SimpleNamespace(op=op, tensor=tensor, peer=peer),
    )
    monkeypatch.setattr(dist, "all_reduce", lambda *given, **more: pytest.fail("a ring"))
    grid.groups = {name: grid.groups["world"]}
    for one in communicators(graph, messages=True):
        if not one.ways:
            continue
        way, *_ = one.ways
        for rank in one.ranks:
            sends = rank in graph.stages[way[0]].ranks
            grid.exchanges = {name: (sends, peers(graph, way, rank))}
            assert list(check_groups(grid, graph.coords(rank), CPU, 5.0)) == [name]
    assert sent == awaited and max(sent.values()) == 1
    over = {
        cut: {(here, there) for way, here, there in sent if way == cut} for cut in ((0, 1), (1, 3))
    }
    eye, last_eye, _, llm, *_ = (stage.ranks for stage in graph.stages)
    assert over[0, 1] == set(zip(eye, last_eye, strict=True))
    assert over[1, 3] == set(itertools.product(last_eye, llm))


def test_what_arrives_wrongly_is_named(grid: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda operations: [])
    grid.exchanges = {"world": (False, [7])}
    monkeypatch.setattr(dist, "P2POp", lambda *given: given)
    with pytest.raises(DisttrainError) as caught:
        check_groups(grid, PLACE, CPU, 5.0)
    assert caught.value.what == 'The group "world" of rank 1 gives wrong results over gloo'
    assert "should give [7.0]; they gave [1.0]" in caught.value.why


def test_cp_groups_exchange_and_full_devices_are_no_lost_peers(
    grid: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid.cp = SimpleNamespace(ranks=grid.groups["world"])
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [1])
    assert len(check_groups(grid, PLACE, CPU, 5.0)) == 2
    full = dist.DistBackendError("NCCL error\nCuda failure 2 'out of memory'")

    def broken(*given: Any, **more: Any) -> None:
        raise full

    monkeypatch.setattr(dist, "all_to_all_single", broken)
    with pytest.raises(dist.DistBackendError) as caught:
        check_groups(grid, PLACE, CPU, 5.0)
    assert caught.value is full

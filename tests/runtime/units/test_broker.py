"""Buffers of what was sent are held until it has left, and no longer; each direction has its own
communicator."""

import weakref
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from disttrain_cli.costs.memory import SENT_SLOTS
from disttrain_cli.costs.nccl import CONTEXT_CTAS, MESSAGE_CTAS, WORLD_CTAS
from disttrain_cli.data.slots import Slot, replica_items, slot_items
from disttrain_cli.models.layer import TensorSpec
from disttrain_cli.runtime.messages.hollow import alone
from disttrain_cli.runtime.units import communicators
from disttrain_cli.runtime.units.broker import Broker
from disttrain_cli.runtime.units.grid import UnitGrid
from disttrain_cli.spec.heads import ImageInput
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.plan import Layout, UnitPlan
from disttrain_cli.spec.stage_graph import StageGraph, stage_graph
from tests.runtime.factory import unit

INPUTS = ModelInputs(
    llm="llm",
    vocabulary=272,
    sequence_length=16,
    heads=[ImageInput(module="enc", patch_px=8, merge=1, max_pixels=4096)],
)
ROWS = TensorSpec("rows", "image", "patches", (3,))


def graph_of(*units: UnitPlan) -> StageGraph:
    layout = Layout(
        global_batch_size=1,
        microbatch_size=1,
        microbatches=1,
        gpus_used=sum(u.gpus for u in units),
        units=list(units),
    )
    return stage_graph(layout, units[-1].modules[0])


def slot(images: int = 4) -> Slot:
    none = np.zeros(0, dtype=np.int64)
    own = [replica_items(image=np.arange(images))]
    return Slot(
        inputs=INPUTS,
        sequences=none,
        sequence_tokens=none,
        sequence_length_sq=none,
        items={"image": slot_items(np.zeros(images, dtype=np.int64))},
        replicas={"all": own},
    )


class Work:
    """A message that leaves when it is told to."""

    def __init__(self) -> None:
        self.left, self.waited = False, False

    def is_completed(self) -> bool:
        return self.left

    def wait(self) -> bool:
        self.waited = True
        return True


@pytest.fixture
def works(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Of every batch that is sent over the fake backend, its work and weak references to its
    buffers."""
    sent: list[Any] = []

    def batch(operations: list[dist.P2POp]) -> list[Work]:
        sent.append((Work(), [weakref.ref(one.tensor) for one in operations], operations[0].group))
        return [sent[-1][0]]

    monkeypatch.setattr(dist, "batch_isend_irecv", batch)
    with alone(0, 2):
        yield sent


def broker(sends: list[TensorSpec], receives: list[TensorSpec]) -> Broker:
    graph = graph_of(unit("all", ["m"], [1, 1]))
    return Broker(
        graph.coords(0), graph.stages[1], sends, receives, torch.float32, torch.device("cpu")
    )


def held(sent: list[Any]) -> list[bool]:
    """Of every batch, whether any buffer of it is still there."""
    return [any(buffer() is not None for buffer in buffers) for _, buffers, _ in sent]


def test_sent_buffers_are_let_go_of_in_turn(
    works: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # gloo: nothing else lets go of them
    monkeypatch.setattr(communicators, "in_order", lambda: False)
    link = broker([ROWS], [])
    for _ in range(3):
        link.send(slot(), {"rows": torch.ones(4, 3)})
    assert held(works) == [True] * 3
    works[1][0].left = True  # the first has not: what leaves, leaves in order
    link.send(slot(), {"rows": torch.ones(4, 3)})
    assert held(works) == [True] * 4 and not any(work.waited for work, *_ in works)
    works[0][0].left = True
    link.send(slot(), {"rows": torch.ones(4, 3)})
    assert held(works) == [False, False, True, True, True]
    assert [work.waited for work, *_ in works] == [True, True, False, False, False]
    assert link.drain() and held(works) == [False] * 5 and all(work.waited for work, *_ in works)
    assert not link.drain()


def test_over_nccl_no_more_slots_are_held_than_the_memory_model_counts(works: list[Any]) -> None:
    """The host may be far ahead of a device that has sent nothing yet."""
    link = broker([ROWS], [])
    for number in range(6):
        link.send(slot(), {"rows": torch.ones(4, 3)})
        assert sum(held(works)) == min(number + 1, SENT_SLOTS)
    assert [work.waited for work, *_ in works] == [True] * (6 - SENT_SLOTS) + [False] * SENT_SLOTS


def test_receives_let_go_of_sent_buffers_too(works: list[Any]) -> None:
    link = broker([ROWS], [ROWS])
    now = slot()
    link.send(now, {"rows": torch.ones(4, 3)})
    works[0][0].left = True
    link.receive(now)
    assert held(works)[0] is False


def test_a_slot_whose_routes_are_known_is_held(works: list[Any]) -> None:
    """Routes are found by the slot's id, which after an evaluation another slot could have: nobody
    drained the last stage's broker then."""
    link = broker([], [ROWS])
    now = slot()
    link.receive(now)
    held_slot = weakref.ref(now)
    del now
    assert held_slot() is not None
    link.drain()
    assert held_slot() is None


def test_a_slot_without_rows_sends_nothing(works: list[Any]) -> None:
    link = broker([ROWS], [])
    assert (
        link.send(slot(0), {"rows": torch.ones(0, 3)}) == (0, -1)
        and works == []
        and not link.pending
    )


UNITS = (
    unit("eye", ["eye"], [1, 1], 3),
    unit("ear", ["ear"], [1], 2),
    unit("llm", ["llm"], [2, 2], 2, tp=4),
    unit("draw", ["draw"], [1]),
)


def branched() -> StageGraph:
    layout = Layout(
        global_batch_size=1,
        microbatch_size=1,
        microbatches=1,
        gpus_used=sum(u.gpus for u in UNITS),
        units=list(UNITS),
    )
    return stage_graph(layout, "llm")


def test_a_rank_is_in_few_communicators() -> None:
    graph = branched()
    for rank in range(graph.world_size):
        place = graph.coords(rank)
        with alone(rank, graph.world_size):
            grid = UnitGrid(graph, place)
            sizes = [dist.get_world_size(group) for group in grid.groups.values()]
            here, stage = place.stage.number, place.stage
            cuts = len(stage.before) + len(stage.after)
            assert sum(size > 1 for size in sizes) == (
                1 + (stage.tp > 1) + (stage.unit.dp > 1) + 2 * cuts
            )
            assert set(grid.ways) == {
                way
                for other in (*stage.before, *stage.after)
                for way in ((here, other), (other, here))
            }
            for (sender, taker), group in grid.ways.items():
                assert set(dist.get_process_group_ranks(group)) == {
                    *graph.stages[sender].ranks,
                    *graph.stages[taker].ranks,
                }
    assert len({*grid.groups.values()}) == len(grid.groups)


def test_gloo_sends_over_the_world() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        grid = UnitGrid(
            graph_of(unit("all", ["m"], [1])), graph_of(unit("all", ["m"], [1])).coords(0)
        )
        assert (
            not communicators.in_order()
            and not grid.ways
            and list(grid.groups) == ["world", "replicas of all stage 0, TP rank 0"]
        )
    finally:
        dist.destroy_process_group()


def test_neighbours_along_a_line_do_not_wait_for_a_chain() -> None:
    """A stage makes the communicators of one cut while its other neighbour makes those of the next
    but one."""
    line = graph_of(unit("all", ["m"], [1] * 8))
    ways = [way for one in communicators.communicators(line, messages=True) for way in one.ways]
    assert (
        ways[:4] == [(0, 1), (1, 0), (2, 3), (3, 2)]
        and ways[8:10] == [(1, 2), (2, 1)]
        and len(ways) == 14
    )


LARGE = (
    unit("eye", ["eye"], [1, 1], 108),
    unit("llm", ["llm"], [1] * 5, 48, tp=4),
    unit("draw", ["draw"], [1], 120),
)


@pytest.mark.parametrize(
    ("places", "count", "most"),
    [
        (branched(), 26, 8),
        (graph_of(unit("all", ["m"], [1] * 8, 2, tp=2)), 46, 6),
        (graph_of(*LARGE), 277, 6),
    ],
)
def test_communicators_are_made_in_as_few_rounds_as_a_rank_has(
    places: StageGraph, count: int, most: int
) -> None:
    """Those that share no rank are made side by side, each as soon as all of its ranks have made
    their earlier ones."""
    made, own = dict.fromkeys(range(places.world_size), 0), Counter[int]()
    found = list(communicators.communicators(places, messages=True))
    for one in found:
        made |= dict.fromkeys(one.ranks, 1 + max(made[rank] for rank in one.ranks))
        own.update(one.ranks)
    assert (len(found), max(made.values()), max(own.values())) == (count, most, most)


def test_few_channels_for_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bounds are those of the price; what has none keeps NCCL's own options."""

    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.urgent, self.config = is_high_priority_stream, SimpleNamespace()

    kinds = ("world", "messages", "context parallel", "data parallel", "tensor parallel")
    assert all(communicators.nccl_options(kind, "nccl") is None for kind in kinds)  # a CPU build
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    found = [communicators.nccl_options(kind, "nccl") for kind in kinds]
    assert [one and (one.config.min_ctas, one.config.max_ctas, one.urgent) for one in found] == [
        (WORLD_CTAS, WORLD_CTAS, False),
        (MESSAGE_CTAS, MESSAGE_CTAS, True),
        (CONTEXT_CTAS, CONTEXT_CTAS, True),
        None,
        None,
    ]
    assert all(communicators.nccl_options(kind, "gloo") is None for kind in kinds)

"""What arrives over a cut, whatever the DP and TP of both sides, is what a dense reference has."""

from collections import defaultdict, deque
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from disttrain_cli.data.slots import ReplicaItems, Slot, replica_items, slot_items
from disttrain_cli.models.division import own_rows
from disttrain_cli.models.group import Group
from disttrain_cli.models.layer import TensorSpec
from disttrain_cli.runtime.units import communicators
from disttrain_cli.runtime.units.broker import Broker
from disttrain_cli.spec.heads import ImageInput
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.plan import Layout
from disttrain_cli.spec.stage_graph import RankCoords, stage_graph
from tests.runtime.factory import unit

INPUTS = ModelInputs(
    llm="llm",
    vocabulary=272,
    sequence_length=16,
    heads=[ImageInput(module="eye", patch_px=8, merge=1, max_pixels=4096)],
)
#: A tensor with a row per patch, of two numbers: divided over a TP group's ranks, like its rows.
SPEC = TensorSpec("rows", "image", "tokens", (2,), split=True)


class Operation(NamedTuple):
    """In place of `dist.P2POp`, which wants a process group."""

    op: Any
    tensor: Tensor
    peer: int
    group: Any
    tag: int


class Mailbox:
    """Point-to-point in one process: messages of two ranks pair by their order."""

    def __init__(self) -> None:
        self.rank = -1  # who calls
        self.letters: dict[tuple[int, int], deque[Tensor]] = defaultdict(deque)

    def batch(self, operations: list[Operation]) -> list[Any]:
        return [self._post(one.op, one.tensor, one.peer) for one in operations]

    def _post(self, what: Any, tensor: Tensor, peer: int) -> Any:
        if what is dist.isend:
            self.letters[self.rank, peer].append(tensor.clone())
            return mock.Mock(wait=lambda: True, is_completed=lambda: True)
        key = (peer, self.rank)
        return mock.Mock(wait=lambda: tensor.copy_(self.letters[key].popleft()))


def drawn_slot(images: int, sizes: dict[str, int], random: np.random.Generator) -> Slot:
    """A slot whose images belong to replicas of `sizes` at random, in a random order."""
    none = np.zeros(0, dtype=np.int64)

    def shares(dp: int) -> list[ReplicaItems]:
        owner = random.integers(0, dp, images)
        return [
            replica_items(image=random.permutation(np.flatnonzero(owner == replica)))
            for replica in range(dp)
        ]

    return Slot(
        inputs=INPUTS,
        sequences=none,
        sequence_tokens=none,
        sequence_length_sq=none,
        items={
            "image": slot_items(
                np.zeros(images, dtype=np.int64), random.integers(1, 4, size=(images, 2))
            )
        },
        replicas={name: shares(dp) for name, dp in sizes.items()},
    )


@settings(max_examples=60, deadline=None)
@given(
    *(st.integers(1, 4) for _ in range(4)),
    st.lists(st.integers(0, 9), min_size=1, max_size=4),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_rows_and_gradients_arrive_where_a_dense_reference_has_them(
    dp: int, tp: int, other_dp: int, other_tp: int, images: list[int], ordered: bool, seed: int
) -> None:
    random, box = np.random.default_rng(seed), Mailbox()
    units = [unit("eye", ["eye"], [1], dp, tp), unit("llm", ["llm"], [1], other_dp, other_tp)]
    graph = stage_graph(
        Layout(
            global_batch_size=1,
            microbatch_size=1,
            microbatches=1,
            gpus_used=sum(one.gpus for one in units),
            units=units,
        ),
        "llm",
    )
    slots = [drawn_slot(count, {"eye": dp, "llm": other_dp}, random) for count in images]
    # every row of every image is different, in every slot
    dense = [
        [torch.from_numpy(random.normal(size=(int(n), 2))) for n in slot.rows("image", "tokens")]
        for slot in slots
    ]

    def rows(number: int, coords: RankCoords) -> Tensor:
        """The reference: this rank's rows of a slot."""
        items = slots[number].replicas[coords.unit.name][coords.replica]["image"]
        whole = torch.cat(
            [torch.zeros(0, 2, dtype=torch.float64), *(dense[number][item] for item in items)]
        )
        return whole[slice(*own_rows(len(whole), coords.unit.tp, coords.tp_rank))]

    def broker(coords: RankCoords) -> Broker:
        group = Group(None, coords.unit.tp, coords.tp_rank) if coords.unit.tp > 1 else None
        neighbour = graph.stages[1 - coords.stage.number]
        specs = [SPEC]
        return Broker(coords, neighbour, specs, specs, torch.float64, torch.device("cpu"), group)

    with (
        mock.patch.object(dist, "P2POp", Operation),
        mock.patch.object(dist, "batch_isend_irecv", box.batch),
        mock.patch("disttrain_cli.runtime.units.broker.wire", lambda device: device),
        mock.patch.object(communicators, "in_order", lambda: ordered),
    ):
        ranks = [graph.coords(rank) for rank in range(graph.world_size)]
        brokers = {coords.rank: broker(coords) for coords in ranks}
        for sender, taker in ((0, 1), (1, 0)):  # activations, then gradients on the same routes
            for coords in ranks:
                box.rank = coords.rank
                if coords.stage.number == sender:
                    for number, slot in enumerate(slots):
                        brokers[coords.rank].send(slot, {"rows": rows(number, coords)})
            for coords in ranks:
                box.rank = coords.rank
                if coords.stage.number == taker:
                    brokers[coords.rank].expect(slots)
                    for number, slot in enumerate(slots):
                        arrived, _, _ = brokers[coords.rank].receive(slot)
                        assert torch.equal(arrived["rows"], rows(number, coords))
            assert not any(box.letters.values())  # whatever was sent has arrived

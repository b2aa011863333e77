"""What a TP group's ranks send overlapped with GEMMs goes together, whatever the rows."""

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from disttrain_cli.models.division import own_rows
from disttrain_cli.models.group import Group
from disttrain_cli.models.layer import Batch
from disttrain_cli.models.tensor_parallel import join, shard
from disttrain_cli.runtime.messages.hollow import alone
from disttrain_cli.runtime.messages.proof import faults
from disttrain_cli.runtime.messages.recorder import Recorder
from disttrain_cli.runtime.messages.records import SEND, Record
from tests.cases import first_fast
from tests.models.overlapped_worker import WIDTH, Toy


def _record(rank: int, tp: int, rows: int, recompute: bool, symmetric: bool = False) -> Record:
    """What a rank sends in a forward and a backward."""
    with alone(rank, tp), Recorder(rank) as recorder, torch.device("meta"):
        group = Group(dist.group.WORLD, tp, rank, overlap=True, symmetric=symmetric)
        layer = shard(Toy(True), tp=tp, rank=rank)
        join(layer, group)
        own = torch.ones(rows, WIDTH)[group.local_rows(rows)].requires_grad_()
        given = ({"hidden": own}, Batch(cache={"rows": range(rows)}))
        made = checkpoint(layer, *given, use_reentrant=False) if recompute else layer(*given)
        made["hidden"].sum().backward()
    return recorder.record


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("tp", "rows"), first_fast([(2, 1), (2, 6), (3, 7), (4, 2), (4, 9), (4, 16), (6, 7)], 5)
)
def test_chunks_that_are_passed_on_go_together(tp: int, rows: int, recompute: bool) -> None:
    records = [_record(rank, tp, rows, recompute) for rank in range(tp)]
    assert faults(records) == []
    shapes = {one.shape[0] for record in records for one in record.operations if one.kind == SEND}
    owned = [own_rows(rows, tp, rank) for rank in range(tp)]
    assert shapes == {stop - start for start, stop in owned if stop > start}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("tp", "rows"), [(2, 6), (3, 9), (4, 16)])
def test_a_fused_operator_is_one_collective(tp: int, rows: int, recompute: bool) -> None:
    records = [_record(rank, tp, rows, recompute, symmetric=True) for rank in range(tp)]
    assert faults(records) == []
    kinds = [one.kind for one in records[0].operations]
    both = ["all_gather_matmul", "matmul_reduce_scatter"]
    again = ["all_gather_matmul"] * recompute  # up to where the last product begins
    assert [kind for kind in kinds if "matmul" in kind] == [*both, *again, *both]
    assert len(kinds) == 5 + recompute  # and own rows are gathered again


def test_a_rank_that_alone_goes_round_the_ring_is_found() -> None:
    """Why ranks vote."""
    records = [_record(rank, 2, 6, False, symmetric=rank == 0) for rank in range(2)]
    assert faults(records)


def test_a_rank_that_passes_on_the_other_way_is_found() -> None:
    """The proof tells a ring that does not close."""
    records = []
    for rank in range(3):
        with alone(rank, 3), Recorder(rank) as recorder:
            group = Group(dist.group.WORLD, 3, rank if rank else 2)
            chunk = torch.ones(2, WIDTH)
            group.pass_on(chunk, torch.empty_like(chunk)).wait()
        records.append(recorder.record)
    assert faults(records)

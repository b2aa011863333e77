"""Products of rows that travel through memory that a TP group's devices share.

All forms of layers go this way in `test_overlapped`.
"""

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist

from disttrain_cli.models import symmetric
from disttrain_cli.models.group import Group
from disttrain_cli.runtime.launching.launch import launch
from disttrain_cli.runtime.launching.process import joined
from tests.models.overlapped_worker import HOW as EVERY_HOW
from tests.models.overlapped_worker import toy_checks
from tests.models.symmetric_worker import HOW, VOTES
from tests.runtime.dryrun.on_fake_cuda import on_fake_cuda


@pytest.mark.slow
def test_ranks_agree_and_compute_what_they_do_when_they_wait(tmp_path):  # type: ignore[no-untyped-def]
    payload = {"out": str(tmp_path), "runs": []}
    launch(2, "tests.models.symmetric_worker:ranks", payload, tmp_path / "logs", timeout_s=120)
    for rank in range(2):
        said = json.loads((tmp_path / f"{rank}.json").read_text())
        assert said == dict.fromkeys(("without", *VOTES, *HOW), "")


def test_what_goes_through_it() -> None:
    group = Group(None, 4, 0, overlap=True, symmetric=True)
    assert symmetric.fits(8, 64, torch.bfloat16, group)
    assert symmetric.fits(8, 4, torch.float32, group)
    assert not symmetric.fits(6, 64, torch.bfloat16, group)  # own rows of different length
    assert not symmetric.fits(8, 4, torch.bfloat16, group)  # rows of 8 bytes
    assert not symmetric.fits(8, 64, torch.bfloat16, Group(None, 4, 0, overlap=True))


def shapes() -> list[Any]:
    """Of what PyTorch's operators make on a fake device, and of ours there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    name, found = dist.group.WORLD.group_name, list[Any]()
    own, given = (torch.empty(rows, 32, device="cuda", dtype=torch.bfloat16) for rows in (8, 64))
    factors = [torch.empty(columns, 32, device="cuda", dtype=own.dtype).t() for columns in (48, 16)]
    for gather in (symmetric._gather, torch.ops.disttrain.all_gather_matmul):
        for keep in (False, True):
            whole, made = gather(own, factors, name, 4, keep)
            assert all(one.device.type == "cuda" and one.dtype == own.dtype for one in made)
            found.append([whole is not None and list(whole.shape), *(list(o.shape) for o in made)])
    for scatter in (symmetric._scatter, torch.ops.disttrain.matmul_reduce_scatter):
        found.append(list(scatter([given], factors[:1], name, 4).shape))
    return found


@pytest.mark.slow
def test_operators_take_fake_tensors_and_make_what_pytorchs_make() -> None:
    *gathers, theirs, ours = on_fake_cuda(shapes)
    assert (
        gathers[:2] == gathers[2:] == [[False, [32, 48], [32, 16]], [[32, 32], [32, 48], [32, 16]]]
    )
    assert theirs == ours == [16, 48]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("how", EVERY_HOW)
def test_a_group_of_one_on_a_gpu(how, monkeypatch):  # type: ignore[no-untyped-def]
    """One device shares memory with itself: the operators, their memory and barriers are real."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with joined(torch.device("cuda", 0), 60.0, store=dist.HashStore()) as device:
        group = symmetric.agreed(Group(dist.group.WORLD, 1, 0, overlap=True), device)
        assert group is not None and group.symmetric
        for name, check in toy_checks(group, device).items():
            if f", {how}, " in name:
                check()

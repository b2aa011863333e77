"""Which device a rank takes, and that ranks share none, over the ways in which ranks are given
devices."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from disttrain_cli.errors import DisttrainError, SpecError
from disttrain_cli.runtime.launching.devices import (
    check_devices,
    device_index,
    identity,
    rank_device,
    visible_devices,
)
from disttrain_cli.runtime.launching.process import (
    CUDA_ENVIRONMENT,
    SHARED_DEVICE,
    set_cuda_environment,
)
from disttrain_cli.spec.runfile.cluster import ClusterSpec


@pytest.mark.parametrize(
    ("environment", "visible", "index"),
    [
        ({"LOCAL_RANK": "5"}, 8, 5),
        (
            {"LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "8", "CUDA_VISIBLE_DEVICES": "5"},
            1,
            0,
        ),  # --gpus-per-task=1
        (
            {"LOCAL_RANK": "5", "CUDA_VISIBLE_DEVICES": "MIG-0a,MIG-0b"},
            1,
            0,
        ),  # CUDA shows one part of a device
        ({"LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c,GPU-d"}, 4, 3),
        ({"LOCAL_RANK": "5"}, 2, 1),  # shared
        ({"SLURM_LOCALID": "3"}, 4, 3),
        ({"LOCAL_RANK": "1", "SLURM_LOCALID": "3"}, 4, 1),  # torchrun started by srun
        ({"LOCAL_RANK": "0"}, 1, 0),
    ],
)
def test_a_rank_takes_the_device_of_its_number(
    environment: dict[str, str], visible: int, index: int
) -> None:
    assert device_index(environment, visible) == index


@pytest.mark.parametrize(
    "environment",
    [{}, {"RANK": "3"}, {"LOCAL_RANK": ""}, {"LOCAL_RANK": "-1"}, {"LOCAL_RANK": "two"}],
)
def test_a_rank_without_a_number_is_told(environment: dict[str, str]) -> None:
    with pytest.raises(SpecError, match="does not know its number") as caught:
        device_index(environment, 8)
    assert "LOCAL_RANK" in caught.value.why and "disttrain_cli.emit" in caught.value.next_step


@pytest.mark.parametrize(
    "environment", [{"LOCAL_RANK": "0"}, {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": ""}]
)
def test_no_visible_device_is_told(environment: dict[str, str]) -> None:
    with pytest.raises(DisttrainError, match="There is no CUDA device on") as caught:
        device_index(environment, 0)
    assert ("CUDA_VISIBLE_DEVICES: ''" in caught.value.why) == (
        "CUDA_VISIBLE_DEVICES" in environment
    )


@pytest.mark.parametrize(
    "found",
    [
        [("a", "01:00"), ("a", "02:00"), ("b", "01:00"), ("b", "02:00")],  # equal on two hosts
        [("a", "01:00 a-rank-0"), ("a", "01:00 a-rank-1")],  # shared, as hosts of their own
        [("a", ""), ("a", "")],
        [("a", "01:00")],
    ],
)
def test_ranks_have_a_device_each_or_compute_on_cpus(found: list[tuple[str, str]]) -> None:
    check_devices(found)


def test_a_device_that_two_ranks_were_given_is_named_before_nccl_sees_it() -> None:
    found = [("a", f"0000:{rank % 2:02x}:00") for rank in range(12)] + [("b", "0000:01:00")]
    with pytest.raises(DisttrainError, match="Several ranks have the same CUDA device") as caught:
        check_devices(found)
    assert caught.value.why == (
        "ranks 0, 2, 4, 6, … on a: 0000:00:00\nranks 1, 3, 5, 7, … on a: 0000:01:00"
    )
    assert "cluster.ranks_per_gpu" in caught.value.next_step


def test_a_device_is_known_by_its_place_and_where_torch_does_not_tell_it_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def known(**what: Any) -> None:
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="a-b", **what)
        )

    known(pci_domain_id=1, pci_bus_id=0xC7, pci_device_id=0)
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    assert identity(torch.device("cuda", 0)) == "0001:c7:00"
    monkeypatch.setenv("NCCL_HOSTID", "a-rank-1")
    assert identity(torch.device("cuda", 0)) == "0001:c7:00 a-rank-1"
    monkeypatch.delenv("NCCL_HOSTID")
    known()
    assert identity(torch.device("cuda", 0)) == "GPU-a-b"
    assert identity(torch.device("cpu")) == ""


def test_a_rank_makes_its_device_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    current = list[torch.device]()
    monkeypatch.setenv("LOCAL_RANK", "6")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert rank_device("cuda") == torch.device("cuda", 6) and current == [torch.device("cuda", 6)]
    assert rank_device("cpu") == torch.device("cpu") and len(current) == 1


@pytest.mark.parametrize(
    ("kind", "left_out", "environment", "visible"),
    [
        ("cuda", [], {}, None),
        ("cpu", [1], {}, None),
        ("cuda", [1], {}, "0,2,3"),
        ("cuda", [0, 2], {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c,GPU-d"}, "GPU-b,GPU-d"),
    ],
)
def test_devices_that_a_plan_leaves_out_are_hidden(
    kind: str, left_out: list[int], environment: dict[str, str], visible: str | None
) -> None:
    hidden = visible_devices(kind, 4, left_out, environment)
    assert hidden == ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})


def test_cuda_ranks_start_kernels_in_order_on_queues_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT", raising=False)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # the user's own stays
    said = set_cuda_environment()
    assert said == "NCCL_LAUNCH_ORDER_IMPLICIT=1 CUDA_DEVICE_MAX_CONNECTIONS=1"
    assert os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] == "1"
    monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT")


def test_ranks_that_share_a_gpu_are_hosts_of_their_own_for_nccl(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (*CUDA_ENVIRONMENT, *SHARED_DEVICE, "NCCL_HOSTID"):
        monkeypatch.setenv(name, "")  # so that what is set is taken back
        monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_MAX_CTAS", "4")  # the user's own stays
    hosts = set()
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.delenv("NCCL_HOSTID", raising=False)
        said = set_cuda_environment(3)
        assert "NCCL_MAX_CTAS=4" in said and "NCCL_P2P_DISABLE=1" in said
        hosts.add(os.environ["NCCL_HOSTID"])
    assert len(hosts) == 3


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"nodes": 2, "gpus_per_node": 4}, "allowed: 1 node"),
        ({"gpus_per_node": 3}, "multiples of ranks_per_gpu"),
        ({"gpus_per_node": 4, "memory_gib": 40}, "allowed: without"),
        ({"gpus_per_node": 4, "device": "cpu"}, "allowed: cuda"),
    ],
)
def test_gpus_are_shared_evenly_on_one_machine_or_refused(
    changes: dict[str, Any], reason: str
) -> None:
    assert ClusterSpec(gpus_per_node=4, ranks_per_gpu=2).ranks_per_gpu == 2
    with pytest.raises(ValueError, match=reason):
        ClusterSpec.model_validate({"ranks_per_gpu": 2} | changes)

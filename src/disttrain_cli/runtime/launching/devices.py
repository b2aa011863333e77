"""CUDA device of a rank, and the check that no two ranks have the same one."""

from __future__ import annotations

import os
import socket
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from disttrain_cli.calls import argument, call
from disttrain_cli.errors import DisttrainError, SpecError

if TYPE_CHECKING:
    import torch

MOST_NAMED = 4


def local_rank(environment: Mapping[str, str]) -> int:
    """Return this rank's index on its host, as set by torchrun, `launch` or srun.

    Raises:
        SpecError: it is not set, or no number.
    """
    number = environment.get("LOCAL_RANK") or environment.get("SLURM_LOCALID") or ""
    if not number.isdigit():
        raise SpecError(
            "A rank does not know its number on its host",
            f"LOCAL_RANK: {environment.get('LOCAL_RANK', 'not set')}, SLURM_LOCALID: "
            f"{environment.get('SLURM_LOCALID', 'not set')}",
            f"Start the ranks with the scripts of: {call('emit', kind='slurm')}, or"
            f" {argument('kind', 'torchrun')}",
        )
    return int(number)


def device_index(environment: Mapping[str, str], visible: int) -> int:
    """Return the index of a rank's CUDA device among the `visible` ones.

    Where every rank sees all devices of the host, it is the local rank. Where a rank sees fewer
    devices than there are ranks, either they are its own (Slurm's --gpus-per-task) or ranks share
    them: `check_devices` distinguishes these two cases.

    Raises:
        DisttrainError: no device is visible.
        SpecError: the local rank is unknown.
    """
    if visible < 1:
        named = environment.get("CUDA_VISIBLE_DEVICES")
        raise DisttrainError(
            f"There is no CUDA device on {socket.gethostname()}",
            (
                "the profile was measured on one"
                if named is None
                else f"CUDA_VISIBLE_DEVICES: {named!r}"
            ),
            f"Start the ranks where the devices are, or profile again: {call('profile')}",
        )
    return local_rank(environment) % visible


def visible_devices(
    kind: str, count: int, left_out: Sequence[int], environment: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that hide the devices of this host that a plan excludes.

    Empty if it excludes none, or ranks compute on the CPU.

    Args:
        count: number of the host's devices.
        left_out: indices of the excluded devices.
    """
    if kind != "cuda" or not left_out:
        return {}
    named = environment.get("CUDA_VISIBLE_DEVICES")
    devices = [str(number) for number in range(count)] if named is None else named.split(",")
    kept = [device for number, device in enumerate(devices) if number not in left_out]
    return {"CUDA_VISIBLE_DEVICES": ",".join(kept)}


def rank_device(kind: str) -> torch.device:
    """Return this rank's device of the profile's kind; make a CUDA device the current one.

    Raises:
        DisttrainError: there is none.
    """
    import torch

    from disttrain_cli.models.host import use_cuda

    if kind == "cpu":
        return torch.device("cpu")
    return use_cuda(device_index(os.environ, torch.cuda.device_count()))


def identity(device: torch.device) -> str:
    """Return what NCCL knows a CUDA device by on its host; "" for a CPU.

    It does not depend on which devices a process sees. A part of a device (MIG) counts as the
    device: NCCL does not distinguish them either. NCCL takes ranks with different NCCL_HOSTID for
    ranks of different hosts.
    """
    if device.type != "cuda":
        return ""
    import torch

    known, host = torch.cuda.get_device_properties(device), os.environ.get("NCCL_HOSTID", "")
    if not hasattr(known, "pci_domain_id"):
        return f"GPU-{known.uuid} {host}".rstrip()
    place = f"{known.pci_domain_id:04x}:{known.pci_bus_id:02x}:{known.pci_device_id:02x}"
    return f"{place} {host}".rstrip()


def check_devices(devices: Sequence[tuple[str, str]]) -> None:
    """Check that every rank has a CUDA device of its own, or computes on a CPU.

    Args:
        devices: (host, identity of the device) of every rank, in order of ranks.

    Raises:
        DisttrainError: ranks share a device, which NCCL refuses.
    """
    takers = defaultdict(list)
    for rank, device in enumerate(devices):
        takers[device].append(rank)
    shared = {device: ranks for device, ranks in takers.items() if len(ranks) > 1 and device[1]}
    if shared:
        lines = [
            f"ranks {', '.join(map(str, ranks[:MOST_NAMED]))}{', …' * (len(ranks) > MOST_NAMED)} on"
            f" {host}: {name}"
            for (host, name), ranks in list(shared.items())[:MOST_NAMED]
        ]
        raise DisttrainError(
            "Several ranks have the same CUDA device",
            "\n".join(lines),
            "Start as many ranks on a host as it has devices (cluster.gpus_per_node, the hostfile's"
            " slots), and let each see all of them or one of its own (CUDA_VISIBLE_DEVICES). To"
            " test several ranks on one device, slowly: set cluster.ranks_per_gpu.",
        )

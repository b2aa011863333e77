"""Which CUDA device a rank computes on, and whether the ranks of a job can use NCCL, which wants a
device for each."""

from __future__ import annotations

import os
import socket
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from disttrain_cli.calls import argument, call
from disttrain_cli.errors import DisttrainError, SpecError

if TYPE_CHECKING:
    import torch

Backend = Literal["nccl", "gloo"]
MOST_NAMED = 4


def local_rank(environment: Mapping[str, str]) -> int:
    """This rank's number among those of its host, as torchrun, our starter or srun tell it.

    Raises:
        SpecError: nobody tells it, or it is no number.
    """
    told = environment.get("LOCAL_RANK") or environment.get("SLURM_LOCALID") or ""
    if not told.isdigit():
        raise SpecError(
            "A rank does not know its number on its host",
            f"LOCAL_RANK: {environment.get('LOCAL_RANK', 'not set')}, SLURM_LOCALID: "
            f"{environment.get('SLURM_LOCALID', 'not set')}",
            f"Start the ranks with the scripts of: {call('emit', kind='slurm')}, or"
            f" {argument('kind', 'torchrun')}",
        )
    return int(told)


def device_index(environment: Mapping[str, str], visible: int) -> int:
    """Which of the `visible` CUDA devices a rank takes, as all ranks of a host count theirs.

    Where every rank sees all devices of the host, it is the one of the rank's own number. Where a
    rank sees fewer than there are ranks, either they are its own (Slurm's --gpus-per-task) or ranks
    share them: `choose_backend` tells these two apart.

    Raises:
        DisttrainError: no device is visible.
        SpecError: the rank does not know its number.
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
    """What hides the devices of this host that a plan leaves out from its ranks; nothing where it
    leaves none out, or ranks compute on the CPU.

    Args:
        count: of the host's devices.
    """
    if kind != "cuda" or not left_out:
        return {}
    named = environment.get("CUDA_VISIBLE_DEVICES")
    devices = [str(number) for number in range(count)] if named is None else named.split(",")
    kept = [device for number, device in enumerate(devices) if number not in left_out]
    return {"CUDA_VISIBLE_DEVICES": ",".join(kept)}


def rank_device(kind: str) -> torch.device:
    """The device of this rank, of a profile's kind of device; a CUDA device is made the current
    one.

    Raises:
        DisttrainError: there is none.
    """
    import torch

    from disttrain_cli.models.host import use_cuda

    if kind == "cpu":
        return torch.device("cpu")
    return use_cuda(device_index(os.environ, torch.cuda.device_count()))


def identity(device: torch.device) -> str:
    """What names a CUDA device among all of its host, however many of them a process sees; "" for a
    CPU.

    A part of a device (MIG) counts as the device: NCCL does not tell them apart either.
    """
    if device.type != "cuda":
        return ""
    import torch

    known = torch.cuda.get_device_properties(device)
    if not hasattr(known, "pci_domain_id"):
        return f"GPU-{known.uuid}"
    return f"{known.pci_domain_id:04x}:{known.pci_bus_id:02x}:{known.pci_device_id:02x}"


def choose_backend(devices: Sequence[tuple[str, str]], share: bool) -> Backend:
    """The backend of all ranks, given every rank's host and device in order of ranks: gloo where
    any device is shared.

    Raises:
        DisttrainError: ranks share a device and `share` does not allow it.
    """
    takers = defaultdict(list)
    for rank, device in enumerate(devices):
        takers[device].append(rank)
    shared = {device: ranks for device, ranks in takers.items() if len(ranks) > 1 and device[1]}
    if shared and not share:
        lines = [
            f"ranks {', '.join(map(str, ranks[:MOST_NAMED]))}{', …' * (len(ranks) > MOST_NAMED)} on"
            f" {host}: {name}"
            for (host, name), ranks in list(shared.items())[:MOST_NAMED]
        ]
        raise DisttrainError(
            "Several ranks have the same CUDA device",
            "\n".join(lines),
            "Start as many ranks on a host as it has devices (cluster.gpus_per_node, the hostfile's"
            " slots), and let each see all of them or one of its own (CUDA_VISIBLE_DEVICES). Or set"
            " cluster.device: cuda, so that ranks share devices (over gloo, slowly).",
        )
    return "nccl" if not shared and all(name for _, name in devices) else "gloo"

"""Before ranks train they compare what they were given, and try out their process groups.

Ranks of several hosts may have other programs, files or data, and a network that does not carry what it should: found
here, each is a sentence; found later, it is a hang or a wrong result.
"""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from disttrain_cli.errors import DisttrainError, MismatchError
from disttrain_cli.runtime.units.grid import UnitGrid
from disttrain_cli.runtime.units.topology import Place

Facts = Mapping[str, str]
MOST_NAMED = 4
REMEDIES = {
    "nccl": "Name the network interface in cluster.interface; look for firewalls between the hosts; NCCL_DEBUG=INFO "
            "says in the logs what it tries.",
    "gloo": "Name the network interface in cluster.interface; look for firewalls between the hosts.",
}


def meet(store: dist.Store, rank: int, world_size: int, facts: Facts, told: dict[str, Any],
         timeout_s: float) -> dict[str, Any]:
    """Wait for all ranks and compare `facts` (versions, fingerprints); returns what rank 0 `told`.

    Raises:
        MismatchError: a host's facts are not those of most others; it and what differs are named, on every rank.
        DisttrainError: ranks are missing; they are named.
    """
    store.set(f"meet/{rank}", json.dumps({"host": socket.gethostname(), "facts": dict(facts)}))
    if rank == 0:
        found = _collect(store, world_size, timeout_s)
        store.set("meet/verdict", json.dumps(_verdict(found, world_size) or {"told": told}))
    try:
        store.wait(["meet/verdict"], timedelta(seconds=2 * timeout_s))
    except dist.DistError:
        raise DisttrainError("Rank 0 does not answer", f"waited {2 * timeout_s:g} s", "See its log.") from None
    verdict = json.loads(store.get("meet/verdict"))
    if "error" in verdict:
        raise (MismatchError if verdict["unequal"] else DisttrainError)(*verdict["error"])
    return dict(verdict["told"])


def _collect(store: dist.Store, world_size: int, timeout_s: float) -> dict[int, dict[str, Any]]:
    """What the ranks say, of those that have come in time."""
    deadline = time.monotonic() + timeout_s
    found = {}
    for rank in range(world_size):
        try:
            store.wait([f"meet/{rank}"], timedelta(seconds=max(0.1, deadline - time.monotonic())))
            found[rank] = json.loads(store.get(f"meet/{rank}"))
        except dist.DistError:
            continue
    return found


def _verdict(found: dict[int, dict[str, Any]], world_size: int) -> dict[str, Any] | None:
    """What is wrong, or None."""
    missing = [rank for rank in range(world_size) if rank not in found]
    if missing:
        hosts = ", ".join(sorted({one["host"] for one in found.values()}))
        return {"unequal": False, "error": [
            f"{len(missing)} of {world_size} ranks did not come, the first of them rank {missing[0]}",
            f"hosts that came: {hosts}", "Start the ranks of every host, and look at the logs of the missing."]}
    lines = []
    for name in sorted({name for one in found.values() for name in one["facts"]}):
        values = Counter(one["facts"].get(name, "none") for one in found.values())
        usual = values.most_common(1)[0][0]
        others = {one["host"]: one["facts"].get(name, "none") for one in found.values()
                  if one["facts"].get(name, "none") != usual}
        lines += [f"{name}: {value} on {host}, {usual} on most others" for host, value in sorted(others.items())]
    if not lines:
        return None
    return {"unequal": True, "error": [
        "The hosts of this job are not equal", "\n".join(lines[:MOST_NAMED] + ["…"] * (len(lines) > MOST_NAMED)),
        "Give every host the same program, run file, plan, profile and data."]}


def check_groups(grid: UnitGrid, place: Place, device: torch.device, limit_s: float) -> dict[str, float]:
    """A small all-reduce in every group of this rank, the world first; returns the seconds that each took.

    Raises:
        DisttrainError: a group does not work within the limit; it and the usual remedies are named.
    """
    took_s = {}
    for name, group in grid.groups.items():
        size, backend, begun = dist.get_world_size(group), dist.get_backend(group), time.monotonic()
        try:
            ones = torch.ones(1, device=device)
            dist.all_reduce(ones, group=group, async_op=True).wait(timedelta(seconds=limit_s))
            total = float(ones)
        except (dist.DistError, RuntimeError) as error:
            raise DisttrainError(
                f'Rank {place.rank} cannot reach its group "{name}" ({size} ranks) over {backend}',
                f"unit {place.unit.name}, stage {place.stage.index}, host {socket.gethostname()}: "
                f"{str(error).splitlines()[0]}", REMEDIES.get(backend, REMEDIES["gloo"])) from None
        if total != size:
            raise DisttrainError(f'The group "{name}" of rank {place.rank} sums wrongly over {backend}',
                                 f"{size} ranks each gave 1; the sum is {total:g}", REMEDIES.get(backend, ""))
        took_s[name] = time.monotonic() - begun
    return took_s

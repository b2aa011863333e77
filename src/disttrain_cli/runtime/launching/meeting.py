"""Before ranks train they compare what they were given, and try out their process groups.

Ranks of several hosts may have other programs, files or data, and a network that does not carry what it should: found
here, each is a sentence; found later, it is a hang or a wrong result.
"""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from disttrain_cli.errors import DisttrainError, MismatchError
from disttrain_cli.runtime.launching.process import REMEDIES
from disttrain_cli.runtime.units.grid import UnitGrid
from disttrain_cli.spec.stage_graph import RankCoords

Facts = Mapping[str, str]
MOST_NAMED, MOST_HOSTS = 4, 8
#: Longest wait for the ranks that come last, and seconds between two words about who is missing.
MEETING_S, NEWS_S = 300.0, 15.0
ANSWER_S = 60.0  # more than `MEETING_S`, until rank 0 has answered


@dataclass(frozen=True)
class Guest:
    """What a rank says of itself."""

    facts: Facts  # versions, fingerprints: equal on all ranks
    device: str = ""  # `devices.identity`
    host: str = field(default_factory=socket.gethostname)


def meet(store: dist.Store, rank: int, world_size: int, own: Guest, decide: Callable[[list[Guest]], dict[str, Any]],
         limit_s: float, *, hosts: Sequence[str] = (), say: Callable[[str], None] = print) -> dict[str, Any]:
    """Wait for all ranks, compare their facts, and return what rank 0 decides for all of them.

    A rank makes a few operations on the store and rank 0 a few per rank. What rank 0 raises is raised on every rank.

    Args:
        decide: called by rank 0 with what the ranks said, in their order.
        limit_s: longest wait for the last rank.
        hosts: where every rank should be, if that is known.
        say: hears from rank 0 now and then who is missing.

    Raises:
        MismatchError: a host's facts are not those of most others; it and what differs are named.
        DisttrainError: ranks are missing and are named, or `decide` raises it.
    """
    store.set(f"meet/{rank}", json.dumps(asdict(own)))
    if store.add("meet/joined", 1) == world_size:
        store.set("meet/complete", "")
    if rank == 0:
        store.set("meet/verdict", json.dumps(_verdict(store, world_size, decide, limit_s, hosts, say)))
    try:
        store.wait(["meet/verdict"], timedelta(seconds=limit_s + ANSWER_S))
    except dist.DistError:
        raise DisttrainError("Rank 0 does not answer", f"waited {limit_s + ANSWER_S:g} s", "See its log.") from None
    verdict = json.loads(store.get("meet/verdict"))
    if "error" in verdict:
        error = (MismatchError if verdict["unequal"] else DisttrainError)(*verdict["error"])
        error.on_every_rank = True
        raise error
    return dict(verdict["told"])


def _verdict(store: dist.Store, world_size: int, decide: Callable[[list[Guest]], dict[str, Any]], limit_s: float,
             hosts: Sequence[str], say: Callable[[str], None]) -> dict[str, Any]:
    """What rank 0 tells all ranks: what it decides, or what is wrong."""
    try:
        _wait_for_all(store, world_size, limit_s, hosts, say)
        said = store.multi_get([f"meet/{rank}" for rank in range(world_size)])
        guests = [Guest(**json.loads(one)) for one in said]
        _compare(guests)
        return {"told": decide(guests)}
    except DisttrainError as error:
        return {"unequal": isinstance(error, MismatchError), "error": [error.what, error.why, error.next_step]}


def _wait_for_all(store: dist.Store, world_size: int, limit_s: float, hosts: Sequence[str],
                  say: Callable[[str], None]) -> None:
    deadline = time.monotonic() + limit_s
    while True:
        left_s = deadline - time.monotonic()
        try:
            store.wait(["meet/complete"], timedelta(seconds=max(0.01, min(NEWS_S, left_s))))
            return
        except dist.DistError:
            missing = [rank for rank in range(world_size) if not store.check([f"meet/{rank}"])]
        if left_s > NEWS_S:
            say(f"waiting for {len(missing)} of {world_size} ranks: {_named(missing, hosts)}")
        elif missing:
            known = {json.loads(store.get(f"meet/{rank}"))["host"] for rank in {*range(world_size)} - {*missing}}
            raise DisttrainError(
                f"{len(missing)} of {world_size} ranks did not join within {limit_s:g} s: {_named(missing, hosts)}",
                f"hosts that joined: {', '.join(sorted(known)[:MOST_HOSTS])}{', …' * (len(known) > MOST_HOSTS)}",
                "Start the ranks of every host, and look at the logs of the missing.")


def _named(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Ranks in words, those that follow each other on a host together: "8-15 (worker-2), 20 (worker-3)"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1 and (not hosts or hosts[rank] == hosts[runs[-1][0]]):
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    if hosts:
        words = [f"{word} ({hosts[run[0]]})" for word, run in zip(words, runs, strict=True)]
    return ", ".join(words[:MOST_HOSTS]) + ", …" * (len(words) > MOST_HOSTS)


def _compare(guests: Sequence[Guest]) -> None:
    """MismatchError where a fact differs between ranks; the hosts with another value than most are named."""
    lines = []
    for name in sorted({name for one in guests for name in one.facts}):
        values = Counter(one.facts.get(name, "none") for one in guests)
        usual = values.most_common(1)[0][0]
        others = {one.host: one.facts.get(name, "none") for one in guests if one.facts.get(name, "none") != usual}
        lines += [f"{name}: {value} on {host}, {usual} on most others" for host, value in sorted(others.items())]
    if lines:
        raise MismatchError(
            "The hosts of this job are not equal", "\n".join(lines[:MOST_NAMED] + ["…"] * (len(lines) > MOST_NAMED)),
            "Give every host the same program, run file, plan, profile and data.")


def check_groups(grid: UnitGrid, place: RankCoords, device: torch.device, limit_s: float) -> dict[str, float]:
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

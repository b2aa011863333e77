"""Rendezvous of ranks, with a comparison of their inputs before training.

Ranks of several hosts may have different programs, files or data: detected here, it is one error
message; later, it would be a hang or a wrong result.
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

import torch.distributed as dist

from disttrain_cli.errors import DisttrainError, MismatchError
from disttrain_cli.spec.stage_graph import StageGraph

#: Environment variable: names of the job's hosts in order of ranks, separated by blanks.
HOSTS = "DISTTRAIN_HOSTS"
Facts = Mapping[str, str]
MOST_NAMED, MOST_HOSTS = 4, 8
#: Longest wait for the last ranks, and interval between messages about missing ones.
MEETING_S, NEWS_S = 300.0, 15.0
POLL_S = 0.1
ANSWER_S = 60.0  # added to the limit while waiting for rank 0's answer


@dataclass(frozen=True)
class Guest:
    """Description of a rank for the comparison."""

    facts: Facts  # versions, fingerprints: equal on all ranks
    device: str = ""  # `devices.identity`
    host: str = field(default_factory=socket.gethostname)


def meet(
    store: dist.Store,
    rank: int,
    world_size: int,
    guest: Guest,
    decide: Callable[[list[Guest]], dict[str, Any]],
    limit_s: float,
    *,
    hosts: Sequence[str] = (),
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Wait for all ranks, compare their facts, and return rank 0's decisions.

    A rank does a few operations on the store and rank 0 a few per rank. An error on rank 0 is
    raised on every rank.

    Args:
        decide: called by rank 0 with the ranks' descriptions, in order of ranks.
        limit_s: longest wait for the last rank.
        hosts: expected host of every rank, if known.
        say: called by rank 0 now and then with a message about missing ranks.

    Raises:
        MismatchError: a host's facts differ from those of most others; the message names both.
        DisttrainError: ranks are missing and are named, or `decide` raises it.
    """
    arrive(store, "meet", rank, world_size, json.dumps(asdict(guest)))
    if rank == 0:
        store.set(
            "meet/verdict", json.dumps(_verdict(store, world_size, decide, limit_s, hosts, say))
        )
    wait_for_the_first(store, "meet/verdict", limit_s)
    verdict = json.loads(store.get("meet/verdict"))
    if "error" in verdict:
        error = (MismatchError if verdict["unequal"] else DisttrainError)(*verdict["error"])
        error.on_every_rank = True
        raise error
    return dict(verdict["decided"])


def _verdict(
    store: dist.Store,
    world_size: int,
    decide: Callable[[list[Guest]], dict[str, Any]],
    limit_s: float,
    hosts: Sequence[str],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Return rank 0's message to all ranks: its decisions, or an error."""
    try:
        wait_for_all(
            store,
            "meet",
            world_size,
            limit_s,
            lambda missing: _not_joined(store, missing, world_size, limit_s, hosts),
            hosts=hosts,
            say=say,
        )
        said = store.multi_get([f"meet/{rank}" for rank in range(world_size)])
        guests = [Guest(**json.loads(one)) for one in said]
        _compare(guests)
        return {"decided": decide(guests)}
    except DisttrainError as error:
        return {
            "unequal": isinstance(error, MismatchError),
            "error": error.parts,
        }


def check_name(host: str) -> None:
    """Raise DisttrainError if this host cannot resolve the first host's name.

    torch would try for minutes.
    """
    try:
        socket.getaddrinfo(host, None)
    except socket.gaierror as error:
        if error.errno == socket.EAI_NONAME:  # other errors may be temporary
            raise DisttrainError(
                f"{socket.gethostname()} does not know the first host by the name {host}",
                f"{error.strerror} (MASTER_ADDR)",
                "Name hosts as all of them know each other "
                "(cluster.hostfile), or by their addresses.",
            ) from None


def arrive(store: dist.Store, barrier: str, number: int, count: int, word: str = "") -> None:
    """Record in the store that one of `count` ranks or hosts has reached a barrier.

    Args:
        word: value to store for the others.
    """
    store.set(f"{barrier}/{number}", word)
    if store.add(f"{barrier}/joined", 1) == count:
        store.set(f"{barrier}/complete", "")


def wait_for_all(
    store: dist.Store,
    barrier: str,
    count: int,
    limit_s: float,
    late: Callable[[list[int]], DisttrainError],
    *,
    kind: str = "ranks",
    hosts: Sequence[str] = (),
    say: Callable[[str], None] = print,
) -> None:
    """Wait until all have reached a barrier; raises `late(missing)` after `limit_s`.

    Args:
        hosts: host of each of them, if known.
        say: called now and then with a message about missing ones.
    """
    begun_s, news_s = time.monotonic(), NEWS_S
    while not store.check([f"{barrier}/complete"]):
        waited_s = time.monotonic() - begun_s
        if waited_s >= min(news_s, limit_s):
            missing = [
                number for number in range(count) if not store.check([f"{barrier}/{number}"])
            ]
            if missing and waited_s >= limit_s:
                raise late(missing)
            say(f"waiting for {len(missing)} of {count} {kind}: {named(missing, hosts)}")
            news_s += NEWS_S
        time.sleep(POLL_S)


def wait_for_the_first(store: dist.Store, key: str, limit_s: float) -> None:
    """Wait for a key that the first rank or host sets once all have arrived.

    Raises:
        DisttrainError: it is not set within `ANSWER_S` after the first one's limit.
    """
    try:
        store.wait([key], timedelta(seconds=limit_s + ANSWER_S))
    except dist.DistError:
        raise DisttrainError(
            "Rank 0 does not answer", f"waited {limit_s + ANSWER_S:g} s", "See its log."
        ) from None


def _not_joined(
    store: dist.Store, missing: Sequence[int], world_size: int, limit_s: float, hosts: Sequence[str]
) -> DisttrainError:
    known = {
        json.loads(store.get(f"meet/{rank}"))["host"] for rank in {*range(world_size)} - {*missing}
    }
    return DisttrainError(
        f"{len(missing)} of {world_size} ranks did not join within {limit_s:g} s:"
        f" {named(missing, hosts)}",
        "hosts that joined:"
        f" {', '.join(sorted(known)[:MOST_HOSTS])}{', …' * (len(known) > MOST_HOSTS)}",
        "Start the ranks of every host, and look at the logs of the missing.",
    )


def wait_until_built(store: dist.Store, graph: StageGraph, rank: int, limit_s: float) -> None:
    """Wait until all ranks have built their stages.

    Raises:
        DisttrainError: some have not within the limit; rank 0 names them.
    """

    def late(missing: list[int]) -> DisttrainError:
        stages = dict.fromkeys(
            f"unit {stage.unit.name}, stage {stage.index}"
            for stage in graph.stages
            if {*stage.ranks} & {*missing}
        )
        return DisttrainError(
            f"{len(missing)} of {graph.world_size} ranks have not built their stages, {limit_s:g} s"
            f" after rank 0: {named(missing, ())}",
            "\n".join([*stages][:MOST_NAMED]),
            "See their logs; where large weights take so long to read, raise train.timeout_s.",
        )

    arrive(store, "built", rank, graph.world_size)
    if rank == 0:
        wait_for_all(store, "built", graph.world_size, limit_s, late)
    else:
        wait_for_the_first(store, "built/complete", limit_s)


def named(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Return text for ranks, with ranges per host: "8-15 (worker-2), 20 (worker-3)"."""
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
    """Raise MismatchError if a fact differs between ranks, naming the hosts in the minority."""
    lines = []
    for name in sorted({name for one in guests for name in one.facts}):
        values = Counter(one.facts.get(name, "none") for one in guests)
        usual = values.most_common(1)[0][0]
        others = {
            one.host: one.facts.get(name, "none")
            for one in guests
            if one.facts.get(name, "none") != usual
        }
        lines += [
            f"{name}: {value} on {host}, {usual} on most others"
            for host, value in sorted(others.items())
        ]
    if lines:
        raise MismatchError(
            "The hosts of this job are not equal",
            "\n".join(lines[:MOST_NAMED] + ["…"] * (len(lines) > MOST_NAMED)),
            "Give every host the same program, run file, plan, profile and data.",
        )

"""Time of messages: latency + bytes over bandwidth, rings for collectives (`spec.profile.LinkTimes`)."""

from __future__ import annotations

from disttrain_cli.spec.profile import LinkTimes

GIGABIT_BYTES = 1e9 / 8.0


def p2p_s(link: LinkTimes, size_bytes: float) -> float:
    """One message from one rank to another."""
    return link.p2p_us * 1e-6 + size_bytes / (link.p2p_gbps * GIGABIT_BYTES)


def all_reduce_s(link: LinkTimes, size_bytes: float, ranks: int) -> float:
    """All-reduce of `size_bytes` on every rank."""
    return _ring_s(link.all_reduce_us, link.all_reduce_gbps, 2.0 * size_bytes, ranks)


def all_gather_s(link: LinkTimes, size_bytes: float, ranks: int) -> float:
    """All-gather after which every rank has `size_bytes`."""
    return _ring_s(link.all_gather_us, link.all_gather_gbps, size_bytes, ranks)


def _ring_s(latency_us: float, gbps: float, size_bytes: float, ranks: int) -> float:
    if ranks < 2:
        return 0.0
    return latency_us * 1e-6 + size_bytes * (ranks - 1) / ranks / (gbps * GIGABIT_BYTES)

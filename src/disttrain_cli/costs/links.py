"""Times of messages: latency + bytes over bandwidth, with rings for collectives.

The figures are those of `spec.profile.LinkTimes`.
"""

from __future__ import annotations

from disttrain_cli.spec.profile import LinkProfile, LinkTimes

GIGABIT_BYTES = 1e9 / 8.0


def ring_link(links: LinkProfile, per_node: int) -> LinkTimes:
    """Return the links of a ring between nodes, with at least `per_node` of its ranks in each node.

    NCCL lays as many rings through a node as its ranks there have network devices, so that all of
    these carry the same collective at once; no faster than the links inside the node do.
    """
    if links.inter_node is None:
        return links
    shared = {
        f"{name}_gbps": min(
            getattr(links, f"{name}_gbps"), per_node * getattr(links.inter_node, f"{name}_gbps")
        )
        for name in COLLECTIVES
    }
    inside_us, between_us = links.hop_us, links.inter_node.hop_us
    shared["hop_us"] = (inside_us * (per_node - 1) + between_us) / per_node
    return links.inter_node.model_copy(update=shared)


def p2p_s(link: LinkTimes, size_bytes: float) -> float:
    """Return the time of one message from one rank to another."""
    return link.p2p_us * 1e-6 + size_bytes / (link.p2p_gbps * GIGABIT_BYTES)


def all_reduce_s(link: LinkTimes, size_bytes: float, ranks: int) -> float:
    """Return the time of an all-reduce of `size_bytes` on every rank."""
    steps_us = 2.0 * link.hop_us * (ranks - 1)
    return _ring_s(link, "all_reduce", size_bytes, ranks, link.all_reduce_us + steps_us)


def all_gather_s(link: LinkTimes, size_bytes: float, ranks: int) -> float:
    """Return the time of an all-gather after which every rank has `size_bytes`."""
    steps_us = link.hop_us * (ranks - 1)
    return _ring_s(link, "all_gather", size_bytes, ranks, link.all_gather_us + steps_us)


def reduce_scatter_s(link: LinkTimes, size_bytes: float, ranks: int) -> float:
    """Return the time of a reduce-scatter of `size_bytes` that every rank has."""
    steps_us = link.hop_us * (ranks - 1)
    return _ring_s(link, "reduce_scatter", size_bytes, ranks, link.reduce_scatter_us + steps_us)


def all_to_all_s(link: LinkTimes, size_bytes: float, ranks: int) -> float:
    """Return the time of an all-to-all of `size_bytes` per rank, in equal parts.

    At the rate of an all-gather, which sends as much over the link of one rank, and to all others
    at once.
    """
    return _ring_s(link, "all_gather", size_bytes, ranks, link.all_gather_us)


def exchange_s(links: LinkProfile, size_bytes: float, ranks: int, per_node: int) -> float:
    """Return the time of an all-to-all with `per_node` of the ranks in each node.

    Bytes that leave a node use the network of its ranks' own devices, as all of them send at once;
    the rest uses the links inside meanwhile.
    """
    between = links.inter_node
    if ranks <= per_node or between is None:
        return all_to_all_s(links, size_bytes, ranks)
    part_bytes, latency_us = size_bytes / ranks, max(links.all_gather_us, between.all_gather_us)
    return latency_us * 1e-6 + max(
        part_bytes * (per_node - 1) / (links.all_gather_gbps * GIGABIT_BYTES),
        part_bytes * (ranks - per_node) / (between.all_gather_gbps * GIGABIT_BYTES),
    )


#: Time of each collective as a function of links, bytes of the full tensor, and ranks.
COLLECTIVES = {
    "all_reduce": all_reduce_s,
    "all_gather": all_gather_s,
    "reduce_scatter": reduce_scatter_s,
}


def ring_bytes(operation: str, size_bytes: float, ranks: int) -> float:
    """Return the bytes that a collective moves over the link of one rank, in a ring."""
    return (2.0 if operation == "all_reduce" else 1.0) * size_bytes * (ranks - 1) / ranks


def _ring_s(
    link: LinkTimes, operation: str, size_bytes: float, ranks: int, latency_us: float
) -> float:
    if ranks == 1:
        return 0.0
    bytes_per_s = getattr(link, f"{operation}_gbps") * GIGABIT_BYTES
    return latency_us * 1e-6 + ring_bytes(operation, size_bytes, ranks) / bytes_per_s

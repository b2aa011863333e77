"""Device memory of NCCL's communicators, by the channels that they connect.

Rings and trees are connected by the first collective, a peer by the first message to or from it.
Buffers of a channel (`templates/hardware.yaml`), as read in NCCL 2.28.9, 2.29.7 and 2.30.7:

    connection                      sent to    received from
    inside a node                     2 MiB           10 MiB    p2pSendSetup, p2pRecvSetup
    ring, tree, between nodes        10 MiB           10 MiB    sendProxyConnect, recvProxyConnect
    messages between nodes            2 MiB            2 MiB    sharedNetBuffersInit: of each of the
                                                                communicator's channels, whoever and
                                                                how many the peers are

The latter two need GPUDirect RDMA; without it these buffers are in host memory. The number of
channels of bounded communicators (`WORLD_CTAS` and others, set as `min_ctas` and `max_ctas` of
`ProcessGroupNCCL.Options`) is that bound: connectRings clamps the channels to it, and
ncclTopoComputeP2pChannels takes the channels of messages from these. Not included are the buffers
of NVLink SHARP, 32 MiB for each GPU of a node where an all-reduce chooses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.spec.profile import DeviceProfile

if TYPE_CHECKING:
    from disttrain_cli.spec.stage_graph import Stage, StageGraph

Floats = NDArray[np.float64]
Count = int | Floats | NDArray[np.int64]
Flags = bool | NDArray[np.bool_]
Ranks = range | tuple[int, ...]
# Channels, each a thread block on a multiprocessor. A message kernel holds its multiprocessors
# while it waits for the peer. UNMEASURED: at 15 to 25 GB/s a channel, 8 exceed a node's network
# device, and 16 come near a GPU's NVLinks, which the exchanges of a CP group wait for.
WORLD_CTAS = 2  # sums of a few numbers
MESSAGE_CTAS = 8
CONTEXT_CTAS = 16
# As NCCL logs them ("24 coll channels, 32 p2p channels") on nodes of 8 A100 and of 8 H100.
NODE_CHANNELS = 24
NODE_PEER_CHANNELS = 32
# connectRings: between nodes at most 16, and 4 for each GPU that a node has in the communicator
NETWORK_CHANNELS = 16
CHANNELS_PER_GPU = 4
# ncclTopoGetNchannels: to fill a network device of 400 Gbit/s; 2 before NCCL 2.29
NETWORK_PEER_CHANNELS = 4
PEERS_PER_BATCH = 8  # NCCL_MAX_DEV_WORK_P2P_PER_BATCH
#: Variables that change how many channels there are, how large their buffers, or what they cross.
UNPRICED = (
    *(f"NCCL_{bound}_{unit}" for bound in ("MIN", "MAX") for unit in ("CTAS", "NCHANNELS")),
    *("NCCL_MIN_P2P_NCHANNELS", "NCCL_MAX_P2P_NCHANNELS", "NCCL_NCHANNELS_PER_NET_PEER"),
    *("NCCL_BUFFSIZE", "NCCL_LL_BUFFSIZE", "NCCL_LL128_BUFFSIZE"),
    *("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "NCCL_NET_GDR_LEVEL"),
)


def unpriced(environment: Mapping[str, str]) -> list[str]:
    """Return a note on variables of an environment that plans do not price, if there are any."""
    found = [f"{name}={environment[name]}" for name in UNPRICED if name in environment]
    if not found:
        return []
    return [f"{', '.join(found)}: NCCL's memory and rates are not those of the plan."]


def peer_channels(ctas: int, ranks: int, inside_a_node: bool) -> int:
    """Return the channels to each peer of a communicator of this many ranks."""
    if inside_a_node:
        return ctas
    channels = NETWORK_PEER_CHANNELS
    while channels > 1 and channels * -(-ranks // PEERS_PER_BATCH) > ctas:
        channels //= 2
    return channels


class Spread(NamedTuple):
    """Ranks of a group on their nodes."""

    size: Count
    local: Count  # on the node that has fewest
    nodes: Count

    @classmethod
    @lru_cache(4096)
    def of(cls, ranks: Ranks, node: int, some: Ranks = ()) -> Spread:
        """Return the spread of these ranks; `local` is that of the nodes of `some`, if any."""
        hosts, counts = np.unique(np.array(ranks) // node, return_counts=True)
        here = np.isin(hosts, np.array(some) // node) if some else slice(None)
        return cls(len(ranks), int(counts[here].min()), len(hosts))

    @classmethod
    def dearest(cls, size: Count, stride: Count, node: int) -> Spread:
        """Return the spread that connects most, of groups of ranks `stride` apart anywhere."""
        local = np.clip(node // np.asarray(stride), 1, np.maximum(size, 1))
        nodes = np.ceil(size / local)
        few = np.minimum(local, NETWORK_CHANNELS // CHANNELS_PER_GPU)
        return cls(size, np.where(nodes == 1, local, few), nodes)


def collective_mib(
    device: DeviceProfile,
    group: Spread,
    ctas: int = 0,
    *,
    tree: bool = True,
    passes_on: bool = False,
) -> Floats:
    """Return the memory of a rank's connections in the ring of a group.

    Args:
        ctas: bound of the channels; 0 = none.
        tree: it sums small tensors, too, by a tree.
        passes_on: its ranks send messages to the next one, too.
    """
    sent, received = device.channel_sent_mib, device.channel_received_mib
    size, local, nodes = (np.asarray(count) for count in group)
    channels = ctas or np.where(
        nodes == 1, NODE_CHANNELS, np.minimum(NETWORK_CHANNELS, CHANNELS_PER_GPU * local)
    )
    # Of a node's ranks, channels take turns as the end to which the network is connected.
    ends = np.ceil(channels / local) / channels
    connections = sent + received + (nodes > 1) * (received - sent) * ends
    if tree:  # of two ranks, it is the ring; a node has 3 neighbours in one half of the channels
        inside = (sent + received) * np.where(nodes == 1, 1.0, 1.0 - ends)
        neighbours = np.minimum(np.where(channels > local, 2, 3), nodes - 1)
        shared = np.where(local == 1, 0.875, 1.0)  # with the ring
        more = inside + neighbours * 2 * received * ends * shared
        connections = connections + np.where(size > 2, more, 0.0)
    mib = channels * connections + passes_on * NODE_PEER_CHANNELS * (sent + received)
    return np.asarray((size > 1) * mib, dtype=np.float64)


def context_mib(device: DeviceProfile, group: Spread, gathers: Flags) -> Floats:
    """Return the connections of a rank of a CP group: all-to-all, and a ring if it gathers."""
    sent, received = device.channel_sent_mib, device.channel_received_mib
    size, local, nodes = (np.asarray(count) for count in group)
    channels = np.where(nodes == 1, CONTEXT_CTAS, NETWORK_PEER_CHANNELS)
    exchange = channels * (local - 1) * (sent + received) + (nodes > 1) * 2 * CONTEXT_CTAS * sent
    ring = collective_mib(device, group, CONTEXT_CTAS, tree=False)
    return np.asarray((size > 1) * exchange + gathers * ring, dtype=np.float64)


def messages_mib(device: DeviceProfile, graph: StageGraph, stage: Stage, node: int) -> float:
    """Return the connections of a stage to its neighbours, of the rank that has most.

    Rows of a unit go to the rank of the same coordinates, those of another unit to any rank of its
    stage: samples change places from step to step.
    """
    sent, received = device.channel_sent_mib, device.channel_received_mib
    ranks = np.array(stage.ranks)
    begin = ranks - ranks % node  # first rank of each rank's node
    total = np.zeros(len(ranks))
    for other in (graph.stages[number] for number in (*stage.before, *stage.after)):
        first, last = other.ranks[0], other.ranks[-1]
        if other.unit is stage.unit:
            partner = ranks + first - ranks[0]
            local, peers = (partner - partner % node == begin).astype(int), 1
        else:
            local = np.minimum(last + 1, begin + node) - np.maximum(first, begin)
            local, peers = np.maximum(local, 0), len(other.ranks)
        inside = min(first, ranks[0]) // node == max(last, ranks[-1]) // node
        channels = peer_channels(MESSAGE_CTAS, len(ranks) + len(other.ranks), inside)
        total += channels * local * (sent + received) + (local < peers) * 2 * MESSAGE_CTAS * sent
    return float(total.max())


def most_messages_mib(
    device: DeviceProfile, cuts: int, size: Count, gpus: int, node: int, outer: bool
) -> Floats:
    """Return an upper bound of `messages_mib` of a stage whose neighbours are not known.

    Args:
        cuts: most cuts to neighbours; some of them to other units if `outer`.
        size: ranks of the stage, of `gpus` in all.
    """
    pair = device.channel_sent_mib + device.channel_received_mib
    alone, mixed = node - np.asarray(size), (node - 1) * (gpus > node)
    if not outer:
        alone, mixed = np.minimum(alone, cuts), min(mixed, cuts)
    channels = np.maximum(MESSAGE_CTAS * alone, NETWORK_PEER_CHANNELS * mixed)
    return np.asarray(
        np.maximum(channels, 0) * pair
        + (gpus > node) * cuts * 2 * MESSAGE_CTAS * device.channel_sent_mib,
        dtype=np.float64,
    )

"""Memory of NCCL's connections, priced against connections counted one by one."""

import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import pytest

from disttrain_cli.costs import nccl
from disttrain_cli.costs.hardware import catalogue
from disttrain_cli.costs.memory import Groups, cuts_of, layout_memory
from disttrain_cli.runtime.units.communicators import CTAS, Communicator, communicators, peers
from disttrain_cli.spec.plan import Layout, UnitPlan
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.stage_graph import StageGraph, stage_graph
from tests.planning import synthetic

SENT, RECEIVED = 2, 10  # MiB of a channel inside a node
LAYERS = {"image_encoder": 4, "llm": 6, "image_generator": 4}
#: (peer, channel, True if it sends)
Connection = tuple[int, int, bool]


def _profile(node: int, gpus: int) -> Profile:
    """A profile of CUDA devices in which all but connections is free of charge."""
    profile = synthetic.tiny(synthetic.run_file(), tps=(1, 2, 4, 8))
    reserves = catalogue().memory.reserves | {"context_gib": 0.0, "workspace_mib": 0.0}
    cluster = profile.cluster.model_copy(update={"gpus_per_node": node, "nodes": -(-gpus // node)})
    device = profile.device.model_copy(update=reserves | {"count": gpus})
    return profile.model_copy(update={"device": device, "cluster": cluster})


def _layout(seed: int) -> Layout:
    draw = random.Random(seed)
    together = draw.random() < 0.3
    units = []
    for number, modules in enumerate([list(LAYERS)] if together else [[one] for one in LAYERS]):
        layers = sum(LAYERS[name] for name in modules)
        pp, dp = draw.choice([1, 1, 2, 3]), draw.choice([1, 2, 3, 4, 6])
        tp, cp = (
            draw.choice([1, 1, 2, 4, 8]),
            draw.choice([1, 1, 2, 4]) if modules == ["llm"] else 1,
        )
        tp = min(tp, 8 // cp)
        units.append(
            UnitPlan(
                name=f"u{number}",
                modules=modules,
                tp=tp,
                cp=cp,
                dp=dp,
                pp=pp,
                gpus=tp * cp * dp * pp,
                layers_per_stage=[layers - pp + 1, *[1] * (pp - 1)],
                tp_overlap=tp > 1 and draw.random() < 0.5,
                cp_comm_type="all_gather" if cp > 1 and draw.random() < 0.5 else "a2a",
            )
        )
    return Layout(
        global_batch_size=64,
        microbatch_size=1,
        microbatches=8,
        gpus_used=sum(unit.gpus for unit in units),
        units=units,
    )


def _tree(count: int, index: int) -> Iterator[int]:
    """Neighbours of a node in NCCL's binary tree of `count` nodes."""
    low = next(bit for bit in (1 << n for n in range(20)) if bit & index or bit >= count)
    if index:
        up = (index ^ low) | (low << 1)
        yield up if up < count else index ^ low
        half = low >> 1
        if half:
            yield index - half
            while half and index + half >= count:
                half >>= 1
            if half:
                yield index + half
    elif count > 1:
        yield low >> 1


def _collective(
    ranks: Sequence[int], rank: int, node: int, ctas: int, tree: bool
) -> set[Connection]:
    """Connections of a rank to a ring and to two trees, whose ends in a node change by channel."""
    hosts = defaultdict(list)
    for one in ranks:
        hosts[one // node].append(one)
    fewest = min(map(len, hosts.values()))
    channels = ctas or (24 if len(hosts) == 1 else min(16, 4 * fewest))
    found: set[Connection] = set()
    for channel in range(channels):
        turn = channel if len(hosts) > 1 else 0
        chains = [[*one[turn % len(one) :], *one[: turn % len(one)]] for one in hosts.values()]
        ring = [one for chain in chains for one in chain]
        place = ring.index(rank)
        found |= {
            (ring[(place + 1) % len(ring)], channel, True),
            (ring[place - 1], channel, False),
        }
        around: set[int] = set()
        number = next(number for number, chain in enumerate(chains) if rank in chain)
        chain = chains[number]
        inside = chain.index(rank)
        around |= {chain[other] for other in (inside - 1, inside + 1) if 0 <= other < len(chain)}
        if inside == 0:  # the second half of the channels has the nodes in another order
            shift = int(2 * channel >= channels)
            neighbours = _tree(len(chains), (number + shift) % len(chains))
            around |= {chains[(other - shift) % len(chains)][0] for other in neighbours}
        if tree:
            found |= {(other, channel, sends) for other in around for sends in (True, False)}
    return found


def _counted(
    graph: StageGraph, one: Communicator | None, rank: int, node: int, unit: UnitPlan
) -> float:
    """MiB of a rank's connections of a communicator; None is the world's."""
    ranks = range(graph.world_size) if one is None else one.ranks
    kind = "world" if one is None else one.kind
    ctas, alone = CTAS.get(kind, 0), len({other // node for other in ranks}) == 1
    gathers = kind == "context parallel" and unit.gathers
    found: set[Connection] = set()
    if len(ranks) > 1 and (kind not in ("messages", "context parallel") or gathers):
        found = _collective(ranks, rank, node, ctas, tree=not gathers)
    mib = 0.0
    for peer, _, sends in found:
        near = peer // node == rank // node
        mib += SENT if sends and near else RECEIVED
    messages: set[Connection] = set()
    per_peer = 32 if not ctas else ctas if alone else 4
    while not alone and per_peer > 1 and per_peer * -(-len(ranks) // 8) > ctas:
        per_peer //= 2
    if one is not None and one.ways:
        sends = rank in graph.stages[one.ways[0][0]].ranks
        messages = {
            (peer, channel, sends)
            for peer in peers(graph, one.ways[0], rank)
            for channel in range(per_peer)
        }
    elif kind == "context parallel":
        messages = set(itertools.product(set(ranks) - {rank}, range(per_peer), (True, False)))
    elif kind == "tensor parallel" and unit.tp_overlap:
        place = list(ranks).index(rank)
        after, before = ranks[(place + 1) % len(ranks)], ranks[place - 1]
        messages = {(after, c, True) for c in range(per_peer)}
        messages |= {(before, c, False) for c in range(per_peer)}
    far = Counter(sends for peer, _, sends in messages if peer // node != rank // node)
    mib += sum(
        SENT if sends else RECEIVED for peer, _, sends in messages if peer // node == rank // node
    )
    return mib + len(far) * ctas * SENT + (len(ranks) > 1) * 4


@pytest.mark.parametrize("seed", range(16))
def test_connections_are_priced_as_they_are_counted(seed: int) -> None:
    """Messages and exchanges exactly; with rings and trees never less, and little more than the
    most of each communicator, whose ranks may differ. The bounds of the search
    hold."""
    layout = _layout(seed)
    node = max((4, 8)[seed % 2], *(unit.tp_cp_size for unit in layout.units))
    profile, graph = _profile(node, layout.gpus_used), stage_graph(layout, "llm")
    device, every = profile.device, [None, *communicators(graph, messages=True)]
    for stage, priced in zip(graph.stages, layout_memory(profile, layout, 80.0), strict=True):
        counts = []
        for rank in {*stage.ranks[: node + 1], *stage.ranks[-node - 1 :]}:
            counts.append(defaultdict[str, float](float))
            for one in every:
                if one is None or rank in one.ranks:
                    kind = "world" if one is None else one.kind
                    counts[-1][kind] += _counted(graph, one, rank, node, stage.unit)
        most = {kind: max(each[kind] for each in counts) for kind in list(counts[0])}
        groups, own = Groups.of_stage(profile, graph, stage), device.communicator_mib
        for kind, mib, number in (
            ("messages", groups.messages_mib, 2 * groups.cuts),
            ("context parallel", nccl.context_mib(device, groups.context, groups.gathers), 1),
            (
                "tensor parallel",
                nccl.collective_mib(device, groups.tensor, passes_on=groups.overlap),
                1,
            ),
        ):
            assert most.get(kind, 0) == mib + own * number * (kind in most), (kind, stage.name)
        known = device, cuts_of(profile, stage.unit.modules), len(stage.ranks), graph.world_size
        outer = len(stage.unit.modules) < len(LAYERS)
        assert nccl.most_messages_mib(*known, node, outer) >= groups.messages_mib
        dearest = nccl.Spread.dearest(groups.weights.size, stage.tp, node)
        own_mib = nccl.collective_mib(device, groups.weights)
        assert nccl.collective_mib(device, dearest) >= own_mib
        counted, reserve = max(sum(each.values()) for each in counts), priced.reserve_gib * 1024
        assert 0.99 * counted <= reserve <= 1.05 * sum(most.values()) + 64, stage.name


def test_variables_that_change_what_is_priced_are_named() -> None:
    assert nccl.unpriced({"NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "eth0"}) == []
    (note,) = nccl.unpriced({"NCCL_MAX_CTAS": "4", "NCCL_BUFFSIZE": "1048576", "HOME": "/"})
    assert note.startswith("NCCL_MAX_CTAS=4, NCCL_BUFFSIZE=1048576: ")

"""Experts divided over an EP group compute what all of them do in one place, of every form that the
library's experts have; whatever rows a rank has, and whichever experts they choose."""

import copy
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from disttrain_cli.costs.experts import exchanged_bytes
from disttrain_cli.costs.routing import balanced
from disttrain_cli.models.division import of_experts, whole_shape
from disttrain_cli.models.experts import (
    count_rows,
    expert_weights,
    join_experts,
    prepare,
    recomputing,
    shard_experts,
)
from disttrain_cli.models.library_decoder import library_decoder
from disttrain_cli.spec.layer_costs import Experts, Routed
from disttrain_cli.spec.shape import ParallelShape
from tests.costs.test_experts import PROFILE

EXPERTS, CHOSEN, WIDTH = 4, 2, 8
CONFIG = {
    "hidden_size": WIDTH,
    "intermediate_size": 12,
    "moe_intermediate_size": 12,
    "num_local_experts": EXPERTS,
    "num_experts": EXPERTS,
    "moe_latent_size": None,
    "swiglu_alpha": 1.7,
    "swiglu_limit": 7.0,
    "n_routed_experts": EXPERTS,
    "hidden_act": "silu",
    "mlp_hidden_act": "relu2",
    "_experts_implementation": "grouped_mm",
}
#: Routing with equally many rows at all experts.
EVEN = Routed("text", 1.0, 0.0, (" ".join(["1"] * EXPERTS),))
#: Class of experts by form: gated; biased, transposed and interleaved; without a gate.
FORMS = {
    "gated": ("mixtral", "MixtralExperts"),
    "biased": ("gpt_oss", "GptOssExperts"),
    "ungated": ("nemotron_h", "NemotronHExperts"),
}
#: By name, the rows of each rank, and the experts that they may choose.
ROUTINGS = {
    "even": ([5, 7, 6, 3], range(EXPERTS)),
    "a rank without rows": ([5, 0, 6, 3], range(EXPERTS)),
    "ranks whose experts nobody chooses": ([4, 3, 2, 1], range(2)),
}


@dataclass
class Group:
    """A rank of a group of threads that exchange rows."""

    size: int
    rank: int
    barrier: Barrier
    given: list[Any]
    nodes: int
    overlap: bool = False
    sent: list[int] = field(default_factory=list)  # bytes of each exchange to other ranks

    def exchanged(self, rows: Tensor, give: list[int], take: list[int]) -> Tensor:
        self.given[self.rank] = rows.detach().split(give)
        others = sum(give) - give[self.rank]
        self.sent.append(others * rows[0:1].nelement() * rows.element_size())
        self.barrier.wait(60)
        taken = [self.given[rank][self.rank] for rank in range(self.size)]
        self.barrier.wait(60)
        assert [len(part) for part in taken] == take
        return torch.cat(taken)


def made(form: str) -> Any:
    """All experts of a form, with drawn weights."""
    prepare()
    family, name = FORMS[form]
    module = __import__(f"transformers.models.{family}.modeling_{family}", fromlist=[name])
    torch.manual_seed(0)
    part = getattr(module, name)(SimpleNamespace(**CONFIG))
    for parameter in part.parameters():
        nn.init.normal_(parameter, std=0.5)
    return nn.ModuleDict({"experts": part})


def run(layer: Any, rows: Tensor, index: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Result and gradients, for a gradient of ones."""
    rows, weights = rows.clone().requires_grad_(), weights.clone().requires_grad_()
    result = layer["experts"](rows, index, weights)
    result.sum().backward()
    found = {"result": result.detach(), "rows": rows.grad, "weights": weights.grad}
    return found | {name: weight.grad for name, weight in layer.named_parameters()}


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("ep", "nodes"), [(2, 1), (2, 2), (4, 1), (4, 2)])
@pytest.mark.parametrize("overlap", [False, True])
def test_divided_experts_are_those_in_one_place(
    form: str, routing: str, ep: int, nodes: int, overlap: bool
) -> None:
    layer, (counts, allowed) = made(form), ROUTINGS[routing]
    generator = torch.Generator().manual_seed(1)
    counts = [sum(counts[rank::ep]) for rank in range(ep)]
    total = sum(counts)
    rows = torch.randn(total, WIDTH, generator=generator)
    weights = torch.rand(total, CHOSEN, generator=generator)
    drawn = torch.rand(total, len(allowed), generator=generator)
    index = torch.tensor(list(allowed))[drawn.argsort(1)[:, :CHOSEN]]
    expected = run(copy.deepcopy(layer), rows, index, weights)
    barrier, given = Barrier(ep), [None] * ep

    def of_rank(rank: int) -> dict[str, Tensor]:
        own = copy.deepcopy(layer)
        shard_experts(own, ep=ep, rank=rank)
        join_experts(own, Group(ep, rank, barrier, given, nodes, overlap))  # type: ignore[arg-type]
        parts = (each.split(counts)[rank] for each in (rows, index, weights))
        return run(own, *parts)

    with ThreadPoolExecutor(ep) as threads:
        found = list(threads.map(of_rank, range(ep)))
    for name, whole in expected.items():
        parts = torch.cat([one[name] for one in found])
        torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("ep", "nodes", "overlap"), [(4, 1, True), (4, 2, False), (4, 2, True)])
def test_bytes_of_exchanges_are_those_of_prices(ep: int, nodes: int, overlap: bool) -> None:
    layer, rows, width = made("gated"), 1000, CONFIG["hidden_size"]
    barrier, given = Barrier(ep), [None] * ep
    generator = torch.Generator().manual_seed(2)
    index = torch.rand(ep, rows, EXPERTS, generator=generator).argsort(2)[:, :, :CHOSEN]

    def of_rank(rank: int) -> list[int]:
        own, group = copy.deepcopy(layer), Group(ep, rank, barrier, given, nodes, overlap)
        shard_experts(own, ep=ep, rank=rank)
        join_experts(own, group)  # type: ignore[arg-type]
        run(own, torch.randn(rows, width), index[rank], torch.rand(rows, CHOSEN))
        return group.sent

    with ThreadPoolExecutor(ep) as threads:
        sent = torch.tensor(list(threads.map(of_rank, range(ep))), dtype=torch.float64)
    profile = balanced(PROFILE)
    cost = profile.modules["llm"].costs["block"]
    experts = Experts(EXPERTS, CHOSEN, width, 1, 1, routed=(EVEN,))
    cost = cost.model_copy(update={"experts": experts})
    between = profile.links if nodes > 1 else None
    links = profile.links.model_copy(update={"gpus_per_node": ep // nodes, "inter_node": between})
    profile = profile.model_copy(update={"links": links, "precision": "fp32"})
    shape = ParallelShape(ep=ep, ep_overlap=overlap)
    priced = exchanged_bytes(profile, "llm", cost, shape, "trained")
    # behind the counts: of each half, out and back, forward and backward
    ways = sent[:, 1:].reshape(ep, 4, 1 + overlap, nodes)
    by_hop = ways[:, ::2] + ways[:, 1::2].flip(3)
    for (_, size), mean in zip(priced, by_hop.sum((1, 2)).mean(0) / rows, strict=True):
        assert size == pytest.approx(float(mean), rel=0.03)


@pytest.mark.parametrize(("overlap", "remaining"), [(False, 1), (True, 0)])
def test_weights_have_gradients_once_all_rows_are_on_their_way(
    overlap: bool, remaining: int
) -> None:
    layer, barrier, given = made("gated"), Barrier(2), [None] * 2
    index = torch.rand(2, 6, EXPERTS).argsort(2)[:, :, :CHOSEN]

    def of_rank(rank: int) -> None:
        own, group = copy.deepcopy(layer), Group(2, rank, barrier, given, 1, overlap)
        shard_experts(own, ep=2, rank=rank)
        join_experts(own, group)  # type: ignore[arg-type]
        seen: list[int] = []
        for weight in own.parameters():
            weight.register_post_accumulate_grad_hook(lambda _: seen.append(len(group.sent)))
        run(own, torch.randn(6, WIDTH), index[rank], torch.rand(6, CHOSEN))
        assert seen == [len(group.sent) - remaining] * 2

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(of_rank, range(2)))


def test_rows_are_counted_in_training_and_once_where_activations_are_recomputed() -> None:
    layer, rows = made("gated"), torch.randn(6, WIDTH, requires_grad=True)
    index = torch.tensor([[0, 3], [3, 1], [0, 3], [3, 1], [1, 0], [3, 0]])
    described = SimpleNamespace(experts=(EXPERTS, CHOSEN, WIDTH), named_modules=layer.named_modules)
    counted = count_rows(described, torch.device("cpu"))  # type: ignore[arg-type]
    assert counted is not None
    weights = torch.ones(6, CHOSEN)
    with torch.no_grad():
        layer["experts"](rows, index, weights)
    assert counted.tolist() == [4, 3, 0, 5]
    checkpoint(
        layer["experts"],
        rows,
        index,
        weights,
        use_reentrant=False,
        context_fn=lambda: (nullcontext(), recomputing()),
    ).sum().backward()
    assert counted.tolist() == [8, 6, 0, 10]
    layer.eval()["experts"](rows, index, weights)
    assert counted.tolist() == [8, 6, 0, 10]


def test_a_shard_knows_all_experts() -> None:
    layer = made("biased")
    shapes = {name: tuple(weight.shape) for name, weight in expert_weights(layer)}
    shard_experts(layer, ep=2, rank=1)
    own = dict(layer.named_parameters())
    assert own.keys() == shapes.keys() and layer["experts"].num_experts == 2
    assert all(of_experts(one) and whole_shape(one) == shapes[name] for name, one in own.items())
    assert all(len(one) == 2 for one in own.values())


def test_a_decoder_layer_tells_of_its_experts() -> None:
    from transformers import LlamaConfig, Qwen3MoeConfig

    small = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    small |= {"vocab_size": 32, "num_hidden_layers": 2, "intermediate_size": 8}
    mixed = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 4}
    library = library_decoder(Qwen3MoeConfig(**small, **mixed, mlp_only_layers=[0]))
    assert [library.mixture(number) for number in range(2)] == [None, (6, 3, 16)]
    assert library_decoder(LlamaConfig(**small)).mixture(0) is None

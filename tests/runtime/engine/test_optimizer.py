"""Parameter groups, learning rates, and the weights of a world's gradient norm."""

import pytest
import torch
from torch import nn

from disttrain_cli.costs import buckets
from disttrain_cli.models.division import Shard
from disttrain_cli.models.layer import PipelineLayer
from disttrain_cli.runtime.engine.optimizer import (
    decays,
    drop_gradients,
    make_optimizer,
    parameter_groups,
    reduced_gradients,
    set_lrs,
    sum_of_squares,
)
from disttrain_cli.spec.runfile.train import OptimizerSpec
from tests.runtime.engine.test_schedule import train_spec


class Layer(PipelineLayer):
    """A linear with a norm, and a class token."""

    def __init__(self, module: str, kind: str = "block") -> None:
        super().__init__()
        self.name, self.module, self.kind = f"{module}.{kind}", module, kind
        self.linear, self.norm = nn.Linear(4, 6), nn.LayerNorm(6)
        self.token = nn.Parameter(torch.zeros(1, 1, 6))


def test_only_matrices_and_embeddings_decay() -> None:
    layer = Layer("llm")
    assert [name for name, p in layer.named_parameters() if decays(p)] == ["linear.weight"]
    assert decays(nn.Embedding(3, 4).weight)
    assert decays(nn.Conv2d(1, 2, 3).weight)


def test_one_part_of_a_divided_matrix_decays_like_the_whole() -> None:
    row = nn.Parameter(torch.zeros(1, 4))
    assert not decays(row)
    row.shard = Shard(0, (1,), 4, 0)  # type: ignore[attr-defined]
    assert decays(row)


def test_groups_are_of_one_kind_each_and_leave_out_what_is_frozen() -> None:
    llm, projector, still = (
        Layer("llm"),
        Layer("image_encoder", "projector"),
        Layer("image_encoder"),
    )
    still.requires_grad_(False)
    llm.linear.weight.shard = Shard(0, (1,), 2, 1)  # type: ignore[attr-defined]
    spec = OptimizerSpec.model_validate(
        {"weight_decay": 0.1, "modules": {"projectors": {"lr": 0.5}}}
    )
    groups = parameter_groups([still, projector, llm], spec)
    assert [
        (g["name"], g["module"], g["tp_whole"], g["initial_lr"], g["weight_decay"]) for g in groups
    ] == [
        ("projectors/plain/0", "projectors", True, 0.5, 0.0),
        ("projectors/decay/0", "projectors", True, 0.5, 0.1),
        ("llm/plain/0", "llm", True, 1e-3, 0.0),
        ("llm/decay/divided/0", "llm", False, 1e-3, 0.1),
    ]
    assert sum(len(g["params"]) for g in groups) == len(list(llm.parameters())) + len(
        list(projector.parameters())
    )
    assert make_optimizer([still], spec) is None


def test_groups_lie_in_one_bucket_each_and_of_one_kind_of_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, _, third = layers = [Layer("llm") for _ in range(3)]
    first.norm.requires_grad_(False)
    third.norm.weight.__dict__["partial_gradient"] = True
    monkeypatch.setattr(buckets, "BUCKET_NUMBERS", 24 + 3 * 6 + 6 + 1)  # more than one layer has
    groups = parameter_groups(layers, OptimizerSpec())
    of_first, of_second, of_third = ([*layer.parameters()] for layer in layers)
    last = {id(p) for p in (*of_second, *of_third)}
    assert [(g["name"], len(g["params"]), g["tp_partial"]) for g in groups] == [
        ("llm/plain/0", 2, False),
        ("llm/decay/0", 1, False),
        ("llm/plain/1", 7, False),
        ("llm/decay/1", 2, False),
        ("llm/plain/partial/1", 1, True),
    ]
    assert {id(p) for g in groups[:2] for p in g["params"]} <= {id(p) for p in of_first}
    assert {id(p) for g in groups[2:] for p in g["params"]} == last


def test_a_projector_with_its_modules_own_norm_gives_that_to_the_module() -> None:
    layer = Layer("image_encoder", "projector")
    layer.published = {"norm": "post_layernorm"}
    spec = OptimizerSpec.model_validate({"modules": {"image_encoder": {"lr": 0.25}}})
    assert {
        g["name"]: (g["initial_lr"], len(g["params"])) for g in parameter_groups([layer], spec)
    } == {
        "projectors/decay/0": (1e-3, 1),
        "projectors/plain/0": (1e-3, 2),
        "image_encoder/plain/0": (0.25, 2),
    }


def test_modules_follow_schedules_of_their_own() -> None:
    train = train_spec(
        warmup_steps=4, modules={"projectors": {"lr": 1.0, "warmup_steps": 0, "schedule": "linear"}}
    )
    optimizer = make_optimizer([Layer("llm"), Layer("llm", "projector")], train.optimizer)
    assert optimizer is not None
    set_lrs(optimizer, train, 1)
    assert {group["module"]: group["lr"] for group in optimizer.param_groups} == {
        "llm": pytest.approx(5e-3),
        "projectors": pytest.approx(0.99),
    }


def test_shares_of_the_norm_add_up_over_replicas_and_tp_ranks() -> None:
    """Two replicas of two TP ranks: every whole gradient is held four times, every divided one
    twice."""
    total = torch.zeros((), dtype=torch.float64)
    for _replica in range(2):
        for rank in range(2):
            layer = Layer("llm")
            for parameter in layer.parameters():
                parameter.grad = torch.ones_like(parameter)
            layer.linear.weight.shard = Shard(0, (1,), 2, rank)  # type: ignore[attr-defined]
            optimizer = make_optimizer([layer], OptimizerSpec())
            total += sum_of_squares(reduced_gradients(optimizer, dp=2, tp=2), torch.device("cpu"))
    whole = 6 + 6 + 6 + 6  # biases, norm, token
    assert float(total) == pytest.approx(whole + 2 * 24)


def test_dropping_gradients_leaves_weights_and_moments() -> None:
    layer = Layer("llm")
    optimizer = make_optimizer([layer], OptimizerSpec())
    assert optimizer is not None
    for _ in range(2):
        sum(p.square().sum() for p in layer.parameters()).backward()  # type: ignore[union-attr]
        optimizer.step()
    before = [
        (p.detach().clone(), {k: v.clone() for k, v in optimizer.state[p].items()})
        for p in layer.parameters()
    ]
    drop_gradients(optimizer)
    for parameter, (weight, state) in zip(layer.parameters(), before, strict=True):
        assert parameter.grad is None
        assert torch.equal(parameter, weight)
        assert all(
            torch.equal(optimizer.state[parameter][key], value) for key, value in state.items()
        )
    drop_gradients(None)


def test_the_norm_of_many_numbers_is_exact() -> None:
    many = torch.full((1 << 22,), 0.1)
    squared = sum_of_squares([("llm", [many], 1.0)], torch.device("cpu"))
    assert squared.item() == pytest.approx(len(many) * float(many[0]) ** 2, rel=1e-9)

"""A stage's forward and backward against plain autograd: freezing, recomputation, sums that are not
finite."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from disttrain_cli.models.layer import LOSS_PREFIX, Batch, PipelineLayer, TensorSpec
from disttrain_cli.models.weight_parts import split
from disttrain_cli.runtime.engine.faults import Sums
from disttrain_cli.runtime.engine.gradients import GradientFlow, gradient_flow
from disttrain_cli.runtime.engine.stage import Segment, StageRunner, build_segments

WIDTH = 5


class Linear(PipelineLayer):
    """hidden → tanh(W·hidden); counts its forwards."""

    def __init__(self, module: str, number: int, reads: str, writes: str) -> None:
        super().__init__()
        self.name, self.module, self.kind, self.owners = (
            f"{module}.{number}",
            module,
            "block",
            frozenset({module}),
        )
        self.reads, self.writes = (
            (reads,) if reads else (),
            (TensorSpec(writes, "sequence", "tokens", (WIDTH,)),),
        )
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.forwards = 0

    def is_empty(self, state: dict[str, Tensor], batch: Batch) -> bool:
        return False

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        self.forwards += 1
        given = state[self.reads[0]] if self.reads else batch.cache["input"]
        return {self.writes[0].name: torch.tanh(self.linear(given))}


class Loss(Linear):
    """Adds the loss of the hidden rows, and hands them on."""

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        written = super().compute(state, batch)
        return written | {f"{LOSS_PREFIX}text": written[self.writes[0].name].square().sum()}


def _layers() -> list[PipelineLayer]:
    """Two encoders side by side, one of which the LLM reads together with its own embedding, and
    the loss."""
    torch.manual_seed(0)
    return [
        Linear("encoder", 0, "", "image"),
        Linear("encoder", 1, "image", "image"),
        Linear("llm", 0, "image", "hidden"),
        Linear("llm", 1, "hidden", "hidden"),
        Loss("llm", 2, "hidden", "out"),
    ]


def _live(layers: list[PipelineLayer]) -> Callable[[int], list[TensorSpec]]:
    def live(cut: int) -> list[TensorSpec]:
        written = {spec.name: spec for layer in layers[:cut] for spec in layer.writes}
        wanted = {name for layer in layers[cut:] for name in layer.reads}
        return [
            spec
            for name, spec in written.items()
            if name in wanted or (cut == len(layers) and name == "out")
        ]

    return live


def _flow(layers: list[PipelineLayer], trained: list[str] | None) -> GradientFlow:
    flow = gradient_flow(layers, trained)  # type: ignore[arg-type]  # layers name what a table's rows do
    flow.mark(layers, 0)
    return flow


def _runner(
    layers: list[PipelineLayer],
    trained: list[str] | None,
    recompute: bool = False,
    sums: Sums | None = None,
) -> StageRunner:
    flow = _flow(layers, trained)
    return StageRunner(
        build_segments(layers, 0, _live(layers), flow.carrying.__getitem__), recompute, sums
    )


def _untimed(module: str) -> Callable[[], None]:
    return lambda: None


def _train(runner: StageRunner, given: Tensor) -> float:
    batch = Batch(cache={"input": given})
    outputs = runner.forward(0, {}, batch, _untimed)
    runner.backward(
        0, {name: torch.ones_like(tensor) for name, tensor in outputs.items()}, _untimed
    )
    loss = float(runner.losses["text"])
    runner.losses.clear()
    return loss


def _plain(layers: list[PipelineLayer], given: Tensor) -> None:
    """The same by autograd alone: the loss, and ones as the gradient of what leaves the stage."""
    state: dict[str, Tensor] = {}
    for layer in layers:
        state.update(layer(state, Batch(cache={"input": given})))
    (state[f"{LOSS_PREFIX}text"] + state["out"].sum()).backward()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("trained", [None, ["llm"], ["encoder"]])
def test_gradients_equal_autograds(trained: list[str] | None, recompute: bool) -> None:
    given = torch.randn(3, WIDTH)
    expected, layers = _layers(), _layers()
    _plain(expected, given)
    _train(_runner(layers, trained, recompute), given)
    for layer, same in zip(layers, expected, strict=True):
        for parameter, other in zip(layer.parameters(), same.parameters(), strict=True):
            if trained is None or layer.module in trained:
                assert torch.equal(parameter.grad, other.grad)  # type: ignore[arg-type]
            else:
                assert parameter.grad is None and not parameter.requires_grad


def test_recomputation_gives_the_same_loss_and_runs_layers_twice() -> None:
    given = torch.randn(3, WIDTH)
    kept, again = _layers(), _layers()
    assert _train(_runner(kept, None), given) == _train(_runner(again, None, recompute=True), given)
    assert [layer.forwards for layer in kept] == [1] * 5  # type: ignore[union-attr, misc]
    assert [layer.forwards for layer in again] == [2] * 5  # type: ignore[union-attr, misc]


def test_a_still_module_keeps_nothing_and_is_not_recomputed() -> None:
    layers = _layers()
    runner = _runner(layers, ["llm"], recompute=True)
    seen: list[str] = []

    def timed(module: str) -> Callable[[], None]:
        seen.append(module)
        return lambda: None

    batch = Batch(cache={"input": torch.randn(3, WIDTH)})
    outputs = runner.forward(0, {}, batch, timed)
    assert [segment.still for segment in runner.segments] == [True, False]
    assert len(runner.in_flight[0]) == 1
    assert not runner.in_flight[0][0].inputs  # nothing trains before the LLM
    assert (
        runner.backward(0, {name: torch.ones_like(t) for name, t in outputs.items()}, timed) == {}
    )
    assert seen == ["encoder", "llm", "llm"]
    assert [layer.forwards for layer in layers] == [1, 1, 2, 2, 2]  # type: ignore[union-attr, misc]


def test_what_only_passes_through_a_stage_is_not_kept_and_its_gradient_goes_back() -> None:
    both = ["image", "hidden"]
    layer = Linear("llm", 1, "hidden", "hidden")
    runner = StageRunner([Segment("llm", [layer], both, both, frozenset(both), frozenset(both), 0)])
    state = {name: torch.randn(3, WIDTH) for name in both}
    storages = {name: state[name].untyped_storage()._weak_ref() for name in both}
    given = state["hidden"].clone().requires_grad_()
    outputs = runner.forward(0, state, Batch(), _untimed)
    assert torch.equal(outputs["image"], state["image"])
    seeds = {name: torch.randn(3, WIDTH) for name in both}
    torch.tanh(layer.linear(given)).backward(seeds["hidden"])
    del state, outputs
    gone = {name: torch.UntypedStorage._expired(ref) for name, ref in storages.items()}
    assert gone == {"image": True, "hidden": False}  # the linear's weight needs the latter
    found = runner.backward(0, seeds, _untimed)
    assert torch.equal(found["image"], seeds["image"])
    assert torch.equal(found["hidden"], given.grad)


def test_segments_say_which_gradients_cross_their_ends() -> None:
    layers = _layers()
    segments: list[Segment] = _runner(layers, ["llm"]).segments
    assert [(s.carrying, s.returning) for s in segments] == [(set(), set()), (set(), {"out"})]


def test_sums_are_noted_in_the_order_of_computation() -> None:
    layers = _layers()
    sums = Sums(["encoder", "llm", "projectors"])
    given = torch.randn(3, WIDTH)
    with torch.no_grad():
        layers[3].linear.weight[0, 0] = torch.nan  # type: ignore[union-attr, index]
    _train(_runner(layers, None, sums=sums), given)
    order = sorted(sums.sums, key=lambda note: note[:3])
    assert [(note[0], note[3]) for note in order] == [
        (0, "encoder"),
        (0, "llm"),
        (0, "llm"),
        (1, "llm"),
    ]
    assert [bool(torch.isfinite(note[4])) for note in order] == [True, False, False, False]


class Images(Linear):
    """Has nothing to do in slots without images."""

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        if not batch.cache["images"]:
            return {self.writes[0].name: batch.cache["input"] * 1.0}
        return super().compute(state, batch)


def _aside(dtype: torch.dtype) -> tuple[list[PipelineLayer], StageRunner]:
    """Backwards of three slots, the second without images, that put their weights' parts aside."""
    torch.manual_seed(0)
    layers: list[PipelineLayer] = [
        Images("encoder", 0, "", "image"),
        Images("encoder", 1, "image", "image"),
        *_layers()[2:],
    ]
    runner = _runner(layers, None)
    runner.deferring = True
    for layer in layers:
        layer.to(dtype)
        split(layer)
    for slot in range(3):
        given = torch.randn(3, WIDTH).to(dtype)
        batch = Batch(cache={"input": given, "images": slot != 1})
        left = runner.forward(slot, {}, batch, _untimed)
        runner.backward(slot, {"out": torch.ones_like(left["out"])}, _untimed)
    return layers, runner


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_parts_of_several_slots_go_layer_by_layer(dtype: torch.dtype) -> None:
    """The last layer's first, in the order of the slots, so that sums have the same bits."""
    layers, runner = _aside(dtype)
    weights = {id(layer.linear.weight): number for number, layer in enumerate(layers)}  # type: ignore[union-attr]
    assert sorted(weights[id(w)] for w in runner.waiting([0, 1])) == [0, 1, 2, 2, 3, 3, 4, 4]
    made: list[tuple[int, int, str]] = []
    turns: list[tuple[int, str]] = []

    def timed(slot: int, module: str) -> Callable[[], None]:
        turns.append((slot, module))
        return lambda: None

    for number, layer in enumerate(layers):
        layer.linear.weight.register_hook(  # type: ignore[union-attr, operator]
            lambda _, number=number: made.append((number, *turns[-1]))
        )
    runner.weights(range(3), timed)
    assert made == [
        *((number, slot, "llm") for number in (4, 3, 2) for slot in range(3)),
        *((number, slot, "encoder") for number in (1, 0) for slot in (0, 2)),
    ]
    assert not runner.put_aside and not runner.waiting(range(3))
    assert len(turns) == len(made)
    by_slot, other = _aside(dtype)
    for slot in range(3):
        seen: list[str] = []
        other.weights([slot], lambda _, module: seen.append(module) or (lambda: None))  # noqa: B023
        assert seen == ["llm", "encoder"][: 1 if slot == 1 else 2]
    for layer, same in zip(layers, by_slot, strict=True):
        for parameter, expected in zip(layer.parameters(), same.parameters(), strict=True):
            assert parameter.grad is not None and expected.grad is not None
            assert torch.equal(parameter.grad, expected.grad)

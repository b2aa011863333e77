"""Operators counted on the meta device, against counts by hand."""

import pytest
import torch
from torch import nn

from disttrain_cli.costs.hardware import KernelWork
from disttrain_cli.models.attention import Segments, attend
from disttrain_cli.models.flops import layer_flops
from disttrain_cli.models.graph import build_layers, describe, layer_table
from disttrain_cli.models.layer import Batch, PipelineLayer, TensorSpec
from disttrain_cli.models.operators import layer_operators
from disttrain_cli.models.probe import probe_batch, state_at

ROWS, WIDTH, HIDDEN = 100, 8, 16
X, W, H = 4 * ROWS * WIDTH, 4 * WIDTH * HIDDEN, 4 * ROWS * HIDDEN  # bytes of input, a weight, a hidden tensor


class Toy(PipelineLayer):
    """x → act(x·w1)·w2, with whatever stands between the two products."""

    name, module, kind = "toy", "toy", "toy"
    reads = ("x",)
    writes = (TensorSpec("x", "sequence", "tokens", (WIDTH,)),)

    def __init__(self, between):
        super().__init__()
        self.one, self.two, self.between = nn.Linear(WIDTH, HIDDEN, False), nn.Linear(HIDDEN, WIDTH, False), between

    def is_empty(self, state, batch):
        return False

    def compute(self, state, batch):
        return {"x": self.two(self.between(self.one(state["x"])))}


def toy(between, frozen=False):
    with torch.device("meta"):
        layer = Toy(between).requires_grad_(not frozen)
        state = {"x": torch.empty(ROWS, WIDTH, requires_grad=True)}
    return layer_operators(layer, state, Batch(image_grids=[]))


@pytest.mark.parametrize("between", [torch.relu, lambda h: torch.nn.functional.silu(2.0 * h.abs() + h.mean(1, True))])
def test_what_stands_between_two_products_is_one_kernel(between):
    done = toy(between)
    flops = 2 * ROWS * WIDTH * HIDDEN
    assert done.forward == KernelWork(2 * flops, 0, 0, (X + W + H) + (H + H) + (H + W + X), 3)
    # Products: dh = dy·w2ᵀ, dw2 = hᵀ·dy, dw1, dx; one kernel makes da from dh and a (or act(a)); one adds both dw.
    assert done.backward.product_flops == 4 * flops and done.backward.kernels == 6
    products = (X + W + H) + (X + H + W) + (H + X + W) + (H + W + X)
    assert done.backward.moved_bytes == products + (H + H + H) + 2 * (W + W + W)


def test_gradients_of_inputs_are_written_whatever_makes_them():
    class Residual(Toy):
        def compute(self, state, batch):
            return {"x": state["x"] + super().compute(state, batch)["x"]}

    with torch.device("meta"):
        layer, state = Residual(torch.relu), {"x": torch.empty(ROWS, WIDTH, requires_grad=True)}
    residual, plain = layer_operators(layer, state, Batch(image_grids=[])), toy(torch.relu)
    # The last product's result, the residual's gradient in, their sum out; the sums of weights join the same kernel.
    assert residual.backward.moved_bytes - plain.backward.moved_bytes == 3 * X


def test_only_what_is_in_memory_is_kept():
    assert toy(torch.relu).saved_bytes == X + H  # relu needs its output only, which the second product keeps too
    assert toy(lambda h: torch.exp(h).sin().cos()).saved_bytes == X + 2 * H  # exp and sin are computed again from h
    assert toy(torch.relu, frozen=True).saved_bytes == H


def test_frozen_weights_have_no_gradients():
    trained, frozen = toy(torch.relu), toy(torch.relu, frozen=True)
    assert frozen.forward == trained.forward
    assert frozen.backward.product_flops == trained.backward.product_flops / 2
    assert frozen.backward.moved_bytes == (X + W + H) + (H + H + H) + (H + W + X)


def test_a_group_norm_reads_its_input_twice():
    once = toy(lambda h: h.sin()).forward
    norm = toy(lambda h: torch.nn.functional.group_norm(h[:, :, None], 4)[:, :, 0]).forward
    assert norm.moved_bytes - once.moved_bytes == H
    split = toy(lambda h: torch.nn.functional.group_norm(h.sin()[:, :, None], 4)[:, :, 0].cos()).forward
    assert (split.kernels, split.moved_bytes - norm.moved_bytes) == (norm.kernels + 1, 2 * H)


def operators(run, name, **sizes):
    table, inputs = layer_table(run), describe(run)
    place = next(i for i, info in enumerate(table) if info.name == name)
    batch = probe_batch(inputs, device="meta", **sizes)
    layer = build_layers(run, place, place + 1, device="meta")[0]
    state = state_at(table, place, inputs, batch, "meta")
    return layer_operators(layer, state, batch), layer_flops(layer, state, batch)


def test_attention_runs_as_flash_attention_does(make_run):
    length, width, heads, groups, inner = 40, 48, 4, 2, 96
    found, model = operators(make_run(), "llm.block.1", documents=[[length]], length=length)
    scores = 4 * width * length**2  # model FLOPs of attention, forward
    assert found.forward.attention_flops == scores / 2
    assert found.forward.product_flops == model.forward - scores
    assert found.backward.attention_flops == 2.5 * scores / 2
    assert found.backward.product_flops == model.backward - 2 * scores
    row, key = 4 * length * width, 4 * length * width * groups // heads
    log_sum_exp = 4 * length * heads
    # Kept: x, first norm; q, k and v of all heads, output, log-sum-exp; x + attention, second norm; gate, up, product.
    # The repeated v is a copy; what repeats k comes from the rotated k, so that is all of k that is kept.
    assert found.saved_bytes == 2 * row + 4 * row + log_sum_exp + 2 * row + 3 * 4 * length * inner
    assert key < row


def test_attention_of_images_is_not_halved_and_masks_are_not_counted(make_run):
    run = make_run()
    found, model = operators(run, "image_encoder.block.1", grids=[(6, 6)])
    assert found.forward.attention_flops + found.forward.product_flops == model.forward
    table, inputs = layer_table(run), describe(run)
    place = next(i for i, info in enumerate(table) if info.name == "llm.block.0")
    layer = build_layers(run, place, place + 1, device="meta")[0]
    batch = probe_batch(inputs, documents=[[32]], length=32, device="meta")
    counts = [layer_operators(layer, state_at(table, place, inputs, batch, "meta"), batch) for _ in range(2)]
    assert counts[0] == counts[1]


@pytest.mark.parametrize(("causal", "window", "share"), [(False, None, 1), (True, None, 2), (True, 8, 2)])
def test_flash_attention_skips_what_is_hidden(causal, window, share):
    class Attention(PipelineLayer):
        def is_empty(self, state, batch):
            return False

        def compute(self, state, batch):
            return {"y": attend(state["x"], state["x"], state["x"], Segments([20, 12], torch.device("meta")),
                                causal=causal, window=window)}

    x = torch.empty(32, 4, 16, dtype=torch.bfloat16, device="meta", requires_grad=True)
    found = layer_operators(Attention(), {"x": x}, Batch(image_grids=[]))
    scores = 4 * 4 * 16 * (20**2 + 12**2)
    assert found.forward.attention_flops == scores / share
    assert found.backward.attention_flops == 2.5 * scores / share


def test_the_head_keeps_its_logits(make_run):
    length, vocabulary, width = 32, 261, 48
    found, _ = operators(make_run(), "llm.head", documents=[[length]], length=length)
    rows = 4 * length * width
    assert found.saved_bytes == pytest.approx(2 * rows + 4 * length * vocabulary, abs=64)


def test_convolutions_are_counted_and_gradients_left_as_they_were(make_run):
    found, model = operators(make_run(), "image_generator.down.0", targets=2)
    total = sum(found.forward[:3])
    assert total == model.forward and found.forward.convolution_flops > 0
    assert found.backward.convolution_flops == 2 * found.forward.convolution_flops

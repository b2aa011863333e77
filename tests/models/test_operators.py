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
X, W, H = (
    4 * ROWS * WIDTH,
    4 * WIDTH * HIDDEN,
    4 * ROWS * HIDDEN,
)  # bytes of input, a weight, a hidden tensor


class Toy(PipelineLayer):
    """x → act(x·w1)·w2, with whatever stands between the two products."""

    name, module, kind = "toy", "toy", "toy"
    reads = ("x",)
    writes = (TensorSpec("x", "sequence", "tokens", (WIDTH,)),)

    def __init__(self, between):
        super().__init__()
        self.one, self.two, self.between = (
            nn.Linear(WIDTH, HIDDEN, False),
            nn.Linear(HIDDEN, WIDTH, False),
            between,
        )

    def is_empty(self, state, batch):
        return False

    def compute(self, state, batch):
        return {"x": self.two(self.between(self.one(state["x"])))}


def toy(between, frozen=False):
    with torch.device("meta"):
        layer = Toy(between).requires_grad_(not frozen)
        state = {"x": torch.empty(ROWS, WIDTH, requires_grad=True)}
    return layer_operators(layer, state, Batch())


SUMS = 3 * (W + W)  # each weight's gradient and its sum are read, the sum is written


def test_every_operator_is_a_kernel_that_reads_and_writes():
    done, flops = toy(torch.relu), 2 * ROWS * WIDTH * HIDDEN
    assert done.forward == KernelWork(2 * flops, 0, 0, (X + W + H) + (H + H) + (H + W + X), 3)
    # dh = dy·w2ᵀ, dw2 = hᵀ·dy, da from dh and act(a), dw1, dx; each dw is added to its sum.
    products = (X + W + H) + (X + H + W) + (H + X + W) + (H + W + X)
    assert done.backward == KernelWork(4 * flops, 0, 0, products + (H + H + H) + SUMS, 7)
    three = toy(lambda h: torch.exp(h).sin().cos())
    assert (three.forward.kernels, three.forward.moved_bytes - done.forward.moved_bytes) == (
        5,
        4 * H,
    )


def test_gradients_are_added_to_fp32_sums():
    with torch.device("meta"):
        layer = Toy(torch.relu).to(torch.bfloat16)
        state = {"x": torch.empty(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True)}
    done, exact = layer_operators(layer, state, Batch()), toy(torch.relu)
    assert done.backward.kernels == exact.backward.kernels  # no casts of their own
    halved = (exact.backward.moved_bytes - SUMS) / 2
    assert done.backward.moved_bytes == halved + SUMS - (W + W) / 2  # gradients of half the size


def test_views_and_what_allocates_only_are_no_kernels():
    plain = toy(torch.relu).forward
    assert (
        toy(lambda h: torch.relu(h.view(-1).unflatten(0, (ROWS, HIDDEN)).t().detach().t())).forward
        == plain
    )


def test_kept_is_what_the_backward_holds():
    # relu needs its output only, which the second product keeps too
    assert toy(torch.relu).saved_bytes == X + H
    assert toy(lambda h: torch.exp(h).sin().cos()).saved_bytes == X + 3 * H  # each result, once
    assert toy(torch.relu, frozen=True).saved_bytes == H
    # nothing but the product's input
    assert toy(lambda h: (h * 2.0 + 1.0).clone()).saved_bytes == X + H
    assert toy(lambda h: h[:, :8].repeat(1, 2)).saved_bytes == X + H
    # a view keeps what it is of, once
    assert toy(lambda h: h.expand(2, -1, -1)[0].sin()).saved_bytes == X + 2 * H


def test_what_a_function_keeps_by_itself_counts_too():
    class Hidden(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.own = x * 2.0
            return x + 1.0

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.own

    assert toy(Hidden.apply).saved_bytes == X + H + H


def test_what_stays_for_later_batches_is_not_kept():
    held = []

    def between(h):
        held.append(torch.empty(1000, device="meta"))
        return torch.relu(h)

    assert toy(between).saved_bytes == X + H


def test_frozen_weights_have_no_gradients():
    trained, frozen = toy(torch.relu), toy(torch.relu, frozen=True)
    assert frozen.forward == trained.forward
    assert frozen.backward.product_flops == trained.backward.product_flops / 2
    assert frozen.backward.moved_bytes == (X + W + H) + (H + H + H) + (H + W + X)


def test_moments_of_groups_take_as_long_as_nine_reads_and_norms_are_several_kernels():
    plain = toy(torch.relu).forward
    norm = toy(lambda h: torch.nn.functional.group_norm(h[:, :, None], 4)[:, :, 0])
    moments = 2 * 4 * ROWS * 4  # of each row and group
    assert norm.forward.kernels == plain.kernels + 2
    assert norm.forward.moved_bytes == plain.moved_bytes + 9 * H + moments


def test_looking_up_reads_no_whole_table():
    table = torch.empty(10_000, HIDDEN, device="meta")

    def looked_up(h):
        return h + torch.nn.functional.embedding(
            torch.empty(ROWS, dtype=torch.int64, device="meta"), table
        )

    assert (
        toy(looked_up).forward.moved_bytes
        == toy(torch.relu).forward.moved_bytes + 8 * ROWS + 2 * H + H
    )


def operators(run, name, **sizes):
    table, inputs = layer_table(run), describe(run)
    place = next(i for i, info in enumerate(table) if info.name == name)
    batch = probe_batch(inputs, device="meta", **sizes)
    layer = build_layers(run, place, place + 1, device="meta")[0]
    state = state_at(table, place, inputs, batch, "meta")
    return layer_operators(layer, state, batch), layer_flops(layer, state, batch)


def test_attention_runs_as_flash_attention_does(make_run):
    length, width, heads, inner = 40, 48, 4, 96
    found, model = operators(make_run(), "llm.block.1", documents=[[length]], length=length)
    scores = 4 * width * length**2  # model FLOPs of attention, forward
    assert found.forward.attention_flops == scores / 2
    assert found.forward.product_flops == model.forward - scores
    assert found.backward.attention_flops == 2.5 * scores / 2
    assert found.backward.product_flops == model.backward - 2 * scores
    row = 4 * length * width
    # Kept: x, first norm; q, k and v of all heads, output; x + attention, second norm; gate, up,
    # product; a scale for each row of both norms, cosines and sines are the batch's.
    kept = 2 * row + 4 * row + 2 * row + 3 * 4 * length * inner + 2 * 4 * length
    log_sums = 4 * heads * -(-length // 32) * 32  # in steps of 32 rows
    assert found.saved_bytes == kept + log_sums + 2 * 8  # and a seed and an offset


def test_attention_of_images_is_not_halved_and_masks_are_not_counted(make_run):
    run = make_run()
    found, model = operators(run, "image_encoder.block.1", image=[(6, 6)])
    assert found.forward.attention_flops + found.forward.product_flops == model.forward
    table, inputs = layer_table(run), describe(run)
    place = next(i for i, info in enumerate(table) if info.name == "llm.block.0")
    layer = build_layers(run, place, place + 1, device="meta")[0]
    batch = probe_batch(inputs, documents=[[32]], length=32, device="meta")
    counts = [
        layer_operators(layer, state_at(table, place, inputs, batch, "meta"), batch)
        for _ in range(2)
    ]
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("causal", "window", "share"), [(False, None, 1), (True, None, 2), (True, 8, 2)]
)
def test_flash_attention_skips_what_is_hidden(causal, window, share):
    class Attention(PipelineLayer):
        def is_empty(self, state, batch):
            return False

        def compute(self, state, batch):
            return {
                "y": attend(
                    state["x"],
                    state["x"],
                    state["x"],
                    Segments([20, 12], torch.device("meta")),
                    causal=causal,
                    window=window,
                )
            }

    x = torch.empty(32, 4, 16, dtype=torch.bfloat16, device="meta", requires_grad=True)
    found = layer_operators(Attention(), {"x": x}, Batch())
    scores = 4 * 4 * 32 * (20**2 + 12**2)  # heads of 16 are computed as 32
    assert found.forward.attention_flops == scores / share
    assert found.backward.attention_flops == 2.5 * scores / share


@pytest.mark.parametrize(
    ("dtype", "width", "softcap", "sunk", "attention", "products", "saved"),
    [
        # forward FLOPs that run, over model FLOPs: flash attention skips what is hidden
        (torch.bfloat16, 32, None, False, 0.5, 0.0, 0),
        (torch.bfloat16, 32, None, True, 0.5, 0.0, 2 * 8),
        (torch.bfloat16, 16, None, False, 0.5 * 64 / 48, 0.0, 2 * 64 * (2 + 8) * 16),  # padded
        (torch.float32, 16, None, False, 0.5, 0.0, None),
        (torch.bfloat16, 32, 2.0, False, 0.0, 1.0, -16),  # one block of scores in memory; no seed
        (torch.float32, 32, None, True, 0.0, 1.0, -16 + 2 * 16),
    ],
)
def test_attention_is_counted_by_the_kernel_that_runs(
    dtype, width, softcap, sunk, attention, products, saved
):
    class Attention(PipelineLayer):
        def is_empty(self, state, batch):
            return False

        def compute(self, state, batch):
            segments = batch.cache.setdefault("all", Segments([40, 24], torch.device("meta")))
            given = [state[name] for name in ("query", "key", "value")]
            sinks = state.get("sinks")
            return {"y": attend(*given, segments, causal=True, softcap=softcap, sinks_H=sinks)}

    shapes = {"query": (64, 8, 32), "key": (64, 2, 32), "value": (64, 2, width)}
    shapes |= {"sinks": (8,)} if sunk else {}
    state = {
        name: torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
        for name, shape in shapes.items()
    }
    found = layer_operators(Attention(), state, Batch())
    model = layer_flops(Attention(), state, Batch())
    scores = 2 * 8 * (40**2 + 24**2) * (32 + width)
    assert (model.forward, model.backward) == (scores, 2 * scores)
    assert found.forward.attention_flops == pytest.approx(attention * scores)
    assert found.forward.product_flops == products * scores
    if saved is not None:  # inputs, result, a log-sum per row and head, flash attention's seed
        size = dtype.itemsize
        rows = 64 * size * (8 * 32 + 2 * 32 + 2 * width + 8 * width)
        assert found.saved_bytes == rows + 4 * 8 * 64 + 16 + saved


def test_the_head_keeps_its_logits(make_run):
    length, vocabulary, width = 32, 261, 48
    found, _ = operators(make_run(), "llm.head", documents=[[length]], length=length)
    rows = 4 * length * width
    # Beside x, the norm and the logits, of each row: the norm's scale; largest logit, sum and
    # label's logit; where the label is, whether it is here and whether it is trained.
    assert found.saved_bytes == 2 * rows + 4 * length * vocabulary + length * (4 + 4 + 8 + 1 + 1)


def test_convolutions_are_counted_and_gradients_left_as_they_were(make_run):
    found, model = operators(make_run(), "image_generator.down.0", target=2)
    total = sum(found.forward[:3])
    assert total == model.forward and found.forward.convolution_flops > 0
    assert found.backward.convolution_flops == 2 * found.forward.convolution_flops

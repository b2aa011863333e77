"""Attention inside segments against a softmax over all rows with everything else masked."""

import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from disttrain_cli.errors import SpecError
from disttrain_cli.models import attention, library_attention, merged
from disttrain_cli.models.attention import Rule, Segments, attend, kernel_for

CPU = torch.device("cpu")


def drawn(rows, heads, groups, width, seed=0):
    draws = torch.Generator().manual_seed(seed)
    return [
        torch.randn(rows, count, width, generator=draws, dtype=torch.float64, requires_grad=True)
        for count in (heads, groups, groups)
    ]


def masked(query, key, value, lengths, causal, window, scale, softcap=None, sinks=None, rule=None):
    """[R, H, D] by a mask of all rows against all rows."""
    segment = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    place = torch.arange(len(segment))
    back = place[:, None] - place[None, :]
    together = torch.zeros_like(back, dtype=torch.bool)
    for start, stop in rule.spans if rule else ():
        together[start:stop, start:stop] = True
    seen = back >= 0 if causal else torch.ones_like(together)
    within = back < window if causal and window is not None else torch.ones_like(together)
    hides = rule is None or rule.window_hides_spans
    seen = (seen | together) & within if hides else (seen & within) | together
    seen = seen & (segment[:, None] == segment[None, :])
    each = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(each, 1), value.repeat_interleave(each, 1)
    scores = torch.einsum("rhd,shd->hrs", query, key) * (scale or query.shape[-1] ** -0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(seen), 1)], -1)
    return torch.einsum("hrs,shd->rhd", scores.softmax(-1)[..., : len(seen)], value)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=8),
    st.sampled_from([(4, 4), (4, 2), (3, 1)]),
    st.booleans(),
    st.none() | st.integers(1, 13),
    st.sampled_from([None, 0.3]),
)
def test_it_is_the_masked_softmax(lengths, heads, causal, window, scale):
    window = window if causal else None
    inputs = drawn(sum(lengths), *heads, 8)
    made = attend(*inputs, Segments(lengths, CPU), causal=causal, window=window, scale=scale)
    expected = masked(*inputs, lengths, causal, window, scale)
    seed = torch.randn(made.shape, dtype=made.dtype)
    assert torch.allclose(made, expected, atol=1e-12)
    for own, other in zip(
        torch.autograd.grad(made, inputs, seed),
        torch.autograd.grad(expected, inputs, seed),
        strict=True,
    ):
        assert torch.allclose(own, other, atol=1e-11)


LENGTHS = [3, 14, 1, 9, 3]
SPANS = ((4, 9), (10, 17), (17, 18), (18, 20), (24, 27))
WINDOWED = Rule(True, 4, SPANS)
#: Rule of the segments, soft cap, whether there are sinks, width of values.
FEATURES = {
    "soft cap": (Rule(), 0.7, False, 8),
    "soft cap, window": (Rule(True, 4), 0.7, False, 8),
    "soft cap of images": (Rule(False), 0.7, False, 8),
    "sinks": (Rule(), None, True, 8),
    "sinks, window": (Rule(True, 4), None, True, 8),
    "narrow values": (Rule(), None, False, 4),
    "wide values, window": (Rule(True, 4), None, False, 12),
    "spans": (Rule(True, None, SPANS), None, False, 8),
    "spans in windows": (WINDOWED, None, False, 8),
    "spans beyond windows": (Rule(True, 8, SPANS, False), None, False, 8),
    "spans longer than windows": (Rule(True, 4, SPANS, False), None, False, 8),
    "all but soft caps": (WINDOWED, None, True, 4),
    "all": (WINDOWED, 0.7, True, 12),
}


def calls(monkeypatch, kernel):
    """Run the code of a GPU on the CPU, with stand-ins for flash attention's kernels."""
    if kernel == "CPU":
        return

    def by_mask(query, key, value, starts, others, longest, most, causal, scale, window):
        assert torch.equal(starts, others) and (longest, most) == (int(starts.diff().max()),) * 2
        assert query.shape == (len(query), query.shape[1], value.shape[2])
        lengths, window = starts.diff().tolist(), None if window[0] < 0 else window[0] + 1
        return lengths, window, scale or query.shape[-1] ** -0.5

    def forward(*args):
        lengths, window, scale = by_mask(*args)
        rows, causal = args[:3], args[9][1] == 0
        made = masked(*rows, lengths, causal, window, scale)
        ones = torch.ones_like(rows[2])
        # the log-sum of scores, by a softmax with a sink at 0: p = e / (1 + e)
        sink = rows[0].new_zeros(rows[0].shape[1])
        share = masked(rows[0], rows[1], ones, lengths, causal, window, scale, None, sink)
        return made, torch.logit(share[..., 0].double()).t().to(made.dtype), made.new_zeros(2)

    def backward(gradient, query, key, value, made, sums, starts, others, *more):
        longest, most, causal, _, scale, window = more
        lengths, window, scale = by_mask(
            query, key, value, starts, others, longest, most, causal, scale, window
        )
        each = query.shape[1] // key.shape[1]
        keys, values = key.repeat_interleave(each, 1), value.repeat_interleave(each, 1)
        place = torch.arange(len(query))
        segment = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        back = place[:, None] - place[None]
        seen = (segment[:, None] == segment) & (back >= 0) & (back < (window or len(place)))
        scores = torch.einsum("rhd,shd->hrs", query, keys) * scale
        weights = (scores - sums[..., None]).exp().masked_fill(~seen, 0.0)
        inner = (gradient * made).sum(-1).t()[..., None]
        of_scores = weights * (torch.einsum("rhd,shd->hrs", gradient, values) - inner) * scale
        of_key = torch.einsum("hrs,rhd->shd", of_scores, query)
        of_value = torch.einsum("hrs,rhd->shd", weights, gradient)
        return (
            torch.einsum("hrs,shd->rhd", of_scores, keys),
            of_key.unflatten(1, (-1, each)).sum(2),
            of_value.unflatten(1, (-1, each)).sum(2),
        )

    def varlen(*args, scale, window_size, enable_gqa):
        return masked(
            *args[:3],
            args[3].diff().tolist(),
            window_size[1] == 0,
            None if window_size[0] < 0 else window_size[0] + 1,
            scale,
        )

    kinds = SimpleNamespace(_varlen_attn=forward, _varlen_attn_backward=backward)
    monkeypatch.setattr(merged.torch.ops, "torch_attn", kinds)
    monkeypatch.setattr(attention, "varlen_attn", varlen)
    monkeypatch.setattr(
        attention,
        "kernel_for",
        lambda device, dtype, width, capped, _: "scored" if capped else "varlen",
    )


@pytest.mark.parametrize("kernel", ["CPU", "GPU"])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3)])
@pytest.mark.parametrize("name", FEATURES)
def test_every_feature_is_the_masked_softmax(monkeypatch, name, heads, kernel):
    rule, softcap, sunk, width = FEATURES[name]
    calls(monkeypatch, kernel)
    rows = drawn(sum(LENGTHS), *heads, 8)
    rows[2] = drawn(sum(LENGTHS), heads[0], heads[1], width, 1)[2]
    sinks = drawn(1, heads[0], 1, 1, 2)[0].detach()[0, :, 0].requires_grad_() if sunk else None
    given = [*rows, sinks] if sunk else rows
    segments = Segments(LENGTHS, CPU).under(rule)
    expected = masked(*rows, LENGTHS, rule.causal, rule.window, 0.3, softcap, sinks, rule)
    made = attend(*rows, segments, scale=0.3, softcap=softcap, sinks_H=sinks)
    assert torch.allclose(made, expected, atol=1e-12)
    seed = torch.randn(made.shape, dtype=made.dtype)
    for own, other in zip(
        torch.autograd.grad(made, given, seed),
        torch.autograd.grad(expected, given, seed),
        strict=True,
    ):
        assert torch.allclose(own, other, atol=1e-11)


@pytest.mark.parametrize("name", FEATURES)
def test_every_feature_in_bf16_is_as_exact_as_bf16(name):
    rule, softcap, sunk, width = FEATURES[name]
    exact = drawn(sum(LENGTHS), 4, 2, 8)
    exact[2] = drawn(sum(LENGTHS), 4, 2, width, 1)[2]
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0]) if sunk else None
    made = attend(
        *(rows.bfloat16() for rows in exact),
        Segments(LENGTHS, CPU).under(rule),
        softcap=softcap,
        sinks_H=None if sinks is None else sinks.bfloat16(),
    )
    expected = masked(*exact, LENGTHS, rule.causal, rule.window, None, softcap, sinks, rule)
    assert made.dtype == torch.bfloat16
    torch.testing.assert_close(made.double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", FEATURES)
def test_every_feature_is_the_masked_softmax_on_a_gpu(name, dtype):
    rule, softcap, sunk, width = FEATURES[name]
    exact = drawn(sum(LENGTHS), 4, 2, 32)
    exact[2] = drawn(sum(LENGTHS), 4, 2, 4 * width, 1)[2]
    if sunk:
        exact.append(torch.tensor([0.5, -1.0, 2.0, 0.0]).double().requires_grad_())
    given = [one.detach().cuda().to(dtype).requires_grad_() for one in exact]
    segments = Segments(LENGTHS, given[0].device).under(rule)
    made = attend(*given[:3], segments, softcap=softcap, sinks_H=given[3] if sunk else None)
    sinks = exact[3] if sunk else None
    want = masked(*exact[:3], LENGTHS, rule.causal, rule.window, None, softcap, sinks, rule)
    near = 4e-2 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(made.double().cpu(), want, rtol=near, atol=near)
    seed = torch.randn_like(want)
    for own, other in zip(
        torch.autograd.grad(made, given, seed.cuda().to(dtype)),
        torch.autograd.grad(want, exact, seed),
        strict=True,
    ):
        scale = float(other.abs().max())
        torch.testing.assert_close(own.double().cpu() / scale, other / scale, rtol=near, atol=near)


class Ran(TorchDispatchMode):
    """Names and shapes of the operators that run."""

    def __init__(self):
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        made = (tensor for tensor in tree_leaves(result) if isinstance(tensor, torch.Tensor))
        shapes = [tuple(tensor.shape) for tensor in made]
        if shapes and not func.is_view and "_to_copy" not in str(func):
            self.operators.append((str(func), shapes))
        return result


def test_what_is_counted_is_what_runs(monkeypatch):
    """Scores in memory: the same operators on the meta device, of several blocks of queries."""
    for limit in ("LEAST_BLOCK", "MOST_BLOCK"):
        monkeypatch.setattr(f"disttrain_cli.models.scored.{limit}", 4)
    ran = {}
    for device in (CPU, torch.device("meta")):
        rows = [one.detach().to(device).requires_grad_() for one in drawn(sum(LENGTHS), 4, 2, 8)]
        segments, sinks = Segments(LENGTHS, device), torch.zeros(4, device=device)
        attend(*rows, segments, causal=True, softcap=2.0, sinks_H=sinks)  # prepares the segments
        with Ran() as mode:
            made = attend(*rows, segments, causal=True, softcap=2.0, sinks_H=sinks)
            made.backward(torch.ones_like(made))
        ran[device.type] = mode.operators
    assert ran["cpu"] == ran["meta"] and len(ran["cpu"]) > 100


@pytest.mark.parametrize(
    ("spans", "message"),
    [(((2, 5),), "2 to 5"), (((5, 8), (7, 9)), "7 to 9"), (((30, 31),), "30 to 31")],
)
def test_spans_lie_within_segments(spans, message):
    with pytest.raises(ValueError, match=message):
        Segments(LENGTHS, CPU).under(Rule(spans=spans))


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"indices": torch.zeros(1)}, "indices"),
        ({"something_new": 1.0, "position_ids": torch.zeros(1)}, "something_new"),
        ({"dropout": 0.1}, "dropout"),
        ({"attention_mask": torch.zeros(1)}, r"mask of its own \(Tensor\)"),
        ({"attention_mask": None}, r"mask of its own \(NoneType\)"),
        ({"s_aux": torch.zeros(2, 8)}, "s_aux"),
        ({"key": torch.zeros(1, 2, 9, 4)}, "9 keys for 8 queries"),
    ],
)
def test_no_argument_is_left_out_in_silence(more, named):
    rows = dict.fromkeys(("query", "key", "value"), torch.zeros(1, 2, 8, 4))
    given = rows | {"attention_mask": Segments([3, 5], CPU)} | more
    with pytest.raises(SpecError) as raised:
        library_attention._attend(SimpleNamespace(is_causal=True), **given)
    assert re.search(named, raised.value.why) and "position_ids" not in raised.value.why


def test_arguments_that_change_nothing_are_ignored():
    query = torch.randn(1, 2, 8, 4)
    module, segments = SimpleNamespace(is_causal=False), Segments([3, 5], CPU)
    more = dict.fromkeys(library_attention.IGNORED, torch.ones(1)) | {
        "position_bias": None,
        "output_attentions": False,
    }
    made, _ = library_attention._attend(
        module, query, query, query, segments, is_causal=True, **more
    )
    plain, _ = library_attention._attend(
        SimpleNamespace(is_causal=True), query, query, query, segments
    )
    assert torch.equal(made, plain)


@pytest.mark.parametrize(
    "use",
    [
        lambda mask: mask.dtype,
        lambda mask: mask[:, 0],
        lambda mask: mask[:, :7],
        lambda mask: torch.ones(2) + mask,
    ],
)
def test_a_mask_that_a_layer_computes_with_is_refused(use):
    segments = Segments([3, 5], CPU)
    assert segments[:, :, slice(-0, None), :8] is segments
    with pytest.raises(SpecError, match="cannot attend within packed samples"):
        use(segments)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operator makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        made = (tensor for tensor in tree_leaves(result) if isinstance(tensor, torch.Tensor))
        self.elements = max([self.elements, *(tensor.numel() for tensor in made)])
        return result


@pytest.mark.parametrize(
    ("lengths", "window"), [([4096], None), ([4096], 64), ([1000, 2000, 1096], None)]
)
def test_nothing_grows_with_the_square_of_the_rows(lengths, window):
    query, key, value = (
        tensor.detach().float().requires_grad_() for tensor in drawn(4096, 2, 1, 8)
    )
    with Largest() as largest:
        attend(
            query, key, value, Segments(lengths, CPU), causal=True, window=window
        ).sum().backward()
    assert largest.elements <= 4 * query.numel()


@pytest.mark.parametrize(
    ("dtype", "width", "kernel"),
    [
        (torch.bfloat16, 128, "varlen"),
        (torch.float16, 256, "varlen"),
        (torch.bfloat16, 264, "efficient"),
        (torch.bfloat16, 20, "grouped"),
        (torch.float32, 20, "efficient"),
        (torch.float32, 6, "grouped"),
        (torch.float64, 128, "grouped"),
    ],
)
def test_flash_attention_runs_where_it_can(dtype, width, kernel):
    assert kernel_for(torch.device("meta"), dtype, width) == kernel
    assert kernel_for(CPU, dtype, width) == "grouped"


@pytest.mark.parametrize(
    ("causal", "window", "said"),
    [
        (False, None, (-1, -1)),
        (True, None, (-1, 0)),
        (True, 3, (2, 0)),
        (True, 4, (3, 0)),
        (True, 5, (-1, 0)),
        (True, 1, (0, 0)),
    ],
)
def test_flash_attention_is_told_the_window_without_the_row_itself(
    monkeypatch, causal, window, said
):
    told = {}

    def varlen(query, key, value, starts, others, longest, most, **options):
        told.update(options, starts=starts, longest=longest)
        assert starts is others and longest == most
        return query

    monkeypatch.setattr(attention, "varlen_attn", varlen)
    monkeypatch.setattr(attention, "kernel_for", lambda *_: "varlen")
    query, key, value = drawn(12, 4, 2, 8)
    attend(query, key, value, Segments([5, 4, 3], CPU), causal=causal, window=window)
    assert told["window_size"] == said and told["enable_gqa"] and told["longest"] == 5
    assert told["starts"].dtype == torch.int32 and told["starts"].tolist() == [0, 5, 9, 12]


def test_a_result_lies_row_by_row_however_its_queries_lie() -> None:
    """Else the projection behind it would keep a copy of its own."""
    gpu = torch.device("meta")
    heads = [torch.empty(1, 2, 8, 16, dtype=torch.bfloat16, device=gpu) for _ in range(3)]
    module = SimpleNamespace(is_causal=False)
    made, _ = library_attention._attend(module, *heads, Segments([3, 5], gpu))  # from [N, H, L, D]
    assert made.is_contiguous() and made.shape == (1, 8, 2, 16)

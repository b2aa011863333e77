"""Attention inside segments against a softmax over all rows with everything else masked."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from disttrain_cli.models import attention
from disttrain_cli.models.attention import Segments, attend, kernel_for

CPU = torch.device("cpu")


def drawn(rows, heads, groups, width, seed=0):
    draws = torch.Generator().manual_seed(seed)
    return [
        torch.randn(rows, count, width, generator=draws, dtype=torch.float64, requires_grad=True)
        for count in (heads, groups, groups)
    ]


def masked(query, key, value, lengths, causal, window, scale):
    """[R, H, D] by a mask of all rows against all rows."""
    segment = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    place = torch.arange(len(segment))
    back = place[:, None] - place[None, :]
    seen = segment[:, None] == segment[None, :]
    if causal:
        seen &= back >= 0
        if window is not None:
            seen &= back < window
    each = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(each, 1), value.repeat_interleave(each, 1)
    scores = torch.einsum("rhd,shd->hrs", query, key) * (scale or query.shape[-1] ** -0.5)
    return torch.einsum("hrs,shd->rhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)


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
    made, _ = attention._attend(module, *heads, Segments([3, 5], gpu))  # from [N, H, L, D]
    assert made.is_contiguous() and made.shape == (1, 8, 2, 16)

"""Our functions give what transformers' classes give, forward and backward, and keep no more than
they say."""

import pytest
import torch
from torch import nn
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from disttrain_cli.models.fused import RmsNorm, gated_mlp, with_own_norms

ROWS, WIDTH, INNER = 12, 16, 24


def kept(make):
    """Shapes and types of what a forward saves, and its result."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (saved.append(tensor), tensor)[1], lambda t: t
    ):
        result = make()
    return {(tuple(tensor.shape), tensor.dtype) for tensor in saved}, result


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_rms_norm(dtype, tolerance):
    torch.manual_seed(0)
    theirs, ours = LlamaRMSNorm(WIDTH).to(dtype), RmsNorm(WIDTH, 1e-6).to(dtype)
    with torch.no_grad():
        theirs.weight.copy_(torch.randn(WIDTH))
        ours.weight.copy_(theirs.weight)
    x, seed = torch.randn(2, ROWS, WIDTH).to(dtype), torch.randn(2, ROWS, WIDTH).to(dtype)
    gradients = []
    for norm in (theirs, ours):
        own = x.clone().requires_grad_()
        saved, made = kept(lambda norm=norm, own=own: norm(own))
        gradients.append([made, *torch.autograd.grad(made, [own, norm.weight], seed)])
    assert saved == {((2, ROWS, WIDTH), dtype), ((WIDTH,), dtype), ((2, ROWS, 1), torch.float32)}
    for one, other in zip(*gradients, strict=True):
        assert torch.allclose(one.float(), other.float(), rtol=tolerance, atol=tolerance)


def test_rms_norm_in_double_precision_has_exact_gradients():
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)
    norm = RmsNorm(5, 1e-6).double()
    assert torch.autograd.gradcheck(
        lambda x, weight: torch.func.functional_call(norm, {"weight": weight}, (x,)), (x, weight)
    )


@pytest.mark.parametrize("act", ["silu", "gelu"])
@pytest.mark.parametrize("frozen", [False, True])
def test_gated_mlp(act, frozen):
    torch.manual_seed(0)
    mlp = LlamaMLP(
        LlamaConfig(
            hidden_size=WIDTH, intermediate_size=INNER, hidden_act=act, num_attention_heads=2
        )
    ).requires_grad_(not frozen)
    x, seed = torch.randn(ROWS, WIDTH, requires_grad=True), torch.randn(ROWS, WIDTH)
    inputs = [x, *(parameter for parameter in mlp.parameters() if parameter.requires_grad)]
    expected, made = mlp(x), gated_mlp(mlp, x)
    assert torch.equal(expected, made)
    for one, other in zip(
        *(torch.autograd.grad(result, inputs, seed) for result in (expected, made)), strict=True
    ):
        assert torch.allclose(one, other, atol=1e-6)
    activations = {shape for shape, _ in kept(lambda: gated_mlp(mlp, x.detach()))[0]} - {
        tuple(parameter.T.shape) for parameter in mlp.parameters()
    }
    assert activations <= {(ROWS, WIDTH), (ROWS, INNER)}


def test_norms_are_replaced_under_their_names():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.ModuleDict({"norm": LlamaRMSNorm(WIDTH, 1e-3)})

    layer = with_own_norms(Layer())
    assert isinstance(layer.inner["norm"], RmsNorm) and layer.inner["norm"].eps == 1e-3
    assert [name for name, _ in layer.named_parameters()] == ["inner.norm.weight"]

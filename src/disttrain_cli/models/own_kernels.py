"""Our kernels in the place of a library's code that computes the same.

transformers generates its models' files from each other, so that equal mathematics is equal source:
a module is replaced if the code of its forward is that of Llama's.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Any

from torch import nn

from disttrain_cli.models.fused import RmsNorm, gated_mlp, rotated


def with_own_kernels(layer: nn.Module) -> nn.Module:
    """Use our kernels in a library's layer where its code is that of Llama; return the layer."""
    gated, norm, rotary = _of_llama()
    for path, part in list(layer.named_modules()):
        code, file = body_of(type(part).forward), import_module(type(part).__module__)
        if code == gated:
            part.__class__ = _gated_class(type(part))  # type: ignore[arg-type]
        elif code == norm:
            weight: Any = part.weight
            own = RmsNorm(len(weight), float(part.variance_epsilon))
            layer.set_submodule(path, own.to(weight.device))
        function = getattr(file, "apply_rotary_pos_emb", None)
        if inspect.isfunction(function) and body_of(function) == rotary:
            file.apply_rotary_pos_emb = partial(rotated, function)  # type: ignore[attr-defined]
    return layer


@cache
def _of_llama() -> tuple[str, str, str]:
    """Return the code of Llama's gated feed-forward, RMSNorm and rotary positions."""
    from transformers.models.llama import modeling_llama as llama

    rotary = llama.apply_rotary_pos_emb
    rotary = rotary.args[0] if isinstance(rotary, partial) else rotary
    return (
        body_of(llama.LlamaMLP.forward),
        body_of(llama.LlamaRMSNorm.forward),
        body_of(rotary),
    )


@cache
def _gated_class(made: type[nn.Module]) -> type[nn.Module]:
    return type(made.__name__, (made,), {"forward": gated_mlp})


def adds_feed_forward(layer: nn.Module) -> bool:
    """Return True if a decoder layer ends as Llama's: its `mlp` is added to the residual as is."""
    llama: Any = import_module("transformers.models.llama.modeling_llama").LlamaDecoderLayer
    own, known = (body_of(one.forward).split("\n")[-3:] for one in (type(layer), llama))
    return own == known


@cache
def body_of(function: Callable[..., Any]) -> str:
    """Return the source of a function without annotations, decorators and docstring."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError):
        return ""
    made = tree.body[0]
    if not isinstance(made, ast.FunctionDef):
        return ""
    body = made.body
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]
    return "\n".join(ast.unparse(statement) for statement in body)

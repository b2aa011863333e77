"""Library models without memory for their weights, but with their buffers.

Under `torch.device("meta")` buffers would lose their values, such as rotary frequencies.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

#: Functions by which classes allocate weights, and the most elements of a buffer.
_ALLOCATING = (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn, torch.full)
_LARGE = 1 << 22
#: Attribute of a module for the values of its weights after construction, by name.
STARTS = "starting_values"


class _WeightsOnMeta(TorchFunctionMode):
    """Mode under which uninitialised and large tensors are on the meta device."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _ALLOCATING and kwargs.get("device") is None:
            blank = function(*args, **{**kwargs, "device": "meta"})
            if function is torch.empty or blank.numel() > _LARGE:
                return blank
        return function(*args, **kwargs)


_register = nn.Module.register_buffer


def _register_buffer(
    module: nn.Module, name: str, tensor: Tensor | None, persistent: bool = True
) -> None:
    """Register a buffer; one that its class fills only afterwards (timm's) gets memory."""
    if tensor is not None and tensor.is_meta and tensor.numel() <= _LARGE:
        tensor = torch.empty_like(tensor, device="cpu")
    _register(module, name, tensor, persistent)


@contextmanager
def empty_weights() -> Iterator[None]:
    """Construct transformers' models whose weights are not allocated nor initialised."""
    from transformers.initialization import no_init_weights

    buffers = patch.object(nn.Module, "register_buffer", _register_buffer)
    with no_init_weights(), torch.device("cpu"), _WeightsOnMeta(), buffers:
        yield


def move_weights(part: nn.Module) -> None:
    """Move a module's own weights to the meta device; note the values that its class gives them.

    Its stored buffers become parameters without gradients, which are loaded and saved.
    """
    starts = {}
    for name, parameter in list(part.named_parameters(recurse=False)):
        if not parameter.is_meta and parameter.ndim < 2:
            starts[name] = parameter.detach().clone()
        setattr(part, name, nn.Parameter(parameter.detach().to("meta")))
    for name, buffer in list(part.named_buffers(recurse=False)):
        if name not in part._non_persistent_buffers_set:
            starts[name] = buffer
            delattr(part, name)
            part.register_parameter(name, nn.Parameter(buffer.to("meta"), requires_grad=False))
    part.__dict__[STARTS] = starts

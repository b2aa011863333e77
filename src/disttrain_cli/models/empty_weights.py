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

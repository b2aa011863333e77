"""Bytes that operators read and write, counted from their schemas alone.

It shares nothing with `models.operators`, which prices them.
"""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: In-place operators that do not read what they overwrite.
OVERWRITING = ("zero_", "fill_", "copy_", "_foreach_zero_")
#: Gradients that a fused AdamW writes only where a loss scaler asks for it.
UNSCALED = ("_fused_adamw_", "grads")
NO_KERNEL = ("empty", "empty_like", "detach", "alias", "empty_strided", "new_empty")


class Moved(TorchDispatchMode):
    """Sums the bytes of all operators that run while it is active, each without fusion."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        schema, given = func._schema, dict(kwargs or {})
        name = schema.name.removeprefix("aten::")
        result = func(*args, **given)
        views = not schema.is_mutable and any(one.alias_info for one in schema.arguments)
        if views or name in NO_KERNEL:
            return result
        values = dict(zip((one.name for one in schema.arguments), args, strict=False)) | given
        for one in schema.arguments:
            size = _bytes(values.get(one.name))
            writes = one.alias_info is not None and one.alias_info.is_write
            writes = writes and (name, one.name) != UNSCALED
            self.bytes += size * (writes + (not writes or name not in OVERWRITING))
        if not schema.is_mutable:
            self.bytes += _bytes(result)
        return result


def _bytes(value: Any) -> int:
    return sum(
        tensor.numel() * tensor.element_size()
        for tensor in tree_leaves(value)
        if isinstance(tensor, Tensor)
    )

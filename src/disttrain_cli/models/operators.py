"""What the kernels of a layer would do on a GPU, counted on the meta device: FLOPs, bytes moved, how many there are.

FLOPs here are those that run, not model FLOPs (`flops.py`): attention's backward computes the scores again, and causal
attention skips what its mask hides.

Two rules turn PyTorch's operators into kernels:

- Attention runs as flash attention with variable lengths (Dao 2023, arXiv 2307.08691): it reads q, k and v once and
  writes the output and one log-sum-exp per row; no mask is read, and of block-causal attention half the scores are
  computed. For the backward it keeps exactly those five.
- All other operators that one product, attention or convolution waits for are one kernel, as a fusing compiler makes
  them: it reads what comes from outside, writes what others read, and keeps nothing inside. What the backward needs of
  its inside is computed again from what is in memory. Only a group norm is not fused away: it reads its input twice and
  begins a kernel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from disttrain_cli.costs.hardware import KernelWork
from disttrain_cli.models.layer import Batch, PipelineLayer

Kind = Literal["product", "attention", "convolution", "other"]

#: Attention by segments, and which of its arguments is its window; one that looks at no later row is causal.
_VARLEN = {"torch_attn::_varlen_attn": 9, "torch_attn::_varlen_attn_backward": 13}
_CONVOLUTIONS = ("convolution", "convolution_backward")
_READ_TWICE = ("native_group_norm", "native_group_norm_backward")
_NOT_READING = ("zeros_like", "new_zeros", "ones_like", "full_like", "new_full", "new_ones")
_NO_KERNEL = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias")


class LayerOperators(NamedTuple):
    """Kernels of one forward and one backward of a layer, and bytes that it keeps from one to the other."""

    forward: KernelWork
    backward: KernelWork
    saved_bytes: int


@dataclass
class _Operator:
    """One operator; `reads` and `writes` are bytes by storage."""

    kind: Kind
    flops: int
    reads: Counter[int]
    writes: Counter[int]
    backward: bool
    begins: bool = False  # begins a kernel and reads its inputs twice
    kernels: int = 1


def layer_operators(layer: PipelineLayer, state: Mapping[str, Tensor], batch: Batch) -> LayerOperators:
    """Count one forward and backward of a layer on the meta device.

    The backward makes the gradients of the inputs in `state` that ask for one and of the weights that do, and adds
    these to sums over microbatches. What a stage prepares once per batch (masks) does not count; nor do
    weights and the batch in `saved_bytes`, of which the input is a part if it is kept, the output only if the layer
    itself keeps it.
    """
    prepared = len(batch.tensors())
    trace, saved = _Trace(), set[int]()

    def pack(tensor: Tensor) -> Tensor:
        saved.add(trace.storage(tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), _FlashAttention(trace), trace:
        results = layer(dict(state), batch)
    if len(batch.tensors()) > prepared:
        return layer_operators(layer, state, batch)
    final = {trace.storage(tensor) for tensor in results.values()}
    known = {trace.storage(tensor) for tensor in (*layer.parameters(), *batch.tensors())}
    trace.backward = True
    roots = [tensor for tensor in results.values() if tensor.requires_grad]
    inputs = [tensor for tensor in state.values() if tensor.requires_grad]
    weights = [tensor for tensor in layer.parameters() if tensor.requires_grad]
    sums = [torch.empty_like(weight) for weight in weights]  # over microbatches
    seeds = [torch.empty_like(tensor) for tensor in roots]
    with trace:
        if roots:
            gradients = torch.autograd.grad(roots, [*weights, *inputs], seeds, allow_unused=True)
            for total, gradient in zip(sums, gradients, strict=False):
                if gradient is not None:
                    total.add_(gradient)
            final |= {trace.storage(gradient) for gradient in gradients[len(weights):] if gradient is not None}
    kernels = _Kernels(trace, final)
    return LayerOperators(kernels.work(backward=False), kernels.work(backward=True),
                          sum(trace.sizes[storage] for storage in kernels.sources(saved) - known))


class _Trace(TorchDispatchMode):
    """The operators that run while it is active, without views."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[_Operator] = []
        self.sizes: dict[int, int] = {}  # bytes of every storage
        self.backward = False
        self._alive: list[Tensor] = []  # so that no storage's number is given out twice

    def storage(self, tensor: Tensor) -> int:
        """A number for the tensor's storage."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.sizes:
            self.sizes[storage._cdata] = storage.nbytes()
            self._alive.append(tensor)
        return storage._cdata

    def touched(self, tensors: list[Tensor]) -> Counter[int]:
        """Bytes of every storage that the tensors cover together, none more than once."""
        amounts: Counter[int] = Counter()
        for tensor in tensors:
            place = self.storage(tensor)
            amounts[place] = min(self.sizes[place], amounts[place] + tensor.numel() * tensor.element_size())
        return amounts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        made = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
        reads, writes = self.touched(given[1:] if name == "copy_" else given), self.touched(made)
        view = not func._schema.is_mutable and writes.keys() <= reads.keys()
        if view or name.rstrip("_") in _NO_KERNEL or not given:
            return result
        kind, flops = _counted(func, name, args, kwargs, result)
        self.operators.append(_Operator(
            kind, flops,
            Counter() if name in _NOT_READING else reads, writes, self.backward, begins=name in _READ_TWICE,
            kernels=len(made) if name in _CONVOLUTIONS else 1))
        return result


def _counted(func: Any, name: str, args: Any, kwargs: Any, result: Any) -> tuple[Kind, int]:
    """What kind of operator this is, and its FLOPs."""
    counts = flop_registry.get(func._overloadpacket)
    if counts is None:
        return "other", 0
    flops = counts(*args, **kwargs, out_val=result)
    if name in _VARLEN:
        return "attention", flops // 2 if args[_VARLEN[name]][1] == 0 else flops
    return "convolution" if name in _CONVOLUTIONS else "product", flops


class _FlashAttention(TorchFunctionMode):
    """Lets scaled_dot_product_attention be one operator of the trace, on whose inputs' shapes alone it depends."""

    def __init__(self, trace: _Trace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = dict(zip(names, args, strict=False)) | kwargs
        causal = given.get("attn_mask") is not None or given.get("is_causal", False)
        return _Attention.apply(self._trace, causal, given["query"], given["key"], given["value"])


class _Attention(torch.autograd.Function):
    """Shapes and records of flash attention; q [N, heads, L, D], k and v [N, heads, S, D]."""

    @staticmethod
    def forward(ctx: Any, trace: _Trace, causal: bool, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        items, heads, rows, _ = query.shape
        made = query.new_empty((items, rows, heads, value.shape[-1])).transpose(1, 2)  # as the kernels lay it out
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, made, sums)
        ctx.trace, ctx.causal = trace, causal
        flops = sdpa_flop_count(query.shape, key.shape, value.shape)
        _Attention._record(ctx, flops, [query, key, value], [made, sums])
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, made, sums = ctx.saved_tensors
        own = [torch.empty_like(tensor) for tensor in (query, key, value)]
        flops = sdpa_backward_flop_count(gradients[0].shape, query.shape, key.shape, value.shape)
        _Attention._record(ctx, flops, [query, key, value, made, sums, gradients[0]], own)
        return (None, None, *own)

    @staticmethod
    def _record(ctx: Any, flops: int, reads: list[Tensor], writes: list[Tensor]) -> None:
        trace: _Trace = ctx.trace
        trace.operators.append(_Operator("attention", flops // 2 if ctx.causal else flops, trace.touched(reads),
                                         trace.touched(writes), trace.backward))


@dataclass
class _Kernel:
    """Operators that run as one."""

    backward: bool
    operators: list[_Operator]


def _gather(operators: list[_Operator]) -> list[_Kernel]:
    """Kernels in the order in which they run: each operator that fuses waits until something else needs its result."""
    kernels: list[_Kernel] = []
    waiting: list[_Operator] = []

    def run(chosen: list[_Operator]) -> None:
        for place, operator in enumerate(chosen):
            if place == 0 or operator.begins:
                kernels.append(_Kernel(operator.backward, []))
            kernels[-1].operators.append(operator)
        waiting[:] = [operator for operator in waiting if not any(operator is other for other in chosen)]

    for operator in operators:
        if waiting and waiting[-1].backward != operator.backward:
            run(list(waiting))
        if operator.kind == "other":
            waiting.append(operator)
            continue
        wanted, chosen = set(operator.reads), []
        for other in reversed(waiting):
            if not wanted.isdisjoint(other.writes):
                wanted |= other.reads.keys()
                chosen.append(other)
        run(chosen[::-1])
        kernels.append(_Kernel(operator.backward, [operator]))
    run(list(waiting))
    return kernels


class _Kernels:
    """The operators of a trace, gathered into kernels by the rules at the head of this file."""

    def __init__(self, trace: _Trace, final: set[int]) -> None:
        self._sizes = trace.sizes
        self._kernels = _gather(trace.operators)
        self._maker: dict[int, _Operator] = {}
        self._inside: set[int] = set()  # storages that are never written to memory
        self._find_inside(final)

    def _find_inside(self, final: set[int]) -> None:
        kernel_of: dict[int, _Kernel] = {}
        in_memory = set(final)
        for kernel in self._kernels:
            for operator in kernel.operators:
                for storage in operator.reads:
                    source = kernel_of.get(storage)
                    if source is None or (source is not kernel and source.backward == kernel.backward):
                        in_memory.add(storage)
                for storage in operator.writes:
                    if storage not in kernel_of and storage not in in_memory:  # else it was there before
                        kernel_of[storage], self._maker[storage] = kernel, operator
                    if operator.kind != "other":
                        in_memory.add(storage)
        self._inside = self._maker.keys() - in_memory

    def sources(self, storages: set[int]) -> set[int]:
        """What must be in memory for these storages to be read: themselves, or what they are computed from."""
        found: set[int] = set()
        left, seen = list(storages), set(storages)
        while left:
            storage = left.pop()
            if storage not in self._inside:
                found.add(storage)
                continue
            new = self._maker[storage].reads.keys() - seen
            seen |= new
            left += new
        return found

    def work(self, backward: bool) -> KernelWork:
        """All kernels of the forward or the backward together."""
        flops: Counter[Kind] = Counter()
        moved_bytes = kernels = 0
        for kernel in self._kernels:
            if kernel.backward == backward:
                moved_bytes += self._moved_bytes(kernel)
                kernels += sum(operator.kernels for operator in kernel.operators[:1])
                for operator in kernel.operators:
                    flops[operator.kind] += operator.flops
        return KernelWork(flops["product"], flops["attention"], flops["convolution"], moved_bytes, kernels)

    def _moved_bytes(self, kernel: _Kernel) -> int:
        made: set[int] = set()
        read: Counter[int] = Counter()
        again = 0
        for operator in kernel.operators:
            for storage, size in operator.reads.items():
                if storage in made:
                    continue
                for source in self.sources({storage}) - made:
                    amount = size if source == storage else self._sizes[source]
                    read[source] = min(self._sizes[source], read[source] + amount)
                    again += amount if operator.begins else 0
            made |= operator.writes.keys()
        written = sum(self._sizes[storage] for storage in made - self._inside)
        return read.total() + again + written

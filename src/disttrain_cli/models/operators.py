"""GPU kernels of a layer, counted on the meta device: FLOPs, bytes moved, launches, saved bytes.

No fusion is assumed: PyTorch's operators are counted as a step runs them, each of which reads its
inputs from memory and writes its results there, so the same code decides what runs and how it is
priced (`attention.kernel_for`, `fused`). This file lists the few differences between a GPU and the
meta device: operators that launch several kernels or touch less than their arguments, and cuDNN's
copies of a convolution's images between memory layouts. Not counted, as no operator shows them:
workspaces inside cuDNN, cuBLAS and flash attention's backward (their memory: `workspaces`).

FLOPs here are those that run, not model FLOPs (`flops.py`): attention's backward recomputes the
scores, and causal attention skips masked ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from disttrain_cli.costs.hardware import KernelWork
from disttrain_cli.models import delta_rule
from disttrain_cli.models.layer import Batch, PipelineLayer
from disttrain_cli.models.signatures import SignatureMode

Kind = Literal["product", "attention", "convolution", "other"]

#: Attention by segments, and the index of its window argument; a window without later rows is
#: causal.
_VARLEN = {"torch_attn::_varlen_attn": 9, "torch_attn::_varlen_attn_backward": 13}
#: Index of the arguments that cut rows and keys into segments: starts, and longest of both.
_STARTS = {"torch_attn::_varlen_attn": 3, "torch_attn::_varlen_attn_backward": 6}
#: Attention of equal lengths, and the index of its `is_causal` argument.
_EFFICIENT = {
    "_scaled_dot_product_efficient_attention": 6,
    "_scaled_dot_product_efficient_attention_backward": 11,
}
_CONVOLUTIONS = ("convolution", "convolution_backward")
_HALF = (torch.bfloat16, torch.float16)
#: Reads and writes of a convolution's output equivalent to adding its bias: two passes, at 40 % of
#: the bandwidth (an H100, 2026-11-26).
_BIAS_PASSES = 5
_NO_KERNEL = (
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "detach",
    "alias",
)
_NOT_READING = (
    "zeros_like",
    "new_zeros",
    "zeros",
    "ones_like",
    "full_like",
    "new_full",
    "new_ones",
    "fill",
    "zero",
    "arange",
)
#: Operators that read only as much of their first input as they write; and in-place ones that write
#: only as much as they read from their last input.
_PICKING = ("embedding", "index_select", "gather", "index")
_PLACING = ("index_copy_", "index_add_", "scatter_add_", "index_put_", "_index_put_impl_")
#: Kernels of an operator that launches more than one, and how often its inputs are read (from
#: ATen's CUDA sources). In a convolution's backward each gradient is one.
_KERNELS = {
    # moments, by one block per group of an image, which takes as long as nine reads (an H100,
    # 2026-11-26); scale and shift of each channel; the result
    "native_group_norm": (3, 10),
    "native_group_norm_backward": (
        5,
        2,
    ),  # sums; two sets of factors; the input's gradient; the weights'
    "native_layer_norm_backward": (2, 2),  # the input's gradient; the weights'
    "disttrain::rms_norm_backward": (2, 2),
    # norms of queries and keys, sums of decays, k kᵀ, its inverse, two factors, states, outputs;
    # and their gradients after factors and states again
    delta_rule.FORWARD: (8, 10),
    delta_rule.BACKWARD: (12, 12),
    "torch_attn::_varlen_attn": (2, 1),  # attention; an unused seed
    "torch_attn::_varlen_attn_backward": (
        3,
        1,
    ),  # output · gradient; gradients; the query's to its own precision
    "_scaled_dot_product_efficient_attention_backward": (2, 1),
    "logsumexp": (
        7,
        2,
    ),  # maximum, where it is infinite, difference, exponentials, sum, logarithm, their sum
    "embedding_dense_backward": (6, 1),  # ids are sorted and counted
    **dict.fromkeys(
        (
            "slice_backward",
            "select_backward",
            "index_copy",
            "index_add",
            "index_fill",
            "scatter_add",
            "index_put",
            "masked_fill",
        ),
        (2, 1),
    ),  # the full tensor; a part of it
}


class LayerOperators(NamedTuple):
    """Kernels of one forward and one backward of a layer, and the bytes saved in between."""

    forward: KernelWork
    backward: KernelWork
    saved_bytes: int


def layer_operators(
    layer: PipelineLayer, state: Mapping[str, Tensor], batch: Batch
) -> LayerOperators:
    """Count one forward and backward of a layer on the meta device.

    The backward computes the gradients of those inputs in `state` and weights that require one, and
    adds the latter to fp32 sums over microbatches. Tensors that a stage prepares once per batch do
    not count. `saved_bytes` excludes weights and the batch: it is the size of all storages that
    only the backward holds once the layer has returned and its inputs and outputs are released.
    """
    prepared, trace = len(batch.tensors()), Trace()
    graph = _forward(layer, state, batch, trace)
    if len(batch.tensors()) > prepared:
        return layer_operators(layer, state, batch)
    forward, held = trace.take(), trace.alive()
    _backward(layer, graph, trace)
    del graph
    kept = held.keys() - trace.alive().keys()  # without what stays for later batches
    return LayerOperators(forward, trace.take(), sum(held[storage] for storage in kept))


class _Graph(NamedTuple):
    """Autograd graph of a layer between its outputs and its inputs."""

    outputs: list[GradientEdge]
    gradients: list[Tensor]  # of the outputs
    inputs: list[GradientEdge]


def _forward(
    layer: PipelineLayer, state: Mapping[str, Tensor], batch: Batch, trace: Trace
) -> _Graph:
    """Run a layer as in the middle of a stage, on inputs that nothing else references."""
    leaves = {
        name: tensor.detach().requires_grad_(tensor.requires_grad) for name, tensor in state.items()
    }
    given = {name: tensor.clone() for name, tensor in leaves.items()}
    trace.know(given.values())
    with trace:
        made = layer(given, batch)
    outputs = [tensor for tensor in made.values() if tensor.requires_grad]
    return _Graph(
        [get_gradient_edge(tensor) for tensor in outputs],
        [torch.empty_like(tensor) for tensor in outputs],
        [get_gradient_edge(tensor) for tensor in given.values() if tensor.requires_grad],
    )


def _backward(layer: PipelineLayer, graph: _Graph, trace: Trace) -> None:
    """Compute the gradients of weights and inputs, and add the weights' to sums."""
    if not graph.outputs:
        return
    weights = [weight for weight in layer.parameters() if weight.requires_grad]
    with trace:
        gradients = torch.autograd.grad(
            graph.outputs, [*weights, *graph.inputs], graph.gradients, allow_unused=True
        )
        for weight, gradient in zip(weights, gradients, strict=False):
            if gradient is not None:
                torch.empty_like(weight, dtype=torch.float32).add_(gradient)


class Trace(SignatureMode):
    """Counts the kernels of operators that run while it is active, and tracks live storages."""

    def __init__(self) -> None:
        super().__init__()
        self._flops: dict[Kind, int] = {"product": 0, "attention": 0, "convolution": 0, "other": 0}
        self._moved_bytes = self._kernels = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def take(self) -> KernelWork:
        """Return the counts since the last call, and reset them."""
        flops = self._flops
        work = KernelWork(
            flops["product"],
            flops["attention"],
            flops["convolution"],
            self._moved_bytes,
            self._kernels,
        )
        self._flops, self._moved_bytes, self._kernels = dict.fromkeys(flops, 0), 0, 0
        return work

    def know(self, tensors: Iterable[Tensor]) -> None:
        """Track the tensors' storages."""
        for storage in (tensor.untyped_storage() for tensor in tensors):
            self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()

    def alive(self) -> dict[int, int]:
        """Return the bytes of tracked storages that are still alive, by address."""
        return {
            address: size
            for address, (reference, size) in self._storages.items()
            if not reference.expired()
        }

    def count(
        self, func: Any, args: Any, kwargs: dict[str, Any], result: Any, new: list[Tensor]
    ) -> tuple[Kind, int, int, int] | None:
        """Return kind, FLOPs, bytes moved and kernels of an operator, if it has kernels."""
        name = func._schema.name.removeprefix("aten::")
        if name in _NO_KERNEL or not (func._schema.is_mutable or new):
            return None
        named = {key: value for key, value in kwargs.items() if key != "out"}
        given, made = (
            [value for value in tree_leaves(values) if isinstance(value, Tensor)]
            for values in ((args, named), result)
        )
        operator = _Operator(func, name, args, named, given, made, result)
        return *operator.flops(), operator.moved_bytes(), operator.kernels()

    def note(self, facts: Any, times: int, results: list[Tensor], new: list[Tensor]) -> None:
        self.know(new)
        if facts is not None:
            kind, flops, moved_bytes, kernels = facts
            self._flops[kind] += times * flops
            self._moved_bytes += times * moved_bytes
            self._kernels += times * kernels


class _Operator(NamedTuple):
    """Executed operator with its input and output tensors."""

    func: Any
    name: str
    args: Any
    kwargs: Any
    given: list[Tensor]
    made: list[Tensor]
    result: Any

    @property
    def _has_bias(self) -> bool:
        return self.name == "convolution" and self.args[2] is not None  # cuDNN's kernels add none

    @property
    def _converted(self) -> bool:
        """True if cuDNN converts a convolution's images to channels-last, for tensor cores."""
        return self.name in _CONVOLUTIONS and self.made[0].dtype in _HALF

    def flops(self) -> tuple[Kind, int]:
        """Return the operator's kind and its FLOPs."""
        counts = flop_registry.get(self.func._overloadpacket)
        if counts is None:
            return "other", 0
        begin = _STARTS.get(self.name)
        if begin is not None and type(self.args[begin]) is Tensor:  # a fake tensor has no values
            rows, keys = (starts.long().diff() for starts in self.args[begin : begin + 2])
            pair = (torch.tensor([0, 1]),) * 2 + (1, 1)  # FLOPs are linear in pairs of rows
            args = (*self.args[:begin], *pair, *self.args[begin + 4 :])
            flops = int(rows @ keys) * counts(*args, **self.kwargs, out_val=self.result)
        else:
            flops = counts(*self.args, **self.kwargs, out_val=self.result)
        if self.name in _VARLEN:
            flops = flops * _padded(self.given[0].shape[-1]) // self.given[0].shape[-1]
            return "attention", flops // 2 if self.args[_VARLEN[self.name]][1] == 0 else flops
        if self.name in _EFFICIENT:
            count = _EFFICIENT[self.name]
            return "attention", flops // 2 if len(self.args) > count and self.args[count] else flops
        return "convolution" if self.name in _CONVOLUTIONS else "product", flops

    def kernels(self) -> int:
        """Return the number of kernels it launches."""
        if self.name in _CONVOLUTIONS:
            return len(self.made) + self._has_bias
        return _KERNELS.get(self.name, (1, 1))[0]

    def moved_bytes(self) -> int:
        """Return the bytes that its kernels read and write."""
        read, written = _bytes(self.given), _bytes(self.made)
        if self.name.rstrip("_") in _NOT_READING:
            return written
        if self.name == "copy_":
            return _bytes(self.given[1:]) + written
        if self.name in _PICKING:
            return _bytes(self.given[1:]) + 2 * written
        if self.name in _PLACING:
            return _bytes(self.given[1:]) + _bytes(self.given[-1:])
        if self.name == "convolution_backward":  # each gradient reads the output's gradient
            read += (len(self.made) - 1) * _bytes(self.given[:1])
        if self.name in _CONVOLUTIONS:
            beside = _BIAS_PASSES * written if self._has_bias else 0
            return (1 + 2 * self._converted) * (read + written) + beside
        return _KERNELS.get(self.name, (1, 1))[1] * read + written


def _padded(width: int) -> int:
    """Return flash attention's computed head width (Dao 2023): the next multiple of 32."""
    return -(-width // 32) * 32


def _bytes(tensors: list[Tensor]) -> int:
    """Return the bytes that tensors cover together, for each storage at most its size."""
    amounts: dict[int, int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        covered = amounts.get(storage._cdata, 0) + tensor.numel() * tensor.element_size()
        amounts[storage._cdata] = min(storage.nbytes(), covered)
    return sum(amounts.values())

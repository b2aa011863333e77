"""Layers run by the stages' own code on a fake CUDA device, counted by code that shares nothing
with their prices.

Kept is what is alive after the forward and was not before; kernels are operators that compute,
FLOPs those of products, convolutions and attention, all by the formulas below.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

MATRICES = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}
#: Operators that are several kernels on a GPU.
SEVERAL = {
    "aten::native_group_norm": 3,
    "aten::native_group_norm_backward": 5,
    "aten::native_layer_norm_backward": 2,
    "disttrain::rms_norm_backward": 2,
    "torch_attn::_varlen_attn": 2,
    "torch_attn::_varlen_attn_backward": 3,
    "aten::_scaled_dot_product_efficient_attention_backward": 2,
    "aten::logsumexp": 7,
    "aten::embedding_dense_backward": 6,
    "aten::slice_backward": 2,
    "aten::select_backward": 2,
    "aten::masked_fill": 2,
    "aten::index_copy": 2,
    "aten::index_fill": 2,
    "aten::index_put": 2,
    "aten::index_add": 2,
    "aten::scatter_add": 2,
}
SILENT = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "detach",
    "alias",
    "lift_fresh",
}


def executed(cases: list[list[Any]]) -> list[dict[str, float]]:
    """What each case (run file, place of a layer, TP size, sizes of the batch) keeps and runs."""
    import gc

    import torch._subclasses.fake_tensor
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from disttrain_cli.models import host

    torch._subclasses.fake_tensor.CONSTANT_NUMEL_LIMIT = -1  # no real numbers beside the fake ones
    real = host.to_device
    host.to_device = lambda values, device, dtype=None: (
        torch.empty(  # before others import it
            values.shape, dtype=values.dtype, device=device
        )
        if isinstance(values, torch.Tensor)
        else real(values, device, dtype)
    )
    Counter()  # from now on lengths of segments are remembered
    found = []
    for path, place, tp, sizes in cases:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=tp)
        gc.freeze()  # else every collection of `_step` goes through all that torch has imported
        try:
            found.append(_one(path, place, tp, sizes))
        finally:
            dist.destroy_process_group()
    return found


def _one(path: str, place: int, tp: int, sizes: dict[str, Any]) -> dict[str, float]:
    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    from disttrain_cli.models.graph import build_layers, describe, layer_table
    from disttrain_cli.models.group import Group
    from disttrain_cli.models.probe import probe_batch
    from disttrain_cli.models.tensor_parallel import join
    from disttrain_cli.spec.runfile import read_run

    run = read_run(Path(path))
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[run.file.train.precision]
    with unset_fake_temporarily():
        table, inputs = layer_table(run), describe(run)
        on_host = probe_batch(inputs, **sizes)
        layer = build_layers(run, place, place + 1, "meta", dtype, tp=tp)[0]
        if hasattr(layer, "layout"):
            for grid in on_host.of("image").grids:
                layer.layout(*grid)  # looked up later, as its values are needed
    marks = {name: dict(parameter.__dict__) for name, parameter in layer.named_parameters()}
    layer.to_empty(device="cuda")
    for name, parameter in layer.named_parameters():
        parameter.__dict__.update(marks[name])
    join(layer, Group(dist.group.WORLD, tp, 0) if tp > 1 else None)
    layer.ask_for_gradients()
    batch = _on_device(on_host)
    shapes = _shapes(table, place, inputs, on_host, tp)
    result: dict[str, float] = {}
    for recompute in (False, True):
        kept, kernels, flops = _step(layer, batch, shapes, dtype, recompute)
        if recompute:
            result |= {"recomputed_kept": kept}
        else:
            result |= {
                "kept": kept,
                "forward_kernels": kernels[0],
                "backward_kernels": kernels[1],
                "forward_flops": flops[0],
                "backward_flops": flops[1],
            }
    return result


def _on_device(batch: Any) -> Any:
    """The same without values, except for the seeds of noise, which stay where they are."""
    import torch
    from torch.utils._pytree import tree_map_only

    def made(value: Any) -> Any:
        def empty(tensor: Any) -> Any:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")

        return tree_map_only(torch.Tensor, empty, value)

    items = {
        item: replace(
            type(own)(**{name: made(value) for name, value in vars(own).items()}),
            noise_seeds=own.noise_seeds,
        )
        for item, own in batch.items.items()
    }
    rest = {name: made(value) for name, value in vars(batch).items() if name != "items"}
    return type(batch)(items, **rest)


def _shapes(table: Any, place: int, inputs: Any, batch: Any, tp: int) -> dict[str, tuple[int, ...]]:
    """Of the layer's inputs: of tensors that are divided the first rank's rows."""
    from disttrain_cli.models.graph import live_tensors
    from disttrain_cli.models.probe import row_count

    rows = {spec.name: row_count(spec, inputs, batch) for spec in live_tensors(table, place)}
    return {
        spec.name: (-(-rows[spec.name] // tp) if spec.split else rows[spec.name], *spec.shape)
        for spec in live_tensors(table, place)
        if spec.name in table[place].reads
    }


def _step(
    layer: Any, batch: Any, shapes: dict[str, tuple[int, ...]], dtype: Any, recompute: bool
) -> tuple[int, list[int], list[int]]:
    import gc

    import torch
    from torch.autograd.graph import get_gradient_edge

    from disttrain_cli.runtime.dryrun.storages import Storages
    from disttrain_cli.runtime.engine.stage import StageRunner

    runner, passes = StageRunner([], recompute=recompute), not layer.frozen
    sums = [
        torch.zeros_like(weight, dtype=torch.float32)
        for weight in layer.parameters()
        if weight.requires_grad
    ]

    def state() -> dict[str, Any]:  # made by an operator, as the layer before would have
        return {
            name: torch.randn(shape, device="cuda", dtype=dtype, requires_grad=passes) * 2.0
            for name, shape in shapes.items()
        }

    with Storages() as storages:
        runner._compute(layer, state(), batch)  # what is made once, for the batch or for good
        given = state()
        edges = [get_gradient_edge(tensor) for tensor in given.values()] if passes else []
        for tensor in (*layer.parameters(), *batch.tensors(), *sums):
            storages.follow(tensor)
        leaves = storages.alive_bytes - sum(_rounded(tensor) for tensor in given.values())
        with Counter() as forward:
            made = runner._compute(layer, given, batch)
        roots = [get_gradient_edge(tensor) for tensor in made.values() if tensor.requires_grad]
        seeds = [torch.empty_like(tensor) for tensor in made.values() if tensor.requires_grad]
        before = sum(_rounded(tensor) for tensor in seeds)
        del made, given
        gc.collect()
        kept = storages.alive_bytes - leaves - before
        with Counter() as backward:
            if roots and not recompute:
                wanted = [weight for weight in layer.parameters() if weight.requires_grad]
                gradients = torch.autograd.grad(roots, [*wanted, *edges], seeds, allow_unused=True)
                for total, gradient in zip(sums, gradients, strict=False):
                    if gradient is not None:
                        total.data.add_(gradient.data)  # as `optimizer.add_at_once`
    return kept, [forward.kernels, backward.kernels], [forward.flops, backward.flops]


def _rounded(tensor: Any) -> int:
    return -(-tensor.untyped_storage().nbytes() // 512) * 512


def _counter() -> Any:
    import math

    from torch import Tensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    from disttrain_cli.models import attention

    lengths: dict[int, list[int]] = {}  # by the storage of where they start
    kept: list[Tensor] = []
    make = attention.Segments.starts.func

    def remembered(segments: Any) -> Any:
        made = make(segments)
        lengths[made.untyped_storage()._cdata] = list(segments.lengths)
        kept.append(made)
        return made

    attention.Segments.starts.func = remembered

    class Counting(TorchDispatchMode):
        """Kernels and FLOPs of what runs."""

        def __init__(self) -> None:
            super().__init__()
            self.kernels = self.flops = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            tensors = [value for value in tree_leaves(args) if isinstance(value, Tensor)]
            made = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
            name, short = func._schema.name, func._schema.name.split("::")[-1]
            there = any(tensor.device.type == "cuda" for tensor in tensors or made)
            if not there or func.is_view or short in SILENT or name.startswith(("c10d", "prim")):
                return result
            if not func._schema.is_mutable and all(
                any(
                    one.untyped_storage()._cdata == other.untyped_storage()._cdata
                    for other in tensors
                )
                for one in made
            ):
                return result  # a view after all
            if short.startswith("convolution"):
                self.kernels += len(made) + (short == "convolution" and args[2] is not None)
            else:
                self.kernels += SEVERAL.get(name, 1)
            self.flops += self._flops(short, args, result)
            return result

        def _flops(self, name: str, args: Any, result: Any) -> int:
            if name in MATRICES:
                left, right = (args[place] for place in MATRICES[name])
                return 2 * left.numel() * right.shape[-1]
            if name == "scores":  # of attention, in memory: rows by rows of keys
                return 2 * args[0].numel() * args[1].shape[1]
            if name == "convolution":
                return 2 * result.numel() * math.prod(args[1].shape[1:])
            if name == "convolution_backward":
                both = 2 * args[0].numel() * math.prod(args[2].shape[1:])
                return both * sum(args[-1][:2])
            if "varlen_attn" in name:
                back = name.endswith("backward")
                query, starts = args[1 if back else 0], (6, 7) if back else (3, 4)
                window = args[13 if back else 9]
                sizes = [lengths[args[place].untyped_storage()._cdata] for place in starts]
                pairs = sum(own * other for own, other in zip(*sizes, strict=True))
                return (
                    2
                    * (5 if back else 2)
                    * query.shape[1]
                    * 32
                    * math.ceil(query.shape[2] / 32)  # flash attention computes wider heads
                    * pairs
                    // (2 if window[1] == 0 else 1)
                )
            if "efficient_attention" in name:
                back = name.endswith("backward")
                query, key = args[1:3] if back else args[:2]
                causal = (
                    args[11]
                    if back and len(args) > 11
                    else (not back and len(args) > 6 and args[6])
                )
                pairs = query.shape[0] * query.shape[2] * key.shape[2]
                return (
                    2
                    * (5 if back else 2)
                    * query.shape[1]
                    * query.shape[3]
                    * pairs
                    // (2 if causal else 1)
                )
            return 0

    return Counting


class Counter:
    """Counts what runs inside (made when torch is there)."""

    kind: Any = None

    def __new__(cls) -> Any:
        cls.kind = cls.kind or _counter()
        return cls.kind()

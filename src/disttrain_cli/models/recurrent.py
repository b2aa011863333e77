"""Recurrent token mixers of transformers' decoder layers, restarted at every document.

Gated DeltaNet, Kimi delta attention, lightning attention, Mamba and short convolutions pass a state
(recurrent, of a convolution, or both) from row to row instead of attending. In packed rows it must
restart at every document. `restart` converts a layer's mixers in place; `documents` sets the
documents of the rows that run inside it, without which a converted mixer does not run.

- A mixer whose kernels take the borders of documents (`flash-linear-attention`, `causal-conv1d`,
  `mamba-ssm`) runs once over all rows. Neither packages nor signatures show that they reach every
  kernel: each class is tried on two short documents, once per device and dtype (`_borders`).
  On meta and fake devices the delta rule counts as these kernels (`delta_rule`).
- Any other runs once for each length of documents, over all documents of that length.

A mixer is a module that takes a cache, as it could not generate otherwise, and does not attend:
neither it nor any module inside it calls the library's attention interface.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from disttrain_cli.models import delta_rule
from disttrain_cli.models.attention import Segments
from disttrain_cli.models.division import Division, Sharding, colwise, per_head, rowwise
from disttrain_cli.models.host import waiting
from disttrain_cli.models.weight_parts import deferred

#: Parameters of a module's forward that pass the state of earlier tokens, or ask for it.
_CACHES = {"cache_params", "past_key_values", "state", "use_cache"}
#: Names under which modules take the borders of documents, depending on the kernels they call.
_NAMES = (("cu_seq_lens_q", "seq_idx"), ("cu_seqlens", "seq_idx"), ("seq_idx",))
#: Lengths of the documents of a trial: longer than a chunk of the kernels (64), and shorter.
_TRIAL = (70, 3)

_documents: ContextVar[Segments] = ContextVar("documents")


def mixers(layer: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost recurrent mixers among a layer's submodules, by path."""
    found: dict[str, nn.Module] = {}
    for path, part in layer.named_modules():
        if not path or any(path.startswith(f"{outer}.") for outer in found):
            continue
        takes_cache = not _CACHES.isdisjoint(inspect.signature(type(part).forward).parameters)
        if takes_cache and not any(map(attends, part.modules())):
            found[path] = part
    return found


def restart(layer: nn.Module) -> list[str]:
    """Make a layer's recurrent mixers restart at every document, in place; return their paths.

    Without a GPU the library's advice to install kernels for one is not shown.
    """
    found = mixers(layer)
    if found and not torch.cuda.is_available():
        logging.getLogger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)
    for mixer in found.values():
        kind: Any = type(mixer)
        mixer.__class__ = _restarting(kind)
    return list(found)


def needs_kernels(layer: nn.Module) -> bool:
    """Return True if a layer has mixers that are priced as the kernels of `fla` compute them."""
    return any(
        name in _globals(type(mixer))
        for mixer in mixers(layer).values()
        for name in delta_rule.REPLACED
    )


def division(layer: nn.Module) -> Division:
    """Return the shardings by heads of the mixers of a library's decoder layer, by path.

    A mixer is sharded only if all its weights are known here and none mixes heads (as Mamba's B
    and C and a norm over all heads do). All others are replicated.
    """
    made: Division = {}
    for path, mixer in mixers(layer).items():
        known = _by_heads(mixer)
        names = {
            name.removesuffix(".weight").removesuffix(".bias")
            for name, _ in mixer.named_parameters()
        }
        if names <= known.keys():
            made |= {f"{path}.{name}": known[name] for name in sorted(names)}
    return made


def _by_heads(mixer: Any) -> Division:
    """Return the shardings of the weights of mixers with the (Kimi) gated delta rule, by path."""
    if hasattr(mixer, "num_k_heads"):
        packed = (mixer.key_dim, mixer.key_dim, mixer.value_dim)
    elif hasattr(mixer, "qkv_dim"):
        packed = (mixer.qkv_dim,) * 3
    else:
        return {}
    gate = getattr(mixer, "forget_gate", mixer)
    return {
        **colwise("in_proj_qkv", "conv1d", packed=packed),
        **colwise("q_proj", "k_proj", "v_proj", "in_proj_qkvz", "in_proj_z", "in_proj_ba"),
        **colwise("in_proj_a", "in_proj_b", "a_proj", "b_proj", "g_proj", "g_b_proj"),
        **colwise("A_log", "dt_bias", "forget_gate.dt_bias"),
        **colwise("forget_gate.f_proj", "forget_gate.f_b_proj"),
        # [heads], or [1, 1, heads, 1]
        "forget_gate.A_log": Sharding(2 if gate.A_log.ndim == 4 else 0),
        **per_head("norm", "o_norm", "g_a_proj", "forget_gate.f_a_proj"),
        **rowwise("out_proj", "o_proj"),
    }


def passes_weight(owner: nn.Module, name: str) -> bool:
    """Return True if a converted mixer may pass the weight of a linear to a kernel.

    Hooks of the linear, as an adapter's, do not run then: Mamba's fused kernel computes the output
    projection, too.
    """
    kind = getattr(type(owner), "restarts", None)
    return kind is not None and f"self.{name}.weight" in inspect.getsource(kind)


def is_inside(layer: nn.Module, path: str) -> bool:
    """Return True if a layer's submodule is inside a converted mixer."""
    parts = path.split(".")
    outer = (layer.get_submodule(".".join(parts[:count])) for count in range(len(parts)))
    return any(hasattr(type(part), "restarts") for part in outer)


@contextmanager
def documents(within: Segments) -> Iterator[None]:
    """Set the documents at which converted mixers that run inside restart.

    They cover all rows of a microbatch; padding is a document of its own.
    """
    assert within.cp is None, "a recurrent mixer needs all rows of its documents on one rank"
    token = _documents.set(within)
    try:
        yield
    finally:
        _documents.reset(token)


def attends(module: nn.Module) -> bool:
    """Return True if a module calls the library's attention interface."""
    called = inspect.unwrap(type(module).forward).__code__.co_names
    return "ALL_ATTENTION_FUNCTIONS" in called


@cache
def _restarting(kind: Any) -> type[nn.Module]:
    """Return the subclass of a mixer's class that restarts at documents."""
    first = list(inspect.signature(kind.forward).parameters)[1]

    def forward(self: nn.Module, *args: Any, **named: Any) -> Any:
        hidden_MLD, *rest = args or (named.pop(first),)
        call: Callable[..., Any] = partial(kind.forward, self)
        leaves, structure = tree_flatten(((hidden_MLD, *rest), named))
        within = _documents.get()
        running: AbstractContextManager[None] = nullcontext()
        names = _borders(kind, self.training, call, hidden_MLD)
        if names is not None:
            call = partial(call, **{name: within.borders[name] for name in names})
            sequences, length = hidden_MLD.shape[:2]
            rows = [length] * sequences if _counted(hidden_MLD) else [sequences * length]
            within, running = Segments(rows, hidden_MLD.device), _running(kind, hidden_MLD)
        parts = zip(*(_cut(leaf, hidden_MLD.shape[:2], within) for leaf in leaves), strict=True)
        made = []
        with running:
            for args, options in (tree_unflatten(part, structure) for part in parts):
                made.append(call(*args, **options))
        outputs, (of_one, *_) = zip(*map(tree_flatten, made), strict=True)
        joined = [
            _joined(list(one), hidden_MLD.shape[:2], within) for one in zip(*outputs, strict=True)
        ]
        if joined[0] is None:
            raise NotImplementedError(f"{kind.__name__} does not return features of every row")
        return tree_unflatten(joined, of_one)

    own = {"forward": forward, "__module__": kind.__module__, "restarts": kind}
    return type(kind.__name__, (kind,), own)


def _cut(value: Any, shape: torch.Size, within: Segments) -> list[Any]:
    """Return an argument's documents [n, L'] for each length; no mask, and all else as it is."""
    if isinstance(value, Segments):
        return [None] * len(within.groups)
    if not isinstance(value, Tensor) or value.shape[:2] not in (shape, (1, shape[1])):
        return [value] * len(within.groups)
    rows = value.expand(*shape, *value.shape[2:]).flatten(0, 1)
    if within.order is not None:
        rows = rows.index_select(0, within.order[0])
    parts = rows.split([count * length for count, length in within.groups])
    return [part.unflatten(0, group) for part, group in zip(parts, within.groups, strict=True)]


def _joined(values: list[Any], shape: torch.Size, within: Segments) -> Tensor | None:
    """Return an output of all rows from that of each length; None for a state or a mask."""
    if not all(
        isinstance(value, Tensor) and value.is_floating_point() and value.shape[:2] == group
        for value, group in zip(values, within.groups, strict=True)
    ):
        return None
    rows = torch.cat([value.flatten(0, 1) for value in values])
    if within.order is not None:
        rows = rows.index_select(0, within.order[1])
    return rows.unflatten(0, shape)


_tried: dict[tuple[Any, ...], tuple[str, ...] | None] = {}


def _borders(
    kind: type[nn.Module], training: bool, call: Callable[..., Any], like: Tensor
) -> tuple[str, ...] | None:
    """Return the names under which a class takes borders and heeds them; None if it does not.

    On meta and fake devices nothing can be tried: there the delta rule counts as kernels that heed
    borders (`delta_rule`), and all else runs as it would without kernels.
    """
    if _counted(like):
        return () if any(name in _globals(kind) for name in delta_rule.REPLACED) else None
    key = kind, training, like.device, like.dtype
    if key not in _tried:
        # A recomputed layer must not count what the trial saves, as it runs once only; gradients of
        # split linears are dropped.
        apart = torch.autograd.graph.saved_tensors_hooks(Tensor.detach, Tensor.detach)
        with waiting(like.device), torch.enable_grad(), apart, deferred([]):
            _tried[key] = next((names for names in _NAMES if _heeds(call, names, like)), None)
    return _tried[key]


def _running(kind: type[nn.Module], like: Tensor) -> AbstractContextManager[None]:
    """Return the context in which kernels run that take borders.

    They read the number of chunks on the host, once per batch.
    """
    return delta_rule.counted(_globals(kind)) if _counted(like) else waiting(like.device)


def _counted(like: Tensor) -> bool:
    return like.is_meta or isinstance(like, FakeTensor)


def _globals(kind: type[nn.Module]) -> dict[str, Any]:
    names: dict[str, Any] = inspect.unwrap(kind.forward).__globals__
    return names


def _heeds(call: Callable[..., Any], names: tuple[str, ...], like: Tensor) -> bool:
    """Return True if, given borders, a document does not depend on the one before it.

    Without them it must, or the trial would prove nothing.
    """
    borders = Segments(_TRIAL, like.device).borders
    given = {name: borders[name] for name in names}
    try:
        return _leaks(call, like) and not _leaks(partial(call, **given), like)
    # unknown names; borders refused without the kernels; a width or dtype that kernels lack
    except (TypeError, ValueError, AssertionError, RuntimeError):
        return False


def _leaks(call: Callable[..., Any], like: Tensor) -> bool:
    """Return True if a document's output or its gradient depends on the document before it."""
    before, after = _TRIAL
    with torch.device("cpu"):
        drawn = torch.randn(
            2, before + after, like.shape[-1], generator=torch.Generator().manual_seed(0)
        )
    drawn[1, before:] = drawn[0, before:]
    outputs = []
    for rows in drawn.to(like).split(1):
        rows.requires_grad_()
        made = call(rows)
        outputs.append((made if isinstance(made, Tensor) else made[0])[:, before:])
        (gradient,) = torch.autograd.grad(outputs[-1].sum(), rows)
    return bool(gradient[:, :before].any()) or not torch.equal(*outputs)

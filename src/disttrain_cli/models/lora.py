"""Low-rank adapters of linears (LoRA): W x + s · B (A x), s = lora_alpha / r, with peft's names.

See Hu et al. 2021, arXiv 2106.09685. Over a TP group an adapter is sharded as its linear is
(`tensor_parallel.shard`). For a column-parallel linear every rank has A and its own outputs of B;
for a row-parallel one its own inputs of A, and B, whose product is a partial sum like the linear's
and is part of the same message. The only additional messages are the sums of the gradients of
replicated matrices.

A is initialised uniformly (He et al. 2015, arXiv 1502.01852, with a = √5, as in peft), B to zero. A
is drawn unsharded, seeded by its own name, so that it does not depend on the layout.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from disttrain_cli.errors import SpecError
from disttrain_cli.models.division import by_ids, sharding_of
from disttrain_cli.models.dropout import announce, of_adapter
from disttrain_cli.models.layer import ADAPTER, PipelineLayer, is_adapter
from disttrain_cli.models.recurrent import is_inside, passes_weight
from disttrain_cli.spec.families.family import prefixed
from disttrain_cli.spec.runfile.lora import ALL_LINEAR

#: Kinds of submodules that peft can adapt.
ADAPTABLE = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Lora:
    """Adapter configuration of a module."""

    module: str
    r: int
    lora_alpha: int
    target_modules: tuple[str, ...] | str
    use_rslora: bool
    #: submodules of the published model trained in full in addition
    modules_to_save: tuple[str, ...] = ()
    lora_dropout: float = 0.0  # dropout probability of the adapters' input
    folder: Path | None = None  # folder of the initial adapters
    #: prefixes of names in the module's own published class → in the whole model, if targets name
    #: the whole model's; empty: they name the module's own
    within: tuple[tuple[str, str], ...] = ()

    @property
    def scale(self) -> float:
        """Factor of B (A x)."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)

    def matches(self, path: str) -> bool:
        """Return True if a submodule of the published model is a target, by peft's rule."""
        return matches(self.target_modules, self.name_of(path))

    def saves(self, path: str) -> bool:
        """Return True if a parameter of the published model is trained in full, by peft's rule.

        The name of a submodule containing it must end with an entry of `modules_to_save`; `norm`
        also matches `input_layernorm`.
        """
        parts = self.name_of(path).split(".")
        return any(
            ".".join(parts[:count]).endswith(self.modules_to_save) for count in range(1, len(parts))
        )

    def name_of(self, path: str) -> str:
        """Return the adapted model's name of a submodule or parameter of the module's own class."""
        return prefixed(path, dict(self.within)) if self.within else path


def matches(targets: Collection[str] | str, path: str) -> bool:
    """Return True if a submodule is a target: its name ends so, or matches the regex in full."""
    if isinstance(targets, str):
        return re.fullmatch(targets, path) is not None
    return any(path == end or path.endswith(f".{end}") for end in targets)


def adapt(layer: PipelineLayer, lora: Lora) -> None:
    """Add adapters, without values yet, to the layer's targeted linears.

    Of the module's weights only these and the fully trained ones are trainable from then on.

    Raises:
        SpecError: a target is no linear layer, or an LLM's head, which is sharded by token ids, or
            its weight is passed to a kernel; or one inside a recurrent mixer has dropout.
    """
    if layer.weights_of != "module":
        return
    layer.saved = frozenset(_saved(layer, lora))
    dropouts = []
    for path, linear in list(targets(layer, lora)):
        if lora.lora_dropout:
            if is_inside(layer, path):
                raise SpecError(
                    f"model.modules.{lora.module}.lora.lora_dropout: adapters inside recurrent"
                    " mixers have no dropout",
                    f"given: {lora.lora_dropout}, with {layer.published_path(path)}, which runs"
                    " document by document",
                    "Set lora_dropout: 0, or name only linear layers outside of the mixers.",
                )
            sharding = sharding_of(layer.division, path)
            divided = len(sharding.packed) if sharding and sharding.dim == 1 else 0
            linear.lora_dropout = of_adapter(layer, path, lora.lora_dropout, divided)
            dropouts.append(linear.lora_dropout)
        linear.lora_A = nn.Linear(linear.in_features, lora.r, bias=False)
        linear.lora_B = nn.Linear(lora.r, linear.out_features, bias=False)
        linear.lora_scale = lora.scale
        linear.register_forward_hook(_add)
        layer.row_by_row = False  # its linears do not send on their own (`overlapped`)
    announce(layer, dropouts)
    layer.adapted = True
    layer.ask_for_gradients()


def _saved(layer: PipelineLayer, lora: Lora) -> Iterator[str]:
    """Yield the paths of the layer's parameters that are trained in full."""
    for path, _ in layer.named_parameters():
        name = layer.published_name(path)
        if name is not None and lora.saves(name):
            yield path


def _add(linear: Any, given: tuple[Tensor, ...], made: Tensor) -> Tensor:
    read = linear.lora_dropout(given[0]) if hasattr(linear, "lora_dropout") else given[0]
    return made + linear.lora_B(linear.lora_A(read) * linear.lora_scale)


def targets(layer: PipelineLayer, lora: Lora) -> Iterator[tuple[str, Any]]:
    """Yield the layer's targeted linears with their paths.

    Raises:
        SpecError: a target is no linear layer, or an LLM's head, which is sharded by token ids, or
            its weight is passed to a kernel.
    """
    for path, part in layer.named_modules():
        if not isinstance(part, ADAPTABLE) or not _is_target(layer, path, lora):
            continue
        if not _is_adaptable(layer, path):
            name = layer.published_path(path)
            raise SpecError(
                f"model.modules.{lora.module}.lora.target_modules: {name} cannot have an adapter",
                "adapters are of linear layers; there are none of an LLM's head, nor of a linear"
                " whose weight a kernel takes (out_proj of Mamba)",
                "Name the linear layers alone, or give all-linear.",
            )
        yield path, part


def _is_adaptable(layer: PipelineLayer, path: str) -> bool:
    owner, _, name = path.rpartition(".")
    linear = isinstance(layer.get_submodule(path), nn.Linear)
    passed = passes_weight(layer.get_submodule(owner), name)
    return linear and not passed and not by_ids(layer.division, path)


def _is_target(layer: PipelineLayer, path: str, lora: Lora) -> bool:
    """Return True if a submodule is named by `target_modules` and not trained in full."""
    name = layer.published_path(path)
    if name is None or lora.saves(f"{name}.weight"):
        return False
    if lora.target_modules == ALL_LINEAR:
        return _is_adaptable(layer, path)
    return lora.matches(name)


def adapters(layer: PipelineLayer) -> dict[str, Any]:
    """Return the layer's linears with adapters, by path."""
    return {path: part for path, part in layer.named_modules() if hasattr(part, "lora_A")}


@torch.no_grad()
def draw(layer: PipelineLayer, seed: int) -> None:
    """Initialise the adapters' matrices, each seeded by the run's seed and its own name."""
    for path, linear in adapters(layer).items():
        digest = hashlib.sha256(f"{seed}/{layer.name}/{path}.lora_A".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        bound = 1.0 / math.sqrt(linear.in_features)
        linear.lora_A.weight.uniform_(-bound, bound, generator=generator)
        linear.lora_B.weight.zero_()


def check_targets(lora: Lora, layers: Sequence[PipelineLayer]) -> None:
    """Raise SpecError if a module's adapters are missing, misnamed, or differ within a kind.

    A module needs at least one target, every name must match one, and layers of one kind must have
    equal adapters.
    """
    of_kind: dict[str, set[str]] = {}
    for layer in layers:
        here = {*adapters(layer), *layer.saved}
        if of_kind.setdefault(layer.kind, here) != here:
            raise SpecError(
                f"model.modules.{lora.module}.lora.target_modules: {layer.name} has other adapters"
                f" than the layers before it",
                f"it has {', '.join(sorted(here)) or 'none'}; they have"
                f" {', '.join(sorted(of_kind[layer.kind])) or 'none'}",
                "Layers of one kind must have the same adapters: name them without numbers.",
            )
    names = {
        lora.name_of(name)
        for layer in layers
        for path in adapters(layer)
        if (name := layer.published_path(path)) is not None
    }
    given = lora.target_modules
    each = [given] if isinstance(given, str) else given
    missing = [
        end
        for end in each
        if not any(isinstance(given, str) or matches((end,), name) for name in names)
    ]
    if lora.within and (names or any(layer.saved for layer in layers)):
        missing = []  # it also names other modules' linears
    _check_saved(lora, layers)
    if missing:
        there = [
            name
            for layer in layers
            for path, part in layer.named_modules()
            if isinstance(part, nn.Linear)
            and not by_ids(layer.division, path)
            and f"{path}.weight" not in layer.saved
            and not path.endswith(("lora_A", "lora_B"))
            and (name := layer.published_path(path)) is not None
        ]
        ends = dict.fromkeys(name.rpartition(".")[2] for name in there)
        beside = " beside modules_to_save" if lora.modules_to_save else ""
        inside = (
            f"; names with dots are those inside {lora.module}, as {there[0]}, not inside a whole"
            " model"
            if there and any("." in name for name in missing)
            else ""
        )
        raise SpecError(
            f"model.modules.{lora.module}.lora.target_modules: no layer is called"
            f" {', '.join(missing)}",
            f"linear layers of {lora.module}{beside}: {', '.join(ends) or 'none'}{inside}",
            "Name some of these.",
        )


def _check_saved(lora: Lora, layers: Sequence[PipelineLayer]) -> None:
    """Raise SpecError if an entry of `modules_to_save` matches nothing, or a tied weight."""
    field = f"model.modules.{lora.module}.lora.modules_to_save"
    saved = {(layer.name, path) for layer in layers for path in layer.saved}
    pairs = [
        pair
        for layer in layers
        for path, owner in layer.tied.items()
        for pair in ((layer.name, path), owner)
    ]
    if tied := [f"{name}/{path}" for name, path in pairs if (name, path) in saved]:
        raise SpecError(
            f"{field}: the LLM's embedding and head are one weight",
            f"named: {', '.join(tied)}; peft would train a copy of it apart from the other",
            f"Set tie_word_embeddings: false in model.modules.{lora.module}.config, and name both.",
        )
    found = {
        end
        for layer in layers
        for path in layer.saved
        for end in lora.modules_to_save
        if replace(lora, modules_to_save=(end,)).saves(layer.published_path(path) or "")
    }
    missing = [end for end in lora.modules_to_save if end not in found]
    if missing and not lora.within:
        raise SpecError(
            f"{field}: nothing is called {', '.join(missing)}",
            f"looked for by the ends of names in {lora.module}",
            "Name parts of the model with weights, such as embed_tokens, lm_head or norm.",
        )


def merged(layer: PipelineLayer, lora: Lora, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a layer's unsharded tensors with adapters merged in fp32: W + s · B A.

    The adapters themselves are omitted.
    """
    found = {path: tensor for path, tensor in tensors.items() if not is_adapter(path)}
    for path in adapters(layer):
        a, b = (tensors[f"{path}.{name}.weight"].float() for name in ADAPTER)
        weight = found[f"{path}.weight"]
        found[f"{path}.weight"] = (weight.float() + lora.scale * b @ a).to(weight.dtype)
    return found

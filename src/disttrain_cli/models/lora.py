"""Low-rank adapters of a layer's linears (LoRA, Hu et al. 2021, arXiv 2106.09685): W x + s · B
(A x), s = lora_alpha / r, with peft's names.

Over a TP group an adapter is divided as its linear is (`tensor_parallel.shard`). Beside a
column-parallel one every rank has A and its own outputs of B; beside a row-parallel one its own
inputs of A, and B, whose product is a partial sum like the linear's own and goes into the same
message. Nothing is sent that is not sent without adapters but the sums of the gradients of what
every rank has.

A starts from a uniform distribution (He et al. 2015, arXiv 1502.01852, with a = √5, as peft's), B
from zero. A is drawn whole, by its own name, so that it does not depend on the layout.
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
from disttrain_cli.models.dropout import announce, of_adapter
from disttrain_cli.models.layer import ADAPTER, PipelineLayer, is_adapter
from disttrain_cli.spec.families.family import prefixed
from disttrain_cli.spec.runfile.lora import ALL_LINEAR

#: Parts of models that peft, too, could adapt.
ADAPTABLE = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Lora:
    """A module's adapters."""

    module: str
    r: int
    lora_alpha: int
    target_modules: tuple[str, ...] | str
    use_rslora: bool
    #: parts of the published model that are trained whole beside them
    modules_to_save: tuple[str, ...] = ()
    lora_dropout: float = 0.0  # share of what an adapter reads that it drops in training
    folder: Path | None = None  # they start from
    #: prefixes of names in the module's own published class → in the whole model that names of
    #: targets are of; none: they are of the module's own
    within: tuple[tuple[str, str], ...] = ()

    @property
    def scale(self) -> float:
        """By which B (A x) is multiplied."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)

    def matches(self, path: str) -> bool:
        """Whether a part of the published model is a target, as peft decides it."""
        return matches(self.target_modules, self.name_of(path))

    def saves(self, path: str) -> bool:
        """Whether a parameter of the published model is trained whole, as peft decides it: the name
        of a part that it is in ends so, `norm` being the end of `input_layernorm`, too."""
        parts = self.name_of(path).split(".")
        return any(
            ".".join(parts[:count]).endswith(self.modules_to_save) for count in range(1, len(parts))
        )

    def name_of(self, path: str) -> str:
        """What the adapted model calls a part or a parameter of the module's own published
        class."""
        return prefixed(path, dict(self.within)) if self.within else path


def matches(targets: Collection[str] | str, path: str) -> bool:
    """Whether a part of a published model is a target: by the end of its name, or by a regular
    expression of all of it."""
    if isinstance(targets, str):
        return re.fullmatch(targets, path) is not None
    return any(path == end or path.endswith(f".{end}") for end in targets)


def adapt(layer: PipelineLayer, lora: Lora) -> None:
    """Give the layer's linears that are targets their adapters, without values yet; of the module's
    weights these and what is saved whole are trained from now on.

    Raises:
        SpecError: a target is no linear layer, or an LLM's head, which is multiplied by in parts.
    """
    if layer.weights_of != "module":
        return
    layer.saved = frozenset(_saved(layer, lora))
    dropouts = []
    for path, linear in list(targets(layer, lora)):
        if lora.lora_dropout:
            divided = next((of for ends, of in layer.division.inputs if matches(ends, path)), 0)
            linear.lora_dropout = of_adapter(layer, path, lora.lora_dropout, divided)
            dropouts.append(linear.lora_dropout)
        linear.lora_A = nn.Linear(linear.in_features, lora.r, bias=False)
        linear.lora_B = nn.Linear(lora.r, linear.out_features, bias=False)
        linear.lora_scale = lora.scale
        linear.register_forward_hook(_add)
        layer.row_by_row = False  # its linears do not send themselves (`overlapped`)
    announce(layer, dropouts)
    layer.adapted = True
    layer.ask_for_gradients()


def _saved(layer: PipelineLayer, lora: Lora) -> Iterator[str]:
    """Paths of the layer's parameters that are trained whole."""
    for path, _ in layer.named_parameters():
        name = layer.published_name(path)
        if name is not None and lora.saves(name):
            yield path


def _add(linear: Any, given: tuple[Tensor, ...], made: Tensor) -> Tensor:
    read = linear.lora_dropout(given[0]) if hasattr(linear, "lora_dropout") else given[0]
    return made + linear.lora_B(linear.lora_A(read) * linear.lora_scale)


def targets(layer: PipelineLayer, lora: Lora) -> Iterator[tuple[str, Any]]:
    """The layer's linears that are targets, by path.

    Raises:
        SpecError: a target is no linear layer, or an LLM's head, which is multiplied by in parts.
    """
    for path, part in layer.named_modules():
        if not isinstance(part, ADAPTABLE) or not _is_target(layer, path, lora):
            continue
        if not _is_adaptable(layer, path):
            name = layer.published_path(path)
            raise SpecError(
                f"model.modules.{lora.module}.lora.target_modules: {name} cannot have an adapter",
                "adapters are of linear layers, and of an LLM's head there are none",
                "Name the linear layers alone, or give all-linear.",
            )
        yield path, part


def _is_adaptable(layer: PipelineLayer, path: str) -> bool:
    return (
        isinstance(layer.get_submodule(path), nn.Linear) and path not in layer.division.vocabulary
    )


def _is_target(layer: PipelineLayer, path: str, lora: Lora) -> bool:
    """Whether a part of a layer is named by `target_modules`, and not trained whole."""
    name = layer.published_path(path)
    if name is None or lora.saves(f"{name}.weight"):
        return False
    if lora.target_modules == ALL_LINEAR:
        return _is_adaptable(layer, path)
    return lora.matches(name)


def adapters(layer: PipelineLayer) -> dict[str, Any]:
    """The layer's linears with adapters, by path."""
    return {path: part for path, part in layer.named_modules() if hasattr(part, "lora_A")}


@torch.no_grad()
def draw(layer: PipelineLayer, seed: int) -> None:
    """Set the adapters' matrices to what they start from, each by the seed and its own name."""
    for path, linear in adapters(layer).items():
        digest = hashlib.sha256(f"{seed}/{layer.name}/{path}.lora_A".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        bound = 1.0 / math.sqrt(linear.in_features)
        linear.lora_A.weight.uniform_(-bound, bound, generator=generator)
        linear.lora_B.weight.zero_()


def check_targets(lora: Lora, layers: Sequence[PipelineLayer]) -> None:
    """SpecError where the layers of a module have no target at all, a name fits none, or layers of
    one kind have other adapters than each other."""
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
        missing = []  # it names other modules' linears, too
    _check_saved(lora, layers)
    if missing:
        there = [
            name
            for layer in layers
            for path, part in layer.named_modules()
            if isinstance(part, nn.Linear)
            and path not in layer.division.vocabulary
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
    """SpecError where what is saved whole fits no layer, or is one weight with another's."""
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
            f"sought by the ends of names in {lora.module}",
            "Name parts of the model with weights, such as embed_tokens, lm_head or norm.",
        )


def merged(layer: PipelineLayer, lora: Lora, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A layer's whole tensors by path with adapters added to their linears' weights, in fp32:
    W + s · B A; without the adapters."""
    found = {path: tensor for path, tensor in tensors.items() if not is_adapter(path)}
    for path in adapters(layer):
        a, b = (tensors[f"{path}.{name}.weight"].float() for name in ADAPTER)
        weight = found[f"{path}.weight"]
        found[f"{path}.weight"] = (weight.float() + lora.scale * b @ a).to(weight.dtype)
    return found

"""How a class of models of transformers, of diffusers, or of another package becomes a module
here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from disttrain_cli.models.building import LayerMaker
from disttrain_cli.models.configs.checks import ModuleConfig
from disttrain_cli.spec.heads import Head, Item
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.runfile.model import Kind, LossWeights, ModuleSpec, Projector


@dataclass(frozen=True)
class Joined:
    """A module and what its makers must know of the rest of the model."""

    module: ModuleConfig
    spec: ModuleSpec
    reads: tuple[str, ...]  # tensors that the encoders before the LLM leave
    features: tuple[str, ...]  # and, of inner blocks, for its first blocks, one after each
    llm_width: int
    projector_hidden: int
    feeds_generator: bool
    loss_weights: LossWeights
    head: Head | None = None  # what it asks of the data; None of an LLM
    index: int = 0  # of the module among those of the model that work on the same items


@dataclass(frozen=True)
class Architecture:
    """How a class of transformers or diffusers becomes a module.

    Attributes:
        item: what the module works on.
        published: the library's class whose weights `PipelineLayer.published` names, as
            "MODULE:CLASS".
        read: the configuration (and a VAE's) of (name, architecture, spec, fields of
            `config.json`); SpecError.
        make: the layers in pipeline order.
        inputs: what it asks of the data; None for an LLM.
        several: whether other modules may work on the same items (`Joined.index`).
        projectors: what may join an encoder to the LLM (`ModuleSpec.projector`).
    """

    kind: Kind
    item: Item
    published: str
    read: Callable[[str, str, ModuleSpec, dict[str, Any]], tuple[Any, dict[str, Any] | None]]
    make: Callable[[Joined], list[LayerMaker]]
    inputs: Callable[[Run, ModuleConfig], Head] | None = None
    several: bool = False
    projectors: tuple[Projector, ...] = ("mlp",)

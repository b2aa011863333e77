"""Registry entry of a model class: how a class of a library or plugin becomes a module."""

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
    """Module with the facts about the rest of the model that its layer factories need."""

    module: ModuleConfig
    spec: ModuleSpec
    reads: tuple[str, ...]  # tensors that the encoders before the LLM write
    features: tuple[str, ...]  # DeepStack features, one per initial block of the LLM
    llm_width: int
    projector_hidden: int
    feeds_generator: bool
    loss_weights: LossWeights
    head: Head | None = None  # modality spec: data requirements; None for an LLM
    index: int = 0  # index among the modules that process the same items


@dataclass(frozen=True)
class Architecture:
    """Conversion of a class of transformers or diffusers to a module.

    Attributes:
        item: kind of item that the module processes.
        published: the library's class whose weights `PipelineLayer.published` names, as
            "MODULE:CLASS"; None: the one that transformers has for the `model_type`.
        read: returns the configuration (and a VAE's) from (name, architecture, spec, fields of
            `config.json`); raises SpecError.
        make: returns the layers' factories in pipeline order.
        inputs: returns the module's modality spec (its data requirements); None for an LLM.
        several: True if other modules may process the same items (`Joined.index`).
        projectors: supported projectors between an encoder and the LLM (`ModuleSpec.projector`).
    """

    kind: Kind
    item: Item
    published: str | None
    read: Callable[[str, str, ModuleSpec, dict[str, Any]], tuple[Any, dict[str, Any] | None]]
    make: Callable[[Joined], list[LayerMaker]]
    inputs: Callable[[Run, ModuleConfig], Head] | None = None
    several: bool = False
    projectors: tuple[Projector, ...] = ("mlp",)

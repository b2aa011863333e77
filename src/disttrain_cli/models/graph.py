"""A run's model as one list of layers in pipeline order: encoder, LLM, generator.

Everything else speaks of layers by their place in this list: a stage is a range of it, and a cut before layer i
is crossed by `live_tensors(table, i)`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from disttrain_cli.models import llama, unet, vit
from disttrain_cli.models.building import LayerMaker
from disttrain_cli.models.configs import ModuleConfig, read_configs
from disttrain_cli.models.layer import PipelineLayer, TensorSpec
from disttrain_cli.spec.files import fingerprint
from disttrain_cli.spec.inputs import ImageInput, ModelInputs, TargetInput
from disttrain_cli.spec.runfile import Run


@dataclass(frozen=True)
class LayerInfo:
    """What is known of a layer without building it; the fields are those of `layer.PipelineLayer`."""

    name: str
    module: str
    kind: str
    reads: tuple[str, ...]
    writes: tuple[TensorSpec, ...]
    needs: tuple[str, ...]
    loss: str | None
    parameters: int


def describe(run: Run) -> ModelInputs:
    """What the model asks of its data, from the configurations alone; raises SpecError where they are wrong."""
    configs = read_configs(run)
    llm = _of_kind(configs, "llm")
    assert llm is not None
    encoder, generator = _of_kind(configs, "encoder"), _of_kind(configs, "generator")
    image = target = None
    if encoder is not None:
        image = ImageInput(
            module=encoder.name,
            patch_px=encoder.config.patch_size,
            merge=run.file.model.modules[encoder.name].merge,
            channels=encoder.config.num_channels,
            mean=0.5,
            std=0.5,
            extra_tokens=1,
            max_pixels=run.file.data.max_image_pixels,
        )
    if generator is not None:
        size = generator.config["sample_size"]
        target = TargetInput(
            module=generator.name,
            size_px=size,
            channels=generator.config["in_channels"],
            context_tokens=run.file.model.modules[generator.name].context_tokens,
            latent_pixels=size * size,
        )
    return ModelInputs(
        llm=llm.name,
        vocabulary=llm.config.vocab_size,
        sequence_length=run.file.data.sequence_length,
        image=image,
        target=target,
    )


_tables: dict[str, list[LayerInfo]] = {}


def layer_table(run: Run) -> list[LayerInfo]:
    """All layers of the model in pipeline order, without memory for weights; remembered within a process.

    Raises:
        SpecError: a module's configuration is wrong.
    """
    configs = read_configs(run)
    plain = {n: c.config if isinstance(c.config, dict) else c.config.to_dict() for n, c in configs.items()}
    key = fingerprint({"configs": plain, "model": run.file.model.model_dump(mode="json")})
    if key not in _tables:
        _tables[key] = [_info(maker.on_meta()) for maker in _makers(run, configs)]
    return _tables[key]


def build_layers(
    run: Run, start: int, stop: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> list[PipelineLayer]:
    """Layers `start` to `stop` (exclusive) of the model with their initial weights, and no others.

    A layer's initial weights depend on `train.seed` and its name only: they are the same on every layout.
    """
    makers = _makers(run, read_configs(run))
    assert 0 <= start <= stop <= len(makers)
    return [maker.build(run.file.train.seed, device, dtype) for maker in makers[start:stop]]


def live_tensors(table: list[LayerInfo], cut: int) -> list[TensorSpec]:
    """State tensors that cross the cut before layer `cut`: written before it and read at or after it.

    In the order in which they are first written, with the shape that the last writer before the cut gives them.
    """
    written = {spec.name: spec for layer in table[:cut] for spec in layer.writes}
    wanted: set[str] = set()
    replaced: set[str] = set()
    for layer in table[cut:]:
        wanted.update(name for name in layer.reads if name not in replaced)
        replaced.update(spec.name for spec in layer.writes)
    return [spec for name, spec in written.items() if name in wanted]


def _of_kind(configs: dict[str, ModuleConfig], kind: str) -> ModuleConfig | None:
    return next((config for config in configs.values() if config.kind == kind), None)


def _makers(run: Run, configs: dict[str, ModuleConfig]) -> list[LayerMaker]:
    model = run.file.model
    llm = _of_kind(configs, "llm")
    assert llm is not None
    encoder, generator = _of_kind(configs, "encoder"), _of_kind(configs, "generator")
    width = llm.config.hidden_size
    hidden = model.projector_hidden or width
    makers: list[LayerMaker] = []
    if encoder is not None:
        makers += vit.makers(encoder.name, encoder.config, model.modules[encoder.name].merge, hidden, width)
    makers += llama.makers(llm.name, llm.config, encoder is not None, generator is not None, model.loss_weights.text)
    if generator is not None:
        makers += unet.makers(
            generator.name,
            generator.config,
            model.modules[generator.name].context_tokens,
            hidden,
            width,
            model.loss_weights.image,
        )
    return makers


def _info(layer: PipelineLayer) -> LayerInfo:
    return LayerInfo(
        layer.name,
        layer.module,
        layer.kind,
        layer.reads,
        layer.writes,
        layer.needs,
        layer.loss,
        sum(parameter.numel() for parameter in layer.parameters()),
    )

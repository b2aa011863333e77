"""Model of a run as one list of layers in pipeline order: encoders, LLM, generators.

All other code refers to layers by their index in this list: a stage is a range of it, and a cut
before layer i is crossed by `live_tensors(table, i)`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, wraps
from types import MappingProxyType
from typing import Any, TypeVar, cast

import torch

from disttrain_cli.errors import SpecError
from disttrain_cli.models.architecture import Joined
from disttrain_cli.models.architectures import architectures, read_configs
from disttrain_cli.models.building import LayerMaker
from disttrain_cli.models.configs import ModuleConfig
from disttrain_cli.models.configs.checks import wrong
from disttrain_cli.models.configs.decoders import positions_of
from disttrain_cli.models.configs.videos import check_read
from disttrain_cli.models.disk_cache import from_disk
from disttrain_cli.models.layer import PipelineLayer, TensorSpec, embeds_name, features_name
from disttrain_cli.models.library_decoder import library_decoder
from disttrain_cli.models.lora import check_targets
from disttrain_cli.spec.files import fingerprint
from disttrain_cli.spec.heads import Head, ImageInput
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.library_images import LibraryImages
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.stage_graph import parallel_to

Function = TypeVar("Function", bound=Callable[..., Any])
#: Size of a function's cache of results per model.
MOST = 128


@dataclass(frozen=True)
class LayerInfo:
    """Static facts about a layer, known without building it; fields as in `layer.PipelineLayer`."""

    name: str
    module: str
    kind: str
    reads: tuple[str, ...]
    writes: tuple[TensorSpec, ...]
    needs: tuple[str, ...]
    loss: str | None
    parameters: int  # tied ones count in the layer that owns them
    owners: frozenset[str]  # of its trainable parameters (`PipelineLayer.owner_of`)
    frozen: bool = False
    # `PipelineLayer.tied`
    tied: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    experts: int = 0  # number of them, in a layer whose experts an EP group may divide


def describe(run: Run) -> ModelInputs:
    """Return the model's data requirements, from its configurations alone.

    Raises:
        SpecError: a configuration is wrong, or image encoders cut images into different patches.
    """
    configs = read_configs(run)
    llm = next(config for config in configs.values() if config.kind == "llm")
    heads = list(_heads(run, configs).values())
    eyes = [head for head in heads if isinstance(head, ImageInput)]
    if len({(eye.patch_px, eye.merge, eye.channels, eye.processor, eye.video) for eye in eyes}) > 1:
        given = ", ".join(
            f"{eye.module} {eye.patch_px} px × {eye.merge} of {eye.channels} channels"
            + (f", resized by {eye.processor.resize} as its folder says" if eye.processor else "")
            for eye in eyes
        )
        raise SpecError(
            "Image encoders of one model must cut images into the same patches",
            f"given: {given}",
            "Their tokens are added one by one: give them equal patch sizes and merge, or leave one"
            " out.",
        )
    check_read(run, heads)
    turned = any(isinstance(head, LibraryImages) and head.mrope for head in heads)
    length = run.file.data.sequence_length
    return ModelInputs(
        llm=llm.name,
        vocabulary=llm.config.vocab_size,
        sequence_length=length,
        windows=library_decoder(llm.config).windows(length),
        positions="mrope" if turned else positions_of(llm.config),
        heads=heads,
    )


_makers: dict[str, list[LayerMaker]] = {}
_tables: dict[str, list[LayerInfo]] = {}
_latest: tuple[Run, str] | None = None  # latest run, and the key of its layer factories


def layer_table(run: Run) -> list[LayerInfo]:
    """Return all layers of the model in pipeline order, without memory for weights.

    Cached per process.

    Raises:
        SpecError: a module's configuration is wrong, or a name to be trained has no weights.
    """
    key = _remember_makers(run)
    if key not in _tables:
        for lora in {maker.lora for maker in _makers[key]}:
            if lora is not None:
                check_targets(lora, [one.on_meta() for one in _makers[key] if one.lora == lora])
        _tables[key] = [_info(maker.on_meta()) for maker in _makers[key]]
    run.file.check_owners({owner for layer in _tables[key] for owner in layer.owners})
    return _tables[key]


def build_layers(
    run: Run,
    start: int,
    stop: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    tp: int = 1,
    tp_rank: int | None = None,
    ep: int = 1,
    ep_rank: int = 0,
    module_tp: Mapping[str, int] = MappingProxyType({}),
) -> list[PipelineLayer]:
    """Build only layers `start` to `stop` (exclusive) of the model, with their initial weights.

    A layer's initial weights depend on `train.seed` and its name only: they are the same on every
    layout. With `tp_rank` each layer is that rank's shard, cut from the full layer, one layer at a
    time. With `tp` alone it has a shard's shapes, for compute only, and the full layer is never in
    memory. Layers of modules in `module_tp` have the TP size named there. With `ep` layers have the
    experts of this rank of an EP group.
    """
    makers = _makers[_remember_makers(run)]
    assert 0 <= start <= stop <= len(makers)
    tps = [tp] * (stop - start)
    if module_tp:
        tps = [module_tp.get(info.module, tp) for info in layer_table(run)[start:stop]]
    return [
        maker.build(
            run.file.train.seed,
            device,
            dtype,
            tp=own_tp,
            tp_rank=tp_rank,
            ep=ep,
            ep_rank=ep_rank,
        )
        for maker, own_tp in zip(makers[start:stop], tps, strict=True)
    ]


def live_tensors(
    table: Sequence[LayerInfo], cut: int, parallel: Container[int] = ()
) -> list[TensorSpec]:
    """Return the state tensors that cross the cut before layer `cut`.

    They are written before it and read at or after it; layers of `parallel` branches neither send
    nor receive across it. In the order in which tensors are first written, with the shape of the
    last writer before the cut.
    """
    before, after = (
        [table[number] for number in side if number not in parallel]
        for side in (range(cut), range(cut, len(table)))
    )
    written = {spec.name: spec for layer in before for spec in layer.writes}
    wanted: set[str] = set()
    replaced: set[str] = set()
    for layer in after:
        wanted.update(name for name in layer.reads if name not in replaced)
        replaced.update(spec.name for spec in layer.writes)
    return [spec for name, spec in written.items() if name in wanted]


def parallel_layers(table: list[LayerInfo], llm: str, module: str) -> frozenset[int]:
    """Return the table indices of layers in a module's parallel branches (`spec.stage_graph`)."""
    modules = list(dict.fromkeys(layer.module for layer in table))
    others = {
        modules[other]
        for other in parallel_to(modules.index(module), len(modules), modules.index(llm))
    }
    return frozenset(index for index, layer in enumerate(table) if layer.module in others)


def _remember_makers(run: Run) -> str:
    """Return the key of the model's layer factories, created once per process.

    So a U-Net is constructed only once.
    """
    global _latest
    if _latest is not None and _latest[0] is run:
        return _latest[1]
    configs = read_configs(run)
    heads = _heads(run, configs)
    plain = {
        n: c.config if isinstance(c.config, dict) else c.config.to_dict()
        for n, c in configs.items()
    }
    of_folders = {
        name: [module.vae, str(module.noise), str(module.lora)] for name, module in configs.items()
    }
    key = fingerprint(
        {
            "configs": plain,
            "more": of_folders,
            "newlines": [h.newlines for h in heads.values() if isinstance(h, ImageInput)],
            "model": run.file.model.model_dump(mode="json"),
            "order": run.file.model.order,
        }
    )
    if key not in _makers:
        _makers[key] = _make(run, configs, heads)
    _latest = run, key
    return key


@dataclass(frozen=True)
class _Model:
    """Run that compares equal to runs with the same layers, regardless of weights."""

    key: tuple[str, str, str]
    run: Run = field(compare=False)


def of_model(function: Function) -> Function:
    """Cache a function of a run's layers without their weights and of further arguments.

    Cached in memory, as clusters of several devices evaluate the same models, and on disk
    (`disk_cache`), as the result is of no device. Results must not be mutated.
    """

    @lru_cache(maxsize=MOST)
    def known(model: _Model, *arguments: Any, **named: Any) -> Any:
        return from_disk(
            function,
            (model.key, arguments, sorted(named.items())),
            lambda: function(model.run, *arguments, **named),
        )

    @wraps(function)
    def answer(run: Run, *arguments: Any, **named: Any) -> Any:
        key = _remember_makers(run), run.file.train.precision, describe(run).model_dump_json()
        hashable = (tuple(one) if isinstance(one, list) else one for one in arguments)
        return known(_Model(key, run), *hashable, **named)

    return cast(Function, answer)


def _heads(run: Run, configs: Mapping[str, ModuleConfig]) -> dict[str, Head]:
    """Return the modality specs of encoders and generators, by module."""
    entries = {name: architectures()[module.architecture] for name, module in configs.items()}
    return {
        name: entry.inputs(run, configs[name])
        for name, entry in entries.items()
        if entry.inputs is not None
    }


def _make(
    run: Run, configs: dict[str, ModuleConfig], heads: Mapping[str, Head]
) -> list[LayerMaker]:
    model = run.file.model
    llm = next(config for config in configs.values() if config.kind == "llm")
    items = {name: architectures()[c.architecture].item for name, c in configs.items()}
    positions = {
        name: [other for other in items if items[other] == item].index(name)
        for name, item in items.items()
    }
    reads = tuple(
        embeds_name(items[name], positions[name])
        for name, module in configs.items()
        if module.kind == "encoder"
    )
    features = _features(configs, llm)
    makers: list[LayerMaker] = []
    for name, module in configs.items():
        joined = Joined(
            module,
            model.modules[name],
            reads,
            features,
            llm_width=llm.config.hidden_size,
            projector_hidden=model.projector_hidden or llm.config.hidden_size,
            feeds_generator=any(config.kind == "generator" for config in configs.values()),
            loss_weights=model.loss_weights,
            head=heads.get(name),
            index=positions[name],
        )
        makers += [
            replace(maker, lora=module.lora)
            for maker in architectures()[module.architecture].make(joined)
        ]
    return makers


def _features(configs: dict[str, ModuleConfig], llm: ModuleConfig) -> tuple[str, ...]:
    """Return the names of the DeepStack features: encoder block outputs for the LLM's first blocks.

    Raises:
        SpecError: their width is not the LLM's, or there are more than the LLM has blocks.
    """
    for name, module in configs.items():
        vision = getattr(module.config, "vision_config", module.config)  # of a tower by the library
        levels = getattr(vision, "deepstack_visual_indexes", None) or ()
        if not levels:
            continue
        width, blocks = llm.config.hidden_size, llm.config.num_hidden_layers
        if vision.out_hidden_size != width:
            allowed = (
                f"{width}, the width of {llm.name}, to whose rows DeepStack's features are added"
            )
            raise wrong(name, "out_hidden_size", vision.out_hidden_size, allowed)
        if len(levels) > blocks:
            allowed = f"at most {blocks} numbers: each goes to one of the blocks of {llm.name}"
            raise wrong(name, "deepstack_visual_indexes", list(levels), allowed)
        return tuple(features_name(level) for level in range(len(levels)))
    return ()


def _info(layer: PipelineLayer) -> LayerInfo:
    return LayerInfo(
        layer.name,
        layer.module,
        layer.kind,
        layer.reads,
        layer.writes,
        layer.needs,
        layer.loss,
        sum(p.numel() for path, p in layer.named_parameters() if path not in layer.tied),
        frozenset(
            layer.owner_of(path) for path, _ in layer.named_parameters() if layer.trains(path)
        ),
        layer.frozen,
        layer.tied,
        0 if layer.experts is None else layer.experts[0],
    )

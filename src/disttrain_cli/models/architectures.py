"""Registry of model classes, and the modules of a run read through it.

A model class is one file with its layers, its checks in the family's file in `configs`, and one
entry below.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from disttrain_cli.calls import call
from disttrain_cli.errors import SpecError
from disttrain_cli.models import (
    clip,
    decoder,
    flux,
    internvl_vision,
    library_generator,
    library_tower,
    lumina2,
    pixart,
    qwen3_vision,
    qwen_image,
    qwen_vision,
    sd3,
    unet,
    vae,
    vit,
    whisper,
)
from disttrain_cli.models.architecture import Architecture, Joined
from disttrain_cli.models.building import LayerMaker
from disttrain_cli.models.configs import decoders, encoders
from disttrain_cli.models.configs.buckets import read_buckets
from disttrain_cli.models.configs.checks import (
    MISTAKES,
    ModuleConfig,
    read_transformer,
    wrong,
    wrong_field,
)
from disttrain_cli.models.configs.decoders import Family
from disttrain_cli.models.configs.generators import (
    CLASSES,
    denoised,
    patch_of,
    read_flux,
    read_library_generator,
    read_lumina2,
    read_pixart,
    read_qwen_image,
    read_sd3,
    read_unet,
    with_folder,
)
from disttrain_cli.models.configs.images import CLIP, HALVES, IMAGENET, Normal, image_input
from disttrain_cli.models.configs.library_generators import FAMILIES
from disttrain_cli.models.configs.lora import read_lora
from disttrain_cli.models.configs.noise import read_noise
from disttrain_cli.models.configs.videos import with_video
from disttrain_cli.models.configs.wholes import section_fields
from disttrain_cli.models.generator import Canvas
from disttrain_cli.models.layer import PipelineLayer
from disttrain_cli.models.library_decoder import (
    LibraryDecoder,
    NoPipeline,
    library_decoder,
)
from disttrain_cli.models.posterior import posterior_of
from disttrain_cli.models.projectors import FORMS, Joint
from disttrain_cli.models.towers import ImageLayer
from disttrain_cli.spec.families.folder import newer_library, published_in
from disttrain_cli.spec.files import parse_json
from disttrain_cli.spec.heads import AudioInput, ImageInput, Item, TargetInput
from disttrain_cli.spec.plugins import with_plugins
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.runfile.model import ModuleSpec
from disttrain_cli.spec.suggestions import listed

#: Folders in a diffusers pipeline that can be modules.
PARTS = ("unet", "transformer")
#: File of a generator's noise schedule.
SCHEDULE = "scheduler_config.json"
#: Ids of the built-in byte tokenizer: 256 bytes and 5 special tokens.
BYTE_TOKENS = 261


def _transformer(class_name: str, check: Any) -> Callable[..., tuple[Any, None]]:
    def read(
        name: str, architecture: str, spec: ModuleSpec, fields: dict[str, Any]
    ) -> tuple[Any, None]:
        return read_transformer(class_name, check, name, architecture, spec, fields), None

    return read


def read_decoder(
    name: str, architecture: str, spec: ModuleSpec, fields: dict[str, Any]
) -> tuple[Any, None]:
    """Return the checked configuration of a decoder of transformers.

    Raises:
        SpecError: a field is unknown or wrong, or the decoder does not run as pipeline layers.
    """
    from transformers import CONFIG_MAPPING

    config = read_transformer(
        CONFIG_MAPPING[architecture], decoders.check_decoder, name, architecture, spec, fields
    )
    decoder_of(architecture, config, f"model.modules.{name}: ")
    return config, None


def decoder_of(architecture: str, config: Any, where: str = "") -> LibraryDecoder:
    """Return the library's model of a decoder's configuration.

    Raises:
        SpecError: it does not run as pipeline layers.
    """
    try:
        return library_decoder(config)
    except (NoPipeline, SpecError, *MISTAKES) as error:
        reason = f"its classes fail: {error!r}"
        if isinstance(error, SpecError):
            reason = f"{error.what}: {error.why}"
        elif isinstance(error, NoPipeline):
            reason = str(error)
        raise SpecError(
            f"{where}this {architecture} does not run as pipeline layers",
            " ".join(reason.split()),
            "Correct its configuration; else it is of a kind that is not supported.",
        ) from None


def _tower_config(class_name: str, check: Any) -> Callable[..., tuple[Any, None]]:
    """Return a reader for a tower whose last block is the one at `feature_layer`."""

    def read(
        name: str, architecture: str, spec: ModuleSpec, fields: dict[str, Any]
    ) -> tuple[Any, None]:
        config = read_transformer(class_name, check, name, architecture, spec, fields)
        if spec.feature_layer is not None:
            config.num_hidden_layers += spec.feature_layer + 1
        return config, None

    return read


def _encoder(makers: Callable[..., list[LayerMaker]], joined: Joined) -> list[LayerMaker]:
    module, spec = joined.module, joined.spec
    return makers(module.name, module.config, spec.merge, joined.projector_hidden, joined.llm_width)


def _tower(makers: Callable[..., list[LayerMaker]], joined: Joined) -> list[LayerMaker]:
    module, spec, head = joined.module, joined.spec, joined.head
    newlines = head.newlines if isinstance(head, ImageInput) else 0
    if newlines and spec.projector == "linear":
        allowed = "mlp, norm_mlp: rows of joined tiles end in a learned image_newline"
        raise wrong_field(module.name, "projector", "linear", allowed)
    joint = Joint(spec.projector, spec.merge, joined.projector_hidden, joined.llm_width, newlines)
    return _beside(
        joined,
        makers(
            module.name,
            module.config,
            joint,
            final_norm=spec.feature_layer is None,
        ),
    )


def _merging(makers: Callable[..., list[LayerMaker]], joined: Joined) -> list[LayerMaker]:
    """Return the factories of a tower that ends in its own patch merger, and of a projector."""
    module, width = joined.module, joined.llm_width
    if joined.spec.projector == "mlp":
        return _beside(joined, makers(module.name, module.config, joined.projector_hidden, width))
    if (own := module.config.out_hidden_size) != width:
        allowed = f"mlp: the tower's rows have {own} values (out_hidden_size), the LLM's {width}"
        raise wrong_field(module.name, "projector", "none", allowed)
    return _beside(joined, makers(module.name, module.config))


def _beside(joined: Joined, makers: list[LayerMaker]) -> list[LayerMaker]:
    """Return an image encoder's factories; layers of further encoders carry their index."""

    def placed(construct: Callable[[], PipelineLayer]) -> PipelineLayer:
        layer = construct()
        assert isinstance(layer, ImageLayer)
        return layer.with_index(joined.index)

    return (
        [replace(maker, construct=partial(placed, maker.construct)) for maker in makers]
        if joined.index
        else makers
    )


def _decoder(joined: Joined) -> list[LayerMaker]:
    return decoder.makers(
        joined.module.name,
        joined.module.config,
        joined.reads,
        joined.features,
        joined.feeds_generator,
        joined.loss_weights.text,
    )


def _generator(makers: Callable[..., list[LayerMaker]], joined: Joined) -> list[LayerMaker]:
    module, spec = joined.module, joined.spec
    assert spec.image_size is not None and module.noise is not None
    (channels, side), cached = denoised(module.vae, spec.image_size), spec.cached_latents
    canvas = Canvas(
        (channels, side, side),
        module.noise,
        spec.image_size,
        reads_latents=module.vae is not None and not cached,
        index=joined.index,
        posterior=posterior_of(module.vae) if module.vae is not None and cached else None,
        buckets=module.buckets,
    )
    before = (
        [vae.encoder_maker(module.name, module.vae, spec.image_size, joined.index, module.buckets)]
        if module.vae is not None and not cached
        else []
    )
    return before + makers(
        module.name,
        module.config,
        canvas,
        spec.context_tokens,
        joined.projector_hidden,
        joined.llm_width,
        joined.loss_weights.of(module.name),
    )


def _tower_input(normal: Any, extra_tokens: int, run: Run, module: ModuleConfig) -> ImageInput:
    merge = run.file.model.modules[module.name].merge
    return image_input(
        run,
        module.name,
        normal,
        patch_px=encoders.side_of(module.config.patch_size),
        merge=merge,
        extra_tokens=extra_tokens,
        side_px=encoders.side_of(module.config.image_size),
    )


def _merging_input(normal: Normal, run: Run, module: ModuleConfig) -> ImageInput:
    config = module.config
    images = image_input(
        run,
        module.name,
        normal,
        patch_px=config.patch_size,
        merge=config.spatial_merge_size,
        window=getattr(config, "window_size", config.patch_size) // config.patch_size,
    )
    return with_video(run, module.name, module.architecture, config, images)


def _whisper_input(run: Run, module: ModuleConfig) -> AudioInput:
    return AudioInput(
        module=module.name,
        mel_bins=module.config.num_mel_bins,
        frames=module.config.max_source_positions * whisper.FRAMES_PER_POSITION,
        merge=run.file.model.modules[module.name].merge,
    )


def _generator_input(run: Run, module: ModuleConfig) -> TargetInput:
    spec = run.file.model.modules[module.name]
    assert spec.image_size is not None
    channels, side = denoised(module.vae, spec.image_size)
    return TargetInput(
        module=module.name,
        size_px=spec.image_size,
        channels=2 * channels if spec.cached_latents else 3,
        context_tokens=spec.context_tokens,
        latent_pixels=side**2,
        cached_latents=spec.cached_latents and run.file.train.precision,
        buckets=module.buckets,
    )


#: Generators by name: what reads their configuration, and what makes their layers.
_GENERATORS: dict[str, tuple[Callable[..., Any], Callable[..., list[LayerMaker]]]] = {
    "unet2d_condition": (read_unet, unet.makers),
    "pixart": (read_pixart, pixart.makers),
    "flux": (read_flux, flux.makers),
    "lumina2": (read_lumina2, lumina2.makers),
    "sd3": (read_sd3, sd3.makers),
    "qwen_image": (read_qwen_image, qwen_image.makers),
    **{
        name: (read_library_generator, partial(library_generator.makers, name)) for name in FAMILIES
    },
}

_OWN: dict[str, Architecture] = {
    "vit": Architecture(
        "encoder",
        "image",
        "transformers:ViTModel",
        _tower_config("ViTConfig", encoders.check_vit),
        partial(_tower, vit.makers),
        partial(_tower_input, HALVES, 1),
        several=True,
        projectors=tuple(FORMS),
    ),
    **{
        name: Architecture(
            "encoder",
            "image",
            f"transformers:{family}Vision{kind}",
            _tower_config(f"{family}VisionConfig", encoders.check_clip_or_siglip),
            partial(_tower, partial(clip.makers, tower)),
            partial(_tower_input, normal, int(tower.class_token)),
            several=True,
            projectors=tuple(FORMS),
        )
        for name, family, kind, tower, normal in (
            ("clip_vision_model", "CLIP", "Model", clip.CLIP, CLIP),
            ("siglip_vision_model", "Siglip", "Model", clip.SIGLIP, HALVES),
            ("idefics3_vision", "Idefics3", "Transformer", clip.IDEFICS3, HALVES),
            ("smolvlm_vision", "SmolVLM", "Transformer", clip.IDEFICS3, HALVES),
        )
    },
    "internvl_vision": Architecture(
        "encoder",
        "image",
        "transformers:InternVLVisionModel",
        _tower_config("InternVLVisionConfig", encoders.check_internvl_vision),
        partial(_tower, internvl_vision.makers),
        partial(_tower_input, IMAGENET, 1),
        several=True,
        projectors=tuple(FORMS),
    ),
    "qwen2_5_vl_vision": Architecture(
        "encoder",
        "image",
        "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl:Qwen2_5_VisionTransformerPretrainedModel",
        _transformer("Qwen2_5_VLVisionConfig", encoders.check_qwen_vision),
        partial(_merging, qwen_vision.makers),
        partial(_merging_input, CLIP),
        several=True,
        projectors=("mlp", "none"),
    ),
    "qwen3_vl_vision": Architecture(
        "encoder",
        "image",
        "transformers:Qwen3VLVisionModel",
        _transformer("Qwen3VLVisionConfig", encoders.check_qwen3_vision),
        partial(_merging, qwen3_vision.makers),
        partial(_merging_input, HALVES),
        projectors=("mlp", "none"),
    ),
    "library_tower": Architecture(
        "encoder",
        "image",
        "transformers:PreTrainedModel",
        library_tower.read,
        library_tower.makers,
        library_tower.images_of,
        projectors=("none",),
    ),
    "library_audio_tower": Architecture(
        "encoder",
        "audio",
        "transformers:PreTrainedModel",
        library_tower.read,
        library_tower.makers,
        library_tower.clips_of,
        projectors=("none",),
    ),
    "whisper": Architecture(
        "encoder",
        "audio",
        "transformers.models.whisper.modeling_whisper:WhisperEncoder",
        _transformer("WhisperConfig", encoders.check_whisper),
        partial(_encoder, whisper.makers),
        _whisper_input,
    ),
    **{
        name: Architecture(
            "generator",
            "target",
            f"diffusers:{CLASSES[name]}",
            read,
            partial(_generator, makers),
            _generator_input,
            several=True,
        )
        for name, (read, makers) in _GENERATORS.items()
    },
}


@cache
def architectures() -> dict[str, Architecture]:
    """Return all architectures by the `model_type` of a `config.json`, including plugins.

    Decoders are all that transformers has with a head, and those inside its whole models.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES as CONFIGS
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL,
    )

    names = {*CAUSAL, *decoders.FAMILIES, *(name for name in CONFIGS if name.endswith("_text"))}
    entries = {
        name: Architecture(
            "llm",
            "sequence",
            decoders.FAMILIES.get(name, Family()).published,
            read_decoder,
            _decoder,
        )
        for name in sorted(names)
    }
    return with_plugins("disttrain.architectures", {**entries, **_OWN})


#: Alternative names in a `config.json`: the architecture, and the field of the whole model's
#: configuration that holds its own.
_ALIASES: dict[str, tuple[str, str | None]] = {
    "clip": ("clip_vision_model", "vision_config"),
    "siglip": ("siglip_vision_model", "vision_config"),
    **{class_name: (name, None) for name, class_name in CLASSES.items()},
}


def read_configs(run: Run) -> dict[str, ModuleConfig]:
    """Return the configurations of a run's modules in pipeline order.

    Raises:
        SpecError: unknown architecture or field, wrong value, missing or unsuitable `config.json`,
            two encoders of items that support only one.
    """
    configs = {name: _read(run, name) for name in run.file.model.order}
    first: dict[Item, str] = {}
    for name, module in configs.items():
        entry = architectures()[module.architecture]
        if first.setdefault(entry.item, name) != name and not entry.several:
            raise SpecError(
                f"{first[entry.item]} and {name} are both {entry.item} {entry.kind}s",
                "this version takes at most one",
                "Remove one of them from model.modules.",
            )
    generators = [name for name, module in configs.items() if module.kind == "generator"]
    if len(generators) > 1 and any(configs[name].buckets is not None for name in generators):
        raise SpecError(
            f"{' and '.join(generators)} learn to draw the same images, some in buckets",
            "buckets are for a model with one generator",
            "Remove the buckets, or all generators but one.",
        )
    llm = next(c for c in configs.values() if c.kind == "llm")
    if hasattr(llm.config, "max_position_embeddings"):
        decoders.check_length(llm.name, llm.config, run.file.data.sequence_length)
    if run.file.data.tokenizer == "bytes" and llm.config.vocab_size < BYTE_TOKENS:
        allowed = f"at least {BYTE_TOKENS}, the ids of the tokenizer 'bytes'"
        raise wrong(llm.name, "vocab_size", llm.config.vocab_size, allowed)
    return configs


def _read(run: Run, name: str) -> ModuleConfig:
    spec = run.file.model.modules[name]
    architecture, fields = (
        (spec.architecture, {}) if spec.folder is None else _folder(run, name, spec.folder)
    )
    if architecture not in architectures():
        what = f"model.modules.{name}: unknown architecture {architecture!r}"
        known = [*_OWN, *difflib.get_close_matches(str(architecture), architectures(), n=3)]
        why = f"known: {listed(str(architecture), known)}, and the decoders of transformers"
        raise SpecError(what, newer_library(fields) or why)
    entry = architectures()[architecture]
    if entry.kind != spec.kind:
        names = ", ".join(
            name for name, other in architectures().items() if other.kind == spec.kind
        )
        raise SpecError(
            f"model.modules.{name}: {architecture} is of kind {entry.kind}, not {spec.kind}",
            f"architectures of kind {spec.kind}: {names or 'the decoders of transformers'}",
        )
    if spec.projector not in entry.projectors:
        allowed = f"{', '.join(entry.projectors)}, of {architecture}"
        raise wrong_field(name, "projector", spec.projector, allowed)
    if spec.vae_folder is not None:
        path = run.resolve(spec.vae_folder) / "config.json"
        spec = with_folder(
            name,
            spec,
            _mapping(path, "VAE's configuration", f"Correct model.modules.{name}.vae_folder."),
        )
    try:
        config, own_vae = entry.read(name, architecture, spec, fields)
    except SpecError as error:
        raise _with_vae(run, name, spec, fields, error) from None
    noise = buckets = None
    if entry.kind == "generator":
        assert spec.image_size is not None
        side, patch = denoised(own_vae, spec.image_size)[1], patch_of(architecture, config)
        noise = read_noise(
            name, architecture, spec, scheduler_fields(run, spec), (side // patch) ** 2
        )
        factor = spec.image_size // side
        buckets = read_buckets(name, architecture, spec, config, factor, patch)
    return ModuleConfig(
        name, entry.kind, architecture, config, own_vae, noise, read_lora(run, name), buckets
    )


def _with_vae(
    run: Run, name: str, spec: ModuleSpec, fields: dict[str, Any], error: SpecError
) -> SpecError:
    """Return the error with a next step added if a generator of latents lacks its VAE."""
    channels = {**fields, **spec.config}.get("in_channels", 3)
    if (
        spec.kind != "generator"
        or spec.vae is not None
        or channels == 3
        or "channels" not in error.what
    ):
        return error
    vae_folder = run.resolve(spec.folder).parent / "vae" if spec.folder is not None else None
    has_vae = vae_folder is not None and (vae_folder / "config.json").exists()
    given = (
        f"{str(spec.folder).rstrip('/').rpartition('/')[0] or '.'}/vae"
        if has_vae
        else "FOLDER, its VAE's"
    )
    return SpecError(
        error.what, error.why, f"It denoises latents: set model.modules.{name}.vae_folder: {given}"
    )


def scheduler_fields(run: Run, spec: ModuleSpec) -> dict[str, Any]:
    """Return the fields of `scheduler_config.json` in a generator's folder or next to it."""
    folder = run.resolve(spec.folder) if spec.folder is not None else None
    folders = [folder, folder.parent / "scheduler"] if folder is not None else []
    path = next(
        (p / SCHEDULE for p in folders if (p / SCHEDULE).exists()),
        None,
    )
    return {} if path is None else _mapping(path, "noise schedule", "Download the folder again.")


def _mapping(path: Path, what: str, next_step: str) -> dict[str, Any]:
    fields = parse_json(path, what, next_step)
    if not isinstance(fields, dict):
        raise SpecError(
            f"The {what} {path} must be a mapping", f"given: {type(fields).__name__}", next_step
        )
    return fields


def _instead(there: Path, name: str, folder: str) -> str:
    """Return the next step for a folder without `config.json`.

    Either a part of a whole pipeline can be named, or the folder must be downloaded.
    """
    field = f"model.modules.{name}.folder"
    parts = [part for part in PARTS if (there / part / "config.json").exists()]
    if parts:
        return (
            f"It holds the parts of a whole pipeline: set {field}: {folder.rstrip('/')}/{parts[0]}"
        )
    if not there.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", folder):
        return (
            f"Correct {field}; or download it first, if it is a model's name on Hugging Face: "
            f"hf download {folder} --local-dir {folder}"
        )
    return f"Correct {field}, or give architecture."


def _folder(run: Run, name: str, folder: str) -> tuple[str, dict[str, Any]]:
    """Return architecture and configuration from a folder's `config.json`.

    Code in the folder is never run.
    """
    path = run.resolve(folder) / "config.json"
    fields = _mapping(path, "model configuration", _instead(path.parent, name, folder))
    if "auto_map" in fields:
        what = (
            f"model.modules.{name}: {path} asks for code of its own (auto_map:"
            f" {fields['auto_map']})"
        )
        kind = str(fields.get("model_type"))
        step = (
            f"Remove auto_map from config.json if the model is exactly transformers' own {kind}."
            if kind in architectures()
            else f"Name a model of a family that {call('models')} lists."
        )
        raise SpecError(what, "code of a model's folder is never run", step)
    given = str(fields.get("model_type", fields.get("_class_name")))
    if (given, fields.get("norm_type")) == ("Transformer2DModel", "ada_norm_single"):
        given = "PixArtTransformer2DModel"  # diffusers' remapping of folders older than the class
    published = published_in(path.parent)
    kind = run.file.model.modules[name].kind
    part = None if published is None else published.family.part(name, kind)
    if published is not None and part is not None:
        return published.architecture(part), section_fields(published, part)
    architecture, inside = _ALIASES.get(given, (given, None))
    if inside is None:
        return architecture, fields
    if not isinstance(fields.get(inside), dict):
        what = (
            f"model.modules.{name}: {path} is of a whole {given} model, of which {inside} is used"
        )
        raise SpecError(
            what, f"given: {fields.get(inside)!r}", f"Correct model.modules.{name}.folder."
        )
    return architecture, fields[inside]

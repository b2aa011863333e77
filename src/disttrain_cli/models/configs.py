"""From the run file's modules to checked configurations of transformers and diffusers classes.

transformers swallows misspelt fields and diffusers raises tracebacks; here every wrong field is named.
"""

from __future__ import annotations

import difflib
import inspect
import math
from dataclasses import dataclass
from typing import Any

from disttrain_cli.errors import SpecError
from disttrain_cli.spec.files import parse_json
from disttrain_cli.spec.runfile import Run

#: Architecture names by kind of module.
ARCHITECTURES: dict[str, str] = {
    "vit": "encoder",
    "whisper": "encoder",
    "llama": "llm",
    "unet2d_condition": "generator",
}

# Width, heads and activation of a transformer by the names of its configuration, then what else must be positive.
_TRANSFORMER_FIELDS = ("hidden_size", "num_attention_heads", "hidden_act", "num_hidden_layers", "intermediate_size")
_WHISPER_FIELDS = ("d_model", "encoder_attention_heads", "activation_function", "encoder_layers", "encoder_ffn_dim",
                   "num_mel_bins", "max_source_positions")

#: Ids of the built-in byte tokenizer: 256 bytes and 5 special tokens.
BYTE_TOKENS = 261

_UNET_BLOCKS = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "mid_block_type": ("UNetMidBlock2D", "UNetMidBlock2DCrossAttn"),
}
# Parts of UNet2DConditionModel.forward that need inputs which nothing here supplies.
_UNET_UNSUPPORTED = (
    "center_input_sample",
    "encoder_hid_dim_type",
    "encoder_hid_dim",
    "class_embed_type",
    "addition_embed_type",
    "num_class_embeds",
    "time_embedding_act_fn",
    "time_cond_proj_dim",
    "class_embeddings_concat",
)


@dataclass(frozen=True)
class ModuleConfig:
    """A module's checked configuration."""

    name: str
    kind: str
    architecture: str
    config: Any  # ViTConfig, WhisperConfig or LlamaConfig; for the U-Net a dict of all its arguments
    vae: dict[str, Any] | None = None  # all arguments of the generator's AutoencoderKL


def read_configs(run: Run) -> dict[str, ModuleConfig]:
    """Configurations of a run's modules in pipeline order.

    Raises:
        SpecError: unknown architecture or field, wrong value, missing or foreign `config.json`, two encoders alike.
    """
    configs = {name: _read(run, name) for name in run.file.model.order}
    encoders = [config for config in configs.values() if config.kind == "encoder"]
    if len(encoders) > len({config.architecture for config in encoders}):
        what = f"{' and '.join(config.name for config in encoders)} are both {encoders[0].architecture}"
        next_step = "Remove one of them from model.modules."
        raise SpecError(what, "this version takes at most one image encoder and one audio encoder", next_step)
    llm = next(c for c in configs.values() if c.kind == "llm")
    if run.file.data.tokenizer == "bytes" and llm.config.vocab_size < BYTE_TOKENS:
        allowed = f"at least {BYTE_TOKENS}, the ids of the tokenizer 'bytes'"
        raise _wrong(llm.name, "vocab_size", llm.config.vocab_size, allowed)
    return configs


def refused(name: str, architecture: str, error: Exception, section: str = "config") -> SpecError:
    """The error of a library's class that does not accept a module's configuration, as one of ours."""
    return SpecError(f"model.modules.{name}.{section} does not fit {architecture}", " ".join(str(error).split()))


def latent_side(vae: dict[str, Any], image_size: int) -> int:
    """Side of the latents of square images: every block of the encoder but the last halves it."""
    return int(image_size // 2 ** (len(vae["block_out_channels"]) - 1))


def _wrong(name: str, field: str, given: Any, allowed: str, section: str = "config") -> SpecError:
    what = f"model.modules.{name}.{section}.{field} does not fit"
    return SpecError(what, f"given: {given!r}; allowed: {allowed}", "Correct it in the run file.")


def _read(run: Run, name: str) -> ModuleConfig:
    spec = run.file.model.modules[name]
    fields: dict[str, Any] = {}
    architecture = spec.architecture
    if spec.folder is not None:
        path = run.resolve(spec.folder) / "config.json"
        next_step = f"Correct model.modules.{name}.folder, or give architecture."
        fields = parse_json(path, "model configuration", next_step)
        if not isinstance(fields, dict):
            raise SpecError(f"The model configuration {path} must be a mapping", f"given: {type(fields)}")
        given = fields.get("model_type", fields.get("_class_name"))
        architecture = "unet2d_condition" if given == "UNet2DConditionModel" else str(given)
    if architecture not in ARCHITECTURES:
        what = f"model.modules.{name}: unknown architecture {architecture!r}"
        raise SpecError(what, f"known: {', '.join(ARCHITECTURES)}")
    kind = ARCHITECTURES[architecture]
    if kind != spec.kind:
        names = ", ".join(a for a, k in ARCHITECTURES.items() if k == spec.kind)
        raise SpecError(
            f"model.modules.{name}: {architecture} is of kind {kind}, not {spec.kind}",
            f"architectures of kind {spec.kind}: {names}",
        )
    _refuse_unknown(name, architecture, spec.config, "config")
    if architecture != "unet2d_condition":
        config = _make_transformer(name, architecture, {**fields, **spec.config})
        if architecture == "whisper" and config.max_source_positions % spec.merge:
            what = f"model.modules.{name}.merge does not fit max_source_positions"
            allowed = f"a divisor of {config.max_source_positions}, the positions of a clip"
            raise SpecError(what, f"given: {spec.merge}; allowed: {allowed}", "Correct it in the run file.")
        return ModuleConfig(name, kind, architecture, config)
    assert spec.image_size is not None
    vae = None if spec.vae is None else _make_vae(name, spec.vae, spec.image_size)
    return ModuleConfig(
        name, kind, architecture, _make_unet(name, architecture, {**fields, **spec.config}, spec.image_size, vae), vae
    )


def _refuse_unknown(name: str, architecture: str, given: dict[str, Any], section: str) -> None:
    known = known_fields(architecture)
    for field in given:
        if field not in known:
            near = difflib.get_close_matches(field, known, n=3) or sorted(known)
            what = f"model.modules.{name}.{section}.{field}: unknown field of {architecture}"
            raise SpecError(what, f"known: {', '.join(near)}")


def known_fields(architecture: str) -> dict[str, Any]:
    """Fields of an architecture's configuration, with their defaults."""
    if architecture in ("unet2d_condition", "AutoencoderKL"):
        from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
        from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

        made = AutoencoderKL if architecture == "AutoencoderKL" else UNet2DConditionModel
        arguments = inspect.signature(made.__init__).parameters
        return {name: a.default for name, a in arguments.items() if name != "self"}
    return dict.fromkeys(inspect.get_annotations(_transformer_class(architecture)))


def _transformer_class(architecture: str) -> Any:
    import transformers

    classes = {"vit": "ViTConfig", "whisper": "WhisperConfig", "llama": "LlamaConfig"}
    return getattr(transformers, classes[architecture])


def _make_transformer(name: str, architecture: str, fields: dict[str, Any]) -> Any:
    from huggingface_hub.errors import StrictDataclassError

    try:
        config = _transformer_class(architecture)(**fields)
    except (StrictDataclassError, ValueError, TypeError, KeyError, ZeroDivisionError) as error:
        raise refused(name, architecture, error) from None
    fields_of = _WHISPER_FIELDS if architecture == "whisper" else _TRANSFORMER_FIELDS
    _check_transformer(name, config, *fields_of)
    {"vit": _check_vit, "whisper": _check_whisper, "llama": _check_llama}[architecture](name, config)
    config._attn_implementation = "sdpa"
    return config


def _check_transformer(name: str, config: Any, width: str, heads: str, activation: str, *counts: str) -> None:
    from transformers.activations import ACT2FN

    for field in (width, heads, *counts):
        if getattr(config, field) < 1:
            raise _wrong(name, field, getattr(config, field), "1 or more")
    if getattr(config, width) % getattr(config, heads):
        raise _wrong(name, width, getattr(config, width), f"a multiple of {heads} ({getattr(config, heads)})")
    if getattr(config, activation) not in ACT2FN:
        raise _wrong(name, activation, getattr(config, activation), ", ".join(sorted(ACT2FN)))


def _refuse_dropout(name: str, field: str, value: float | None) -> None:
    if value:
        raise _wrong(name, field, value, "0: dropout would depend on the layout")


def _check_vit(name: str, config: Any) -> None:
    _refuse_dropout(name, "attention_probs_dropout_prob", config.attention_probs_dropout_prob)
    _refuse_dropout(name, "hidden_dropout_prob", config.hidden_dropout_prob)
    for field in ("image_size", "patch_size"):
        if not isinstance(getattr(config, field), int) or getattr(config, field) < 1:
            raise _wrong(name, field, getattr(config, field), "one positive number (squares)")
    if config.image_size < config.patch_size:
        raise _wrong(name, "image_size", config.image_size, f"at least patch_size ({config.patch_size})")
    if config.num_channels != 3:
        raise _wrong(name, "num_channels", config.num_channels, "3: images are read as RGB")


def _check_whisper(name: str, config: Any) -> None:
    for field in ("dropout", "attention_dropout", "activation_dropout", "encoder_layerdrop"):
        _refuse_dropout(name, field, getattr(config, field))
    if config.d_model < 4 or config.d_model % 2:
        raise _wrong(name, "d_model", config.d_model, "even and at least 4, for sinusoidal positions")


def _check_llama(name: str, config: Any) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    _refuse_dropout(name, "attention_dropout", config.attention_dropout)
    if config.vocab_size < 1:
        raise _wrong(name, "vocab_size", config.vocab_size, "1 or more")
    if config.tie_word_embeddings:
        raise _wrong(name, "tie_word_embeddings", True, "false: the pipeline's ends share no weights")
    rope = config.rope_parameters["rope_type"]
    if rope not in ("default", *ROPE_INIT_FUNCTIONS):
        raise _wrong(name, "rope_parameters.rope_type", rope, ", ".join(("default", *ROPE_INIT_FUNCTIONS)))
    if config.num_key_value_heads < 1 or config.num_attention_heads % config.num_key_value_heads:
        raise _wrong(
            name,
            "num_key_value_heads",
            config.num_key_value_heads,
            f"a divisor of num_attention_heads ({config.num_attention_heads})",
        )
    if config.head_dim < 2 or config.head_dim % 2:
        raise _wrong(name, "head_dim", config.head_dim, "even, for rotary positions")


def _make_vae(name: str, fields: dict[str, Any], image_size: int) -> dict[str, Any]:
    _refuse_unknown(name, "AutoencoderKL", fields, "vae")
    config = {**known_fields("AutoencoderKL"), **fields}
    for field in ("in_channels", "out_channels"):
        if config[field] != 3:
            raise _wrong(name, field, config[field], "3: RGB images are encoded", "vae")
    for field in ("latents_mean", "latents_std"):
        if config[field] is not None:
            raise _wrong(name, field, config[field], "nothing: latents are scaled by scaling_factor", "vae")
    if not isinstance(config["latent_channels"], int) or config["latent_channels"] < 1:
        raise _wrong(name, "latent_channels", config["latent_channels"], "1 or more", "vae")
    scaling, shift = config["scaling_factor"], config["shift_factor"]
    if not isinstance(scaling, (int, float)) or not 0.0 < scaling < math.inf:
        raise _wrong(name, "scaling_factor", scaling, "a positive number", "vae")
    if shift is not None and (not isinstance(shift, (int, float)) or not math.isfinite(shift)):
        raise _wrong(name, "shift_factor", shift, "a number, or nothing", "vae")
    for field, block in {"down_block_types": "DownEncoderBlock2D", "up_block_types": "UpDecoderBlock2D"}.items():
        given = config[field]
        if not isinstance(given, (list, tuple)) or not given or any(part != block for part in given):
            raise _wrong(name, field, given, f"a list of {block}", "vae")
    depth = len(config["down_block_types"])
    for field in ("block_out_channels", "up_block_types"):
        if not isinstance(config[field], (list, tuple)) or len(config[field]) != depth:
            raise _wrong(name, field, config[field], f"{depth}, one for each of down_block_types", "vae")
    factor = 2 ** (depth - 1)
    if image_size % factor:
        what = f"model.modules.{name}.image_size does not fit the VAE's down-sampling"
        raise SpecError(what, f"given: {image_size}; allowed: multiples of {factor} ({depth} blocks)")
    return config


def _make_unet(
    name: str, architecture: str, fields: dict[str, Any], image_size: int, vae: dict[str, Any] | None
) -> dict[str, Any]:
    defaults = known_fields(architecture)
    side = image_size if vae is None else latent_side(vae, image_size)
    config = {**defaults, **{k: v for k, v in fields.items() if k in defaults}, "sample_size": side}
    if fields.get("sample_size") not in (None, side):
        allowed = f"{side}, the side of " + ("image_size" if vae is None else "the VAE's latents") + ", or nothing"
        raise _wrong(name, "sample_size", fields["sample_size"], allowed)
    _refuse_dropout(name, "dropout", config["dropout"])
    for field in _UNET_UNSUPPORTED:
        if config[field]:
            raise _wrong(name, field, config[field], "nothing: this version does not feed it")
    for field, blocks in _UNET_BLOCKS.items():
        given = [config[field]] if field == "mid_block_type" else config[field]
        if not isinstance(given, (list, tuple)) or any(block not in blocks for block in given):
            raise _wrong(name, field, config[field], ", ".join(blocks))
    for field, only in {"time_embedding_type": "positional", "attention_type": "default"}.items():
        if config[field] != only:
            raise _wrong(name, field, config[field], only)
    if not isinstance(config["cross_attention_dim"], int):
        raise _wrong(name, "cross_attention_dim", config["cross_attention_dim"], "one number for all blocks")
    channels, why = (3, "RGB images are denoised") if vae is None else (vae["latent_channels"], "vae.latent_channels")
    for field in ("in_channels", "out_channels"):
        if config[field] != channels:
            raise _wrong(name, field, config[field], f"{channels}: {why}")
    depth = len(config["down_block_types"])
    factor = 2 ** (depth - 1) * (image_size // side)
    if image_size % factor:
        what = f"model.modules.{name}.image_size does not fit the U-Net's down-sampling"
        after = "" if vae is None else f" after the VAE's by {image_size // side}"
        raise SpecError(what, f"given: {image_size}; allowed: multiples of {factor} ({depth} blocks{after})")
    return config

"""`model`: modules, their connections, trained modules, and weights of losses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from disttrain_cli.spec.files import Strict
from disttrain_cli.spec.runfile.lora import LoraSpec

Kind = Literal["encoder", "llm", "generator"]
#: Connection of an encoder's rows to the LLM; `models/projectors.py` describes each.
Projector = Literal["mlp", "norm_mlp", "linear", "none"]
PROJECTORS = "projectors"
MOST_NAME = 64  # characters of a unit's name
UNIT_NAME = rf"^[A-Za-z0-9][A-Za-z0-9_+-]{{0,{MOST_NAME - 1}}}$"
UNIT_NAME_WORDS = f"at most {MOST_NAME} letters, digits, _, + and -, a letter or digit first"
BucketSide = Annotated[int, Field(ge=8, le=4096)]
MONOLITH = "model"  # the unit that holds every module
KIND_ORDER: tuple[Kind, ...] = ("encoder", "llm", "generator")


def unit_name(modules: Sequence[str], count: int) -> str:
    """Return the name of the unit of some of a model's `count` modules."""
    joined = "+".join(modules)
    several = len(modules) > 1
    return MONOLITH if several and (len(modules) == count or len(joined) > MOST_NAME) else joined


class NoiseSpec(Strict):
    """Noise schedule and prediction target of a generator; fields not given follow the folder.

    Without a folder: 1,000 timesteps, beta linear from 0.0001 to 0.02, the noise is predicted
    (DDPM).
    """

    prediction: Literal["epsilon", "v_prediction", "flow"] | None = Field(
        None,
        description="Training target: the noise, the velocity, or the rectified flow from image to"
        " noise.",
    )
    betas: Literal["linear", "scaled_linear", "squaredcos_cap_v2"] | None = Field(
        None,
        description="Schedule of the noise variance (diffusers' beta_schedule); not used with"
        " flow.",
    )
    beta_start: float | None = Field(
        None, gt=0, lt=1, description="Noise variance at the first timestep."
    )
    beta_end: float | None = Field(
        None, gt=0, lt=1, description="Noise variance at the last timestep."
    )
    timesteps: int | None = Field(
        None, ge=1, le=100_000, description="Number of timesteps from image to noise."
    )
    density: Literal["uniform", "logit_normal", "mode"] | None = Field(
        None,
        description="Flow: distribution of the timesteps (Stable Diffusion 3, arXiv 2403.03206,"
        " section 3.1); uniform by default.",
    )
    logit_mean: float | None = Field(
        None,
        ge=-10,
        le=10,
        description="logit_normal: mean; values above 0 give more noise, 0 by default.",
    )
    logit_std: float | None = Field(
        None, gt=0, le=10, description="logit_normal: standard deviation, 1 by default."
    )
    mode_scale: float | None = Field(
        None,
        ge=-1,
        le=1.75,
        description="mode: values above 0 favour the middle, values below 0 both ends; 1.29 by"
        " default.",
    )
    shift: Annotated[float, Field(gt=0, le=1000)] | Literal["resolution"] | None = Field(
        None,
        description="Flow: shift of the timesteps towards noise, in training and in sampling: s of"
        " s·σ / (1 + (s − 1)·σ), 3 in Stable Diffusion 3; or resolution: by the image's number of"
        " tokens, like diffusers' dynamic shifting. 1 if neither this nor the folder sets it.",
    )


class ModuleSpec(Strict):
    """One module of the model."""

    kind: Kind = Field(description="Role of the module: before the LLM, the LLM, or after it.")
    architecture: str | None = Field(
        None,
        description="Architecture by name, as in the model_type of a config.json: vit,"
        " clip_vision_model, siglip_vision_model, internvl_vision, idefics3_vision,"
        " smolvlm_vision, qwen2_5_vl_vision, qwen3_vl_vision, whisper; llama, mistral, qwen2,"
        " qwen3, qwen2_5_vl_text, qwen3_vl_text; unet2d_condition, pixart, sd3, flux, lumina2,"
        " qwen_image, and whole flux2, z_image, wan, skyreels_v2, chroma, ovis_image,"
        " longcat_image, hunyuan_image, sana, prx.",
    )
    folder: str | None = Field(
        None,
        description="Local folder with a Hugging Face config.json, instead of a name; if it"
        " contains weights (safetensors), training starts from them. For encoders and LLMs also a"
        " model's name on Hugging Face: org/name, org/name@revision.",
    )
    pretrained: bool = Field(
        True, description=("Start from the weights in the folders; false: from random weights.")
    )
    config: dict[str, Any] = Field(
        default_factory=dict, description="Fields of the architecture's configuration class."
    )
    merge: int = Field(
        1,
        ge=1,
        le=1024,
        description="Encoders: amount of input per LLM token: patches per side of a square of the"
        " image, or positions of the audio.",
    )
    feature_layer: int | None = Field(
        None,
        ge=-1024,
        le=-1,
        description="Image encoders: block whose output the LLM reads, counted from the end (-2:"
        " the last but one, as in LLaVA with CLIP), without the final norm; later blocks are not"
        " built. None: the last block, with the norm.",
    )
    projector: Projector = Field(
        "mlp",
        description="Encoders: projector between the module and the LLM: mlp, a two-layer MLP;"
        " norm_mlp, the same after a norm of the merged rows, as in InternVL; linear, one linear"
        " layer without bias, as in SmolVLM (the last two: image encoders with merge); none, if a"
        " tower's merger already outputs the LLM's width (qwen2_5_vl_vision, qwen3_vl_vision).",
    )
    image_size: int | None = Field(
        None, ge=8, le=4096, description="Generators: side length of a generated image in pixels."
    )
    buckets: list[tuple[BucketSide, BucketSide]] | None = Field(
        None,
        min_length=1,
        description="Generators (all but unet2d_condition and pixart): sizes [width, height] in"
        " pixels of training images, of about equal area, instead of squares of image_size: each"
        " image uses the size with the nearest aspect ratio, resized and cropped. Sampled images"
        " are still squares of image_size.",
    )
    context_tokens: int = Field(
        8,
        ge=1,
        le=65_536,
        description="Generators: number of LLM positions that condition one generated image.",
    )
    vae: dict[str, Any] | None = Field(
        None,
        description="Generators: fields of the VAE in whose latent space images are denoised, and"
        " as _class_name its class in diffusers (AutoencoderKL if there is none); it is frozen and"
        " encodes target images on the generator's first stage.",
    )
    vae_folder: str | None = Field(
        None,
        description="Generators: local folder of a diffusers VAE with its weights; fields of vae"
        " override those of its config.json.",
    )
    noise: NoiseSpec | None = Field(
        None,
        description="Generators: noising of images; overrides a scheduler_config.json in the"
        " folder or its subfolder scheduler.",
    )
    cached_latents: bool = Field(
        False,
        description="Generators with a vae: training reads latents prepared by `disttrain data"
        " latents`, so that the vae does not run.",
    )
    lora: LoraSpec | None = Field(
        None,
        description="Adapters, which are trained instead of the module's weights if `trained`"
        " lists the module; its projector still belongs to the projectors.",
    )

    @model_validator(mode="after")
    def _one_source(self) -> ModuleSpec:
        if (self.architecture is None) == (self.folder is None):
            raise ValueError(
                "set either architecture (a name) or folder (with config.json), not both"
            )
        if (self.kind == "generator") != (self.image_size is not None):
            raise ValueError("image_size belongs to generators, and every generator needs it")
        if self.feature_layer is not None and self.kind != "encoder":
            raise ValueError("feature_layer belongs to image encoders")
        if self.projector != "mlp" and self.kind != "encoder":
            raise ValueError(f"projector: {self.projector} belongs to encoders")
        for field in ("vae", "vae_folder", "noise", "buckets"):
            if getattr(self, field) is not None and self.kind != "generator":
                raise ValueError(f"{field} belongs to generators")
        if self.cached_latents and self.vae is None and self.vae_folder is None:
            raise ValueError("cached_latents needs a vae, which computes the latents")
        return self


class LossWeights(Strict):
    """Weight of each loss in the training objective."""

    text: float = Field(
        1.0, ge=0, le=1e6, description="Weight of the cross-entropy of trained tokens."
    )
    image: float = Field(
        1.0, ge=0, le=1e6, description="Weight of the mean squared error of each generator."
    )
    modules: dict[str, Annotated[float, Field(ge=0, le=1e6)]] = Field(
        default_factory=dict, description="Weights by generator that override image."
    )

    def of(self, generator: str) -> float:
        """Return the weight of a generator's loss."""
        return self.modules.get(generator, self.image)


class ModelSpec(Strict):
    """The multimodal model: modules by name, joined by projectors."""

    folder: str | None = Field(
        None,
        description="Folder of a complete published vision-language model, or its name on Hugging"
        " Face (org/name, org/name@revision), which defines its modules (vision, llm) and their"
        " starting weights; entries in `modules` with the same name adjust or replace one.",
    )
    adapter: str | None = Field(
        None,
        description="Local folder of a peft adapter for the complete published model of `folder`;"
        " it sets `lora` of its modules, which start from it.",
    )
    modules: dict[str, ModuleSpec] = Field(
        default_factory=dict, description="Modules by name, in any order."
    )
    projector_hidden: int | None = Field(
        None,
        ge=1,
        le=2**20,
        description="Hidden width of the two-layer projectors; by default the LLM's width.",
    )
    loss_weights: LossWeights = Field(
        default_factory=LossWeights, description="Weights of the losses in their sum."
    )
    trained: list[str] | None = Field(
        None,
        description="Modules whose weights are trained, and 'projectors' for the layers that"
        " connect modules, including Qwen-VL's mergers; by default all. The others are frozen. For"
        " a module with lora, its adapters (also those of the merger) are trained or frozen.",
    )

    @model_validator(mode="after")
    def _names(self) -> ModelSpec:
        for name in self.modules:
            if name == PROJECTORS or not re.match(UNIT_NAME, name):
                raise ValueError(
                    f"modules: {name!r} is no name for a module; allowed: {UNIT_NAME_WORDS}, and"
                    f" not {PROJECTORS!r} (the layers between)"
                )
        return self

    @model_validator(mode="after")
    def _adapter_of_folder(self) -> ModelSpec:
        if self.adapter is not None and self.folder is None:
            raise ValueError(
                "adapter needs folder, the complete model that it adapts; the adapter of one"
                " module is modules.NAME.lora.folder"
            )
        return self

    @model_validator(mode="after")
    def _known_trained(self) -> ModelSpec:
        allowed = [*self.modules, PROJECTORS]
        unknown = [name for name in self.trained or [] if name not in allowed]
        if unknown:
            raise ValueError(
                f"trained: no such module: {', '.join(unknown)}; allowed: {', '.join(allowed)}"
            )
        if self.trained == []:
            raise ValueError("trained: at least one of " + ", ".join(allowed))
        return self

    @model_validator(mode="after")
    def _one_llm(self) -> ModelSpec:
        if len(self.named("llm")) != 1:
            raise ValueError(
                f"modules must hold exactly one module of kind llm; given: {len(self.named('llm'))}"
            )
        return self

    @model_validator(mode="after")
    def _generators_agree(self) -> ModelSpec:
        generators = self.named("generator")
        lengths = {name: self.modules[name].context_tokens for name in generators}
        if len(set(lengths.values())) > 1:
            raise ValueError(
                "generators read the same LLM positions, so that context_tokens must be equal;"
                " given: " + ", ".join(f"{name} {length}" for name, length in lengths.items())
            )
        unknown = [name for name in self.loss_weights.modules if name not in generators]
        if unknown:
            raise ValueError(
                f"loss_weights.modules: no such generator: {', '.join(unknown)}; allowed: "
                f"{', '.join(generators) or 'none'}"
            )
        return self

    @property
    def trained_names(self) -> list[str]:
        """Names of trained weights: modules in pipeline order, and "projectors"."""
        return [
            name
            for name in (*self.order, PROJECTORS)
            if self.trained is None or name in self.trained
        ]

    def named(self, kind: str) -> list[str]:
        """Return the names of the modules of a kind."""
        return [name for name, module in self.modules.items() if module.kind == kind]

    @property
    def order(self) -> list[str]:
        """Module names in pipeline order: encoders, the LLM, generators."""
        return [name for kind in KIND_ORDER for name in self.named(kind)]

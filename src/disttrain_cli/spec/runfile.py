"""The run file `disttrain.yaml`: everything a user decides about a run, with one sentence and a
unit per field."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, PrivateAttr, model_validator

from disttrain_cli.spec.files import Strict, fingerprint, parse_yaml, validate
from disttrain_cli.spec.rundir import RunDir

Kind = Literal["encoder", "llm", "generator"]
PROJECTORS = "projectors"
#: A value that Slurm reads: no blanks, quotes or other signs that a shell or sbatch would take
#: apart.
SLURM_WORD = r"^[A-Za-z0-9_.,:@%/+\[\]-]+$"
#: Fields of `cluster` that say how ranks are started, and not what they run on.
LAUNCHING = frozenset({"cpu_nodes", "node_cores", "hostfile", "port", "interface", "slurm"})
#: Bounds: what follows from any number within them takes a machine's memory and seconds, not more.
MOST_GPUS = 65_536
MOST_SEQUENCES = 16_384  # of a step
MOST_STEPS = 10**9
MOST_S = 30 * 86_400.0
MOST_DRAWN = 4_000_000  # images and clips of a distribution
WORKER_SCHEMES = ("grpc", "grpc+tls")
UNIT_NAME = r"^[A-Za-z0-9][A-Za-z0-9_+-]{0,63}$"
MONOLITH = "model"  # the unit that holds every module
KIND_ORDER: tuple[Kind, ...] = ("encoder", "llm", "generator")


class NoiseSpec(Strict):
    """How an image becomes noise while training, and what the generator predicts; none = as the
    folder says.

    Without a folder: 1,000 timesteps, beta linear from 0.0001 to 0.02, the noise is predicted
    (DDPM).
    """

    prediction: Literal["epsilon", "v_prediction", "flow"] | None = Field(
        None,
        description=(
            "What is predicted: the noise, the velocity, or the rectified flow from image to noise."
        ),
    )
    betas: Literal["linear", "scaled_linear", "squaredcos_cap_v2"] | None = Field(
        None,
        description=(
            "Schedule of the noise's variance (diffusers' beta_schedule); flow: does not matter."
        ),
    )
    beta_start: float | None = Field(None, gt=0, lt=1)
    beta_end: float | None = Field(None, gt=0, lt=1)
    timesteps: int | None = Field(
        None, ge=1, le=100_000, description="Timesteps from image to noise."
    )


class ModuleSpec(Strict):
    """One module of the model."""

    kind: Kind = Field(description="Where the module stands: before the LLM, the LLM, or after it.")
    architecture: str | None = Field(
        None,
        description=(
            "Architecture by name, as in the model_type of a config.json: vit, clip_vision_model,"
            " siglip_vision_model, qwen2_5_vl_vision, whisper; llama, mistral, qwen2, qwen3;"
            " unet2d_condition, pixart."
        ),
    )
    folder: str | None = Field(
        None,
        description=(
            "Local folder with a Hugging Face config.json, instead of a name; where it holds"
            " weights (safetensors), training starts from them."
        ),
    )
    pretrained: bool = Field(
        True,
        description=(
            "Whether training starts from the weights that the folders hold; if not, from random"
            " ones."
        ),
    )
    config: dict[str, Any] = Field(
        default_factory=dict, description="Fields of the architecture's configuration class."
    )
    merge: int = Field(
        1,
        ge=1,
        le=1024,
        description=(
            "Encoders: what one LLM token stands for: patches per side of a square of the "
            "image, or positions of the audio."
        ),
    )
    feature_layer: int | None = Field(
        None,
        ge=-1024,
        le=-1,
        description=(
            "Image encoders: the block whose output the LLM reads, from the end (-2: the last but"
            " one, as LLaVA reads CLIP), without the final norm; the blocks after it are not built."
            " None: the last, normed."
        ),
    )
    image_size: int | None = Field(
        None, ge=8, le=4096, description="Generators: side of a generated image in pixels."
    )
    context_tokens: int = Field(
        8,
        ge=1,
        le=65_536,
        description="Generators: LLM positions that condition one generated image.",
    )
    vae: dict[str, Any] | None = Field(
        None,
        description=(
            "Generators: fields of diffusers' AutoencoderKL, in whose latent space images are"
            " denoised; it is frozen and encodes target images on the generator's first stage."
        ),
    )
    vae_folder: str | None = Field(
        None,
        description=(
            "Generators: local folder of a diffusers AutoencoderKL with its weights; fields of vae"
            " are put over those of its config.json."
        ),
    )
    noise: NoiseSpec | None = Field(
        None,
        description=(
            "Generators: how images are made noisy, over what a scheduler_config.json in the"
            " folder, or in a folder scheduler beside it, says."
        ),
    )
    cached_latents: bool = Field(
        False,
        description=(
            "Generators with a vae: latents were prepared beforehand, so that the vae does not run."
        ),
    )

    @model_validator(mode="after")
    def _one_source(self) -> ModuleSpec:
        if (self.architecture is None) == (self.folder is None):
            raise ValueError(
                "give either architecture (a name) or folder (with config.json), not both"
            )
        if (self.kind == "generator") != (self.image_size is not None):
            raise ValueError("image_size belongs to generators, and every generator needs it")
        if self.feature_layer is not None and self.kind != "encoder":
            raise ValueError("feature_layer belongs to image encoders")
        for field in ("vae", "vae_folder", "noise"):
            if getattr(self, field) is not None and self.kind != "generator":
                raise ValueError(f"{field} belongs to generators")
        if self.cached_latents and self.vae is None and self.vae_folder is None:
            raise ValueError("cached_latents needs a vae, whose latents they are")
        return self


class LossWeights(Strict):
    """Weight of each loss in the sum that is trained."""

    text: float = Field(1.0, ge=0, le=1e6)
    image: float = Field(1.0, ge=0, le=1e6)
    modules: dict[str, Annotated[float, Field(ge=0, le=1e6)]] = Field(
        default_factory=dict, description="Other weights than image of some generators, by module."
    )

    def of(self, generator: str) -> float:
        """Weight of a generator's loss."""
        return self.modules.get(generator, self.image)


class ModelSpec(Strict):
    """The multimodal model: modules by name, joined by projectors."""

    modules: dict[str, ModuleSpec] = Field(description="Modules by name, in any order.")
    projector_hidden: int | None = Field(
        None,
        ge=1,
        le=2**20,
        description="Hidden width of the two-layer projectors; the LLM's width if not given.",
    )
    loss_weights: LossWeights = Field(default_factory=LossWeights)
    trained: list[str] | None = Field(
        None,
        description=(
            "Modules whose weights are trained, and 'projectors' for the layers that join modules; "
            "all of them if not given. The others are frozen."
        ),
    )

    @model_validator(mode="after")
    def _names(self) -> ModelSpec:
        for name in self.modules:
            if name == PROJECTORS or not re.match(UNIT_NAME, name):
                raise ValueError(
                    f"modules: {name!r} is no name for a module; allowed: at most 64 letters,"
                    f" digits, _, + and -, a letter or digit first, and not {PROJECTORS!r} (the"
                    " layers between)"
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
        """Under which names weights are trained: modules in pipeline order, and "projectors"."""
        return [
            name
            for name in (*self.order, PROJECTORS)
            if self.trained is None or name in self.trained
        ]

    def named(self, kind: str) -> list[str]:
        """Names of the modules of a kind."""
        return [name for name, module in self.modules.items() if module.kind == kind]

    @property
    def order(self) -> list[str]:
        """Module names in pipeline order: encoders, the LLM, generators."""
        return [name for kind in KIND_ORDER for name in self.named(kind)]


class SourceSpec(Strict):
    """One dataset."""

    path: str = Field(
        description=(
            "Folder or file of shards (tars, Parquet, Arrow, or LLaVA's JSON), relative to the run"
            " file, or a URL that fsspec opens (s3://, https://, …)."
        )
    )
    images: str | None = Field(
        None,
        description=(
            "Folder of the images that a LLaVA JSON names; the JSON's own folder if not given."
        ),
    )
    weight: float = Field(
        1.0,
        gt=0,
        le=1000,
        description=(
            "How often its samples are drawn, relative to the other sources (1 = once per epoch)."
        ),
    )


class DistributionSpec(Strict):
    """A named distribution of sizes that stands in for a dataset: to plan for data that nobody has
    here."""

    name: str = Field("laion-like", description="File of templates/distributions/.")
    images_per_sequence: float = Field(
        8.0, ge=0, le=1e6, description="Mean images read per packed sequence."
    )
    generated_per_sequence: float = Field(
        8.0, ge=0, le=1e6, description="Mean images generated per packed sequence."
    )
    clips_per_sequence: float = Field(
        0.0, ge=0, le=1e6, description="Mean audio clips heard per packed sequence."
    )
    min_side_px: int = Field(
        0, ge=0, le=10_000, description="Smaller images are not used (shorter side in pixels)."
    )
    sequences: int = Field(
        4096, ge=1, le=100_000, description="Packed sequences drawn; together they are one epoch."
    )

    @model_validator(mode="after")
    def _drawn(self) -> DistributionSpec:
        each = self.images_per_sequence + self.generated_per_sequence + self.clips_per_sequence
        if each * self.sequences > MOST_DRAWN:
            raise ValueError(
                f"{each:g} images and clips × {self.sequences:,} sequences are more than are drawn;"
                f" allowed: {MOST_DRAWN:,}"
            )
        return self


class DataSpec(Strict):
    """What is trained on and how it is cut into sequences."""

    sources: list[SourceSpec] = Field(default_factory=list)
    distribution: DistributionSpec | None = Field(
        None,
        description=(
            "Instead of sources: sizes drawn from a named distribution; plans only, no training."
        ),
    )
    tokenizer: str = Field(
        "bytes",
        description=(
            "'bytes', a local Hugging Face tokenizer folder, or the name of one on Hugging Face."
        ),
    )
    sequence_length: int = Field(
        8192, ge=16, le=2**20, description="Tokens of one packed sequence."
    )
    max_image_pixels: int = Field(
        1048576,
        ge=64,
        le=100_000_000,
        description="Pixels of one image read; larger ones are scaled down to it.",
    )
    held_out: float = Field(
        0.0,
        ge=0,
        lt=1,
        description=(
            "Share of the samples that are never trained on, for train.evaluation; chosen by "
            "their keys."
        ),
    )
    max_bad_fraction: float = Field(
        0.01, ge=0, le=1, description="Share of samples that may be broken before the run stops."
    )

    @model_validator(mode="after")
    def _one_origin(self) -> DataSpec:
        if bool(self.sources) == (self.distribution is not None):
            raise ValueError(
                "give either sources (a dataset) or distribution (sizes that stand in for one)"
            )
        if self.held_out and self.distribution is not None:
            raise ValueError(
                "held_out belongs to sources: a distribution has no samples to evaluate on"
            )
        return self


class LinkSpec(Strict):
    """Published bandwidths of one GPU's links, one direction; needed for devices that cannot be
    measured here."""

    intra_node_gbps: float | None = Field(
        None, ge=1e-3, le=1e6, description="NVLink or the like; the catalogue's if not given."
    )
    inter_node_gbps: float = Field(
        100.0,
        ge=1e-3,
        le=1e6,
        description="Network of one GPU: a node's network bandwidth over its GPUs.",
    )


class SlurmSpec(Strict):
    """What `disttrain train --emit slurm` asks Slurm for."""

    partition: str | None = Field(
        None, pattern=SLURM_WORD, description="Partition of the GPU nodes."
    )
    cpu_partition: str | None = Field(
        None,
        pattern=SLURM_WORD,
        description="Partition of the preprocessing nodes; that of the GPU nodes if not given.",
    )
    account: str | None = Field(None, pattern=SLURM_WORD, description="Account that pays.")
    qos: str | None = Field(None, pattern=SLURM_WORD, description="Quality of service.")
    time: str | None = Field(
        None,
        pattern=r"^(\d+-)?\d+(:\d{2}){0,2}$",
        description="Time limit as Slurm reads it, such as 1-12:00:00.",
    )
    signal_s: int = Field(
        300,
        ge=10,
        le=86_400,
        description=(
            "Seconds before the time limit at which the job saves, ends and is queued again."
        ),
    )
    options: list[Annotated[str, Field(pattern=rf"^--[a-z][a-z-]*(={SLURM_WORD[1:-1]})?$")]] = (
        Field(
            default_factory=list,
            description="More options of sbatch for the GPU nodes, such as --exclusive.",
        )
    )
    setup: str | None = Field(
        None,
        description=(
            "Shell script, relative to the run file, that is sourced first: modules, environments."
        ),
    )


class ClusterSpec(Strict):
    """The machines."""

    nodes: int = Field(1, ge=1, le=MOST_GPUS)
    gpus_per_node: int = Field(
        8, ge=1, le=1024, description="Devices of one node; on a CPU, processes."
    )
    device: str = Field(
        "auto",
        pattern=r"^(auto|cpu|cuda|analytic:[A-Za-z0-9._-]+)$",
        description=(
            "auto, cpu, cuda, or analytic:NAME for a device of the hardware catalogue that is not"
            " here."
        ),
    )
    memory_gib: float | None = Field(
        None, ge=1e-3, le=1e6, description="Memory of one device; measured when not given."
    )
    peak_tflops: float | None = Field(
        None,
        ge=1e-3,
        le=1e6,
        description="Dense peak of one device; needed when the device is not in the catalogue.",
    )
    links: LinkSpec = Field(default_factory=LinkSpec)
    node_cores: int | None = Field(
        None,
        ge=1,
        le=MOST_GPUS,
        description=(
            "Cores of one GPU node; a rank of --emit slurm gets its device's share "
            "of them, or as many as it needs if not given."
        ),
    )
    cpu_node_cores: int = Field(
        64, ge=1, le=MOST_GPUS, description="Cores of one preprocessing node."
    )
    cpu_nodes: int = Field(
        0, ge=0, le=MOST_GPUS, description="Preprocessing nodes that --emit slurm asks for."
    )
    hostfile: str | None = Field(
        None,
        description=(
            "DeepSpeed hostfile (lines such as 'worker-1 slots=8'), relative to the run file: the"
            " hosts of --emit torchrun."
        ),
    )
    port: int = Field(
        29500,
        ge=1,
        le=65535,
        description="Port on the first host at which the ranks of several find each other.",
    )
    interface: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9_.=^,-]+$",
        description=(
            "Network interface of NCCL and gloo between hosts; they "
            "choose one themselves if not given."
        ),
    )
    slurm: SlurmSpec = Field(default_factory=SlurmSpec)

    @model_validator(mode="after")
    def _most_gpus(self) -> ClusterSpec:
        if self.gpus > MOST_GPUS:
            raise ValueError(
                f"nodes × gpus_per_node = {self.nodes:,} × {self.gpus_per_node:,} = {self.gpus:,} "
                f"devices; allowed: {MOST_GPUS:,}"
            )
        return self

    @property
    def gpus(self) -> int:
        """Devices in all."""
        return self.nodes * self.gpus_per_node


class ModuleOptimizerSpec(Strict):
    """What the optimizer does differently for one module; fields not given are those of the whole
    model."""

    lr: float | None = Field(None, ge=0, le=1e3)
    weight_decay: float | None = Field(None, ge=0, le=1e3)
    warmup_steps: int | None = Field(None, ge=0, le=MOST_STEPS)
    schedule: Literal["constant", "cosine", "linear"] | None = None
    min_lr_fraction: float | None = Field(None, ge=0, le=1)


Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSpec(Strict):
    """AdamW and its learning rate."""

    lr: float = Field(1e-3, gt=0, le=1e3, description="Learning rate after the warm-up.")
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0, le=1)
    weight_decay: float = Field(
        0.0,
        ge=0,
        le=1e3,
        description=(
            "Decoupled decay of matrices, kernels and embeddings; biases, norms and other "
            "single vectors do not decay."
        ),
    )
    warmup_steps: int = Field(
        0, ge=0, le=MOST_STEPS, description="Steps of linear warm-up, before the schedule begins."
    )
    schedule: Literal["constant", "cosine", "linear"] = Field(
        "constant",
        description=(
            "The rate after the warm-up: constant, or falling to min_lr_fraction at train.steps."
        ),
    )
    min_lr_fraction: float = Field(
        0.0, ge=0, le=1, description="Where cosine and linear end, as a share of lr."
    )
    modules: dict[str, ModuleOptimizerSpec] = Field(
        default_factory=dict,
        description="Other values by module, and 'projectors' for the layers that join modules.",
    )

    def of(self, module: str) -> OptimizerSpec:
        """The values of one module, or of the projectors."""
        own = self.modules.get(module)
        return self if own is None else self.model_copy(update=own.model_dump(exclude_none=True))


class CheckpointSpec(Strict):
    """When checkpoints are written."""

    every_steps: int = Field(
        0, ge=0, le=MOST_STEPS, description="Steps between checkpoints; 0 = only at the end."
    )
    keep: int = Field(2, ge=1, le=MOST_STEPS, description="Newest checkpoints kept.")


class EvaluationSpec(Strict):
    """Losses on data that are never trained on (`data.held_out`)."""

    every_steps: int = Field(ge=1, le=MOST_STEPS, description="Steps between evaluations.")
    sequences: int = Field(
        ge=1,
        le=10**6,
        description="Packed sequences evaluated, rounded up to whole global batches.",
    )


class EmaSpec(Strict):
    """Exponential moving averages of weights, which images are generated with and `disttrain
    export` writes."""

    decay: float = Field(
        0.9999, gt=0, lt=1, description="Share of the average that stays at each step."
    )
    modules: list[str] = Field(
        min_length=1, description="Modules whose weights are averaged, such as the generator."
    )


class TrainSpec(Strict):
    """The optimisation."""

    global_batch_size: int = Field(
        ge=1,
        le=MOST_SEQUENCES,
        description="Packed sequences per optimizer step, over the whole job.",
    )
    steps: int = Field(ge=1, le=MOST_STEPS, description="Optimizer steps.")
    precision: Literal["fp32", "bf16"] = "bf16"
    zero_stage: Literal[0, 1, "auto"] = Field(
        1,
        description=(
            "1 splits optimizer states over the replicas of a unit, 0 does not; auto lets the plan"
            " choose."
        ),
    )
    activation_checkpointing: Literal["none", "full", "auto"] = Field(
        "auto",
        description=(
            "Recompute activations in the backward: never, in every unit, or where the plan"
            " needs it."
        ),
    )
    optimizer: OptimizerSpec = Field(default_factory=OptimizerSpec)
    gradient_clipping: float = Field(
        1.0, ge=0, le=1e6, description="Largest global gradient norm; 0 = no clipping."
    )
    on_bad_loss: Literal["stop", "skip"] = Field(
        "stop",
        description=(
            "When a loss or the gradient norm is not finite: stop and name the module, or skip the "
            "step (weights stay as they were), and stop after ten such steps in a row."
        ),
    )
    checkpoint: CheckpointSpec = Field(default_factory=CheckpointSpec)
    evaluation: EvaluationSpec | None = Field(
        None, description="Losses on held-out data; none if not given."
    )
    ema: EmaSpec | None = Field(None, description="Moving averages of weights; none if not given.")
    ordering: Literal["none", "paper", "best"] = Field(
        "paper",
        description=(
            "How samples are ordered in a global batch: as packed, by the paper's two rules, or by "
            "a search that the simulator drives."
        ),
    )
    seed: int = Field(0, ge=0, lt=2**32)
    timeout_s: float = Field(
        600.0, ge=1e-3, le=MOST_S, description="Longest wait of a rank for another one."
    )
    hang_s: float | None = Field(
        None,
        ge=1e-3,
        le=MOST_S,
        description=(
            "Longest time without progress of any rank, after which the job ends and "
            "names the rank that the others wait for; three quarters of timeout_s if not given."
        ),
    )
    restarts: int = Field(
        0,
        ge=0,
        le=10**6,
        description=(
            "How often the job is started again from its newest checkpoint when a rank dies "
            "or hangs."
        ),
    )
    track: list[Literal["tensorboard", "wandb"]] = Field(
        default_factory=list,
        description="Where every step's figures go besides the console and the traces.",
    )

    @property
    def longest_hang_s(self) -> float:
        """`hang_s`, or what stands for it."""
        return self.hang_s if self.hang_s is not None else 0.75 * self.timeout_s

    @model_validator(mode="after")
    def _hang_before_timeout(self) -> TrainSpec:
        if self.longest_hang_s >= self.timeout_s:
            raise ValueError(
                "hang_s must be shorter than timeout_s, after which waits fail by themselves;"
                f" given: {self.hang_s:g} and {self.timeout_s:g}"
            )
        return self

    @model_validator(mode="after")
    def _precision_and_zero(self) -> TrainSpec:
        if self.precision == "bf16" and self.zero_stage == 0:
            raise ValueError(
                "precision bf16 accumulates gradients in fp32, which needs zero_stage 1"
            )
        return self


def worker_host(address: str) -> tuple[str, str]:
    """Scheme and host of a worker's address; raises ValueError where it is none."""
    url = urlsplit(address)
    if url.scheme not in WORKER_SCHEMES or not url.hostname or not url.port:
        allowed = ", ".join(f"{scheme}://HOST:PORT" for scheme in WORKER_SCHEMES)
        raise ValueError(f"not the address of a worker; allowed: {allowed}")
    return url.scheme, url.hostname


def _address(address: str) -> str:
    worker_host(address)
    return address


class PreprocessSpec(Strict):
    """How pixels are prepared: in every rank, or by workers on CPU nodes (`disttrain data
    serve`)."""

    workers: int = Field(
        1, ge=1, le=1024, description="Decoding threads per rank that loads images, or per worker."
    )
    prefetch_slots: int = Field(
        2, ge=1, le=1024, description="Slots prepared ahead of the training step, per rank."
    )
    addresses: list[Annotated[str, AfterValidator(_address)]] = Field(
        default_factory=list,
        description=(
            "Preprocessing workers that ranks pull from, as grpc://HOST:PORT or "
            "grpc+tls://HOST:PORT; none: ranks prepare their data themselves."
        ),
    )
    tls_ca: str | None = Field(
        None,
        description="File of the certificate (PEM) that those of the workers must be signed by.",
    )
    token_file: str | None = Field(
        None,
        description=(
            "File of the secret that ranks and workers share; needed for workers beyond loopback."
        ),
    )
    tls_cert: str | None = Field(
        None,
        description=(
            "Certificate (PEM) of the preprocessing nodes that --emit slurm starts; {host} stands"
            " for the node's name."
        ),
    )
    tls_key: str | None = Field(
        None, description="Its private key (PEM); {host} stands for the node's name."
    )
    wait_s: float = Field(
        300.0,
        ge=1e-3,
        le=MOST_S,
        description="Longest wait for a worker when none answers, before training stops.",
    )


class SampleSpec(Strict):
    """What the model draws and writes after training, beside its checkpoint's step in `images/`."""

    images: int = Field(8, ge=0, le=10_000, description="Images generated at the end of a run.")
    prompts: list[str] = Field(
        default_factory=list,
        max_length=10_000,
        description="Texts that they are drawn after, in turn; none: what the data ask for.",
    )
    read: int = Field(
        0,
        ge=0,
        le=10_000,
        description=(
            "Held-out images (of all data where none are held out) that it writes a text about."
        ),
    )
    judge: Literal["digits"] | None = Field(
        None,
        description=(
            "Who says what an image shows: digits, a classifier of scikit-learn's scanned digits."
        ),
    )
    denoising_steps: int = Field(20, ge=1, le=10_000)


class FaultSpec(Strict):
    """Something that a rehearsal makes slower than the profile says."""

    slow: Literal["rank", "stage", "link", "worker", "host"] = Field(
        description=(
            "rank: one replica of a stage computes slower; stage: all of them do; link: what leaves"
            " the stage, and its gradients, takes longer; worker: the data of a unit's replicas"
            " take longer to prepare; host: one replica of a stage begins its operations late, so"
            " that they take longer with the wait."
        )
    )
    unit: str = Field(description="Unit of the plan.")
    stage: int = Field(
        0, ge=0, le=MOST_GPUS, description="Stage of the unit; worker: does not matter."
    )
    replica: int | None = Field(
        None,
        ge=0,
        le=MOST_GPUS,
        description="rank, host, worker: the replica; none: all workers of it.",
    )
    factor: float = Field(ge=1e-3, le=1e6, description="Times as long.")

    @model_validator(mode="after")
    def _one_rank(self) -> FaultSpec:
        if self.slow in ("rank", "host") and self.replica is None:
            raise ValueError(
                f"a slow {self.slow} needs replica: the number of the replica of its stage"
            )
        if self.slow in ("stage", "link") and self.replica is not None:
            raise ValueError(f"a slow {self.slow} has no replica: it is all of them")
        return self


class RehearseSpec(Strict):
    """How `disttrain train --rehearse` stands in for the cluster."""

    steps: int = Field(
        3, ge=1, le=MOST_STEPS, description="Optimizer steps, where --steps gives none."
    )
    time_scale: Annotated[float, Field(gt=0, le=1e6)] | Literal["auto"] = Field(
        "auto",
        description=(
            "Seconds here per second of the cluster; auto: slow enough for this machine to keep up."
        ),
    )
    gpus_per_process: Annotated[int, Field(ge=1, le=MOST_GPUS)] | Literal["auto"] = Field(
        "auto",
        description=(
            "GPUs of one stage for which a process stands, whole TP groups; auto: as few as make "
            "at most 24 processes."
        ),
    )
    messages: Literal["scaled", "real"] = Field(
        "scaled",
        description=(
            "Size of what ranks send each other: one value per row of a tensor, or all of it."
        ),
    )
    noise: float = Field(
        0.0, ge=0, le=1, description="Standard deviation of an operation's time, as a share of it."
    )
    faults: list[FaultSpec] = Field(default_factory=list)
    distribution: DistributionSpec | None = Field(
        None,
        description="Sizes of other data than the plan was made for; the run's own if not given.",
    )


class RunFile(Strict):
    """The whole run file."""

    version: Literal[1] = 1
    name: str = Field(
        max_length=100,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="Name of the run's folder under runs/, of at most 100 characters.",
    )
    model: ModelSpec
    data: DataSpec
    cluster: ClusterSpec = Field(default_factory=ClusterSpec)
    train: TrainSpec
    preprocess: PreprocessSpec = Field(default_factory=PreprocessSpec)
    samples: SampleSpec = Field(default_factory=SampleSpec)
    rehearse: RehearseSpec = Field(default_factory=RehearseSpec)

    @model_validator(mode="after")
    def _known_optimizer_modules(self) -> RunFile:
        allowed = [*self.model.modules, PROJECTORS]
        unknown = [name for name in self.train.optimizer.modules if name not in allowed]
        if unknown:
            raise ValueError(
                f"train.optimizer.modules: no such module: {', '.join(unknown)}; allowed:"
                f" {', '.join(allowed)}"
            )
        return self

    @model_validator(mode="after")
    def _known_units(self) -> RunFile:
        allowed = [*self.model.modules, MONOLITH]
        unknown = [fault.unit for fault in self.rehearse.faults if fault.unit not in allowed]
        if unknown:
            raise ValueError(
                f"rehearse.faults: no plan has such a unit: {', '.join(unknown)}; allowed: "
                f"{', '.join(allowed)}, which holds every module"
            )
        return self

    @model_validator(mode="after")
    def _averaged_and_evaluated(self) -> RunFile:
        unknown = (
            [name for name in self.train.ema.modules if name not in self.model.modules]
            if self.train.ema
            else []
        )
        if unknown:
            raise ValueError(
                f"train.ema.modules: no such module: {', '.join(unknown)}; allowed: "
                f"{', '.join(self.model.modules)}"
            )
        if self.train.evaluation and not self.data.held_out:
            raise ValueError(
                "train.evaluation needs data.held_out: the share of the samples to evaluate on"
            )
        return self

    #: Sizes in bytes of the weight files that modules start from, by module and file; set where
    #: the file is read.
    _weights: dict[str, dict[str, int]] = PrivateAttr(default_factory=dict)

    def model_fingerprint(self) -> str:
        """Changes when a checkpoint or a profile of the model would no longer fit, or it starts
        from other weights."""
        return fingerprint(
            {
                "modules": {n: m.model_dump(mode="json") for n, m in self.model.modules.items()},
                **({"weights": self._weights} if self._weights else {}),
                "projector_hidden": self.model.projector_hidden,
                "sequence_length": self.data.sequence_length,
                "max_image_pixels": self.data.max_image_pixels,
                "precision": self.train.precision,
            }
        )

    def cluster_fingerprint(self) -> str:
        """Changes when a plan was made for other machines; how ranks are started there does not
        matter."""
        return fingerprint(self.cluster.model_dump(mode="json", exclude=set(LAUNCHING)))


class Run(Strict):
    """A run file with the place it was read from."""

    path: Path
    file: RunFile

    @property
    def folder(self) -> Path:
        """Folder of the run file; relative paths in it start here."""
        return self.path.resolve().parent

    @property
    def dir(self) -> RunDir:
        """The run's own folder."""
        return RunDir(self.folder / "runs" / self.file.name)

    def resolve(self, path: str) -> Path:
        """A path of the run file as an absolute one."""
        return (self.folder / path).resolve()


def read_run(path: Path) -> Run:
    """Read and check a run file.

    Raises:
        SpecError: it is missing, not YAML, or has wrong fields (each named by its path).
    """
    value = parse_yaml(
        path, "run file", "Write one with: disttrain init DIR --preset tiny --sample-data"
    )
    run = Run(path=path, file=validate(RunFile, value, path, "run file"))
    run.file._weights.update(_weight_files(run))
    return run


def _weight_files(run: Run) -> dict[str, dict[str, int]]:
    """Names and sizes of the weight files that modules start from."""
    found = {}
    for name, spec in run.file.model.modules.items():
        folders = [
            run.resolve(given)
            for given in (spec.folder, spec.vae_folder)
            if given and spec.pretrained
        ]
        files = {
            f"{folder.name}/{path.name}": path.stat().st_size
            for folder in folders
            for path in sorted(folder.glob("*.safetensors"))
        }
        if files:
            found[name] = files
    return found

"""The run file `disttrain.yaml`: everything a user decides about a run, with one sentence and a unit per field."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from disttrain_cli.spec.files import Strict, fingerprint, parse_yaml, validate
from disttrain_cli.spec.rundir import RunDir

Kind = Literal["encoder", "llm", "generator"]
KIND_ORDER: tuple[Kind, ...] = ("encoder", "llm", "generator")


class ModuleSpec(Strict):
    """One module of the model."""

    kind: Kind = Field(description="Where the module stands: before the LLM, the LLM, or after it.")
    architecture: str | None = Field(None, description="Architecture by name: vit, llama, unet2d_condition.")
    folder: str | None = Field(None, description="Local folder with a Hugging Face config.json, instead of a name.")
    config: dict[str, Any] = Field(
        default_factory=dict, description="Fields of the architecture's configuration class.")
    merge: int = Field(1, ge=1, description="Encoders: patches per side that one LLM token stands for.")
    image_size: int | None = Field(None, ge=8, description="Generators: side of a generated image in pixels.")
    context_tokens: int = Field(8, ge=1, description="Generators: LLM positions that condition one generated image.")

    @model_validator(mode="after")
    def _one_source(self) -> ModuleSpec:
        if (self.architecture is None) == (self.folder is None):
            raise ValueError("give either architecture (a name) or folder (with config.json), not both")
        if (self.kind == "generator") != (self.image_size is not None):
            raise ValueError("image_size belongs to generators, and every generator needs it")
        return self


class LossWeights(Strict):
    """Weight of each loss in the sum that is trained."""

    text: float = Field(1.0, ge=0)
    image: float = Field(1.0, ge=0)


class ModelSpec(Strict):
    """The multimodal model: modules by name, joined by projectors."""

    modules: dict[str, ModuleSpec] = Field(description="Modules by name, in any order.")
    projector_hidden: int | None = Field(
        None, ge=1, description="Hidden width of the two-layer projectors; the LLM's width if not given.")
    loss_weights: LossWeights = Field(default_factory=LossWeights)

    @model_validator(mode="after")
    def _one_of_each(self) -> ModelSpec:
        counts = {kind: len(self.named(kind)) for kind in KIND_ORDER}
        if counts["llm"] != 1:
            raise ValueError(f"modules must hold exactly one module of kind llm; given: {counts['llm']}")
        for kind in ("encoder", "generator"):
            if counts[kind] > 1:
                raise ValueError(f"this version runs at most one {kind}; given: {', '.join(self.named(kind))}")
        return self

    def named(self, kind: str) -> list[str]:
        """Names of the modules of a kind."""
        return [name for name, module in self.modules.items() if module.kind == kind]

    @property
    def order(self) -> list[str]:
        """Module names in pipeline order: encoders, the LLM, generators."""
        return [name for kind in KIND_ORDER for name in self.named(kind)]


class SourceSpec(Strict):
    """One dataset."""

    path: str = Field(description="Folder or file of shards (*.tar), relative to the run file.")
    weight: float = Field(
        1.0, gt=0, description="How often its samples are drawn, relative to the other sources (1 = once per epoch).")


class DataSpec(Strict):
    """What is trained on and how it is cut into sequences."""

    sources: list[SourceSpec] = Field(min_length=1)
    tokenizer: str = Field("bytes", description="'bytes', or a local Hugging Face tokenizer folder.")
    sequence_length: int = Field(8192, ge=16, description="Tokens of one packed sequence.")
    max_image_pixels: int = Field(
        1048576, ge=64, description="Pixels of one image read; larger ones are scaled down to it.")
    max_bad_fraction: float = Field(
        0.01, ge=0, le=1, description="Share of samples that may be broken before the run stops.")


class ClusterSpec(Strict):
    """The machines."""

    nodes: int = Field(1, ge=1)
    gpus_per_node: int = Field(8, ge=1, description="Devices of one node; on a CPU, processes.")
    device: Literal["auto", "cpu", "cuda"] = "auto"
    memory_gib: float | None = Field(None, gt=0, description="Memory of one device; measured when not given.")
    peak_tflops: float | None = Field(
        None, gt=0, description="Dense peak of one device; needed when the device is not in the catalogue.")

    @property
    def gpus(self) -> int:
        """Devices in all."""
        return self.nodes * self.gpus_per_node


class OptimizerSpec(Strict):
    """AdamW."""

    lr: float = Field(1e-3, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    warmup_steps: int = Field(0, ge=0, description="Steps of linear warm-up; the rate is constant after them.")


class CheckpointSpec(Strict):
    """When checkpoints are written."""

    every_steps: int = Field(0, ge=0, description="Steps between checkpoints; 0 = only at the end.")
    keep: int = Field(2, ge=1, description="Newest checkpoints kept.")


class TrainSpec(Strict):
    """The optimisation."""

    global_batch_size: int = Field(ge=1, description="Packed sequences per optimizer step, over the whole job.")
    steps: int = Field(ge=1, description="Optimizer steps.")
    precision: Literal["fp32", "bf16"] = "bf16"
    zero_stage: Literal[0, 1] = 1
    optimizer: OptimizerSpec = Field(default_factory=OptimizerSpec)
    gradient_clipping: float = Field(1.0, ge=0, description="Largest global gradient norm; 0 = no clipping.")
    checkpoint: CheckpointSpec = Field(default_factory=CheckpointSpec)
    ordering: Literal["none", "paper"] = Field("paper", description="How samples are ordered inside a global batch.")
    seed: int = Field(0, ge=0)
    timeout_s: float = Field(600.0, gt=0, description="Longest wait of a rank for another one.")

    @model_validator(mode="after")
    def _precision_and_zero(self) -> TrainSpec:
        if self.precision == "bf16" and self.zero_stage != 1:
            raise ValueError("precision bf16 accumulates gradients in fp32, which needs zero_stage 1")
        return self


class PreprocessSpec(Strict):
    """How pixels are prepared."""

    workers: int = Field(1, ge=1, description="Decoding threads per rank that loads images.")
    prefetch_slots: int = Field(2, ge=1, description="Slots prepared ahead of the training step, per rank.")


class SampleSpec(Strict):
    """Images generated after training."""

    images: int = Field(8, ge=0, description="Images generated at the end of a run.")
    denoising_steps: int = Field(20, ge=1)


class RunFile(Strict):
    """The whole run file."""

    version: Literal[1] = 1
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Name of the run's folder under runs/.")
    model: ModelSpec
    data: DataSpec
    cluster: ClusterSpec = Field(default_factory=ClusterSpec)
    train: TrainSpec
    preprocess: PreprocessSpec = Field(default_factory=PreprocessSpec)
    samples: SampleSpec = Field(default_factory=SampleSpec)

    def model_fingerprint(self) -> str:
        """Changes when a checkpoint or a profile of the model would no longer fit."""
        return fingerprint({"modules": {n: m.model_dump(mode="json") for n, m in self.model.modules.items()},
                            "projector_hidden": self.model.projector_hidden,
                            "sequence_length": self.data.sequence_length,
                            "max_image_pixels": self.data.max_image_pixels,
                            "precision": self.train.precision})

    def cluster_fingerprint(self) -> str:
        """Changes when a plan was made for other machines."""
        return fingerprint(self.cluster)


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
    value = parse_yaml(path, "run file", "Write one with: disttrain init DIR --preset tiny --sample-data")
    return Run(path=path, file=validate(RunFile, value, path, "run file"))

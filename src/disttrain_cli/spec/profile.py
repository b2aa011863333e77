"""The profile: what each layer, link and sample costs here (`profile.json`)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from disttrain_cli.spec.files import Strict, parse_json, validate
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.work import Work


class Polynomial(Strict):
    """An amount that depends on work: base + per_item·items + per_token·tokens + per_length_sq·Σ length²."""

    base: float = 0.0
    per_item: float = 0.0
    per_token: float = 0.0
    per_length_sq: float = 0.0

    def __call__(self, work: Work) -> float:
        return (self.base + self.per_item * work.items + self.per_token * work.tokens
                + self.per_length_sq * work.sum_length_sq)


class LayerTime(Strict):
    """Measured time of one layer at one TP size, in ms; no work at all costs nothing."""

    forward_ms: Polynomial
    backward_ms: Polynomial
    fit_error_pct: float = Field(description="Mean absolute error on held-out sizes, forward plus backward.")


class LayerCost(Strict):
    """Everything known of one kind of layer of a module."""

    parameters: int
    tp: dict[str, LayerTime] = Field(description="By TP size.")
    activation_bytes: Polynomial = Field(description="Bytes kept from forward to backward, at TP 1.")
    forward_flops: Polynomial = Field(description="Counted from the operators.")
    backward_flops: Polynomial


class ModuleTime(Strict):
    """Whole module at one TP size: mean over the data's packed sequences."""

    forward_ms: float
    backward_ms: float
    fit_error_pct: float


class ModuleProfile(Strict):
    """Costs of one module."""

    kind: Literal["encoder", "llm", "generator"]
    parameters: int
    layers: list[str] = Field(min_length=1, description="Kind of each layer in order; keys of `costs`.")
    costs: dict[str, LayerCost]
    tp: dict[str, ModuleTime]
    work_per_sequence: Work = Field(description="Mean work that one packed sequence brings to the module.")
    max_work_per_sequence: Work = Field(description="Largest work seen in one packed sequence.")
    output_bytes_per_sequence: float = Field(description="Bytes one packed sequence sends to the next module.")

    @model_validator(mode="after")
    def _every_layer_costs(self) -> ModuleProfile:
        for layer in self.layers:
            if layer not in self.costs or not self.costs[layer].tp:
                raise ValueError(f"costs must hold every kind of layer; missing: {layer}")
        return self


class DeviceProfile(Strict):
    """The device that was measured."""

    name: str
    kind: Literal["cpu", "cuda"]
    count: int = Field(ge=1, description="Devices (on a CPU: processes) of the cluster.")
    memory_gib: float = Field(gt=0, description="Memory of one device; on a CPU its share of the machine's.")
    peak_tflops: float = Field(
        gt=0, description="Dense peak of one device; on a CPU the whole machine's best GEMM rate.")
    shared_by: int = Field(1, ge=1, description="Processes that shared the device while it was measured.")
    cores: int = Field(1, ge=1, description="CPU: cores of the machine, shared by all processes.")


class LinkProfile(Strict):
    """Latency and bandwidth between two processes of a node."""

    p2p_gbps: float = Field(gt=0)
    p2p_us: float
    all_reduce_gbps: float = Field(gt=0, description="Bytes reduced per second by a group, in units of 10^9 bits.")
    all_reduce_us: float


class Distribution(Strict):
    mean: float
    p50: float
    p95: float
    p99: float
    max: float


class DataProfile(Strict):
    """The dataset in numbers."""

    samples: int
    sequences: int = Field(description="Packed sequences of one epoch.")
    fingerprint: str
    text_tokens: int
    image_tokens: int
    images: int
    targets: int = Field(description="Images to generate.")
    fill_fraction: float = Field(description="Tokens that are not padding, of all.")
    images_per_sequence: Distribution
    skipped: int = Field(0, description="Samples that could not be read.")


class PreprocessProfile(Strict):
    images_per_s_per_core: float
    sequences_per_s_per_core: float


class Fingerprints(Strict):
    """What an artefact was made for."""

    model: str
    data: str
    cluster: str
    profile: str = ""


class Profile(Strict):
    """The whole profile."""

    version: Literal[1] = 1
    precision: Literal["fp32", "bf16"]
    fingerprints: Fingerprints
    provenance: dict[str, str] = Field(description="Library versions, host kind, date.")
    device: DeviceProfile
    inputs: ModelInputs
    modules: dict[str, ModuleProfile] = Field(description="In pipeline order.")
    links: LinkProfile
    data: DataProfile
    preprocess: PreprocessProfile

    @model_validator(mode="after")
    def _modules_of_the_inputs(self) -> Profile:
        heads = [("llm", self.inputs.llm)]
        heads += [("image", self.inputs.image.module)] if self.inputs.image else []
        heads += [("target", self.inputs.target.module)] if self.inputs.target else []
        for what, module in heads:
            if module not in self.modules:
                raise ValueError(f"modules lacks {module!r}, which inputs.{what} names")
        return self


def read_profile(path: Path) -> Profile:
    """Read and check a profile; raises SpecError."""
    value = parse_json(path, "profile", "Measure one with: disttrain profile")
    return validate(Profile, value, path, "profile", "Measure again: disttrain profile")

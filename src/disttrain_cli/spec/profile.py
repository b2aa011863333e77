"""The profile (`profile.json`): costs of each layer, link and sample on the user's hardware."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from disttrain_cli.calls import call
from disttrain_cli.errors import MismatchError
from disttrain_cli.spec.files import Strict, parse_json, validate
from disttrain_cli.spec.heads import Item
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.layer_costs import LayerCost
from disttrain_cli.spec.library_images import LibraryItems
from disttrain_cli.spec.library_processor import digest_of
from disttrain_cli.spec.runfile.cluster import ClusterSpec
from disttrain_cli.spec.work import Work

if TYPE_CHECKING:
    from disttrain_cli.spec.runfile import Run


class ModuleTime(Strict):
    """Time of an entire module at one TP size: mean over the data's packed sequences."""

    forward_ms: float
    backward_ms: float
    fit_error_pct: float


class ModuleProfile(Strict):
    """Costs of one module."""

    kind: Literal["encoder", "llm", "generator"]
    parameters: int
    layers: list[str] = Field(
        min_length=1, description="Kind of each layer in order; keys of `costs`."
    )
    costs: dict[str, LayerCost]
    tp: dict[str, ModuleTime]
    work_per_sequence: Work = Field(description="Mean work of the module per packed sequence.")
    max_work_per_sequence: Work = Field(
        description="Largest work of the module in one packed sequence."
    )
    cut_bytes_per_sequence: list[float] = Field(
        description="Bytes per packed sequence sent over the cut after each layer; 0 after the"
        " model's last."
    )
    projector: list[int] = Field(
        default_factory=list, description="Indices of layers that connect the module to the LLM."
    )
    frozen: list[int] = Field(
        default_factory=list,
        description="Indices of layers that are never trained (a generator's VAE).",
    )
    side: list[int] = Field(
        default_factory=list,
        description="Indices of layers whose output no later layer of the module reads"
        " (DeepStack's mergers).",
    )

    tied: list[int] = Field(
        default_factory=list,
        max_length=2,
        description="Indices of a layer whose parameters are all shared, and of its tied-embedding"
        " peer (an LLM's embedding and head); empty if none are shared.",
    )

    @property
    def output_bytes_per_sequence(self) -> float:
        """Bytes that one packed sequence sends to the next module."""
        return self.cut_bytes_per_sequence[-1]

    @model_validator(mode="after")
    def _every_layer_costs(self) -> ModuleProfile:
        for layer in self.layers:
            if layer not in self.costs or not self.costs[layer].tp:
                raise ValueError(f"costs must hold every kind of layer; missing: {layer}")
        if len(self.cut_bytes_per_sequence) != len(self.layers):
            raise ValueError(
                f"cut_bytes_per_sequence must have one entry per layer ({len(self.layers)}); "
                f"given: {len(self.cut_bytes_per_sequence)}"
            )
        return self


class DeviceProfile(Strict):
    """Measured device."""

    name: str
    kind: Literal["cpu", "cuda", "analytic"]
    count: int = Field(ge=1, description="Number of devices (on a CPU: processes) of the cluster.")
    memory_gib: float = Field(
        gt=0, description="Memory of one device; on a CPU, its share of the machine's memory."
    )
    context_gib: float = Field(
        0.0, ge=0, description="Part of it for the context and libraries; stated, not measured."
    )
    workspace_mib: float = Field(
        0.0, ge=0, description="Part of it for cuBLAS workspaces; stated, not measured."
    )
    communicator_mib: float = Field(
        0.0,
        ge=0,
        description="Part of it for each NCCL communicator without connections; stated, not"
        " measured.",
    )
    channel_sent_mib: float = Field(
        0.0, ge=0, description="Part of it for each NCCL channel to a rank of the same node."
    )
    channel_received_mib: float = Field(
        0.0, ge=0, description="Part of it for each NCCL channel from a rank of the same node."
    )
    fragmentation: float = Field(
        0.0,
        ge=0,
        description=("Allocator overhead as a share of the activations; stated, not measured."),
    )
    peak_tflops: float = Field(
        gt=0,
        description="Dense peak of one device; on a CPU, the best GEMM rate of the whole machine.",
    )
    shared_by: int = Field(
        1, ge=1, description="Number of processes that shared the device during the measurement."
    )
    cores: int = Field(
        1, ge=1, description="CPU: number of cores of the machine, shared by all processes."
    )
    flash_attention: Literal[2, 4] = Field(
        2, description="Version of flash attention that was measured, and that ranks use."
    )
    optimizer_ns_per_parameter: float = Field(
        0.0,
        ge=0,
        description="Time of an optimizer step per parameter whose states are on the rank.",
    )
    sm_mhz: float | None = Field(
        None, gt=0, description="GPU: median SM clock while layers were measured."
    )
    power_w: float | None = Field(None, ge=0, description="GPU: median power at that time.")
    throttle: list[str] = Field(
        default_factory=list, description="GPU: reasons that limited the clock at that time."
    )


class LinkTimes(Strict):
    """Latency in µs and bandwidth in Gbit/s of messages between ranks.

    A collective's bandwidth is its bus bandwidth: the bytes over the slowest link per time. In a
    ring of N ranks an all-reduce of b bytes moves 2·b·(N-1)/N over it, an all-gather and a
    reduce-scatter of b bytes in total b·(N-1)/N.
    """

    p2p_gbps: float = Field(gt=0)
    p2p_us: float
    all_reduce_gbps: float = Field(gt=0)
    all_reduce_us: float
    all_gather_gbps: float = Field(gt=0)
    all_gather_us: float
    reduce_scatter_gbps: float = Field(gt=0)
    reduce_scatter_us: float
    hop_us: float = Field(
        0.0,
        ge=0,
        description="Additional latency of every step of a ring: N-1 steps, twice as many for an"
        " all-reduce. 0 in a profile; set in expected costs.",
    )


class LinkProfile(LinkTimes):
    """Links inside a node, and between nodes."""

    gpus_per_node: int | None = Field(
        None, ge=1, description="Number of ranks per node if there are several nodes."
    )

    inter_node: LinkTimes | None = Field(
        None,
        description="Between nodes: times of one rank while all ranks of its node send; None for a"
        " single node.",
    )

    def of(self, inside_a_node: bool) -> LinkTimes:
        """Return the links that a group uses."""
        return self if inside_a_node or self.inter_node is None else self.inter_node


class Distribution(Strict):
    mean: float
    p50: float
    p95: float
    p99: float
    max: float


#: Modalities that have fields of their own; `others` holds further ones.
NAMED_ITEMS = ("image", "target", "audio")


class SizeSample(Strict):
    """Sizes of some packed sequences of the data, for simulated orderings.

    All lists have equal length.
    """

    tokens: list[int] = Field(description="Unpadded tokens of each sequence.")
    length_sq: list[int] = Field(description="Σ length² over the samples of each sequence.")
    images: list[list[int]] = Field(description="Patches of each input image, by sequence.")
    targets: list[int] = Field(description="Number of images to generate, by sequence.")
    target_areas: list[list[int]] = Field(
        default_factory=list,
        description="Patches of each of these, by sequence; empty if all have one size.",
    )
    clips: list[int] = Field(
        default_factory=list,
        description="Number of audio clips, by sequence; empty if there are none.",
    )
    others: dict[str, list[list[int]]] = Field(
        default_factory=dict, description="Areas of each item, by further modality and sequence."
    )

    def areas(self, item: Item) -> list[list[int]]:
        """Return the areas of a modality's items (`spec.heads.Head`), by sequence."""
        if item == "image":
            return self.images
        if item == "target" and self.target_areas:
            return self.target_areas
        counts = {"target": self.targets, "audio": self.clips or [0] * len(self.tokens)}
        if item in counts:
            return [[1] * count for count in counts[item]]
        return self.others.get(item, [[]] * len(self.tokens))

    def sized_as(self, known: SizeSample) -> SizeSample:
        """Return the sample with the mean area of `known` targets, if targets were only counted."""
        areas = [area for of_sequence in known.target_areas for area in of_sequence]
        if not areas:
            return self
        mean = round(sum(areas) / len(areas))
        return self.model_copy(update={"target_areas": [[mean] * count for count in self.targets]})

    @model_validator(mode="after")
    def _equal(self) -> SizeSample:
        if not len(self.tokens) == len(self.length_sq) == len(self.images) == len(self.targets):
            raise ValueError(
                "tokens, length_sq, images and targets must have one entry per sequence"
            )
        if self.target_areas and [len(areas) for areas in self.target_areas] != self.targets:
            raise ValueError("target_areas must have as many as targets, by sequence")
        if len(self.clips) not in (0, len(self.tokens)):
            raise ValueError("clips must have one entry per sequence, or none at all")
        return self


class PhaseProfile(Strict):
    """Steps in which the sources have the same weights."""

    step: int = Field(ge=0, description="First of these steps.")
    weights: list[float] = Field(
        description="Sampling rate of each source per epoch; 0 for sources after the last entry."
    )
    sample: SizeSample | None = Field(
        None,
        description="Sizes of some of its sequences; none if they are in `DataProfile.sample`, or"
        " if the phase was over when the data were profiled.",
    )


class LossToBeat(Strict):
    """Loss of a model that has not learned the task: an upper bound for successful training."""

    loss: Literal["text", "image"]
    value: float
    basis: str = Field(description="Information that such a model uses.")


class DataProfile(Strict):
    """Statistics of the dataset."""

    samples: int
    sequences: int = Field(description="Number of packed sequences per epoch.")
    fingerprint: str
    text_tokens: int
    label_tokens: int = Field(0, description="Number of trained tokens, and ends of samples.")
    image_tokens: int
    images: int
    scaled_down: int | None = Field(
        None,
        description="Number of input images with more pixels than data.max_image_pixels; null if"
        " sizes were drawn.",
    )
    videos: int = Field(
        0,
        description="Number of videos; every two sampled frames of a video count as one of the"
        " images.",
    )
    targets: int = Field(description="Number of images to generate.")
    clips: int = Field(0, description="Number of audio clips.")
    others: dict[str, int] = Field(default_factory=dict, description="Items of further modalities.")
    fill_fraction: float = Field(description="Share of tokens that are not padding.")
    images_per_sequence: Distribution
    duplicates: int = Field(
        0, description="Number of samples that are not used because they duplicate an earlier one."
    )
    skipped: int = Field(
        0,
        description="Number of samples that could not be read, including an estimate for damaged,"
        " truncated, empty and missing shards.",
    )
    skipped_first: list[str] = Field(
        default_factory=list, description="The largest skipped entries, with reasons."
    )
    skipped_entries: int = Field(
        0, description="Number of skipped entries; a damaged shard is one."
    )
    unread_files: list[str] = Field(
        default_factory=list,
        description="Files in the folders of data.sources that are not read, such as other splits,"
        " with reasons; also the validation split used for evaluation.",
    )
    unread: dict[str, int] = Field(
        default_factory=dict,
        description="Number of images and clips for which the model has no module.",
    )
    unread_keys: list[dict[str, int]] = Field(
        default_factory=list,
        description="For each source, number of samples by key or column of their records that is"
        " ignored.",
    )
    sources: list[str] = Field(
        default_factory=list,
        description="Fingerprint of each source; a run may be resumed with additional sources.",
    )
    phases: list[PhaseProfile] = Field(
        default_factory=list, description="Mixture of the sources by first step."
    )
    goes_on_from: int = Field(
        0,
        description="Step of the checkpoint whose run had different phases; 0 if all of them are"
        " from the run file.",
    )
    priced_step: int = Field(0, description="First step of the phase that these figures describe.")
    losses_to_beat: list[LossToBeat] = Field(
        default_factory=list,
        description="Loss values that successful training must fall below, where known.",
    )
    sample: SizeSample

    def phase_at(self, step: int) -> PhaseProfile:
        """Return the phase of a step, with its sizes; one without weights if there is none."""
        phases = [one for one in self.phases if one.step <= step]
        phase = phases[-1] if phases else PhaseProfile(step=0, weights=[])
        return phase if phase.sample else phase.model_copy(update={"sample": self.sample})

    def count(self, item: Item) -> int:
        """Return the number of items of a modality."""
        known = {"image": self.images, "target": self.targets, "audio": self.clips}
        return known[item] if item in known else self.others.get(item, 0)


class PreprocessProfile(Strict):
    images_per_s_per_core: float
    clips_per_s_per_core: float = Field(
        0.0, description="Audio clips converted to features; 0 if there are none."
    )
    others_per_s_per_core: dict[str, float] = Field(
        default_factory=dict, description="Items of further modalities."
    )
    sequences_per_s_per_core: float

    def rate(self, item: Item) -> float:
        """Return the items of a modality that a core prepares per second; 0 = unknown.

        Images read and images to generate have one rate.
        """
        known = {
            "image": self.images_per_s_per_core,
            "target": self.images_per_s_per_core,
            "audio": self.clips_per_s_per_core,
        }
        return known[item] if item in known else self.others_per_s_per_core.get(item, 0.0)


class Fingerprints(Strict):
    """Fingerprints of an artefact's inputs."""

    model: str
    data: str
    cluster: str
    profile: str = ""


class Measuring(Strict):
    """Budget, spending and coverage of measuring the layers."""

    clock: Literal["cpu", "wall"] = Field(
        description="Clock of the budget: CPU time of all processes together, or wall time (GPUs)."
    )
    budget_s: float = Field(description="Seconds after which measuring ends.")
    started_s: float = Field(
        description="Seconds spent before the first layer: imports, device, links, optimizer."
    )
    spent_s: float = Field(description="Seconds spent, reading the data not included.")
    sizes: dict[str, dict[str, tuple[int, int]]] = Field(
        description="By module and TP size, number of work sizes measured and number drawn from"
        " the data, with trained and frozen weights counted separately; the rest is interpolated."
        " A TP size without measurements is not in the profile."
    )

    @property
    def counts(self) -> tuple[int, int]:
        """Sizes measured and drawn, of all modules."""
        pairs = [pair for by_tp in self.sizes.values() for pair in by_tp.values()]
        return sum(measured for measured, _ in pairs), sum(drawn for _, drawn in pairs)

    @property
    def not_measured(self) -> dict[str, list[str]]:
        """By module, the TP sizes of which nothing was measured."""
        missing = {
            name: [tp for tp, (measured, _) in by_tp.items() if not measured]
            for name, by_tp in self.sizes.items()
        }
        return {name: tps for name, tps in missing.items() if tps}


class Profile(Strict):
    """The complete profile."""

    version: Literal[1] = 1
    precision: Literal["fp32", "bf16"]
    fingerprints: Fingerprints
    cluster: ClusterSpec = Field(description="`cluster` of the run file at the time of profiling.")
    provenance: dict[str, str] = Field(description="Library versions, host kind, date.")
    device: DeviceProfile
    inputs: ModelInputs
    modules: dict[str, ModuleProfile] = Field(description="In pipeline order.")
    links: LinkProfile
    data: DataProfile
    preprocess: PreprocessProfile
    measuring: Measuring | None = Field(
        None,
        exclude_if=lambda measuring: measuring is None,
        description="None if the device's figures were computed.",
    )

    @property
    def tied_layers(self) -> tuple[int, int] | None:
        """The two layers of the model that share a weight, if any."""
        first = 0
        for module in self.modules.values():
            if module.tied:
                owner, sharer = module.tied
                return first + owner, first + sharer
            first += len(module.layers)
        return None

    @model_validator(mode="after")
    def _modules_of_the_inputs(self) -> Profile:
        named = [("llm", self.inputs.llm)]
        named += [("heads", head.module) for head in self.inputs.heads]
        for what, module in named:
            if module not in self.modules:
                raise ValueError(f"modules lacks {module!r}, which inputs.{what} names")
        return self


def profile_of(run: Run, path: Path | None = None) -> Profile:
    """Read and check a run's profile, or the one at `path`.

    The folder of a published model is the run file's, as both may have moved since.

    Raises:
        SpecError: there is no profile, or it cannot be read.
        MismatchError: it is of a model with another processor.
    """
    source, folder = path or run.dir.profile, run.file.model.folder
    profile = read_profile(source)
    if folder is None:
        return profile
    own = run.resolve(folder)
    for head in profile.inputs.heads:
        if isinstance(head, LibraryItems) and (digest := digest_of(own)) != head.digest:
            raise MismatchError(
                f"{source} is of a model with another processor",
                f"processor files in {own} have another content ({digest}, not {head.digest})",
                f"Measure again: {call('profile')}",
            )
    return profile.model_copy(update={"inputs": profile.inputs.moved(own)})


def read_profile(path: Path) -> Profile:
    """Read and check a profile; raise SpecError."""
    value = parse_json(path, "profile", f"Measure one with: {call('profile')}")
    return validate(Profile, value, path, "profile", f"Measure again: {call('profile')}")

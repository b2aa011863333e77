"""`cluster`: the machines, their links, and how ranks are started on them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from disttrain_cli.errors import SpecError
from disttrain_cli.spec.files import Strict
from disttrain_cli.spec.forms import Form
from disttrain_cli.spec.runfile.bounds import MOST_GPUS
from disttrain_cli.spec.runfile.containers import KubernetesSpec, SkypilotSpec

DEVICE = Form(r"^(auto|cpu|cuda|analytic:[A-Za-z0-9._-]+)$", "auto, cpu, cuda, analytic:NAME")
#: A value that Slurm reads: without blanks, quotes or other characters that a shell or sbatch would
#: split or interpret.
_WORD = r"[A-Za-z0-9_.,:@%/+\[\]-]+"
SlurmWord = Annotated[str, Form(f"^{_WORD}$", "letters, digits and _ . , : @ % / + [ ] -")]
#: Price of one device for an hour, in any one currency.
Price = Annotated[float, Field(strict=True, gt=0, le=1e6)]
#: Fields of `cluster` about starting ranks and prices, not about the devices that they run on.
LAUNCHING = frozenset(
    {
        "price_per_gpu_hour",
        "cpu_nodes",
        "node_cores",
        "hostfile",
        "port",
        "interface",
        "slurm",
        "kubernetes",
        "skypilot",
    }
)


class LinkSpec(Strict):
    """Published bandwidths of one GPU's links, one direction.

    They are needed for devices that cannot be measured here.
    """

    intra_node_gbps: float | None = Field(
        None,
        ge=1e-3,
        le=1e6,
        description="Bandwidth inside a node (NVLink or similar); by default that of the"
        " catalogue.",
    )
    inter_node_gbps: float = Field(
        100.0,
        ge=1e-3,
        le=1e6,
        description="Network bandwidth per GPU: that of a node divided by its GPUs.",
    )


#: Options of sbatch that the script writes itself, and the field that sets each.
_OWN_OPTIONS = {
    "--job-name": "name",
    "--output": "--out",
    "--error": "--out",
    "--open-mode": "nothing: the log of a job that is queued again is appended to",
    "--requeue": "nothing: jobs are queued again after a lost node",
    "--no-requeue": "nothing: jobs are queued again after a lost node",
    "--signal": "cluster.slurm.signal_s",
    "--time": "cluster.slurm.time",
    "--partition": "cluster.slurm.partition",
    "--account": "cluster.slurm.account",
    "--qos": "cluster.slurm.qos",
    "--nodes": "cluster.nodes",
    "--ntasks": "nothing: a task is a rank of the plan",
    "--ntasks-per-node": "cluster.gpus_per_node",
    "--gpus-per-node": "cluster.gpus_per_node",
    "--mem": "cluster.slurm.mem",
    "--array": "nothing: a run is one job",
}


def _seconds(limit: str) -> int:
    """Return the seconds of a time limit, as Slurm reads it."""
    days, _, rest = limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if not days and len(parts) == 1:
        return parts[0] * 60
    hours, minutes, seconds = (*parts, 0, 0)[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


class SlurmSpec(Strict):
    """Settings of `disttrain train --emit slurm` for Slurm."""

    partition: SlurmWord | None = Field(None, description="Partition of the GPU nodes.")
    cpu_partition: SlurmWord | None = Field(
        None, description="Partition of the preprocessing nodes; by default that of the GPU nodes."
    )
    account: SlurmWord | None = Field(None, description="Account to charge.")
    qos: SlurmWord | None = Field(None, description="Quality of service.")
    time: (
        Annotated[
            str,
            Form(
                r"^(\d+-\d+(:\d{2}){0,2}|\d+:\d{2}:\d{2}|\d+)$",
                "[days-]hours:minutes:seconds, days-hours, or minutes alone in quotes",
            ),
        ]
        | None
    ) = Field(None, description="Time limit in Slurm's format, such as 1-12:00:00.")
    signal_s: int = Field(
        300,
        ge=10,
        le=65_535,
        description=("Seconds before the time limit at which the job saves, ends and is requeued."),
    )
    mem: (
        Annotated[int, Field(ge=0, le=1_000_000_000)]
        | Annotated[str, Form(r"^\d+[KMGT]?$", "a number of MB, or one with K, M, G or T")]
        | None
    ) = Field(
        0,
        description="Memory of each GPU node in Slurm's format, such as 500G (--mem); 0 is all of"
        " the node's memory, null is the cluster's default. Preprocessing nodes get all of theirs,"
        " unless null.",
    )
    options: list[
        Annotated[str, Form(rf"^--[a-z][a-z-]*(={_WORD})?$", "--option or --option=value")]
    ] = Field(
        default_factory=list,
        description="Additional sbatch options for the GPU nodes, such as --exclusive.",
    )
    setup: str | None = Field(
        None,
        description="Shell script, relative to the run file, that is sourced first, for modules"
        " and environments.",
    )

    @model_validator(mode="after")
    def _options_not_ours(self) -> SlurmSpec:
        for option in self.options:
            name = option.partition("=")[0]
            if name in _OWN_OPTIONS:
                raise ValueError(f"options: {name} is the job's own; set {_OWN_OPTIONS[name]}")
            if name in ("--mem-per-cpu", "--mem-per-gpu") and self.mem is not None:
                raise ValueError(
                    f"options: {name} and --mem={self.mem} exclude each other; set mem: null"
                )
        return self

    @model_validator(mode="after")
    def _time_to_work(self) -> SlurmSpec:
        # 0 is no limit
        if self.time is not None and 0 < _seconds(self.time) <= self.signal_s:
            raise ValueError(
                f"time: {self.time} is {_seconds(self.time):,} s, and the job would save and end"
                f" {self.signal_s} s before its end, at once; give more time, or lower signal_s"
            )
        return self


class ClusterSpec(Strict):
    """The machines of a run."""

    nodes: int = Field(1, ge=1, le=MOST_GPUS, description="Number of machines with GPUs.")
    gpus_per_node: int = Field(
        8, ge=1, le=1024, description="Number of devices per node; on a CPU, processes."
    )
    ranks_per_gpu: int = Field(
        1,
        ge=1,
        le=64,
        description="Number of ranks that share each GPU of one machine over NCCL, to test layouts"
        " of several ranks on few GPUs: slow, not for measurements. They count as `gpus_per_node`.",
    )
    device: Annotated[str, DEVICE] = Field(
        "auto",
        description="auto, cpu, cuda, or analytic:NAME for a device of the hardware catalogue that"
        " is not available here.",
    )
    flash_attention: Literal["auto", 2, 4] = Field(
        "auto",
        description="Version of flash attention in bf16: 4 needs the extra flash and a Hopper or"
        " Blackwell GPU; auto: 4 on a measured device that has it, else 2.",
    )
    memory_gib: float | None = Field(
        None, ge=1e-3, le=1e6, description="Memory of one device; measured by default."
    )
    memory_margin_gib: float = Field(
        0.0,
        ge=0,
        le=1e6,
        description="Memory of each device that plans leave free, in addition to the stated"
        " reserves; a plan with less than 3 % free reports it.",
    )
    peak_tflops: float | None = Field(
        None,
        ge=1e-3,
        le=1e6,
        description="Dense peak of one device; needed if the device is not in the catalogue.",
    )
    links: LinkSpec = Field(
        default_factory=LinkSpec, description="Bandwidths that cannot be measured."
    )
    node_cores: int | None = Field(
        None,
        ge=1,
        le=MOST_GPUS,
        description="Cores of one GPU node; each rank of an emitted job gets its device's share of"
        " them, by default as many as it needs.",
    )
    cpu_node_cores: int = Field(
        64, ge=1, le=MOST_GPUS, description="Cores of one preprocessing node."
    )
    price_per_gpu_hour: Price | dict[str, Price] | str | None = Field(
        None,
        description="Price of one device per hour, in any one currency: the price of `device`, a"
        " mapping of devices to prices, or a YAML file with such a mapping, relative to the run"
        " file; for `disttrain plan --gpus 8,16 --device H100,B200`.",
    )
    cpu_nodes: int = Field(
        0,
        ge=0,
        le=MOST_GPUS,
        description="Number of preprocessing nodes that --emit slurm and jobset request.",
    )
    hostfile: str | None = Field(
        None,
        description="DeepSpeed hostfile (lines such as 'worker-1 slots=8'), relative to the run"
        " file: the hosts of --emit torchrun.",
    )
    port: int = Field(
        29500,
        ge=1024,
        le=65535,
        description="Rendezvous port on the first host for ranks of several hosts; scripts that"
        " restart ranks use the next port.",
    )
    interface: (
        Annotated[str, Form(r"^[A-Za-z0-9_.=^,-]+$", "letters, digits and _ . = ^ , -")] | None
    ) = Field(
        None,
        description="Network interface of NCCL and gloo between hosts; by default they choose one.",
    )
    slurm: SlurmSpec = Field(
        default_factory=SlurmSpec, description="For `disttrain train --emit slurm`."
    )
    kubernetes: KubernetesSpec = Field(
        default_factory=KubernetesSpec, description="For `disttrain train --emit jobset`."
    )
    skypilot: SkypilotSpec = Field(
        default_factory=SkypilotSpec, description="For `disttrain train --emit skypilot`."
    )

    @model_validator(mode="after")
    def _share_gpus(self) -> ClusterSpec:
        if self.ranks_per_gpu > 1 and self.nodes > 1:
            raise ValueError(
                f"ranks_per_gpu {self.ranks_per_gpu} with {self.nodes} nodes; allowed: 1 node"
            )
        if self.gpus_per_node % self.ranks_per_gpu:
            raise ValueError(
                f"ranks_per_gpu {self.ranks_per_gpu} with gpus_per_node {self.gpus_per_node}, which"
                " counts ranks; allowed: multiples of ranks_per_gpu"
            )
        if self.ranks_per_gpu > 1 and self.memory_gib is not None:
            raise ValueError(
                f"ranks_per_gpu {self.ranks_per_gpu} with memory_gib; allowed: without, as ranks"
                " share a GPU's memory evenly"
            )
        if self.ranks_per_gpu > 1 and self.device not in ("auto", "cuda"):
            raise ValueError(
                f"ranks_per_gpu {self.ranks_per_gpu} with device {self.device}; allowed: cuda"
            )
        return self

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
        """Total number of devices."""
        return self.nodes * self.gpus_per_node

    def usable_gib(self, device_gib: float) -> float:
        """Return the memory of one device that a plan may use.

        Args:
            device_gib: memory of a device, used if the run file does not state it.

        Raises:
            SpecError: the margin leaves nothing.
        """
        given = self.memory_gib or device_gib
        if self.memory_margin_gib >= given:
            raise SpecError(
                "cluster.memory_margin_gib leaves no memory to plan with",
                f"margin: {self.memory_margin_gib:g} GiB; a device has {given:.3g} GiB",
                "Lower cluster.memory_margin_gib in the run file.",
            )
        return given - self.memory_margin_gib

    def figures(self) -> dict[str, Any]:
        """Return the fields that profiles and plans depend on: all but launching and prices."""
        return self.model_dump(mode="json", exclude=set(LAUNCHING))

"""Catalogue of devices (`templates/hardware.yaml`): peaks, memory, links, kernel efficiency.

Every figure has its source. A device that is not listed is an error whose message requests its
figures: a wrong peak makes every MFU wrong.

Kernel times follow the roofline model (Williams et al. 2009) with the sum of its two terms instead
of the maximum: launch + FLOPs / (peak · fraction) + bytes / (bandwidth · fraction). It is linear in
the work, so costs stay polynomials, and shards of a layer lose efficiency without further
modelling: their bytes and launches shrink less than their FLOPs.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from typing import Literal, NamedTuple

from pydantic import Field

from disttrain_cli.errors import SpecError
from disttrain_cli.spec.files import Strict
from disttrain_cli.spec.profile import DeviceProfile, LinkProfile, LinkTimes
from disttrain_cli.spec.runfile.cluster import ClusterSpec
from disttrain_cli.spec.suggestions import listed

Precision = Literal["fp32", "bf16"]
#: Compute capability assumed for an unlisted device.
CAPABILITY = (9, 0)

#: Assumptions of computed profiles; a profile with any other text was computed by another version.
RULES = (
    "every operator as it runs, the optimizer's too, none fused with another; a TP group's messages"
    " wait"
)

#: Bytes that an optimizer step without clipping moves per parameter: 4 for the gradient norm, those
#: of AdamW (fp32 weight and two moments both ways, gradient); in bf16 6 to round the master into
#: the weight and 4 to clear the fp32 sum of gradients. Clipping moves 8 more.
ADAMW_BYTES = 28.0
OPTIMIZER_BYTES = {"fp32": ADAMW_BYTES + 4.0, "bf16": ADAMW_BYTES + 14.0}

# Variants with the same name and other peaks: rejected rather than guessed.
OTHER_FORMS = re.compile(r"\bMIG\b|(?:H100|H800|H200).*(?:PCIe|NVL)", re.IGNORECASE)


class Efficiency(Strict):
    """Fractions of the peak (GEMMs, attention, convolutions) and of the memory's bandwidth."""

    product: float = Field(gt=0, le=1)
    attention: float = Field(gt=0, le=1)
    convolution: float = Field(gt=0, le=1)
    memory: float = Field(gt=0, le=1)


class Curve(Efficiency):
    """Kernel efficiency in bursts between pauses and, where it was measured, under full load."""

    launch_us: float = Field(ge=0, description="Start and end of a kernel on the device.")
    sustained: Efficiency | None = Field(
        description="Efficiency after seconds of full load; null: unknown, a doubt covers it."
    )
    source: str

    @property
    def used(self) -> Efficiency:
        """Efficiency in computed profiles: under full load, as training runs, where it is known."""
        return self.sustained or self


class Device(Strict):
    """Published figures of one device; peaks are dense, bandwidths of one direction."""

    name: str
    pattern: str = Field(description="Pattern of the name that torch.cuda.get_device_name reports.")
    bf16_tflops: float = Field(gt=0)
    fp32_tflops: float = Field(gt=0, description="Without TF32.")
    memory_gib: float = Field(gt=0)
    memory_gbytes_s: float = Field(gt=0)
    link_gbytes_s: float = Field(gt=0, description="Bandwidth to the other devices of a node.")
    network_gbps: float = Field(gt=0, description="Typical network of one device.")
    curve: str
    capability: tuple[int, int] = Field(
        CAPABILITY, description="Compute capability, which decides on its kernels."
    )
    source: str

    @property
    def peak_tflops(self) -> float:
        """Dense bf16 peak."""
        return self.bf16_tflops

    def peak_of(self, precision: Precision) -> float:
        """Return the dense peak of matrix products in TFLOP/s."""
        return self.bf16_tflops if precision == "bf16" else self.fp32_tflops


class Links(Strict):
    """Fractions of published bandwidths that messages reach, and their latencies."""

    link_fraction: float = Field(gt=0, le=1)
    network_fraction: float = Field(gt=0, le=1)
    link_p2p_us: float
    link_collective_us: float
    network_p2p_us: float
    network_collective_us: float
    source: str


class Memory(Strict):
    """Device memory that no operator accounts for; specified, not measured."""

    context_gib: float = Field(ge=0)
    workspace_mib: float = Field(ge=0)
    communicator_mib: float = Field(ge=0)
    channel_sent_mib: float = Field(ge=0)
    channel_received_mib: float = Field(ge=0)
    fragmentation: float = Field(ge=0)
    source: str

    @property
    def reserves(self) -> dict[str, float]:
        """The corresponding fields of a `DeviceProfile`."""
        return self.model_dump(exclude={"source"})


class Catalogue(Strict):
    """Contents of `templates/hardware.yaml`."""

    devices: dict[str, Device]
    curves: dict[str, Curve]
    links: Links
    memory: Memory
    generic_flops_per_byte: float = Field(gt=0)


class KernelWork(NamedTuple):
    """Work of kernels: FLOPs by kind of operator, bytes read and written, number of launches."""

    product_flops: float = 0.0
    attention_flops: float = 0.0
    convolution_flops: float = 0.0
    moved_bytes: float = 0.0
    kernels: float = 0.0


@cache
def catalogue() -> Catalogue:
    """Return the catalogue that comes with the package."""
    import yaml

    value = yaml.safe_load(files("disttrain_cli").joinpath("templates/hardware.yaml").read_text())
    devices = {name: {"name": name, **figures} for name, figures in value["devices"].items()}
    return Catalogue.model_validate(value | {"devices": devices})


def lookup(device_name: str) -> Device:
    """Return the catalogue's entry for the name that torch reports, or for its own name.

    Raises:
        SpecError: the device is not in the catalogue; the message requests `cluster.peak_tflops`.
    """
    devices = catalogue().devices
    if device_name in devices:
        return devices[device_name]
    if not OTHER_FORMS.search(device_name):
        for device in devices.values():
            if re.search(device.pattern, device_name, re.IGNORECASE):
                return device
    raise SpecError(
        f"The peak of the device {device_name!r} is not known",
        f"the catalogue has {', '.join(devices)}",
        "Give its dense peak for your precision in the run file: cluster.peak_tflops",
    )


def analytic_device(name: str, cluster: ClusterSpec, precision: Precision) -> Device:
    """Return the device of `analytic:NAME`; figures of the run file override the catalogue's.

    A device that is not in the catalogue gets its figures from the run file and the curve
    `generic`.

    Raises:
        SpecError: the device is not in the catalogue and the run file lacks its peak or memory; or
            FlashAttention 4 is asked for, and its curve is unknown.
    """
    devices = catalogue().devices
    known = next(
        (device for known_name, device in devices.items() if known_name.lower() == name.lower()),
        None,
    )
    if known is None:
        known = _generic(name, cluster)
    changes: dict[str, float | str] = {}
    if cluster.flash_attention == 4 and precision == "bf16":
        changes["curve"] = f"{known.curve}_flash_4"
        if changes["curve"] not in catalogue().curves:
            raise SpecError(
                f"The speed of FlashAttention 4 on analytic:{name} is not known",
                f"the catalogue has no curve {changes['curve']}",
                "Set cluster.flash_attention: 2, or profile on such a device",
            )
    if cluster.peak_tflops is not None:
        changes[f"{precision}_tflops"] = cluster.peak_tflops
    if cluster.memory_gib is not None:
        changes["memory_gib"] = cluster.memory_gib
    if cluster.links.intra_node_gbps is not None:
        changes["link_gbytes_s"] = cluster.links.intra_node_gbps / 8.0
    return known.model_copy(update=changes)


def _generic(name: str, cluster: ClusterSpec) -> Device:
    missing = [field for field in ("peak_tflops", "memory_gib") if getattr(cluster, field) is None]
    if missing:
        fields = ", ".join(f"cluster.{field}" for field in missing)
        raise SpecError(
            f"The device analytic:{name} is not in the catalogue",
            "the catalogue has " + listed(name, list(catalogue().devices)),
            f"Name one of these, or give the figures of yours in the run file, with cluster.device:"
            f" analytic:{name}: {fields}",
        )
    assert cluster.peak_tflops is not None and cluster.memory_gib is not None
    network_gbps = cluster.links.inter_node_gbps
    memory_gbytes_s = 1e3 * cluster.peak_tflops / catalogue().generic_flops_per_byte
    return Device(
        name=name,
        pattern="",
        bf16_tflops=cluster.peak_tflops,
        fp32_tflops=cluster.peak_tflops,
        memory_gib=cluster.memory_gib,
        memory_gbytes_s=memory_gbytes_s,
        network_gbps=network_gbps,
        link_gbytes_s=(cluster.links.intra_node_gbps or network_gbps) / 8.0,
        curve="generic",
        source=(
            f"the run file; memory bandwidth taken as {memory_gbytes_s:.0f} GB/s, links inside a"
            " node as"
            f" {'given' if cluster.links.intra_node_gbps else 'fast as those between nodes'}"
        ),
    )


def kernels_ms(device: Device, precision: Precision, work: KernelWork) -> float:
    """Return the time of kernels in sequence (formula in the module docstring)."""
    curve, peak = catalogue().curves[device.curve], device.peak_of(precision) * 1e12
    compute_s = (
        work.product_flops / curve.used.product
        + work.attention_flops / curve.used.attention
        + work.convolution_flops / curve.used.convolution
    ) / peak
    return (
        1e3 * (compute_s + memory_s(device, work.moved_bytes))
        + 1e-3 * curve.launch_us * work.kernels
    )


def memory_s(device: Device, moved_bytes: float) -> float:
    """Return the time to read or write bytes of the device's memory."""
    share = catalogue().curves[device.curve].used.memory
    return moved_bytes / (device.memory_gbytes_s * 1e9 * share)


def moved_s(device: DeviceProfile, precision: Precision, moved_bytes: float) -> float:
    """Return the time to read or write bytes of a profiled device's memory.

    The rate is that of its optimizer step, which is memory-bound, too, on a CPU of AdamW alone; 0
    if that is not known.
    """
    step_bytes = ADAMW_BYTES if device.kind == "cpu" else OPTIMIZER_BYTES[precision]
    return moved_bytes * device.optimizer_ns_per_parameter * 1e-9 / step_bytes


def link_profile(device: Device, cluster: ClusterSpec) -> LinkProfile:
    """Return the device's links inside a node and the run file's between nodes.

    The latter is `cluster.links.inter_node_gbps`.
    """
    links = catalogue().links
    inside = _times(
        8.0 * device.link_gbytes_s * links.link_fraction,
        links.link_p2p_us,
        links.link_collective_us,
    )
    if cluster.nodes == 1:
        return LinkProfile(**inside.model_dump())
    return LinkProfile(
        **inside.model_dump(),
        inter_node=network_times(cluster),
        gpus_per_node=cluster.gpus_per_node,
    )


def network_times(cluster: ClusterSpec) -> LinkTimes:
    """Return the network between nodes, as the run file specifies it."""
    links = catalogue().links
    return _times(
        cluster.links.inter_node_gbps * links.network_fraction,
        links.network_p2p_us,
        links.network_collective_us,
    )


def _times(gbps: float, p2p_us: float, collective_us: float) -> LinkTimes:
    return LinkTimes(
        p2p_gbps=gbps,
        p2p_us=p2p_us,
        all_reduce_gbps=gbps,
        all_reduce_us=collective_us,
        all_gather_gbps=gbps,
        all_gather_us=collective_us,
        reduce_scatter_gbps=gbps,
        reduce_scatter_us=collective_us,
    )

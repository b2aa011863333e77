"""Analytic profile: the operators of every layer, timed by the hardware catalogue's curves.

For machines that nobody has here, in seconds and without a GPU, also for a model that would fit on
none. `models.operators` lists the kernels that run, `costs.hardware` their times. Both are linear
in work, so times and bytes are exact polynomials of it, determined by a few probes on the meta
device. A TP shard is counted as the first rank of its TP group, computing as if it had received the
other ranks' messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch

from disttrain_cli.costs.hardware import (
    OPTIMIZER_BYTES,
    RULES,
    Device,
    Precision,
    analytic_device,
    catalogue,
    kernels_ms,
    link_profile,
    memory_s,
)
from disttrain_cli.models.flops import count_flops
from disttrain_cli.models.graph import (
    LayerInfo,
    build_layers,
    describe,
    layer_table,
    of_model,
)
from disttrain_cli.models.group import Group
from disttrain_cli.models.layer import PipelineLayer
from disttrain_cli.models.operators import LayerOperators, layer_operators
from disttrain_cli.models.probe import probe_batch, probe_work, state_at
from disttrain_cli.models.sharding import tp_degrees
from disttrain_cli.models.tensor_parallel import join, same_at_any_tp
from disttrain_cli.profiling.assemble import Series, Setting, known_parts, module_profile
from disttrain_cli.profiling.dataset import read_dataset
from disttrain_cli.profiling.fitting import Floats
from disttrain_cli.profiling.footprints import running
from disttrain_cli.profiling.tp_overlap import overlap_savings
from disttrain_cli.profiling.trial import first_of_kinds
from disttrain_cli.profiling.versions import library_versions
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.library_images import LibraryItems
from disttrain_cli.spec.profile import DeviceProfile, Fingerprints, Profile
from disttrain_cli.spec.progress import Progress, silent
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.runfile.cluster import ClusterSpec
from disttrain_cli.spec.work import Work


def analytic_profile(run: Run, name: str, progress: Progress = silent) -> Profile:
    """Compute the profile of a run on a catalogue device, or one that the run file specifies.

    Preprocessing is measured here, on this machine's cores.

    Raises:
        SpecError: the device is unknown, or the model's configuration is wrong.
        DataError: the dataset is missing, empty or too damaged, or has nothing for one of the
            modules.
    """
    file = run.file
    precision = file.train.precision
    device = analytic_device(name, file.cluster, precision)
    inputs, table = describe(run), layer_table(run)
    data = read_dataset(run, inputs, progress)
    progress("count FLOPs", 0, 0)
    flops = count_flops(run)
    links = link_profile(device, file.cluster)
    setting = Setting(
        table,
        inputs,
        data,
        links.of(True),
        value_bytes=2 if precision == "bf16" else 4,
        grouped=True,
    )
    degrees = {
        module: tp_degrees(run, module, file.cluster.gpus_per_node) for module in file.model.order
    }
    modules = {}
    for module, tps in degrees.items():
        progress(f"record the memory and messages of {module}", 0, 0)
        kind = file.model.modules[module].kind
        shards = {tp: _shards(run, table, module, tp=tp) for tp in tps}
        series: dict[bool, dict[int, Series]] = {False: {}, True: {}}
        once = all(map(same_at_any_tp, shards[1].values()))
        for tp in tps:
            progress(f"count the operators of {module} at TP {tp}", 0, 0)
            for frozen, times in series.items():
                if tp > 1 and once:
                    times[tp] = times[1]
                    continue
                counted = _counted(run, module, frozen, tp=tp)
                times[tp] = _series(inputs, module, counted, device, precision, tp=tp)
        kinds = {
            tp: {layer.kind: layer for layer in layers.values()} for tp, layers in shards.items()
        }
        progress(f"count the overlapped messages of {module}", 0, 0)
        hides = overlap_savings(run, module, tps, device, precision, links.of(True))
        known = known_parts(kinds, flops[module], running(run, module, tps), hides)
        modules[module] = module_profile(module, kind, setting, known, series[False], series[True])
    return Profile(
        precision=precision,
        fingerprints=Fingerprints(
            model=file.model_fingerprint(),
            data=data.profile.fingerprint,
            cluster=file.cluster_fingerprint(),
        ),
        cluster=file.cluster,
        provenance=_provenance(device, file.cluster) | data.provenance,
        device=_described(device, precision, file.cluster),
        inputs=inputs,
        modules=modules,
        links=links,
        data=data.profile,
        preprocess=data.preprocess,
    )


def _shards(run: Run, table: list[LayerInfo], module: str, *, tp: int) -> dict[int, PipelineLayer]:
    """Build the first rank's TP shard of the first layer of every kind, by index in the model."""
    dtype = torch.bfloat16 if run.file.train.precision == "bf16" else torch.float32
    layers = {
        index: layer
        for start, stop in first_of_kinds(table, module, 1)
        for index, layer in enumerate(build_layers(run, start, stop, "meta", dtype, tp=tp), start)
    }
    for layer in layers.values():
        join(layer, None if tp == 1 else Group(None, tp, 0))
    return layers


@of_model
def _counted(run: Run, module: str, frozen: bool, *, tp: int) -> dict[str, list[LayerOperators]]:
    """Count the kernels of one rank's TP shard at each of `_sizes`, by kind of layer.

    The weights are frozen or trained, as `frozen` says.
    """
    inputs, table = describe(run), layer_table(run)
    shards = _shards(run, table, module, tp=tp)
    found: dict[str, list[LayerOperators]] = {layer.kind: [] for layer in shards.values()}
    for size in _sizes(inputs, module, tp=tp):
        batch = probe_batch(inputs, device="meta", **size)
        for index, layer in shards.items():
            layer.ask_for_gradients(not frozen)
            dtype = next(layer.parameters()).dtype
            state = state_at(table, index, inputs, batch, "meta", dtype, tp=tp)
            found[layer.kind].append(layer_operators(layer, state, batch))
    return found


def _series(
    inputs: ModelInputs,
    module: str,
    counted: Mapping[str, Sequence[LayerOperators]],
    device: Device,
    precision: Precision,
    *,
    tp: int,
) -> Series:
    """Return times and saved bytes of every layer of a module at `_sizes`, without TP messages."""
    works = [
        probe_work(
            inputs,
            module,
            windows=False,
            **{name: value for name, value in size.items() if name != "length"},
        )
        for size in _sizes(inputs, module, tp=tp)
    ]
    times = {
        kind: [
            (
                kernels_ms(device, precision, one.forward),
                kernels_ms(device, precision, one.backward),
                float(one.saved_bytes),
            )
            for one in done
        ]
        for kind, done in counted.items()
    }
    values = {part: np.array(rows).T for part, rows in times.items()}
    if inputs.item(module) == "sequence":
        works, values = _padded(inputs.sequence_length, works, values)
    return Series(
        works,
        {part: rows[:2] for part, rows in values.items()},
        works,
        {part: rows[2] for part, rows in values.items()},
    )


def _sizes(inputs: ModelInputs, module: str, *, tp: int) -> list[dict[str, Any]]:
    """Return one probe size per amount that costs depend on, with rows divisible by the TP size."""
    head = inputs.head(module)
    if head is None:  # full-length sequences: the loss's chunks are as large as in a step
        length = inputs.sequence_length
        return [
            {"documents": [lengths] * sequences * tp, "length": length}
            for sequences, lengths in (
                (1, [length]),
                (1, [length - length // 2, length // 2]),
                (2, [length]),
            )
        ]
    if head.alike:  # a TP group of a generator divides no rows
        return [{head.item: count * (1 if head.item == "target" else tp)} for count in (2, 5)]
    if isinstance(head, LibraryItems):
        small, medium, large = head.spread
        return [{head.item: [*one] * tp} for one in ([small], [medium], [small] * 2, [large])]
    p = head.period
    return [  # none is square, so that position embeddings are interpolated in all of them
        {head.item: [head.grid_of(rows * p, columns * p)] * count * tp}
        for count, rows, columns in ((1, 6, 4), (1, 8, 6), (2, 6, 4), (3, 8, 10))
    ]


def _padded(
    length: int, works: list[Work], values: dict[str, Floats]
) -> tuple[list[Work], dict[str, Floats]]:
    """Convert costs of unpadded probes into costs of sequences padded to the model's length.

    Rows are computed whether they hold tokens or padding; the probes have sequences without
    padding. A cost is base + per_row · rows + per_length_sq · Σ length².
    """
    scale = np.array([1.0, length, length**2])
    amounts = np.array([(1.0, work.tokens, work.sum_length_sq) for work in works]) / scale
    full = [
        Work(1, length, length**2),
        Work(1, length / 2, length**2 / 8),
        Work(2, length, length**2 / 2),
        Work(4, 3 * length, length**2),
    ]
    wanted = np.array([(1.0, work.items * length, work.sum_length_sq) for work in full]) / scale
    return full, {
        part: np.maximum(0.0, wanted @ np.linalg.solve(amounts, rows.T)).T
        for part, rows in values.items()
    }


def _described(device: Device, precision: Precision, cluster: ClusterSpec) -> DeviceProfile:
    return DeviceProfile(
        name=device.name,
        kind="analytic",
        count=cluster.gpus,
        memory_gib=device.memory_gib,
        peak_tflops=device.peak_of(precision),
        flash_attention=4 if cluster.flash_attention == 4 else 2,
        **catalogue().memory.reserves,
        optimizer_ns_per_parameter=1e9 * memory_s(device, OPTIMIZER_BYTES[precision]),
    )


def _provenance(device: Device, cluster: ClusterSpec) -> dict[str, str]:
    known = catalogue()
    given = [
        f"{name} {value:g}"
        for name, value in (
            ("peak_tflops", cluster.peak_tflops),
            ("memory_gib", cluster.memory_gib),
            ("links.intra_node_gbps", cluster.links.intra_node_gbps),
        )
        if value is not None
    ]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device.source,
        "kernels": f"curve {device.curve}: {known.curves[device.curve].source}",
        "rules": RULES,
        "links": known.links.source,
        "network": (
            f"{cluster.links.inter_node_gbps:g} Gbit/s per device (run file; typical"
            f" {device.network_gbps:g})"
        ),
        **({"run_file": ", ".join(given)} if given else {}),
        **library_versions(),
    }

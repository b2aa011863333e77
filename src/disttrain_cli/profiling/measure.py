"""Steps of `disttrain profile`, from run file to profile: data, device, processes, fits.

Times on a CPU are CPU times under the load of the whole run, multiplied by processes / cores: the
duration of an operation while all ranks are busy (`compute.py` says why; `simulation.shared_cores`
starts from the same convention).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

import numpy as np

from disttrain_cli.costs.hardware import Precision, lookup
from disttrain_cli.errors import DisttrainError, SpecError
from disttrain_cli.models.flops import LayerFlops, count_flops
from disttrain_cli.models.graph import build_layers, describe, layer_table
from disttrain_cli.models.layer import PipelineLayer
from disttrain_cli.models.probe import probe_work
from disttrain_cli.models.sharding import tp_degrees
from disttrain_cli.profiling.assemble import Hidden, Series, Setting, known_parts, module_profile
from disttrain_cli.profiling.budget import Meter
from disttrain_cli.profiling.dataset import Dataset, read_dataset
from disttrain_cli.profiling.device import choose_kind, cpu_name, describe_device, local_processes
from disttrain_cli.profiling.footprints import running
from disttrain_cli.profiling.processes import Measured, Request, measure_in_processes
from disttrain_cli.profiling.records import record_name, records_path, save
from disttrain_cli.profiling.routing import with_routing
from disttrain_cli.profiling.sizes import (
    draw_sizes,
    needed_draws,
    packed_sizes,
    sequences_per_draw,
    spread,
    with_work,
)
from disttrain_cli.profiling.tp_overlap import overlap_savings
from disttrain_cli.profiling.trial import first_of_kinds
from disttrain_cli.profiling.versions import library_versions
from disttrain_cli.profiling.worker import Variant
from disttrain_cli.spec.files import fingerprint
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.profile import DeviceProfile, Fingerprints, LinkTimes, Measuring, Profile
from disttrain_cli.spec.progress import Progress, silent
from disttrain_cli.spec.runfile import Run

ANALYTIC = "analytic:"
#: Draws at TP 1 with trained weights (MOST), and of all other variants (FEWER): from 18 to 110,
#: errors on other sizes changed by less than 1 % of the time (tiny preset;
#: docs/decisions/10-profiling.md).
MOST = 36
FEWER = 18
#: Draws whose saved activations are counted.
COUNTED = 6


def measure(
    run: Run, device: str = "auto", progress: Progress = silent, meter: Meter | None = None
) -> Profile:
    """Measure everything that the planner needs to know of this machine, this model and this data.

    Builds the sample index, or reuses the existing one if it still describes the data. `device` is
    "auto", "cpu", "cuda" or "analytic:NAME"; "auto" takes the run file's choice (`cluster.device`),
    and if that is "auto" too, CUDA where available. An analytic device is not measured but computed
    (`analytic.py`). Layers measured by an interrupted profile, or by one of a cluster of another
    size, are reused (`records.py`). Measuring ends when `meter` reaches the budget (`budget.py`);
    sizes that were not measured by then are interpolated.

    Raises:
        DisttrainError: no such device, or a module's layers do not fit into its memory.
        DataError: the dataset is missing, empty or too damaged, or has nothing for one of the
            modules.
        SpecError: the model's configuration is wrong, or the peak of this GPU is not known.
        RankFailedError: a measuring process failed (its log is named).
    """
    file, meter = run.file, meter or Meter()
    wanted = device if device != "auto" else file.cluster.device
    kind = "analytic" if wanted.startswith(ANALYTIC) else choose_kind(wanted)
    if file.cluster.ranks_per_gpu > 1 and kind != "cuda":
        raise SpecError(
            "Only ranks on GPUs of this machine can share them",
            f"cluster.ranks_per_gpu: {file.cluster.ranks_per_gpu}, device: {wanted} ({kind})",
            "Remove cluster.ranks_per_gpu; on a CPU, cluster.gpus_per_node counts processes.",
        )
    if kind == "analytic":
        from disttrain_cli.profiling.analytic import analytic_profile

        return analytic_profile(run, wanted.removeprefix(ANALYTIC), progress)
    processes = local_processes(file.cluster, kind)
    inputs = describe(run)
    with meter.stopped():
        data = read_dataset(run, inputs, progress)
    progress("measure the device", 0, 0)
    described = describe_device(file.cluster, kind, file.train.precision)
    progress("count FLOPs", 0, 0)
    flops = count_flops(run)
    progress("record the memory and messages of layers", 0, 0)
    degrees = {name: tp_degrees(run, name, file.cluster.gpus_per_node) for name in file.model.order}
    held = {name: running(run, name, tps) for name, tps in degrees.items()}
    request = _request(run, kind, processes, inputs, data, described, degrees, flops)
    measured = measure_in_processes(run, request, meter, progress)
    sharing = max(1.0, processes / described.cores) if kind == "cpu" else 1.0
    setting = Setting(
        layer_table(run),
        inputs,
        data,
        measured.links.of(True),
        value_bytes=2 if file.train.precision == "bf16" else 4,
    )
    modules, sizes = {}, {}
    for name, wanted_tps in degrees.items():
        sizes[name] = _counts(request, measured, name)
        tps = [tp for tp in wanted_tps if tp == 1 or sizes[name][str(tp)][0]]
        trained, frozen = (
            {tp: _series(run, inputs, request, measured, name, still, sharing, tp=tp) for tp in tps}
            for still in (False, True)
        )
        hides = overlap_savings_on(described, file.train.precision, run, name, tps, setting.links)
        modules[name] = module_profile(
            name,
            file.model.modules[name].kind,
            setting,
            known_parts(_shards(run, name, tps), flops[name], held[name], hides),
            trained,
            frozen,
        )
    modules = with_routing(run, inputs, modules, kind, progress)
    measuring = Measuring(
        clock="cpu" if kind == "cpu" else "wall",
        budget_s=measured.budget_s,
        started_s=measured.started_s,
        spent_s=meter.read_s(kind),
        sizes=sizes,
    )
    profile = Profile(
        precision=file.train.precision,
        fingerprints=Fingerprints(
            model=file.model_fingerprint(),
            data=data.profile.fingerprint,
            cluster=file.cluster_fingerprint(),
        ),
        cluster=file.cluster,
        provenance=_provenance(measured, kind) | data.provenance,
        device=described.model_copy(
            update={"optimizer_ns_per_parameter": measured.optimizer_ns * sharing} | measured.load
        ),
        inputs=inputs,
        modules=modules,
        links=measured.links,
        data=data.profile,
        preprocess=data.preprocess,
        measuring=measuring,
    )
    # another profile of the same cluster goes on with the TP sizes that the budget left out
    completed_for = None if measuring.not_measured else file.cluster.figures()
    save(records_path(run), request.key, request.peak_tflops, measured.records, completed_for)
    return profile


def _counts(request: Request, measured: Measured, module: str) -> dict[str, tuple[int, int]]:
    """Return, by TP size of a module, (draws measured, all draws).

    None count as measured where some that a fit needs are missing, of trained or frozen weights.
    """
    counts: dict[str, tuple[int, int]] = {}
    for tp in sorted({one.tp for one in request.variants if one.module == module}):
        variants = [one for one in request.variants if (one.module, one.tp) == (module, tp)]
        done = [
            sum(
                record_name(module, one.frozen, draw, tp=tp) in measured.records
                for draw in one.draws
            )
            for one in variants
        ]
        fitted = all(
            record_name(module, one.frozen, draw, tp=tp) in measured.records
            for one in variants
            for draw in (one.needed[0], one.needed[-1])  # the largest may exceed the memory
        )
        counts[str(tp)] = (sum(done) if fitted else 0, sum(len(one.draws) for one in variants))
    return counts


def _request(
    run: Run,
    kind: str,
    processes: int,
    inputs: ModelInputs,
    data: Dataset,
    device: DeviceProfile,
    degrees: Mapping[str, list[int]],
    flops: Mapping[str, Mapping[str, LayerFlops]],
) -> Request:
    """Select the draws to measure, spanning the sizes; fewer where TP > 1 or weights are frozen."""
    file, sizes = run.file, packed_sizes(data.drawn)
    per_draw = sequences_per_draw(kind, file.train.global_batch_size)
    draws = {}
    for name in file.model.order:
        what = inputs.item(name)
        # Where fewer than one sequence in hundreds has work, the drawn ones may have none.
        draws[name] = draw_sizes(what, sizes, file.train.seed, per_draw) or draw_sizes(
            what, with_work(what, packed_sizes(data.epoch)), file.train.seed, per_draw
        )
    table = layer_table(run)
    file.train.count_epochs(data.profile.sequences)
    sequences = file.train.total_steps * file.train.global_batch_size
    variants, draw_flops, training_flops = [], {}, {}
    for name, of_module in draws.items():
        works = [probe_work(inputs, name, **draw) for draw in of_module]
        kinds = [flops[name][layer.kind] for layer in table if layer.module == name]
        costs = [sum(one.forward(work) + one.backward(work) for one in kinds) for work in works]
        draw_flops[name] = costs
        training_flops[name] = sequences * sum(
            one.forward(data.mean[name]) + one.backward(data.mean[name]) for one in kinds
        )
        order = spread(works)
        needed = needed_draws(order, costs, kind)
        order = list(dict.fromkeys([*needed, *order]))
        for tp in degrees[name]:
            for frozen in (False, True):
                chosen = order[: FEWER if frozen or tp > 1 else MOST]
                variants.append(Variant(name, tp, frozen, chosen, needed, order[:COUNTED]))
    key = fingerprint(
        {
            "model": file.model_fingerprint(),
            "data": data.profile.fingerprint,
            "seed": file.train.seed,
            "device": device.name,
            "flash_attention": device.flash_attention,
            # they share its cores, or a GPU
            "processes": processes if kind == "cpu" else file.cluster.ranks_per_gpu,
            "versions": library_versions(),
            "draws": draws,
        }
    )
    parameters = sum(layer.parameters for layer in table)
    return Request(
        kind,
        processes,
        parameters,
        draws,
        draw_flops,
        training_flops,
        variants,
        key,
        device.peak_tflops,
    )


def _series(
    run: Run,
    inputs: ModelInputs,
    request: Request,
    measured: Measured,
    module: str,
    frozen: bool,
    sharing: float,
    *,
    tp: int,
) -> Series:
    """Return the measurements of a module's variant, without draws that did not fit into memory.

    Args:
        sharing: processes per core, by which CPU times are multiplied.
    """
    names = {
        draw: record_name(module, frozen, draw, tp=tp) for draw in range(len(request.draws[module]))
    }
    records = {
        draw: measured.records[name] for draw, name in names.items() if name in measured.records
    }
    counted = {
        draw: record["kept_bytes"] for draw, record in records.items() if record["kept_bytes"]
    }
    if not counted:
        raise DisttrainError(
            f"No measured size of {module} at TP {tp} fits into the device's memory",
            "microbatches of its own data were tried",
            "Lower data.sequence_length or data.max_image_pixels.",
        )
    works = {draw: probe_work(inputs, module, **request.draws[module][draw]) for draw in records}
    kinds = next(iter(counted.values()))
    times = {
        kind: (
            sharing
            * np.array([np.median(record["times"][kind], axis=0) for record in records.values()]).T
        )
        for kind in kinds
    }
    return Series(
        list(works.values()),
        times,
        [works[draw] for draw in counted],
        {kind: np.array([kept[kind] for kept in counted.values()]) for kind in kinds},
    )


def _shards(run: Run, module: str, tps: list[int]) -> dict[int, dict[str, PipelineLayer]]:
    """Build one rank's TP shard of the first layer of every kind, by TP size and kind.

    They are on the meta device, without memory.
    """
    ranges = first_of_kinds(layer_table(run), module, 1)
    return {
        tp: {
            layer.kind: layer
            for start, stop in ranges
            for layer in build_layers(run, start, stop, "meta", tp=tp)
        }
        for tp in tps
    }


def overlap_savings_on(
    device: DeviceProfile,
    precision: Precision,
    run: Run,
    module: str,
    tps: list[int],
    links: LinkTimes,
) -> dict[int, dict[str, Hidden]]:
    """Return the time that overlapped messages save, by measured links and the catalogue's curve.

    Nothing on CPUs, where messages take the same cores as compute, or on a device that the
    catalogue lacks.
    """
    if device.kind != "cuda":
        return {}
    try:
        return overlap_savings(run, module, tps, lookup(device.name), precision, links)
    except SpecError:
        return {}


def _provenance(measured: Measured, kind: str) -> dict[str, str]:
    sources = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "host_cpu": cpu_name(),
        "wall_over_cpu_time": f"{measured.slowdown:.2f}",
    }
    if kind == "cuda":
        sources["hidden_ms"] = "computed: the catalogue's curve, measured links"
    if measured.continued:
        sources["continued"] = (
            f"{measured.continued} of {len(measured.records)} measurements of an earlier profile"
        )
    return sources | library_versions()

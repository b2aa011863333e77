"""`disttrain profile`: from a run file to a profile, in the order index → device → processes → fits.

Times on a CPU are CPU times under the load of the whole run, multiplied by processes / cores: what an operation
takes while all ranks are busy (`compute.py` says why; `simulation.sharing` starts from the same convention).
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from disttrain_cli.data.index import Index, build_index, read_index
from disttrain_cli.data.packing import Packing, SequenceStream, pack
from disttrain_cli.data.statistics import describe_data
from disttrain_cli.errors import DataError, DisttrainError, MismatchError
from disttrain_cli.models.flops import count_flops
from disttrain_cli.models.graph import describe, layer_table
from disttrain_cli.models.probe import probe_work
from disttrain_cli.profiling.assemble import ModuleMeasurements, module_profile
from disttrain_cli.profiling.device import choose_kind, cpu_name, describe_device, local_processes
from disttrain_cli.profiling.preprocess import measure_preprocessing
from disttrain_cli.profiling.sizes import SEQUENCES, PackedSizes, draw_sizes
from disttrain_cli.runtime.launch import launch
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.profile import Fingerprints, LinkProfile, Profile
from disttrain_cli.spec.progress import Progress, silent
from disttrain_cli.spec.runfile import Run

PASSES = 3  # over all draws; those after the first only while the budget lasts
BUDGET_S = 8.0
TIMEOUT_S = 3600.0
LIBRARIES = ("disttrain", "torch", "transformers", "diffusers", "deepspeed")

Draws = dict[str, list[dict[str, Any]]]  # module → arguments of `probe_batch`


@dataclass(frozen=True)
class Measured:
    """What the processes found, joined."""

    links: LinkProfile
    times: dict[str, list[dict[str, list[float]]]]  # module → per draw: kind → (forward, backward) in ms
    memory: dict[str, dict[int, dict[str, float]]]  # module → draw → kind → bytes
    slowdown: float  # wall time over CPU time, mean over processes


def measure(run: Run, device: str = "auto", progress: Progress = silent) -> Profile:
    """Measure everything that the planner needs to know of this machine, this model and this data.

    Builds the sample index, or takes the one that is there if it still describes the data. `device` is "auto",
    "cpu" or "cuda"; "auto" asks the run file (`cluster.device`), and then takes CUDA where there is one.

    Raises:
        DisttrainError: no such device, or a module's layers do not fit into its memory.
        DataError: the dataset is missing, empty or too damaged.
        SpecError: the model's configuration is wrong, or the peak of this GPU is not known.
        RankFailedError: a measuring process failed (its log is named).
    """
    file = run.file
    kind = choose_kind(device if device != "auto" else file.cluster.device)
    processes = local_processes(file.cluster, kind)
    inputs, table = describe(run), layer_table(run)
    index = _fresh_index(run, inputs, progress)
    epoch = pack(index, inputs, file.train.seed, 0)
    sample = SequenceStream(index, file.train.seed).batch(0, SEQUENCES)
    progress("measure the device and preprocessing", 0, 0)
    found = describe_device(file.cluster, kind, file.train.precision)
    preprocess = measure_preprocessing(run, sample)
    progress("count FLOPs", 0, 0)
    flops = count_flops(run)
    sizes = packed_sizes(sample)
    draws = {name: draw_sizes(file.model.modules[name].kind, sizes, file.train.seed) for name in file.model.order}
    measured = _measure_in_processes(run, kind, processes, draws, progress)
    modules = {
        name: module_profile(name, file.model.modules[name].kind, table, epoch if len(epoch) >= SEQUENCES else sample,
                             flops[name], _of_module(run, inputs, name, draws[name], measured),
                             sharing=max(1.0, processes / found.cores) if kind == "cpu" else 1.0,
                             value_bytes=2 if file.train.precision == "bf16" else 4)
        for name in file.model.order}
    return Profile(
        precision=file.train.precision,
        fingerprints=Fingerprints(model=file.model_fingerprint(), data=index.fingerprint,
                                  cluster=file.cluster_fingerprint()),
        provenance=_provenance(measured.slowdown), device=found, inputs=inputs, modules=modules,
        links=measured.links, data=describe_data(epoch), preprocess=preprocess)


def packed_sizes(packing: Packing) -> list[PackedSizes]:
    """What each sequence of a packing holds."""
    lengths = packing.index.lengths[packing.samples].tolist()
    grids = [(rows, columns) for rows, columns in packing.image_grid.tolist()]
    samples, images = packing.sample_start.tolist(), packing.image_start.tolist()
    targets = np.diff(packing.target_start).tolist()
    return [PackedSizes(lengths[samples[i]:samples[i + 1]], grids[images[i]:images[i + 1]], targets[i])
            for i in range(len(packing))]


def _fresh_index(run: Run, inputs: ModelInputs, progress: Progress) -> Index:
    try:
        return read_index(run, inputs)
    except (DataError, MismatchError):
        return build_index(run, inputs, progress)


def _measure_in_processes(run: Run, kind: str, processes: int, draws: Draws, progress: Progress) -> Measured:
    """Run `worker.main` in all processes at once and join what they found."""
    total = PASSES * sum(len(own) for own in draws.values())
    with tempfile.TemporaryDirectory(prefix="disttrain-profile-") as name:
        folder = Path(name)

        def report() -> None:
            counts = [file.read_text() for file in folder.glob("*.done")]
            progress(f"measure links and layers, {processes} at once", sum(int(count or 0) for count in counts), total)

        payload = {"run": str(run.path.resolve()), "device": kind, "draws": draws, "passes": PASSES,
                   "budget_s": BUDGET_S, "folder": name}
        launch(processes, "disttrain_cli.profiling.worker:main", payload, run.dir.logs / "profile",
               timeout_s=TIMEOUT_S, on_poll=report)
        results = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]
    times: dict[str, list[dict[str, list[float]]]] = {module: [{}] * len(own) for module, own in draws.items()}
    memory: dict[str, dict[int, dict[str, float]]] = {module: {} for module in draws}
    for share in [share for result in results for share in result["shares"]]:
        first, step = share["first"], share["step"]
        times[share["module"]][first::step] = share["times"]
        memory[share["module"]] |= {first + step * int(place): kept for place, kept in share["memory"].items()}
    return Measured(LinkProfile.model_validate(results[0]["links"]), times, memory,
                    slowdown=float(np.mean([result["slowdown"] for result in results])))


def _of_module(run: Run, inputs: ModelInputs, name: str, draws: list[dict[str, Any]],
               measured: Measured) -> ModuleMeasurements:
    """The measurements of one module, without the draws that did not fit into memory."""
    works = [probe_work(inputs, run.file.model.modules[name].kind, **draw) for draw in draws]
    done = [draw for draw, times in enumerate(measured.times[name]) if times]
    memory = measured.memory[name]
    if draws and not (done and memory):
        raise DisttrainError(f"No measured size of {name} fits into the device's memory",
                             f"{len(draws)} microbatches of its own data were tried",
                             "Lower data.sequence_length or data.max_image_pixels.")
    return ModuleMeasurements([works[draw] for draw in done], [measured.times[name][draw] for draw in done],
                              [works[draw] for draw in memory], list(memory.values()))


def _provenance(slowdown: float) -> dict[str, str]:
    found = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "host_cpu": cpu_name(),
             "wall_over_cpu_time": f"{slowdown:.2f}"}
    for library in LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            continue
    return found

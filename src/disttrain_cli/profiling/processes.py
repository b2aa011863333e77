"""Launch of the measuring processes, their supervision, and storage of their records."""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from disttrain_cli.profiling.budget import CPU_S, CUDA_S, Meter
from disttrain_cli.profiling.records import Records, load, record_name, records_path, save
from disttrain_cli.profiling.worker import Variant
from disttrain_cli.runtime.launching.launch import launch
from disttrain_cli.spec.profile import LinkProfile
from disttrain_cli.spec.progress import Progress
from disttrain_cli.spec.runfile import Run

FITS_S = 2.0  # of the budget, reserved for the fits after the measurements
TIMEOUT_S = 3600.0
SAVE_S = 2.0


@dataclass(frozen=True)
class Request:
    """The measurements to make."""

    kind: str  # "cpu" or "cuda"
    processes: int
    parameters: int  # of the whole model
    draws: dict[str, list[dict[str, Any]]]  # module → arguments of `probe_batch`
    flops: dict[str, list[float]]  # module → of a forward and backward of each draw
    training_flops: dict[str, float]  # module → of all steps
    variants: list[Variant]
    key: str  # of records that may be reused
    peak_tflops: float  # of the device, as measured now

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of the records of a complete profile."""
        return frozenset(
            record_name(variant.module, variant.frozen, draw, tp=variant.tp)
            for variant in self.variants
            for draw in variant.draws
        )


@dataclass(frozen=True)
class Measured:
    """Results of the processes, merged."""

    links: LinkProfile
    optimizer_ns: float  # per parameter, as this process's own time
    records: Records
    slowdown: float  # wall time over CPU time, mean over processes
    continued: int  # records reused from an earlier profile
    budget_s: float
    load: dict[str, Any]  # fields of the device under load (`sustained.load_of`)
    started_s: float  # of the budget, spent before the first layer


def measure_in_processes(run: Run, request: Request, meter: Meter, progress: Progress) -> Measured:
    """Run `worker.main` in all processes at once until `meter` reaches the budget; merge results.

    Every two seconds, and in any case at the end, the records are written to the file next to the
    profile.

    Raises:
        RankFailedError: a process failed or the time ran out.
        SpecError: the run's folder cannot be written.
    """
    path = records_path(run)
    earlier = load(path, request.key, request.peak_tflops, run.file.cluster.figures())
    records = {name: record for name, record in earlier.items() if name in request.names}
    continued = len(records)
    limit_s, clock = (CPU_S, " of CPU") if request.kind == "cpu" else (CUDA_S, "")
    taken_over = f", {continued} sizes reused from an earlier profile" if continued else ""
    progress(f"measure for at most {limit_s:.0f} s{clock} in all{taken_over}", 0, 0)
    what = f"measure links and layers, {request.processes} at once, seconds{clock}"
    with tempfile.TemporaryDirectory(prefix="disttrain-profile-") as folder:
        saved_s = time.monotonic()

        def report() -> None:
            nonlocal saved_s
            if time.monotonic() - saved_s > SAVE_S:
                reports = _keep(path, request, records, Path(folder))
                saved_s = time.monotonic()
                if reports:
                    spent_s, budget_s = (
                        float(np.mean([report[name] for report in reports]))
                        for name in ("spent_s", "budget_s")
                    )
                    progress(what, min(spent_s, budget_s), round(budget_s))

        payload = {
            "run": run.source,
            "device": request.kind,
            "parameters": request.parameters,
            "draws": request.draws,
            "flops": request.flops,
            "training_flops": request.training_flops,
            "variants": [asdict(variant) for variant in request.variants],
            "kept": sorted(records),
            "budget_s": limit_s,
            "before_s": meter.read_s(request.kind) + FITS_S,
            "started_s": time.monotonic(),
            "timeout_s": run.file.train.timeout_s,
            "folder": folder,
        }
        try:
            launch(
                request.processes,
                "disttrain_cli.profiling.worker:main",
                payload,
                run.dir.logs / "profile",
                timeout_s=TIMEOUT_S,
                on_poll=report,
            )
        finally:
            results = _keep(path, request, records, Path(folder))
    budget_s = min(float(result["budget_s"]) for result in results)
    spent_s = round(meter.read_s(request.kind))
    progress(what, spent_s, spent_s)
    return Measured(
        LinkProfile.model_validate(results[0]["links"]),
        records=records,
        continued=continued,
        optimizer_ns=float(np.median([result["optimizer_ns"] for result in results])),
        slowdown=float(np.mean([result["slowdown"] for result in results])),
        budget_s=budget_s,
        load=results[0]["load"],
        started_s=float(np.mean([result["started_s"] for result in results])) - FITS_S,
    )


def _keep(path: Path, request: Request, records: Records, folder: Path) -> list[dict[str, Any]]:
    """Merge the processes' reports into `records`, write them to the file, return the reports."""
    reports = [json.loads(file.read_text()) for file in sorted(folder.glob("[0-9]*.json"))]
    for report in reports:
        records.update(report["records"])
    if records:
        save(path, request.key, request.peak_tflops, records)
    return reports

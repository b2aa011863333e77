"""Starting the measuring processes, watching them, and keeping what they have found so far."""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from disttrain_cli.profiling.kept import Records, kept_path, load, record_name, save
from disttrain_cli.profiling.worker import Variant
from disttrain_cli.runtime.launching.launch import launch
from disttrain_cli.spec.profile import LinkProfile
from disttrain_cli.spec.progress import Progress
from disttrain_cli.spec.runfile import Run

PASSES = 3  # over all draws; those after the first only while the budget lasts
BUDGET_S = 5.0
TIMEOUT_S = 3600.0
SAVE_S = 2.0


@dataclass(frozen=True)
class Request:
    """What is to be measured."""

    kind: str  # "cpu" or "cuda"
    processes: int
    parameters: int  # of the whole model
    draws: dict[str, list[dict[str, Any]]]  # module → arguments of `probe_batch`
    variants: list[Variant]
    key: str  # of records that may be taken over

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of the records that a whole profile has."""
        return frozenset(
            record_name(variant.module, variant.tp, variant.frozen, draw)
            for variant in self.variants
            for draw in variant.draws
        )


@dataclass(frozen=True)
class Measured:
    """What the processes found, joined."""

    links: LinkProfile
    optimizer_ns: float  # per parameter, as this process's own time
    records: Records
    slowdown: float  # wall time over CPU time, mean over processes
    continued: int  # records that an earlier profile had left


def measure_in_processes(run: Run, request: Request, progress: Progress) -> Measured:
    """Run `worker.main` in all processes at once and join what they found.

    Every two seconds, and at the end whatever it is, the records go to the file beside the profile.

    Raises:
        RankFailedError: a process failed or the time ran out.
        SpecError: the run's folder cannot be written.
    """
    path = kept_path(run)
    earlier = load(path, request.key, run.file.cluster.figures())
    records = {name: record for name, record in earlier.items() if name in request.names}
    continued = len(records)
    what = f"measure links and layers, {request.processes} at once"
    if continued:
        what += f", {continued} taken over from an earlier profile"
    progress(what, 0, len(request.names))
    with tempfile.TemporaryDirectory(prefix="disttrain-profile-") as folder:
        saved_s = time.monotonic()

        def report() -> None:
            nonlocal saved_s
            if time.monotonic() - saved_s > SAVE_S:
                _keep(path, request.key, records, Path(folder))
                saved_s = time.monotonic()
                progress(what, len(records), len(request.names))

        payload = {
            "run": run.source,
            "device": request.kind,
            "parameters": request.parameters,
            "draws": request.draws,
            "variants": [asdict(variant) for variant in request.variants],
            "kept": sorted(records),
            "passes": PASSES,
            "budget_s": BUDGET_S,
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
            results = _keep(path, request.key, records, Path(folder))
    progress(what, len(records), len(request.names))
    return Measured(
        LinkProfile.model_validate(results[0]["links"]),
        records=records,
        continued=continued,
        optimizer_ns=float(np.median([result["optimizer_ns"] for result in results])),
        slowdown=float(np.mean([result["slowdown"] for result in results])),
    )


def _keep(path: Path, key: str, records: Records, folder: Path) -> list[dict[str, Any]]:
    """Take in what the processes have reported, write it to the file, and return the reports."""
    reports = [json.loads(file.read_text()) for file in sorted(folder.glob("[0-9]*.json"))]
    for report in reports:
        records.update(report["records"])
    if records:
        save(path, key, records)
    return reports

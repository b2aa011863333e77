"""Locations of one run's artefacts: `runs/NAME/` next to the run file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunDir:
    """Paths inside a run's folder; accessing them creates nothing."""

    root: Path

    @property
    def index(self) -> Path:
        """Sample index, Parquet (`spec.index`)."""
        return self.root / "index.parquet"

    @property
    def partial_index(self) -> Path:
        """Rows of single shards, while the index is created (`data.indexing.shard_files`)."""
        return self.root / "index.partial"

    @property
    def columns(self) -> Path:
        """The index as flat files (`data.index.index_columns`)."""
        return self.root / "columns"

    @property
    def orders(self) -> Path:
        """Orders of epochs, flat files (`data.epochs.making`)."""
        return self.root / "orders"

    @property
    def latents(self) -> Path:
        """Cached latents, by generator (`spec.latents`)."""
        return self.root / "latents"

    @property
    def profile(self) -> Path:
        return self.root / "profile.json"

    @property
    def plan(self) -> Path:
        return self.root / "plan.yaml"

    @property
    def traces(self) -> Path:
        """Folder of trace segments (`spec.trace`) and `job.json`."""
        return self.root / "traces"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def images(self) -> Path:
        """Samples at the end of training, by checkpoint: PNG files and `samples.json`."""
        return self.root / "images"

    @property
    def tensorboard(self) -> Path:
        """Event files of one training from step 0, over all starts that resume it."""
        return self.root / "tensorboard"

    @property
    def samples(self) -> Path:
        """Output of `disttrain sample`, in the same form."""
        return self.root / "samples"

    @property
    def rehearsal(self) -> RunDir:
        """Folder of the same form for rehearsals: traces, checkpoints, logs."""
        return RunDir(self.root / "rehearsal")

    @property
    def preflight(self) -> RunDir:
        """Folder of the same form for `train --preflight`: logs."""
        return RunDir(self.root / "preflight")

    @property
    def report(self) -> Path:
        return self.root / "report.html"


def rank_log(logs: Path, rank: int) -> Path:
    """Return the log file of one rank."""
    return logs / f"rank-{rank:05d}.log"


def pulses(logs: Path) -> Path:
    """Return the folder in which the ranks of a start report their activity."""
    return logs / "pulse"


def flight_recorder(logs: Path) -> Path:
    """Return the folder in which the ranks of a hanging start dump PyTorch's flight recorder."""
    return logs / "flight-recorder"


def stop_file(logs: Path) -> Path:
    """Return the file whose existence makes the ranks stop after their step.

    It may name the signal that requested it.
    """
    return logs / "stop"


def stopped_file(logs: Path) -> Path:
    """Return the file that names the reason of an early end with a checkpoint.

    It is written by the ranks of a start that ended before its last step.
    """
    return logs / "stopped"


def replans_file(logs: Path) -> Path:
    """Return the file to which training appends plans adopted while running, as JSON lines."""
    return logs / "replans.jsonl"


def verdicts_file(logs: Path) -> Path:
    """Return the file to which a run's monitor appends changes of its verdicts, as JSON lines."""
    return logs / "verdicts.jsonl"


def run_folder(path: Path) -> Path | None:
    """Return the run's folder, if `path` is it or the `traces` inside it; else None."""
    if (path / "traces").is_dir():
        return path
    return path.parent if path.name == "traces" else None

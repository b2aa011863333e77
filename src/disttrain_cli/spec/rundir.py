"""Where the artefacts of one run lie: `runs/NAME/` beside the run file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunDir:
    """Paths inside a run's folder; nothing is created by asking."""

    root: Path

    @property
    def index(self) -> Path:
        """Sample index, Parquet (`spec.index`)."""
        return self.root / "index.parquet"

    @property
    def partial_index(self) -> Path:
        """Rows of single shards, while the index is made (`data.shard_files`)."""
        return self.root / "index.partial"

    @property
    def columns(self) -> Path:
        """The index as flat files (`data.index_columns`)."""
        return self.root / "columns"

    @property
    def orders(self) -> Path:
        """Orders of epochs, flat files (`data.epochs.making`)."""
        return self.root / "orders"

    @property
    def latents(self) -> Path:
        """Latents prepared beforehand, by generator (`spec.latents`)."""
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
        """What the model drew and wrote when training ended, by checkpoint: PNG files and
        `samples.json`."""
        return self.root / "images"

    @property
    def samples(self) -> Path:
        """The same of `disttrain sample`."""
        return self.root / "samples"

    @property
    def rehearsal(self) -> RunDir:
        """Folder of the same form in which rehearsals leave theirs: traces, checkpoints, logs."""
        return RunDir(self.root / "rehearsal")

    @property
    def preflight(self) -> RunDir:
        """Folder of the same form for what `train --preflight` leaves: logs."""
        return RunDir(self.root / "preflight")

    @property
    def report(self) -> Path:
        return self.root / "report.html"


def rank_log(logs: Path, rank: int) -> Path:
    """Log file of one rank."""
    return logs / f"rank-{rank:05d}.log"


def pulses(logs: Path) -> Path:
    """Folder in which the ranks of a start tell what they do."""
    return logs / "pulse"


def flight_recorder(logs: Path) -> Path:
    """Folder in which the ranks of a start that hangs dump PyTorch's flight recorder."""
    return logs / "flight-recorder"


def stop_file(logs: Path) -> Path:
    """File whose appearance asks the ranks to stop after their step; it may name the signal that
    asked for it."""
    return logs / "stop"


def stopped_file(logs: Path) -> Path:
    """File in which the ranks of a start that ended before its last step, with a checkpoint, say
    what asked for it."""
    return logs / "stopped"


def replans_file(logs: Path) -> Path:
    """File to which training appends the plans that it went on with, a line of JSON each."""
    return logs / "replans.jsonl"


def verdicts_file(logs: Path) -> Path:
    """File to which whoever watches a run appends what its verdicts change to, a line of JSON
    each."""
    return logs / "verdicts.jsonl"


def run_folder(path: Path) -> Path | None:
    """The run's folder, if that or the `traces` inside it was named."""
    if (path / "traces").is_dir():
        return path
    return path.parent if path.name == "traces" else None

"""Verdict on learning when a job ends, for the training command, trackers and job output.

As a program, `python -m disttrain_cli.mitigation.learned JOB.json`: run on the first host once the
ranks that torchrun, Slurm or Kubernetes started have ended, it draws the samples of the trained
model and prints the verdict, as `disttrain train` does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from disttrain_cli.analysis.job.files import recorded_steps
from disttrain_cli.analysis.learning import learning
from disttrain_cli.calls import Reader, read_by
from disttrain_cli.errors import DisttrainError
from disttrain_cli.runtime.checkpoints.folder import trained
from disttrain_cli.runtime.launching.rank import read_job_file
from disttrain_cli.runtime.launching.starts import alone
from disttrain_cli.runtime.outputs.during import sample_trained
from disttrain_cli.spec.learning import Learning
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.rundir import stopped_file
from disttrain_cli.spec.runfile import Run, read_run
from disttrain_cli.spec.samples import Samples


def learned(
    run: Run, profile: Profile, samples: Samples | None, say: Callable[[str], None]
) -> Learning:
    """Judge a run by its recorded steps and report the verdict to trackers.

    They also get the samples of its last checkpoint.
    """
    rows = recorded_steps(run.dir.traces)
    verdict = learning(
        rows,
        profile,
        run.file.train.global_batch_size,
        (samples.matched, len(samples.answers)) if samples else None,
    )
    if rows and run.file.train.track:
        from disttrain_cli.runtime.watching.trackers import sampled, trackers_of

        values = {"verdict": f"{verdict.headline}. {verdict.advice}".rstrip()}
        for tracker in trackers_of(run, rows[-1]["step"] + 1, say):
            if samples is not None:
                folder = run.dir.images / Path(samples.checkpoint).name
                tracker.write(max(0, samples.step - 1), sampled(folder, samples))
            tracker.write(rows[-1]["step"] + 1, values)
            tracker.close()
    return verdict


def main(arguments: list[str]) -> None:
    """Run the program: JOB_FILE. Samples are drawn unless the job was stopped."""
    read_by(Reader(shell=True))
    try:
        _finish(read_job_file(Path(arguments[0])).payload)
    except DisttrainError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def _finish(payload: dict[str, Any]) -> None:
    run, profile = read_run(*payload["run"]), Profile.model_validate(payload["profile"])
    checkpoint, samples = trained(run), None

    def progress(what: str, done: float = 0, total: int = 0) -> None:
        print(what, flush=True)

    with alone(run.dir):
        if checkpoint is not None and not stopped_file(Path(payload["logs"])).exists():
            try:
                samples = sample_trained(run, profile, checkpoint, progress)
            except DisttrainError as error:  # the verdict needs no samples
                progress(f"warning: no samples of {checkpoint.name}: {error}")
        if samples is not None:
            progress(f"{checkpoint}: {samples.summary}")
        for line in learned(run, profile, samples, progress).lines:
            progress(line)


if __name__ == "__main__":
    main(sys.argv[1:])

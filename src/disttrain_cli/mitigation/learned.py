"""Verdict on learning when a job ends, for the training command, trackers and job output.

The job output is that of ranks started by torchrun, Slurm or Kubernetes.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from disttrain_cli.analysis.job.files import recorded_steps
from disttrain_cli.analysis.learning import learning
from disttrain_cli.errors import SpecError
from disttrain_cli.spec.learning import Learning
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.runfile import Run, read_run
from disttrain_cli.spec.samples import Samples
from disttrain_cli.spec.trace import read_job


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
        try:
            start = read_job(run.dir.traces / "job.json").run
        except SpecError as error:  # a full disk when training began
            say(f"warning: no verdict for experiment trackers: {error.what}")
            return verdict
        for tracker in trackers_of(run, start, True, say):
            if samples is not None:
                folder = run.dir.images / Path(samples.checkpoint).name
                tracker.write(samples.step, sampled(folder, samples))
            tracker.write(rows[-1]["step"] + 1, values)
            tracker.close()
    return verdict


def before_fork(payload: dict[str, Any]) -> None:
    """Prepare as `runtime.worker.before_fork` does."""
    from disttrain_cli.runtime import worker

    worker.before_fork(payload)


def main(payload: dict[str, Any]) -> None:
    """Train as `runtime.worker.main`; rank 0 then prints the verdict, as `disttrain train` does."""
    from disttrain_cli.runtime import worker
    from disttrain_cli.runtime.watching.lines import Narration

    worker.main(payload)
    if os.environ["RANK"] != "0":
        return
    say = Narration(payload["console"], int(payload["steps"])).say
    try:
        verdict = learned(
            read_run(*payload["run"]), Profile.model_validate(payload["profile"]), None, say
        )
        for line in verdict.lines:
            say(line)
    except Exception:  # the training succeeded even if it cannot be judged
        traceback.print_exc()

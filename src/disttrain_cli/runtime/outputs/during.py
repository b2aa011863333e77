"""Samples of the trained model, and of each new checkpoint during training.

During training, a low-priority process on the CPU generates a few answers and images, one
checkpoint at a time.
"""

from __future__ import annotations

import threading
from pathlib import Path

from disttrain_cli.errors import DisttrainError
from disttrain_cli.runtime.checkpoints.folder import held, latest
from disttrain_cli.runtime.launching import launch as launching
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.progress import Progress
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.samples import Samples, read_samples


class Ended(Exception):
    """Raised when training is over."""


def sample(
    run: Run,
    profile: Profile,
    checkpoint: Path,
    most: int | None = None,
    ended: threading.Event | None = None,
) -> Samples | None:
    """Generate a checkpoint's samples into `images/` in a separate process.

    Returns None if the run file requests no samples that the model can generate.

    Args:
        most: limit for each kind, on the CPU and at low priority; None = no limit.
        ended: set to abort sampling.

    Raises:
        RankFailedError: the process failed.
        SpecError: the checkpoint has been removed.
    """
    asked = run.file.samples
    if not (
        asked.answers
        or (asked.images and profile.inputs.target is not None)
        or (asked.read and profile.inputs.of("image"))
    ):
        return None

    def poll() -> None:
        if ended is not None and ended.is_set():
            raise Ended

    folder = run.dir.images / checkpoint.name
    with held(checkpoint):
        launching.launch(
            1,
            "disttrain_cli.runtime.outputs.sampling:main",
            {
                "run": run.source,
                "profile": profile.model_dump(mode="json"),
                "device": profile.device.kind if most is None else "cpu",
                "checkpoint": str(checkpoint),
                "images": str(folder),
                "most": most,
            },
            run.dir.logs / ("sampling" if most is None else "sampling-during"),
            on_poll=poll,
        )
    return read_samples(folder)


def sample_trained(
    run: Run, profile: Profile, checkpoint: Path, progress: Progress
) -> Samples | None:
    """Generate the samples of a finished training as `sample`, and report missing answers."""
    progress("sampling", 0, 0)
    samples, asked = sample(run, profile, checkpoint), run.file.samples
    if samples is not None and (asked.answers or asked.metrics) and not samples.answers:
        why = "the data have no held-out conversation" if asked.answers else "it is 0"
        progress(f"warning: samples.answers: nothing was answered, {why}", 0, 0)
    return samples


class During:
    """Sampling of new checkpoints; `look` is called often, by one thread."""

    def __init__(self, run: Run, profile: Profile, last: int, progress: Progress) -> None:
        self._run, self._profile, self._last, self._progress = run, profile, last, progress
        self._most = run.file.samples.during
        self._seen = latest(run.dir.checkpoints)
        self._ended = threading.Event()
        self.thread: threading.Thread | None = None

    def look(self) -> None:
        """Start sampling the newest checkpoint, unless it is sampled or another one is in progress.

        The last step's checkpoint is sampled after training.
        """
        if not self._most or (self.thread is not None and self.thread.is_alive()):
            return
        newest = latest(self._run.dir.checkpoints)
        if newest is None or newest == self._seen or newest.name == f"step-{self._last:06d}":
            return
        self._seen = newest
        self.thread = threading.Thread(target=self._sample, args=(newest,), daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Abort the sampling in progress."""
        self._ended.set()
        if self.thread is not None:
            self.thread.join()

    def _sample(self, checkpoint: Path) -> None:
        try:
            samples = sample(self._run, self._profile, checkpoint, self._most, self._ended)
        except Ended:
            said = f"{checkpoint.name}: training ended before its samples were there"
        except DisttrainError as error:
            said = f"warning: no samples of {checkpoint.name}: {error.what}"
        else:
            said = "" if samples is None else f"{checkpoint.name}: {samples.summary}"
        if said:
            self._progress(said, 0, 0)

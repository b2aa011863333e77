"""`train --profile-steps A:B`: torch's profile of some steps of a rank, as one Kineto JSON file.

Every operation that the rank's trace has a row for is marked in the profile (`spec.trace.mark`), so
that the analysis can break down its time. Only in these steps the host waits for its GPU at every
mark, so that all work between two marks was queued there. Profiling never ends a training: an error
is reported, and the file omitted.
"""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from disttrain_cli.runtime.hooks import Hook, Step
from disttrain_cli.runtime.watching.marks import Marks
from disttrain_cli.runtime.watching.tracing import Tracer
from disttrain_cli.spec.trace import profile_file


class StepProfiler(Hook):
    """Profiler of one range of steps."""

    def __init__(
        self,
        steps: range,
        traces: Path,
        start: str,
        tracer: Tracer,
        rank: int,
        device: torch.device,
        say: Callable[[str], None],
    ) -> None:
        self._steps, self._file, self._tracer, self._say = (
            steps,
            profile_file(traces, rank, start),
            tracer,
            say,
        )
        self._device = device
        self._activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (
            device.type == "cuda"
        )
        self._profile: profile | None = None
        self._failed = False

    def begin(self, step: int) -> None:
        """Start recording before the range's first step, or where a resumed run enters it."""
        if step not in self._steps or self._failed:
            return
        try:
            if self._profile is None:
                self._tracer.begin("profile")
                self._profile = profile(activities=self._activities)
                self._profile.start()
            self._tracer.marks = Marks(step, self._device)
        except Exception as error:  # training continues without a profile
            self._give_up(error)

    def ended(self, step: Step) -> None:
        """End a step, and write the file after the range's last one."""
        if self._tracer.marks is not None:
            self._tracer.marks.close()
            self._tracer.marks = None
        if step.number + 1 not in self._steps:
            self.close()

    def __exit__(self, *error: Any) -> None:
        self.close()

    def close(self) -> None:
        """Write the recorded steps, if any."""
        if self._profile is None:
            return
        self._tracer.begin("profile")
        recorded, self._profile = self._profile, None
        try:
            recorded.stop()
            _write(recorded, self._file)
        except Exception as error:  # usually a full disk
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._failed, self._profile = True, None
        self._say(f"no profile of {self._file.name.removesuffix('.json.gz')}: {error}")


def _write(recorded: profile, file: Path) -> None:
    """Write the profile atomically (temporary name, then rename), compressed.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    plain, packed = file.with_suffix(".tmp"), file.with_suffix(".gz.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(plain))
        if not _ends_whole(plain):  # Kineto does not report a full disk
            raise OSError(f"{plain} was not written to its end")
        with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=4) as target:
            shutil.copyfileobj(source, target, 1 << 20)
        packed.replace(file)
    finally:
        plain.unlink(missing_ok=True)
        packed.unlink(missing_ok=True)


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 64))
        return file.read().rstrip().endswith(b"}")

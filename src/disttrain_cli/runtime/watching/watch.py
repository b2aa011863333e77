"""Interface of the step loop to the outside: metrics for trackers, and stop requests."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from disttrain_cli.runtime.watching.judged import Judged
from disttrain_cli.runtime.watching.lines import Narration
from disttrain_cli.runtime.watching.trackers import NewSamples, Tracker, Value, figures, sampled

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
#: Reason of a stop after which the job continues on another plan.
STRAGGLER = "straggler"
#: Reasons of stop requests, the first for none; of several, the last in this order counts.
REASONS = ("", STRAGGLER, signal.SIGUSR1.name, "stop file", signal.SIGTERM.name, signal.SIGINT.name)


class Watch:
    """Stop requests and reports of a rank, set up once by its main thread.

    Trackers, narration and the stop file belong to rank 0. SIGTERM, SIGINT or SIGUSR1 to the rank,
    and the file that the launcher writes, request a stop after the step; a second SIGTERM or SIGINT
    ends the rank at once, also while it waits for another one.
    """

    def __init__(
        self,
        trackers: Sequence[Tracker] = (),
        stop_file: Path | None = None,
        narration: Narration | None = None,
        judged: Judged | None = None,
        planned: Mapping[str, float] | None = None,
        new_samples: NewSamples | None = None,
    ) -> None:
        self._new_samples = new_samples
        self._trackers, self._stop_file, self._narration = trackers, stop_file, narration
        self._judged, self._planned = judged, planned or {}
        self._asked = ""
        heard, tell = os.pipe()
        os.set_blocking(tell, False)
        for number in STOPS:
            signal.signal(number, lambda *_: None)
        # written immediately, while Python's handlers wait for the main thread
        signal.set_wakeup_fd(tell)
        threading.Thread(target=self._listen, args=(heard,), name="signals", daemon=True).start()

    def step(self, row: dict[str, Any]) -> None:
        """Pass a finished step to the narration and the trackers (rank 0)."""
        if self._narration is not None:
            self._narration.step(row)
        if not self._trackers:
            return
        if self._judged is not None:
            row = row | {"watch": self._judged.lost(), "plan": self._planned}
        values: list[tuple[int, Mapping[str, Value]]] = [(int(row["step"]), figures(row))]
        if self._new_samples is not None:
            # at the last step that the sampled weights were trained on: what a resumed start
            # repeats, and trackers drop, begins after it
            values += [
                (max(0, one.step - 1), sampled(folder, one))
                for folder, one in self._new_samples.take()
            ]
        for tracker, (step, shown) in product(self._trackers, values):
            tracker.write(step, shown)

    def stop_reason(self) -> str:
        """Return the one of `REASONS` that requested this rank to stop.

        A request to one rank is enough: the step loop compares all ranks' reasons. A launcher that
        received a signal names it in the stop file.
        """
        if self._asked or self._stop_file is None or not self._stop_file.exists():
            return self._asked
        named = self._stop_file.read_text().strip()
        return named if named in REASONS[1:] else "stop file"

    def close(self) -> None:
        """Close the trackers."""
        for tracker in self._trackers:
            tracker.close()

    def _listen(self, heard: int) -> None:
        while True:
            for number in os.read(heard, 64):
                if number not in STOPS:
                    continue
                if self._asked and number != signal.SIGUSR1:
                    os._exit(128 + number)
                self._asked = self._asked or signal.Signals(number).name
                print(
                    f"{signal.Signals(number).name}: stopping after this step, with a checkpoint",
                    flush=True,
                )

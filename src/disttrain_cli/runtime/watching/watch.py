"""Stop requests to a training, by signals and by a file."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

from disttrain_cli.runtime.hooks import Hook, Step

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
#: Reason of a stop after which the job continues on another plan.
STRAGGLER = "straggler"
#: Reasons of stop requests, the first for none; of several, the last in this order counts.
REASONS = ("", STRAGGLER, signal.SIGUSR1.name, "stop file", signal.SIGTERM.name, signal.SIGINT.name)


class StopRequests(Hook):
    """Stop requests to a rank, set up once by its main thread.

    SIGTERM, SIGINT or SIGUSR1 to the rank, and the file that the launcher writes, request a stop
    after the step; a second SIGTERM or SIGINT ends the rank at once, also while it waits for
    another one. A request to one rank is enough. The stop file belongs to rank 0.
    """

    def __init__(self, stop_file: Path | None = None) -> None:
        self._stop_file = stop_file
        self._asked = ""
        heard, tell = os.pipe()
        os.set_blocking(tell, False)
        for number in STOPS:
            signal.signal(number, lambda *_: None)
        # written immediately, while Python's handlers wait for the main thread
        signal.set_wakeup_fd(tell)
        threading.Thread(target=self._listen, args=(heard,), name="signals", daemon=True).start()

    def measure(self) -> dict[str, float]:
        """Return the index of the reason of a request to this rank."""
        return {"stop": REASONS.index(self.reason())}

    def stepped(self, step: Step) -> None:
        step.stop = REASONS[int(step.largest["stop"])]

    def reason(self) -> str:
        """Return the one of `REASONS` that requested this rank to stop.

        A launcher that received a signal names it in the stop file.
        """
        if self._asked or self._stop_file is None or not self._stop_file.exists():
            return self._asked
        named = self._stop_file.read_text().strip()
        return named if named in REASONS[1:] else "stop file"

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

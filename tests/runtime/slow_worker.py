"""Ranks that train as ever, but that rank 1 takes longer for every attention."""

import os
import time
from typing import Any

from disttrain_cli.models import ulysses
from disttrain_cli.runtime import worker

SLOWER_S = 0.03

before_fork = worker.before_fork


def main(payload: dict[str, Any]) -> None:
    """Train, rank 1 slower."""
    if os.environ["RANK"] == "1":
        exchanged = ulysses._exchanged

        def late(*given: Any) -> Any:
            time.sleep(SLOWER_S)
            return exchanged(*given)

        ulysses._exchanged = late
    worker.main(payload)

"""The environment of every process that a part is or starts."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]


def environment() -> dict[str, str]:
    """This process's own, in which disttrain, its benchmarks and what PYTHONPATH names are found
    from any folder."""
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    paths = [ROOT / "src", ROOT, *(Path(one).absolute() for one in given)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(map(str, paths)))}

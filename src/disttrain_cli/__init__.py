"""disttrain: disaggregated training of multimodal LLMs (DistTrain, SIGCOMM 2025).

Start reading at `app.py` (the commands) or `api.py` (the same as functions), `spec/` (the artefacts
that pass between them) and `docs/architecture.md` (which room holds what).
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

API = ("profile", "plan", "train", "analyze")


def __getattr__(name: str) -> Any:
    """The functions of `api`, imported when first asked for: the command line starts without."""
    if name in API:
        return getattr(import_module("disttrain_cli.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

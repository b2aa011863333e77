"""disttrain: disaggregated training of multimodal LLMs (DistTrain, SIGCOMM 2025).

Start reading at `app.py` (the commands) or `api/` (the same as functions), `spec/` (the artefacts
that pass between them) and `docs/architecture.md` (the purpose of each subpackage).
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import the functions of `api` on first use, so that the command line starts without them."""
    if not name.startswith("_") and name in (api := import_module("disttrain_cli.api")).__all__:
        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the names that notebooks complete."""
    return ["__version__", *import_module("disttrain_cli.api").__all__]

"""What was found in own traces is kept: the same folder asked again is answered without reading it.

Kept are the analysis and what the report draws, as JSON in the user's cache folder. They are of exactly these files:
the key has the path, size and time of change of every one, and of every file of this program.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from disttrain_cli import __version__
from disttrain_cli.analysis.cache import cached, forget
from disttrain_cli.analysis.report.pictures import Pictures
from disttrain_cli.analysis.result import Analysis
from disttrain_cli.errors import DataError
from disttrain_cli.spec.files import write_whole


def analyze_run(paths: list[Path]) -> tuple[Analysis, Pictures]:
    """The analysis of own traces and what is drawn of them, found now or before.

    Raises:
        DataError: as `database.open_database` and `own.analyze_database`.
    """
    def build(file: Path) -> None:
        from disttrain_cli.analysis.own.analysis import analyze_database
        from disttrain_cli.analysis.own.database import open_database
        from disttrain_cli.analysis.report.pictures import pictures_of

        database = open_database(paths)
        analysis = analyze_database(database)
        pictures = pictures_of(database, analysis.verdict.place.rank)
        write_whole(file, json.dumps({"analysis": analysis.to_json(), "pictures": vars(pictures)}))

    path, stays = cached(_files(paths), f"run {__version__} {_program()} {[str(path) for path in paths]}", build)
    try:
        known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return Analysis.model_validate(known["analysis"]), Pictures(**known["pictures"])
    except (ValueError, KeyError) as error:
        path.unlink(missing_ok=True)
        raise DataError(f"What was kept of these traces is damaged: {path}", str(error).splitlines()[0],
                        "It is removed; run the command again.") from None
    finally:
        if not stays:
            forget(path)


def _files(paths: list[Path]) -> list[Path]:
    """Every file of the trace folders."""
    folders = [path / "traces" if (path / "traces").is_dir() else path for path in paths]
    return sorted(file for folder in folders for file in folder.rglob("*") if file.is_file())


@cache
def _program() -> str:
    """Changes with any file of this package."""
    root = Path(str(resources.files("disttrain_cli")))
    files = sorted((str(file), file.stat().st_size, file.stat().st_mtime_ns)
                   for ending in ("*.py", "*.sql") for file in root.rglob(ending))
    return hashlib.sha256(repr(files).encode()).hexdigest()

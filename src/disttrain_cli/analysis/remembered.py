"""Cache of results: an analysis of unchanged files is returned without reading them again.

The analysis and the data of the report's pictures are stored as JSON in the user's cache folder.
The key has the path, size and modification time of every input file and of every file of this
program.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from disttrain_cli.analysis.cache import cached, forget, program
from disttrain_cli.analysis.result.summary import plain
from disttrain_cli.spec.whole import write_whole

Result = TypeVar("Result")


def remembered(
    inputs: list[Path], about: str, kind: type[Result], find: Callable[[], Result]
) -> Result:
    """Return the cached result for `inputs`, or compute it by `find` and cache it.

    Args:
        inputs: every file that the result depends on.
        about: name of the result, and all else that it depends on.
        kind: type of the result: a struct or a dataclass.
        find: computes the result.
    """

    def build(file: Path) -> None:
        write_whole(file, msgspec.json.encode(find(), enc_hook=plain))

    def known() -> Result:
        path, stays = cached(inputs, f"{about} {program()}", build, ".json")
        try:
            return msgspec.json.decode(path.read_bytes(), type=kind)
        except msgspec.MsgspecError:
            path.unlink(missing_ok=True)
            raise
        finally:
            if not stays:
                forget(path)

    try:
        return known()
    except msgspec.MsgspecError:  # damaged file: compute the result again
        return known()

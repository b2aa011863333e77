"""What was found in traces is kept: the same files asked again are answered without reading them.

Kept are the analysis and, where a report was wanted, what it draws, as JSON in the user's cache
folder. They are of exactly these files: the key has the path, size and time of change of every one,
and of every file of this program.
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
    """What `find` finds in `inputs`, now or before.

    Args:
        inputs: every file that it depends on.
        about: what it is, and all else that it depends on.
        kind: of what is found: a struct or a dataclass.

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
    except msgspec.MsgspecError:  # the file was damaged: found once more
        return known()

"""Sources of data: list a source's shards, read a shard in order, or open it for random access.

A file here reads a format: `tars`, `llava` (conversations), `tables` (Parquet and Arrow, with
`columns` and `rows`). `samples` has their results, `files` their input, and `listing` decides which
files are shards. Names inside data never become a path outside it nor reach a shell; nothing is
extracted or unpickled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from disttrain_cli.data.sources.files import open_file
from disttrain_cli.data.sources.listing import Listing, list_source, shown
from disttrain_cli.data.sources.llava import LlavaShard, read_llava
from disttrain_cli.data.sources.samples import (
    ChatForm,
    Compact,
    Location,
    OpenShard,
    Part,
    Sample,
    Segment,
    Shard,
    Skipped,
    printable,
)
from disttrain_cli.data.sources.tables import (
    ArrowShard,
    ParquetShard,
    RowGroups,
    parts_of,
    read_arrow,
    read_parquet,
)
from disttrain_cli.data.sources.tars import TarShard, read_tar

__all__ = [
    "ChatForm",
    "Compact",
    "Listing",
    "Location",
    "OpenShard",
    "Part",
    "RowGroups",
    "Sample",
    "Segment",
    "Shard",
    "Skipped",
    "list_source",
    "open_shard",
    "parts_of",
    "printable",
    "read_shard",
    "shown",
]

POINTER, POINTER_BYTES = b"version https://git-lfs", 1024  # of Git LFS: beginning, largest size


def read_shard(
    shard: Shard, label: str, chat: ChatForm | None = None
) -> Iterator[Sample | Compact | Skipped]:
    """Read the samples of a shard in order, and the skipped ones; messages name the shard `label`.

    Args:
        chat: renders conversations; None = the tokenizer has no chat template.

    Raises:
        DataError: a URL cannot be read, or the columns of a table do not identify images and texts.
    """
    if (damage := _no_shard(shard, label)) is not None:
        return iter([damage])
    readers = {"tar": read_tar, "llava": read_llava, "parquet": read_parquet, "arrow": read_arrow}
    return readers[shard.form](shard, label, chat)


def _no_shard(shard: Shard, label: str) -> Skipped | None:
    """Return the fault of a file of which no reader could read anything; None if there is none."""
    try:
        file = open_file(shard.path)
    except OSError as error:
        reason = f"cannot be opened: {error.strerror}"
        return Skipped(label, "", reason, None, cut=True)
    if file.size <= POINTER_BYTES and file.read(0, len(POINTER)) == POINTER:
        reason = "a Git LFS pointer in place of the file: git lfs pull"
        return Skipped(label, "", reason, None, cut=True)
    return None


def open_shard(shard: Shard, cache: RowGroups, chat: ChatForm | None = None) -> OpenShard:
    """Open a shard for random access to its samples, with conversations rendered by `chat`.

    Raises:
        OSError, DataError, pyarrow's errors: it cannot be read.
    """
    if shard.form == "parquet":
        return ParquetShard(shard, cache, chat)
    kinds: dict[str, Callable[[Shard, ChatForm | None], OpenShard]] = {
        "tar": TarShard,
        "llava": LlavaShard,
        "arrow": ArrowShard,
    }
    return kinds[shard.form](shard, chat)

"""Sources of data: find the shards of one, read a shard from end to end, open it to read samples
again in any order.

A form is a file: `tars`, `llava` (conversations), `tables` (Parquet and Arrow, with `columns` and
`rows`). What they give is in `samples`, where they read from in `files`. Names inside data are
never a path outside it nor reach a shell; nothing is extracted or unpickled.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath

from disttrain_cli.data.sources.files import is_file, is_url, join, list_files, shown_url
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
from disttrain_cli.errors import DataError

__all__ = [
    "ChatForm",
    "Compact",
    "Location",
    "OpenShard",
    "Part",
    "RowGroups",
    "Sample",
    "Segment",
    "Shard",
    "Skipped",
    "find_shards",
    "open_shard",
    "parts_of",
    "printable",
    "read_shard",
    "shown",
]

FORMS = {
    ".tar": "tar",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".json": "llava",
    ".jsonl": "llava",
}
BELOW = (
    "parquet",
    "arrow",
)  # forms whose files lie anywhere below a folder; those of others lie in it
CAPTIONS = "metadata.jsonl"  # of an imagefolder: it may lie below too
PICTURES = (".jpg", ".jpeg", ".png", ".webp")
PACKED = (".gz", ".tgz", ".bz2", ".xz", ".zst", ".zip", ".lz4")
#: What Hugging Face and img2dataset write beside the data.
BESIDE = (
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    "state.json",
    "config.json",
)


def find_shards(path: str, field: str, images: str | None = None) -> list[Shard]:
    """Shards of a source in order: the one file given, or a folder's by name.

    A folder with tars is read as tars; else with Parquet files anywhere below as Parquet; else with
    Arrow files anywhere below as a Hugging Face dataset; else as conversations or texts (*.json,
    *.jsonl), or the captions of a Hugging Face imagefolder (metadata.jsonl anywhere below).
    `images`: folder of the images that a JSON names, else that of the JSON.

    Raises:
        DataError: there is nothing at `path`, nothing readable in it, or the URL cannot be reached;
        `field` is the
            run file's field.
    """
    hint = (
        "Correct data.sources in the run file, or write an example with: disttrain init DIR"
        " --sample-data"
    )
    given = f"given by {printable(field)}"
    form = _form(path)
    # a web page that lists files counts as a folder
    if (form or not is_url(path)) and is_file(path):
        if form is None:
            raise DataError(
                f"The form of {shown(path)} is not known",
                f"known: {', '.join(FORMS)}; {given}",
                hint,
            )
        folder, _, name = path.partition("?")[0].rpartition("/")
        return [Shard(form, path, name, images or folder if form == "llava" else "")]
    if form:
        raise DataError(
            f"There is no file at {shown(path)}, or it cannot be reached",
            given,
            "Correct data.sources in the run file, or check the network.",
        )
    files = sorted(list_files(path))
    names = [
        (name, form_of) for name in files if (form_of := _form(name)) and _counts(name, form_of)
    ]
    if not names and not is_url(path) and not os.path.isdir(path):
        raise DataError(f"There is no dataset at {shown(path)}", given, hint)
    if not names and any(name.lower().endswith(PICTURES) for name in files):
        raise DataError(
            f"The dataset {shown(path)} has pictures without texts",
            given,
            'Write metadata.jsonl beside them, one line a picture: {"file_name": "1.jpg", "text":'
            ' "…"}',
        )
    if not names:
        known = ", ".join(f"*{suffix}" for suffix in FORMS)
        packed = any(name.lower().endswith(PACKED) for name in files)
        raise DataError(
            (
                f"The dataset {shown(path)} is empty"
                if not files
                else f"The dataset {shown(path)} holds no shard"
            ),
            f"no {known} in it{''.join(f', but {printable(name)}' for name in files[:3])}; {given}",
            "Unpack what is compressed: samples are read in any order." if packed else hint,
        )
    chosen = next(
        form
        for form in dict.fromkeys(FORMS.values())
        if any(form_of == form for _, form_of in names)
    )
    shards = [(name, join(path, name)) for name, form in names if form == chosen]
    return [
        Shard(chosen, file, name, images or file.rpartition("/")[0] if chosen == "llava" else "")
        for name, file in shards
    ]


def read_shard(
    shard: Shard, label: str, chat: ChatForm | None = None
) -> Iterator[Sample | Compact | Skipped]:
    """Samples of a shard in order, and what is left out; messages name the shard `label`.

    `chat` writes conversations; None = as where the tokenizer has no chat template.

    Raises:
        DataError: a URL cannot be read, or the columns of a table do not tell images and texts.
    """
    readers = {"tar": read_tar, "llava": read_llava, "parquet": read_parquet, "arrow": read_arrow}
    return readers[shard.form](shard, label, chat)


def open_shard(shard: Shard, cache: RowGroups, chat: ChatForm | None = None) -> OpenShard:
    """A shard to read samples again, its conversations written by `chat`; raises OSError, DataError
    or pyarrow's errors where it cannot be read."""
    if shard.form == "parquet":
        return ParquetShard(shard, cache, chat)
    kinds: dict[str, Callable[[Shard, ChatForm | None], OpenShard]] = {
        "tar": TarShard,
        "llava": LlavaShard,
        "arrow": ArrowShard,
    }
    return kinds[shard.form](shard, chat)


def shown(path: str) -> str:
    """How messages name a path or URL."""
    return shown_url(path) if is_url(path) else printable(path)


def _form(name: str) -> str | None:
    return FORMS.get(PurePosixPath(name.partition("?")[0]).suffix.lower())


def _counts(name: str, form: str) -> bool:
    """Whether a file of a folder is a shard, and not something that lies beside them."""
    file = PurePosixPath(name).name
    if form == "arrow" and file.startswith("cache-"):
        return False  # what `datasets` computed from the data
    if form in BELOW or file == CAPTIONS:
        return True
    return "/" not in name and file not in BESIDE and not file.endswith("_stats.json")

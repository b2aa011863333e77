"""Which columns of a Parquet or Arrow file hold images, sounds and texts (`rows` reads them).

Four forms. Conversations: a column `messages` or `conversations` of lists of turns, where no text
has a usual name, with the images of a column of them or of lists of them. Pairs: one column of
images (binary, or Hugging Face's struct {bytes, path}) or of sounds (the same, by its name), or one
of each, and one of texts; where there are several of a type, the usual names decide. Interleaved
(OBELICS): lists `images` and `texts` of equal length, at each position exactly one of the two is
not null. Texts alone: a column of texts where no other is named for images or sounds.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from disttrain_cli.data.modalities.registry import MEDIA
from disttrain_cli.data.sources.chats import KEYS, TURNS
from disttrain_cli.data.sources.samples import unread_of
from disttrain_cli.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

MEDIA_NAMES = tuple(name for media in MEDIA.values() for name in media.columns)
TEXT_NAMES = ("text", "caption", "txt")
SPOKEN_NAMES = (
    "transcription",
    "transcript",
    "sentence",
    "normalized_text",
)  # where there is none of the others
LISTS = ("images", "texts")
# names a column of URLs
ELSEWHERE = re.compile(r"image|img|picture|photo|thumbnail|audio|video", re.IGNORECASE)


class Columns(NamedTuple):
    """Names of the columns that are read."""

    files: dict[str, str]  # by type of file (`data.modalities.MEDIA`)
    text: str  # or turns
    interleaved: bool
    conversations: bool = False
    system: str = ""  # what the system says in conversations
    unread: tuple[str, ...] = ()  # all others, as messages name them

    @property
    def names(self) -> list[str]:
        """All of them."""
        return [*self.files.values(), *self.of_texts]

    @property
    def of_texts(self) -> list[str]:
        """Those without files."""
        return [self.text, self.system] if self.system else [self.text]


def find_columns(schema: pa.Schema, label: str) -> Columns:
    """The columns that hold the samples.

    Raises:
        DataError: there are none, or several that might be meant; all columns are named.
    """
    columns = _find(schema, label)
    others = dict.fromkeys(schema.names, True)
    return columns._replace(unread=tuple(unread_of(others, {*columns.names, *KEYS})))


def _find(schema: pa.Schema, label: str) -> Columns:
    kinds = {field.name: _kind(field.type) for field in schema}
    if all(name in kinds for name in LISTS) and kinds["texts"] == "list of text":
        if kinds["images"] == "list of image":
            return Columns({"image": LISTS[0]}, LISTS[1], interleaved=True)
        if kinds["images"] == "list of text":
            raise _refused(
                label,
                schema,
                "`images` holds URLs or paths instead of image bytes",
                "Download them first, e.g. with img2dataset, and write their bytes into `images`.",
            )
    lists = [name for name, kind in kinds.items() if kind == "list of image"]
    usual = any(kind == "text" and name.lower() in TEXT_NAMES for name, kind in kinds.items())
    turns = [name for name in TURNS if name in kinds and _holds_turns(schema.field(name).type)]
    if turns and not usual:
        return _of_conversations(turns[0], kinds, label, schema)
    if lists and "image" not in kinds.values():
        raise _refused(
            label,
            schema,
            f"`{lists[0]}` holds lists of images, and there is no list `texts` of strings "
            "beside a list `images`",
            "Write texts and images in turn (`images` and `texts`), or conversations as JSON.",
        )
    binary = {name: kind for name, kind in kinds.items() if kind == "image"}
    files = {}
    for name, media in MEDIA.items():  # images are what has no name of another type
        of_type = {key: kind for key, kind in binary.items() if key.lower() in media.columns}
        if name != "image" and of_type:
            files[name] = _one(of_type, "image", media.columns, label, schema)
            binary = {key: kind for key, kind in binary.items() if key not in of_type}
    texts_alone = not files and not binary and not _pictures_elsewhere(kinds)
    if not texts_alone and (binary or not files):
        others = kinds if not files else binary
        files = {"image": _one(others, "image", MEDIA["image"].columns, label, schema), **files}
    spoken = "audio" in files and not usual
    text = _one(kinds, "text", SPOKEN_NAMES if spoken else TEXT_NAMES, label, schema)
    return Columns(files, text, interleaved=False)


def _of_conversations(turns: str, kinds: dict[str, str], label: str, schema: pa.Schema) -> Columns:
    kind = "list of image" if "list of image" in kinds.values() else "image"
    films = {"video", "videos"} | set(MEDIA["video"].columns)
    videos = {
        name: "image"
        for name, of in kinds.items()
        if name.lower() in films and of.endswith("image")
    }
    kinds = {name: of for name, of in kinds.items() if name not in videos}
    files = {}
    if kind in kinds.values():
        files["image"] = _one(kinds, kind, (*MEDIA["image"].columns, "images"), label, schema)
    if videos:
        files["video"] = _one(videos, "image", tuple(films), label, schema)
    system = "system" if kinds.get("system") == "text" else ""
    return Columns(files, turns, interleaved=False, conversations=True, system=system)


def _holds_turns(type_: pa.DataType) -> bool:
    """Whether a column's type is that of lists of turns."""
    import pyarrow.types as types

    if not (types.is_list(type_) or types.is_large_list(type_)):
        return False
    inside = type_.value_type
    names = {field.name for field in inside} if types.is_struct(inside) else set()
    return {"from", "value"} <= names or {"role", "content"} <= names


def _kind(type_: pa.DataType) -> str:
    """image, text, list of image, list of text, or other."""
    import pyarrow.types as types

    if types.is_list(type_) or types.is_large_list(type_):
        inside = _kind(type_.value_type)
        return f"list of {inside}" if inside in ("image", "text") else "other"
    if types.is_dictionary(type_):
        return _kind(type_.value_type)
    if types.is_struct(type_):
        named = [field for field in type_ if field.name == "bytes"]
        return "image" if named and _kind(named[0].type) == "image" else "other"
    if types.is_binary(type_) or types.is_large_binary(type_) or types.is_binary_view(type_):
        return "image"
    if types.is_string(type_) or types.is_large_string(type_) or types.is_string_view(type_):
        return "text"
    return "other"


def _pictures_elsewhere(kinds: dict[str, str]) -> list[str]:
    """Columns that seem to say where images or sounds are: of files, or of URLs beside captions or
    sizes.

    A `url` beside a `text` alone is where a page of a text corpus was found.
    """
    media = [
        name
        for name, kind in kinds.items()
        if name.lower() in (*MEDIA_NAMES, "images")
        or (kind in ("text", "list of text") and ELSEWHERE.search(name))
    ]
    lower = {name.lower() for name in kinds}
    captioned = "caption" in lower or {"width", "height"} <= lower
    urls = (
        [name for name, kind in kinds.items() if kind == "text" and "url" in name.lower()]
        if captioned
        else []
    )
    return [*(name for name in media if kinds[name] == "text"), *urls, *media]


def _one(
    kinds: dict[str, str], kind: str, names: tuple[str, ...], label: str, schema: pa.Schema
) -> str:
    """The only column of a kind, or the only one of them with a usual name."""
    columns = [name for name, kind_of in kinds.items() if kind_of == kind]
    usual = [name for name in columns if name.lower() in names]
    if len(usual) == 1 or len(columns) == 1:
        return (usual if len(usual) == 1 else columns)[0]
    what = "image bytes" if kind == "image" else "texts"
    if not columns:
        url = next(iter(_pictures_elsewhere(kinds)), None) if kind == "image" else None
        advice = (
            f"`{url}` seems to name pictures elsewhere: download them first, e.g. with img2dataset."
            if url
            else (
                "Images are binary or {bytes, path}, texts are strings; or lists `images` and"
                " `texts` of them."
            )
        )
        raise _refused(label, schema, f"no column holds {what}", advice)
    raise _refused(
        label,
        schema,
        f"several columns may hold the {what}: {', '.join(usual or columns)}",
        f"Keep one of them, or name one {' or '.join(names[:3])}.",
    )


def _refused(label: str, schema: pa.Schema, why: str, next_step: str) -> DataError:
    columns = ", ".join(f"{field.name} ({field.type})" for field in list(schema)[:40])
    return DataError(
        f"Cannot tell images and texts in {label}", f"{why}\ncolumns: {columns}", next_step
    )

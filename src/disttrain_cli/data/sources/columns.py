"""Columns of a Parquet or Arrow file with images, sounds, turns and texts (`rows` reads them).

There are three layouts. Interleaved (OBELICS): lists `images` and `texts` of equal length, at each
position exactly one of the two is not null. Pairs: a column of texts, alone or with one of images
(binary, or Hugging Face's struct {bytes, path}), of sounds (the same, by its name), or both.
Records: all others, with a column of turns, lists of images, or columns that may change the meaning
of a text; a row is read as the same record of a JSON (`chats`).

A column of turns or texts has a common name, or is the one that `data.sources[].text` names; a
column is not taken for texts just because it is the only one of strings. Turns take precedence over
texts, `text` over `caption`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from disttrain_cli.data.modalities.registry import MEDIA
from disttrain_cli.data.sources.chats import KEYS, OF_RECORD
from disttrain_cli.data.sources.refusals import (
    ANSWERS,
    CLIPS,
    PREFERENCES,
    QUESTIONS,
    is_plain,
    prompted,
)
from disttrain_cli.data.sources.samples import unread_of
from disttrain_cli.data.sources.turn_forms import PAIR, SPOKEN, TEXTS, TURNS
from disttrain_cli.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

MEDIA_NAMES = tuple(name for media in MEDIA.values() for name in media.columns)
#: Common names of text columns if there is none of `TEXTS`; next to sounds also those of
#: transcripts.
OTHER_TEXTS = ("txt",)
SPOKEN_TEXTS = ("transcription", "transcript", "sentence", "normalized_text")
LISTS = ("images", "texts")
#: Common names of columns of files, by type, and of lists of them.
OF_MEDIA = {name: (*media.columns, f"{name}s") for name, media in MEDIA.items()}
# names a column of URLs
ELSEWHERE = re.compile(r"image|img|picture|photo|thumbnail|audio|video", re.IGNORECASE)
#: Kinds of columns, by the values that their types allow.
FILE, TEXT, TURN_LIST, PAIRS, OTHER = "image", "text", "turns", "pairs of turns", "other"
NULL = "null"  # of a type without values, in a shard whose column is null in every row
FILES, STRINGS, NULLS = f"list of {FILE}", f"list of {TEXT}", f"list of {NULL}"
#: Names of columns of texts and turns that are read without a file.
ALONE = (*TURNS, TEXTS[0], *OTHER_TEXTS)
#: Keys of a record with turns that are read, besides turns and file columns.
OF_TALKS = {*OF_RECORD} - {*TURNS, *KEYS, "file_name"}
NAME_IT = "name the column that holds them in the run file: data.sources[].text"


class Columns(NamedTuple):
    """Names of the columns that are read."""

    files: dict[str, str]  # by type of file (`data.modalities.registry.MEDIA`)
    texts: tuple[str, ...] = ()  # the first one that is not null is read; none in records
    interleaved: bool = False
    record: Mapping[str, str] = {}  # by key of a record (`chats`), the column of its value
    unread: tuple[str, ...] = ()  # all others, as named in messages
    captions: tuple[str, ...] = ()  # those of `texts` that need their file to have a meaning

    @property
    def names(self) -> list[str]:
        """All columns that are read."""
        return [*self.files.values(), *self.of_texts]

    @property
    def of_texts(self) -> list[str]:
        """Columns that are read, without files."""
        return [*self.texts, *self.record.values()]


class Schema(NamedTuple):
    """A file's columns during the search."""

    label: str
    form: pa.Schema
    kinds: dict[str, str]

    def named(self, *names: str) -> list[str]:
        """Return the columns of these names, in their order; case-insensitive.

        Raises:
            DataError: several columns have one of the names.
        """
        found = list[str]()
        for name in names:
            columns = [column for column in self.kinds if column.lower() == name]
            if len(columns) > 1:
                raise self.several(columns, f"`{name}`", "Keep one of them.")
            found += columns
        return found

    def refused(self, why: str, next_step: str) -> DataError:
        """Return the error that these columns cannot be read; it lists all of them."""
        columns = ", ".join(f"{field.name} ({field.type})" for field in list(self.form)[:40])
        return DataError(
            f"Cannot identify images and texts in {self.label}",
            f"{why}\ncolumns: {columns}",
            next_step,
        )

    def several(self, columns: Iterable[str], what: str, next_step: str) -> DataError:
        """Return the error that several columns are candidates."""
        return self.refused(f"several columns may contain {what}: {', '.join(columns)}", next_step)


def find_columns(form: pa.Schema, label: str, text: str = "") -> Columns:
    """Return the columns of the samples.

    Args:
        text: the column of texts or turns that the run file names, if it does.

    Raises:
        DataError: there are none, or several candidates; the message names all columns.
    """
    kinds = {field.name: kind_of(field.type) for field in form}
    schema = Schema(label, form, _without_nulls(kinds, text))
    columns = _find(schema, text)
    others = dict.fromkeys(schema.kinds, True)
    return columns._replace(unread=tuple(unread_of(others, {*columns.names, *KEYS})))


def _without_nulls(kinds: Mapping[str, str], text: str) -> dict[str, str]:
    """Return the kinds of columns without those that are null in every row.

    Null columns of the texts, or of the texts' files, are kept: then each row is skipped. Lists of
    nulls have the kind that their name indicates.
    """
    named = {name: _by_name(name, text) for name in kinds}
    found = {
        name: (named[name] if kind == NULLS else kind)
        for name, kind in kinds.items()
        if kind != NULL
    }
    absent = [name for name, kind in kinds.items() if kind == NULL]
    if text in absent:
        found[text] = TEXT
    elif not any(name.lower() in ALONE for name in found):
        texts = (*ALONE, *TEXTS, *SPOKEN_TEXTS)
        found |= {name: TEXT for name in absent if name.lower() in texts}
        if not {FILE, FILES} & {*found.values()}:
            found |= {name: FILE for name in absent if named[name] == FILES}
    return found


def _by_name(name: str, text: str) -> str:
    """Return the kind of a column of lists of nulls, by its name."""
    if name == text or name.lower() in TURNS:
        return TURN_LIST
    if name == LISTS[1]:
        return STRINGS
    return FILES if any(name.lower() in names for names in OF_MEDIA.values()) else OTHER


def _find(schema: Schema, text: str) -> Columns:
    kinds = schema.kinds
    if turns := _turns(schema, text):
        files = _files(schema, turns.values())
        if audio := files.pop("audio", ""):
            turns["audio"] = audio  # its rows are refused
        known = {*files.values(), *turns.values()}
        return Columns(files, record=turns | _others(schema, known, named=bool(text), talks=True))
    if not text and all(name in kinds for name in LISTS) and kinds[LISTS[1]] == STRINGS:
        if kinds[LISTS[0]] == FILES:
            return Columns({"image": LISTS[0]}, (LISTS[1],), interleaved=True)
        if kinds[LISTS[0]] == STRINGS:
            raise schema.refused(
                "`images` holds URLs or paths instead of image bytes",
                "Download them first, e.g. with img2dataset, and write their bytes into `images`.",
            )
    return _of_texts(schema, text)


def _of_texts(schema: Schema, text: str) -> Columns:
    """Return the columns of a table whose texts are no turns, except for single ones."""
    files = _files(schema, {text})
    named = [name for name in schema.kinds if name.lower().endswith("file_name")]
    if named and not files and PurePosixPath(schema.label).stem == "metadata":
        raise schema.refused(
            f"`{named[0]}` names the images of an imagefolder, which are read through"
            " metadata.jsonl",
            "Write the same rows as metadata.jsonl, one JSON object per line.",
        )
    if elsewhere := [] if files else _pictures_elsewhere(schema.kinds):
        raise schema.refused(
            "no column contains image bytes",
            f"`{elsewhere[0]}` seems to name images elsewhere: download them first, e.g. with"
            " img2dataset.",
        )
    texts = (text,) if text else _texts(schema, files)
    lists = [name for name in files.values() if schema.kinds[name] == FILES]
    others = _others(schema, {*files.values(), *texts}, named=bool(text), talks=bool(text))
    if "audio" not in files and (lists or others):
        by_key = {name.lower(): name for name in texts if name.lower() in TEXTS and not text}
        return Columns(files, record=(by_key or {TEXTS[0]: texts[0]}) | others)
    if lists:
        raise schema.refused(f"`{lists[0]}` contains lists", "Write one clip per row.")
    if others and not text:
        changed = next(iter(others.values()))
        raise schema.refused(f"`{changed}` may change what the texts mean", f"Please {NAME_IT}.")
    spoken = () if text else (TEXTS[1], *SPOKEN_TEXTS)
    return Columns(files, texts, captions=tuple(name for name in texts if name.lower() in spoken))


def _turns(schema: Schema, text: str) -> dict[str, str]:
    """Return the columns of turns by key of a record; nothing if there are no turns.

    Columns of texts that are read if turns are null are included.
    """
    if not text:
        usual = [name for name in schema.named(*TURNS) if schema.kinds[name] not in (FILES, OTHER)]
        turns = {name.lower(): name for name in usual}
        if not turns and schema.kinds.get(LISTS[1]) == PAIRS:
            turns = {PAIRS: LISTS[1]}
        texts = [name for name in schema.named(*TEXTS) if _is_text(schema, name)]
        return turns and turns | {name.lower(): name for name in texts}
    kind = schema.kinds.get(text)
    if kind is None:
        raise schema.refused(f"there is no column `{text}`", "Correct data.sources[].text.")
    if kind in (TURN_LIST, STRINGS):
        return {TURNS[0]: text}
    if kind in (FILES, OTHER) or _is_struct(schema, text):
        raise schema.refused(
            f"`{text}`, which data.sources[].text names, contains neither texts nor turns",
            "Name a column of strings, or of lists of turns.",
        )
    return {PAIRS: text} if kind == PAIRS else {}


def _files(schema: Schema, taken: Collection[str]) -> dict[str, str]:
    """Return the columns of images, sounds and videos, by type, without `taken` columns.

    Raises:
        DataError: there are several of a type.
    """
    holds = [name for name, kind in schema.kinds.items() if kind in (FILE, FILES)]
    holds = [name for name in holds if name not in taken and not _is_text(schema, name)]
    files = dict[str, str]()
    for media, usual in reversed(OF_MEDIA.items()):
        found = [name for name in holds if name.lower() in usual]
        if media == "image":  # files without a name of another type are images
            found = found or holds
        if len(found) > 1:
            advice = f"Keep one of them, or name one {' or '.join(usual[:3])}."
            raise schema.several(found, "the image bytes", advice)
        if found:
            files[media] = found[0]
        holds = [name for name in holds if name.lower() not in usual]
    return {media: files[media] for media in MEDIA if media in files}


def _texts(schema: Schema, files: Mapping[str, str]) -> tuple[str, ...]:
    """Return the columns of texts with common names; the first one that is not null is read."""
    spoken = SPOKEN_TEXTS if "audio" in files else ()
    texts = schema.named(*TEXTS) or schema.named(*OTHER_TEXTS, *spoken)
    if wrong := [name for name in texts if not _is_text(schema, name)]:
        raise schema.refused(f"`{wrong[0]}` contains no strings", f"Write strings, or {NAME_IT}.")
    if not texts:
        raise _nameless(schema, files)
    if len(texts) > 1 and texts[0].lower() not in TEXTS:
        raise schema.several(texts, "the texts", f"Please {NAME_IT}.")
    if not files and texts[0].lower() == TEXTS[1]:
        raise schema.refused(
            f"no column contains the images of `{texts[0]}`",
            f"Add a column of images; if it is a corpus, {NAME_IT}: {texts[0]}.",
        )
    return tuple(texts if files else texts[:1])


def _nameless(schema: Schema, files: Mapping[str, str]) -> DataError:
    """Return the error that no column has a common name of texts."""
    usual = ", ".join((*TURNS, *TEXTS, *OTHER_TEXTS, *(SPOKEN_TEXTS if "audio" in files else ())))
    found = [name for name, kind in schema.kinds.items() if kind in (TEXT, TURN_LIST, PAIRS)]
    return schema.refused(
        f"no column has a name of texts or turns ({usual})",
        (
            f"If {' or '.join(found[:8])} contains the texts or turns, {NAME_IT}. Questions and"
            " answers in separate columns must be written as turns of `messages`."
            if found
            else "Images are binary or {bytes, path}, texts are strings; or lists `images` and"
            " `texts` of them."
        ),
    )


def _others(schema: Schema, known: Collection[str], named: bool, talks: bool) -> dict[str, str]:
    """Return the columns that change a row's meaning, by key of a record, without those `known`.

    Args:
        named: True if the run file names the texts: then other texts, and their alternatives, are
            ignored.
        talks: True if the texts may be turns.
    """
    keys = {name.lower(): name for name in schema.kinds if name not in known}
    matter = {key for key in keys if talks and (key in OF_TALKS or not is_plain([key]))}
    alternatives = {key for key in keys if key.startswith(PREFERENCES)}
    if prompted(keys):
        alternatives |= keys.keys() & {*QUESTIONS, *ANSWERS}
    if not talks:
        matter |= keys.keys() & CLIPS
        matter |= {key for key, name in keys.items() if schema.kinds[name] == TURN_LIST}
    matter = matter - alternatives if named else matter | alternatives
    return {key: name for key, name in keys.items() if key in matter}


def _is_text(schema: Schema, name: str) -> bool:
    """Return True if a column holds texts: strings, or bytes under a common name of texts."""
    named = name.lower() in (*TEXTS, *OTHER_TEXTS, *SPOKEN_TEXTS)
    kind = schema.kinds[name]
    return kind == TEXT or (named and kind == FILE and not _is_struct(schema, name))


def _is_struct(schema: Schema, name: str) -> bool:
    import pyarrow.types as types

    return bool(types.is_struct(schema.form.field(name).type))


def is_list(type_: pa.DataType) -> bool:
    """Return True for every list type."""
    import pyarrow.types as types

    of = (types.is_list, types.is_large_list, types.is_fixed_size_list)
    return any(one(type_) for one in (*of, types.is_list_view, types.is_large_list_view))


def kind_of(type_: pa.DataType) -> str:
    """Return the kind of columns of a type."""
    import pyarrow as pa
    import pyarrow.types as types

    if isinstance(type_, pa.BaseExtensionType):
        return kind_of(type_.storage_type)
    if is_list(type_):
        inside = kind_of(type_.value_type)
        of_structs = {TURN_LIST: TURN_LIST, PAIRS: PAIRS}
        return of_structs.get(
            inside, f"list of {inside}" if inside in (FILE, TEXT, NULL) else OTHER
        )
    if types.is_dictionary(type_):
        return kind_of(type_.value_type)
    if types.is_struct(type_):
        fields = {field.name: field.type for field in type_}
        if any(name in fields for name in TURNS) or any(set(of) <= fields.keys() for of in SPOKEN):
            return TURN_LIST
        if set(PAIR) <= fields.keys():
            return PAIRS
        return FILE if "bytes" in fields and kind_of(fields["bytes"]) in (FILE, NULL) else OTHER
    if types.is_binary(type_) or types.is_large_binary(type_) or types.is_binary_view(type_):
        return FILE
    if types.is_string(type_) or types.is_large_string(type_) or types.is_string_view(type_):
        return TEXT
    return NULL if types.is_null(type_) else OTHER


def _pictures_elsewhere(kinds: Mapping[str, str]) -> list[str]:
    """Return columns that seem to name images or sounds elsewhere.

    They are columns of files, or of URLs next to captions or sizes. A `url` next to a `text` alone
    is the address of a page in a text corpus.
    """
    media = [
        name
        for name, kind in kinds.items()
        if name.lower() in (*MEDIA_NAMES, "images")
        or (kind in (TEXT, STRINGS) and ELSEWHERE.search(name))
    ]
    lower = {name.lower() for name in kinds}
    captioned = "caption" in lower or {"width", "height"} <= lower
    urls = (
        [name for name, kind in kinds.items() if kind == TEXT and "url" in name.lower()]
        if captioned
        else []
    )
    return [*(name for name in media if kinds[name] == TEXT), *urls, *media]

"""Reads tar shards as samples of segments with sizes; bad samples come out as `Skipped`.

Two forms: img2dataset (`KEY.jpg` with `KEY.txt`, or with `KEY.json` that has a `caption`) and interleaved
(`KEY.json` with `segments` of texts and of image files anywhere in the same tar).
Names inside a tar are only ever looked up among the names of that tar; nothing is extracted.
"""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from disttrain_cli.data.headers import read_header
from disttrain_cli.errors import DataError
from disttrain_cli.spec.index import IMAGE, TARGET, TEXT

IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp")
MAX_TEXT_BYTES = 16 * 1024 * 1024  # a larger json or txt is no sample


class Skipped(NamedTuple):
    """A sample or image that is left out, and why."""

    shard: str
    key: str
    reason: str


class Member(NamedTuple):
    """A file inside a tar: where its content lies."""

    name: str
    offset: int
    size: int


class Segment(NamedTuple):
    """A piece of a sample. `member` is the image's file, or the json / txt that holds the text."""

    kind: int
    member: Member
    text: str = ""
    width_px: int = 0
    height_px: int = 0


@dataclass(frozen=True)
class Sample:
    """One sample of a shard."""

    key: str
    segments: list[Segment]


class Part(NamedTuple):
    """A segment as the json says it: a text, or the name of an image file."""

    kind: int
    value: str


def find_shards(path: Path, field: str) -> list[Path]:
    """The tars of a source in order: a folder's `*.tar` by name, or the one tar given.

    Raises:
        DataError: there is nothing at `path`, or no tar in it; `field` is the run file's field.
    """
    hint = "Correct data.sources in the run file, or write an example with: disttrain init DIR --sample-data"
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"There is no dataset at {path}", f"given by {field}", hint)
    shards = sorted(shard for shard in path.glob("*.tar") if shard.is_file())
    if not shards:
        raise DataError(f"The dataset {path} is empty", f"no *.tar in that folder, given by {field}", hint)
    return shards


def read_shard(path: Path, shard: str) -> Iterator[Sample | Skipped]:
    """Samples of one tar, in the order of their json, txt or image members.

    Only headers, json and txt are read. A damaged tar yields what is whole before the damage.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        yield Skipped(shard, "", f"cannot be opened: {error.strerror}")
        return
    try:
        members, damage = _members(path)
        by_key: dict[str, dict[str, Member]] = {}
        by_name: dict[str, Member] = {}
        twice: set[str] = set()
        for member in members:
            key, suffix = split_name(member.name)
            if member.name in by_name:
                twice.add(key)
            by_key.setdefault(key, {})[suffix] = by_name[member.name] = member
        captions = any("txt" in group for group in by_key.values())
        for key, group in by_key.items():
            if "json" not in group and "txt" not in group and not captions:
                continue  # a picture that interleaved samples refer to
            try:
                if key in twice:
                    raise ValueError("a file of this sample is in the shard twice")
                yield Sample(key, _segments(descriptor, group, by_name))
            except (ValueError, OSError) as error:
                yield Skipped(shard, key, str(error))
        if damage:
            yield Skipped(shard, "", damage)
    finally:
        os.close(descriptor)


def parse_parts(data: bytes) -> list[Part] | str:
    """What a json or txt member says: the parts of an interleaved sample, or a caption.

    Index and loader both read texts by this function, so that they agree. Raises ValueError with the reason.
    """
    try:
        return _parse_json(data)
    except ValueError:  # a caption may be any text, also one that looks like JSON
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError("text is not UTF-8") from None


def split_name(name: str) -> tuple[str, str]:
    """Key and suffix of a member (WebDataset): the suffix starts at the first dot of the file name."""
    folder, slash, file = name.rpartition("/")
    stem, _, suffix = file.partition(".")
    return folder + slash + stem, suffix.lower()


def _parse_json(data: bytes) -> list[Part] | str:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON: {error}") from None
    if isinstance(value, dict) and "segments" in value:
        return _parts(value["segments"])
    caption = value.get("caption") if isinstance(value, dict) else None
    if not isinstance(caption, str):
        raise ValueError("the JSON has neither `segments` nor a `caption` text")
    return _clean(caption)


def _members(path: Path) -> tuple[list[Member], str]:
    """Members whose content is whole, and what is wrong with the rest of the tar ("" = nothing)."""
    members: list[Member] = []
    try:
        size = path.stat().st_size
        with tarfile.open(path, "r:", encoding="utf-8", errors="replace") as tar:
            for info in tar:
                if info.offset_data + info.size > size:
                    return members, f"truncated tar: it ends inside {info.name}"
                if info.isreg():
                    members.append(Member(info.name, info.offset_data, info.size))
            end = tar.offset
        with path.open("rb") as file:
            file.seek(end)
            block = file.read(tarfile.BLOCKSIZE)
    except (tarfile.TarError, OSError, EOFError) as error:
        return members, f"not a whole tar: {error}"
    if len(block) < tarfile.BLOCKSIZE:
        return members, "truncated tar: the end marker is missing"
    if any(block):
        return members, f"damaged tar: no valid header at byte {end}"
    return members, ""


def _segments(descriptor: int, group: dict[str, Member], by_name: dict[str, Member]) -> list[Segment]:
    """Segments of one sample: interleaved where its json says so, else an image with its caption."""
    image = next((group[suffix] for suffix in IMAGE_SUFFIXES if suffix in group), None)
    described = group.get("txt") or group.get("json")
    if described is None:
        raise ValueError("an image without a caption (KEY.txt or KEY.json)")
    if described.size > MAX_TEXT_BYTES:
        raise ValueError(f"{described.name} has {described.size} bytes, at most {MAX_TEXT_BYTES} are read")
    data = os.pread(descriptor, described.size, described.offset)
    parts = parse_parts(data) if "txt" in group else _parse_json(data)
    if isinstance(parts, str):
        if image is None:
            raise ValueError("a caption without its image (KEY.jpg, .png or .webp)")
        return [_image(descriptor, IMAGE, image), Segment(TEXT, described, parts)]
    return [
        Segment(TEXT, described, part.value)
        if part.kind == TEXT
        else _image(descriptor, part.kind, _find(part.value, described.name, by_name))
        for part in parts
    ]


def _parts(segments: Any) -> list[Part]:
    if not isinstance(segments, list) or not segments:
        raise ValueError("`segments` must be a list with at least one segment")
    parts = []
    for place, segment in enumerate(segments):
        kind = segment.get("type") if isinstance(segment, dict) else None
        if kind == "text" and isinstance(segment.get("value"), str):
            parts.append(Part(TEXT, _clean(segment["value"])))
        elif kind == "image" and isinstance(segment.get("file"), str):
            generate = segment.get("generate", False)
            if not isinstance(generate, bool):
                raise ValueError(f"segments[{place}].generate must be true or false")
            parts.append(Part(TARGET if generate else IMAGE, segment["file"]))
        else:
            raise ValueError(f"segments[{place}] must be a text with `value` or an image with `file`")
    return parts


def _clean(text: str) -> str:
    """JSON may escape half a character, which no tokenizer takes."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _find(file: str, beside: str, by_name: dict[str, Member]) -> Member:
    folder, slash, _ = beside.rpartition("/")
    member = by_name.get(folder + slash + file) or by_name.get(file)
    if member is None:
        raise ValueError(f"the image {file} is missing from the shard")
    return member


def _image(descriptor: int, kind: int, member: Member) -> Segment:
    def read(offset: int, length: int) -> bytes:
        return os.pread(descriptor, max(0, min(length, member.size - offset)), member.offset + offset)

    try:
        header = read_header(read)
    except ValueError as error:
        raise ValueError(f"{member.name}: {error}") from None
    return Segment(kind, member, "", header.width_px, header.height_px)

"""Tar shards: images or sounds with captions (img2dataset), interleaved samples, conversations.

img2dataset: `KEY.jpg` with `KEY.txt`, or with `KEY.json` that has a `caption`; `KEY.flac` with its
transcript (or caption) the same way. Interleaved: `KEY.json` with `segments` of texts (`loss:
false` = not trained), and of image and sound files anywhere in the same tar. Conversations:
`KEY.json` as `chats` reads it, with images of the same tar, or KEY.jpg if it names none.

Locations are the byte offset and length of a member's content; the length is negative for a caption
with marks of its images. Names inside a tar are only looked up among the names of that tar; nothing
is extracted.
"""

from __future__ import annotations

import contextlib
import json
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, BinaryIO, NamedTuple, Self

from disttrain_cli.data.modalities.registry import MEDIA, MODALITIES, Media
from disttrain_cli.data.sources.chats import (
    KEYS,
    conversation,
    document_text,
    file_names,
    has_turns,
    text_pieces,
    texts_of,
    unread_keys,
    with_files,
)
from disttrain_cli.data.sources.files import File, LocalFile, missing_file, open_file
from disttrain_cli.data.sources.pixel_budgets import KEYS as BUDGET_KEYS
from disttrain_cli.data.sources.pixel_budgets import budget_of
from disttrain_cli.data.sources.refusals import FLAGS, MASKED, check_document, check_text
from disttrain_cli.data.sources.samples import (
    MAX_TEXT_BYTES,
    ChatForm,
    ImageName,
    Location,
    Measured,
    Part,
    Sample,
    Segment,
    Shard,
    Skipped,
    VideoName,
    clean,
    file_segment,
    media_of,
    text_segment,
    unread_of,
)
from disttrain_cli.data.sources.turn_forms import TEXTS, TURNS, turns_in, with_turns
from disttrain_cli.spec.heads import Numbers
from disttrain_cli.spec.index import IMAGE, ITEMS, KINDS, TARGET, TEXT

#: Keys of a json, one of which makes it more than a caption.
FORMS = tuple(f'"{name}"'.encode() for name in (*TURNS, "segments"))


#: Types of names of the files that records may name or mark.
PICTURES: dict[str, type[str]] = {"image": str, "video": VideoName}
#: Types of extended headers, which contain long names and the like.
EXTENDED = (
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
)
#: Sizes to which tars are padded, up to 16 MiB: blocks and the usual record times powers of two.
RECORD_SIZES = [
    size << power
    for size, most in ((tarfile.BLOCKSIZE, 16), (tarfile.RECORDSIZE, 11))
    for power in range(most)
]
MOST_HEADER_BYTES = 1024 * 1024


class Header(NamedTuple):
    """Header of a file that is no text: its type and sizes."""

    media: str
    sizes: Numbers


class Member(NamedTuple):
    """A file inside a tar: its location, and its text, header or the reason why it is unusable."""

    name: str
    location: Location
    content: bytes | Header | str


class Members(dict[str, Member]):
    """Members of a tar by name, and the names of those to which samples refer."""

    def __init__(self) -> None:
        super().__init__()
        self.referred: set[str] = set()

    def find(self, name: str, referrer: str) -> Member:
        """Return the member to which a text or json named `referrer` refers.

        Raises:
            ValueError: there is no such member.
        """
        folder, slash, _ = referrer.rpartition("/")
        name = name.removeprefix("./")
        member = self.get(folder + slash + name) or self.get(name)
        if member is None:
            raise missing_file(name, "is missing from the shard")
        self.referred.add(member.name)
        return member


class TarShard:
    """An open tar."""

    def __init__(self, shard: Shard, chat: ChatForm | None = None) -> None:
        self._file, self._chat = open_file(shard.path), chat

    def file(self, media: str, location: Location, record: Location) -> bytes:
        return self._read(location)

    def file_name(self, media: str, location: Location, record: Location) -> str:
        header = self._file.read(location.offset - tarfile.BLOCKSIZE, tarfile.BLOCKSIZE)
        try:
            return tarfile.TarInfo.frombuf(header, "utf-8", "replace").name
        except tarfile.TarError as error:
            raise ValueError(f"no member there: {error}") from None

    def texts(
        self, record: Location, files: Sequence[Measured] = ()
    ) -> list[str | tuple[int, ...]]:
        data = self._read(record)
        with contextlib.suppress(ValueError):
            if has_turns(value := _record(data)):
                return texts_of(value, self._chat, files)
        parts = parse_parts(data)
        if isinstance(parts, str):
            return [*text_pieces(parts)] if record.size < 0 else [parts]
        return [part.value for part in parts if part.kind == TEXT]

    def _read(self, location: Location) -> bytes:
        offset, size = location.offset, abs(location.size)
        data = self._file.read(offset, size)
        if len(data) < size:
            raise ValueError("the shard is truncated")
        return data


def read_tar(shard: Shard, label: str, chat: ChatForm | None = None) -> Iterator[Sample | Skipped]:
    """Read the samples of one tar, in the order of their json, txt, image or sound members.

    The tar is read once, from end to end. Only headers of images and sounds are read. The texts of
    one tar are in memory together. A damaged tar yields the complete members before the damage.
    """
    try:
        file = open_file(shard.path)
    except OSError as error:
        yield Skipped(label, "", f"cannot be opened: {error.strerror}", None, cut=True)
        return
    by_key: dict[str, dict[str, Member]] = {}
    by_name = Members()
    twice: set[str] = set()
    damage: Skipped | None = None
    for member in _members(file, label):
        if isinstance(member, Skipped):
            damage = member
            break
        key, suffix = split_name(member.name)
        if member.name in by_name:
            twice.add(key)
        by_key.setdefault(key, {})[suffix] = by_name[member.name] = member
    captions = any("txt" in group for group in by_key.values())
    described = captions or any("json" in group for group in by_key.values())
    dotted = list(_dotted(by_key, label))
    yield from dotted
    if by_name and not dotted and not described:
        example = next(iter(by_name))
        reason = f"no KEY.txt or KEY.json in it, but {example}; a key ends at the first dot"
        yield Skipped(label, "", reason, len(by_key))
    pending = list[Sample | Skipped]()  # from the last sample on, which may have unread members
    alone, lost = dict[str, dict[str, Member]](), list[bytes]()
    for key, group in by_key.items():
        if "json" not in group and "txt" not in group and not captions:
            alone[key] = group  # samples refer to it
            continue
        try:
            if key in twice:
                raise ValueError("a file of this sample is in the shard twice")
            sample = Sample(key, *_segments(group, by_name, chat))
        except ValueError as error:
            lost += [one.content for one in group.values() if isinstance(one.content, bytes)]
            pending.append(Skipped(label, key, str(error)))
            continue
        yield from pending
        pending = [sample]
    unused = {} if dotted or not described else _unreferred(alone, by_name.referred, lost)
    files = [one.name for group in unused.values() if len(group) == 1 for one in group.values()]
    if pending and isinstance(first := pending[0], Sample):
        names = unread_of(dict.fromkeys(files, True), (), "member ")
        pending[0] = first._replace(unread=(*first.unread, *names))
    yield from pending
    for key, group in unused.items():
        if len(group) > 1:
            others = ", ".join(f".{suffix}" for suffix in group)
            yield Skipped(label, key, f"neither KEY.txt nor KEY.json, but {others}")
    if damage is not None:
        yield damage


def parse_parts(data: bytes) -> list[Part] | str:
    """Return the contents of a json or txt member: parts of an interleaved sample, or a caption.

    Index and loader both read texts by this function, so that they agree.

    Raises:
        ValueError: it is not valid; the message has the reason.
    """
    try:
        return _parse_json(_json(data))
    except ValueError:  # a caption may be any text, also one that looks like JSON
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError("text is not UTF-8") from None


def split_name(name: str) -> tuple[str, str]:
    """Return key and suffix of a member: the suffix starts at the file name's first dot.

    This is WebDataset's rule.
    """
    folder, slash, file = name.rpartition("/")
    stem, _, suffix = file.partition(".")
    return folder + slash + stem, suffix.lower()


class _LongHeaderError(tarfile.ReadError):
    """An extended header of more than `MOST_HEADER_BYTES`."""


class _Info(tarfile.TarInfo):
    """Tar header whose extended header (PAX, GNU long name) is limited to `MOST_HEADER_BYTES`.

    tarfile would read any size into memory.
    """

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        info = super().frombuf(buf, encoding, errors)
        if info.type in EXTENDED and info.size > MOST_HEADER_BYTES:
            raise _LongHeaderError(
                f"an extended header of {info.size} bytes, at most {MOST_HEADER_BYTES} are read"
            )
        return info

    def _proc_gnusparse_10(self, *_: object) -> None:  # its map may be as long as the file
        raise tarfile.ReadError("a sparse file")


def _members(file: File, label: str) -> Iterator[Member | Skipped]:
    """Yield the members with complete content, then the tar's damage, if any."""
    at = 0
    try:
        with (
            file.stream() as stream,
            tarfile.open(
                fileobj=stream, mode="r:", encoding="utf-8", errors="replace", tarinfo=_Info
            ) as tar,
        ):
            while (info := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # it would keep them all
                location = Location(info.offset_data, info.size)
                at = tar.offset
                if sum(location) > file.size:
                    reason = f"truncated tar: it ends inside {info.name}"
                    yield Skipped(label, "", reason, None, cut=True)
                    return
                if info.isreg() and not info.issparse():
                    content = _content(file, stream, info.name, location)
                    yield Member(info.name.removeprefix("./"), location, content)
                elif not info.isdir():
                    reason = f"{info.name} is not a regular file in the tar, but a link or similar"
                    yield Member(info.name, location, reason)
            end = tar.offset
            stream.seek(end)
            padded = _padded(end + 2 * tarfile.BLOCKSIZE, file.size)
            rest = stream.read(padded - end)
    except _LongHeaderError as error:  # bytes after `at` may be the header's: they give no number
        yield Skipped(label, "", f"not a complete tar: {error}", None)
        return
    except (tarfile.TarError, OSError, EOFError, ValueError, RecursionError) as error:
        yield _damaged(file, label, f"not a complete tar: {error}", at)
        return
    if len(rest) < tarfile.BLOCKSIZE:
        reason = "truncated tar: the end marker is missing"
        yield Skipped(label, "", reason, None, cut=True)
    elif any(rest[: tarfile.BLOCKSIZE]):
        yield _damaged(file, label, f"damaged tar: no valid header at byte {end}", end)
    elif any(rest) or file.size > padded:  # two tars in one, or a hole of zeros
        reason = f"damaged tar: {file.size - end} bytes after the end marker at byte {end}"
        yield _damaged(file, label, reason, end)


def _padded(end: int, size: int) -> int:
    """Return the size to which a tar is padded that ends at `end`.

    Tars are padded to complete records, which writers may enlarge by powers of two (`tar
    --blocking-factor`).
    """
    sizes = [-(-end // record) * record for record in RECORD_SIZES]
    return size if size in sizes else -(-end // tarfile.RECORDSIZE) * tarfile.RECORDSIZE


def _damaged(file: File, label: str, reason: str, at: int) -> Skipped:
    """Return damage from byte `at` on; the file is not cut if its end marker follows."""
    marker = 2 * tarfile.BLOCKSIZE
    end = file.read(max(at, file.size - marker), marker)
    cut = len(end) < marker or any(end)
    return Skipped(label, "", reason, None, file.size - at, cut)


def _content(file: File, stream: BinaryIO, name: str, location: Location) -> bytes | Header | str:
    """Return a text, an image's or sound's header, or the reason why it is neither."""

    def read(offset: int, length: int) -> bytes:
        length = max(0, min(length, location.size - offset))
        if isinstance(file, LocalFile):
            return file.read(location.offset + offset, length)
        stream.seek(location.offset + offset)  # a URL is streamed once
        return stream.read(length)

    if name.lower().endswith((".json", ".txt")):
        if location.size > MAX_TEXT_BYTES:
            return f"{name} has {location.size} bytes, at most {MAX_TEXT_BYTES} are read"
        return read(0, location.size)
    try:
        media = _media_of(name)
        return Header(media.name, media.read_sizes(read, location.size))
    except ValueError as error:
        return f"{name}: {error}"


def _segments(
    group: dict[str, Member], by_name: Members, chat: ChatForm | None
) -> tuple[list[Segment], tuple[str, ...]]:
    """Return (segments, `Sample.unread`) of one sample.

    It is a conversation or interleaved if its json has such keys, else an image or clip with its
    caption.
    """
    media = [
        (name, group[suffix])
        for name, medium in MEDIA.items()
        for suffix in medium.suffixes
        if suffix in group
    ]
    described = _described(group)
    if described is None:
        what = MEDIA[media[0][0] if media else "image"].what
        raise ValueError(f"{_a(what)} without a caption (KEY.txt or KEY.json)")
    if not isinstance(described.content, bytes):
        raise ValueError(described.content)
    parts: list[Part] | str
    unread: Iterable[str] = ()
    value: Any = None
    if described is not group.get("txt"):
        value = _record(described.content)
    elif described.content.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"[", b"{"):
        with contextlib.suppress(ValueError):  # as in `TarShard.texts`
            value = _record(described.content)
    if has_turns(value):

        def measure(names: Sequence[str]) -> list[Numbers]:
            named = ((by_name.find(name, described.name), name) for name in names)
            return [_header(member, media_of(name)).sizes for member, name in named]

        parts = conversation(value, chat, _pictures(media), measure)
        unread = unread_keys(value, chat)
    elif described is group.get("txt"):
        parts = parse_parts(described.content)
        if isinstance(parts, str):
            check_text({TEXTS[0]: parts})
    else:
        parts = _parse_json(value)
        if isinstance(parts, str):
            check_document(value)
        unread = _unread_of_json(value)
    if isinstance(parts, str):
        if not parts.strip():
            raise ValueError("the text is empty")
        first = dict(reversed(media))
        pictures = _pictures(first.items())
        names = file_names(value, pictures) if described is group.get("json") else pictures
        if not media and not names:
            others = [f"; {one.content}" for one in group.values() if isinstance(one.content, str)]
            raise ValueError(
                "a caption without its "
                + " or ".join(
                    f"{one.what} (KEY.{', .'.join(one.suffixes[:-1])} or .{one.suffixes[-1]})"
                    for one in MEDIA.values()
                )
                + "".join(others)
            )
        written = with_files(parts, names)
        place = described.location
        if len(written) != len(names) + 1 or written[-1].value != parts:  # it has marks
            place = place._replace(size=-place.size)
        segments = [
            (
                text_segment(part, place)
                if part.kind == TEXT
                else _file(part.kind, _media(part), by_name.find(part.value, described.name))
            )
            for part in written
        ]
        used = [by_name.find(name, described.name) for name in names]
        sounds = [
            (name, one) for name, one in first.items() if name not in PICTURES and one not in used
        ]
        at = int(written[0].kind == IMAGE and _media(written[0]) == "image")
        segments[at:at] = [_file(KINDS[MEDIA[name].item], name, one) for name, one in sounds]
        used += [one for _, one in sounds]
    else:
        segments = [
            (
                text_segment(part, described.location)
                if part.kind == TEXT
                else _file(part.kind, _media(part), by_name.find(part.value, described.name), part)
            )
            for part in parts
        ]
        # its images may be those of another sample
        used = [one for one in group.values() if isinstance(one.content, Header)]
    used_names = {described.name, *(one.name for one in used)}
    members = {f".{suffix}": one for suffix, one in group.items() if one.name not in used_names}
    return segments, (*unread, *unread_of(members, set(), "member "))


def _pictures(media: Iterable[tuple[str, Member]]) -> list[str]:
    """Return the names of images and videos among files by type."""
    return [PICTURES[name](member.name) for name, member in media if name in PICTURES]


def _described(group: dict[str, Member]) -> Member | None:
    """Return the text or json of a sample: turns and segments take precedence over a caption."""
    text, json_ = group.get("txt"), group.get("json")
    content = json_.content if json_ is not None and text is not None else None
    if isinstance(content, bytes) and any(name in content for name in FORMS):
        with contextlib.suppress(ValueError):
            if has_turns(value := _record(content)) or (
                isinstance(value, dict) and "segments" in value
            ):
                return json_
    return text or json_


def _unreferred(
    alone: dict[str, dict[str, Member]], referred: set[str], lost: list[bytes]
) -> dict[str, dict[str, Member]]:
    """Return by key the files without a description to which no sample refers.

    Args:
        lost: texts and jsons of skipped samples, which may name some.
    """
    names = {key: [one.name for one in group.values()] for key, group in alone.items()}
    return {
        key: alone[key]
        for key, own in names.items()
        if referred.isdisjoint(own)
        and not any(name.rpartition("/")[2].encode() in text for name in own for text in lost)
    }


def _dotted(by_key: dict[str, dict[str, Member]], label: str) -> Iterator[Skipped]:
    """Yield descriptions whose names have an additional dot, so that their samples have none."""
    for group in by_key.values():
        if "json" in group or "txt" in group:
            continue
        for member in group.values():
            name, _, suffix = member.name.rpartition(".")
            if suffix.lower() in ("json", "txt"):
                reason = (
                    f"no KEY.json or KEY.txt, but {member.name}; a key ends at the first dot"
                    " (WebDataset): write other characters for its other dots"
                )
                yield Skipped(label, name, reason)


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON: {error}") from None


def _record(data: bytes) -> Any:
    """Return the value of a json or txt, its turns as a list; ValueError if it is no JSON."""
    value = _json(data)
    turns = turns_in(value) if isinstance(value, list) else None
    return {TURNS[1]: turns} if turns else with_turns(value)


def _parse_json(value: Any) -> list[Part] | str:
    if isinstance(value, dict) and "segments" in value:
        return _parts(value["segments"])
    if not isinstance(value, dict) or not any(key in value for key in TEXTS):
        raise ValueError(
            "the JSON has neither `segments`, a conversation (`messages`, `conversations`) nor a"
            " `text` or `caption`"
        )
    return document_text(value, caption=True)


def _unread_of_json(value: dict[str, Any]) -> list[str]:
    """Return the keys of a valid json without turns that are not read."""
    if "segments" not in value:
        return [*unread_keys(value)]
    keys = {"type", "value", "file", "loss", "generate", *BUDGET_KEYS}
    of_segments = (unread_of(one, keys, "segment key ") for one in value["segments"])
    names = dict.fromkeys(chain.from_iterable(of_segments))
    return [*unread_of(value, {"segments", *KEYS}), *names]


def _parts(segments: Any) -> list[Part]:
    if not isinstance(segments, list) or not segments:
        raise ValueError("`segments` must be a list with at least one segment")
    parts = []
    for index, segment in enumerate(segments):
        kind = segment.get("type") if isinstance(segment, dict) else None
        if kind == "text" and isinstance(value := segment.get("value"), str):
            if flags := [key for key in (*FLAGS, MASKED) if key in segment and key != "loss"]:
                raise ValueError(f"segments[{index}] has `{flags[0]}`; supported is `loss`")
            trained = "loss" not in segment or _flag(segment, index, "loss")
            parts.append(Part(TEXT, clean(value), trained))
        elif kind == "image" and isinstance(value := segment.get("file"), str):
            generated = "generate" in segment and _flag(segment, index, "generate")
            name = ImageName.of(value, budget_of(segment, f"segments[{index}]"))
            parts.append(Part(TARGET if generated else IMAGE, name))
        elif kind in MEDIA and budget_of(segment, f"segments[{index}]"):
            raise ValueError(f"segments[{index}] has a pixel budget, which only images have")
        elif kind in MEDIA and isinstance(value := segment.get("file"), str):
            named = VideoName(value) if kind == "video" else value
            parts.append(Part(KINDS[MEDIA[kind].item], named))
        else:
            types = " or ".join([_a(next(iter(MEDIA))), *list(MEDIA)[1:]])
            raise ValueError(
                f"segments[{index}] must be a text with `value` or {types} with `file`"
            )
    return parts


def _flag(segment: dict[str, Any], index: int, name: str) -> bool:
    if not isinstance(segment[name], bool):
        raise ValueError(f"segments[{index}].{name} must be true or false")
    return bool(segment[name])


def _media(part: Part) -> str:
    """Return the type of the file that a part names."""
    if isinstance(part.value, VideoName):
        return media_of(part.value)
    return MODALITIES[ITEMS[part.kind]].media.name


def _media_of(name: str) -> Media:
    """Return the type of a file by its name; images are the default."""
    suffix = name.lower().rpartition(".")[2]
    return next((media for media in MEDIA.values() if suffix in media.suffixes), MEDIA["image"])


def _file(kind: int, media: str, member: Member, part: Part | None = None) -> Segment:
    """Return the segment of a file, which must be of type `media`, or of a part of it."""
    return file_segment(kind, member.location, _header(member, media).sizes, part)


def _header(member: Member, media: str) -> Header:
    """Return the header of a file, which must be of type `media`."""
    if isinstance(member.content, str):
        raise ValueError(member.content)
    if not isinstance(member.content, Header) or member.content.media != media:
        raise ValueError(f"{member.name} is not {_a('sound' if media == 'audio' else media)}")
    return member.content


def _a(what: str) -> str:
    return f"an {what}" if what[0] in "aeiou" else f"a {what}"

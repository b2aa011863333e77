"""Contents of a record: turns of a conversation, a document, or a caption, and the images it names.

Turns are in `conversations` or `messages`: `{from, value}` (LLaVA, ShareGPT) or `{role, content}`
(OpenAI, chat templates), whose content may be a list of parts (`content_parts`). `<image>` in a
text marks the position of one of the record's images. Videos and clips are named and marked as
images are, with `video` or `audio` instead of `image`. Keys that leave a turn untrained, and keys
for which a record is refused, are in `refusals`. A chat template renders turns (`data.chat`); if
the tokenizer has none, they are `USER: … ASSISTANT: …EOS` after the system message, and only the
text after `ASSISTANT:`, with EOS, is trained (LLaVA, Liu et al. 2023, arXiv 2304.08485, section
4.2). The last EOS is the sample's.

Without turns all of `text` is trained: a document, or the caption of the record's images, whose key
may also be `caption`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from disttrain_cli.data.sources.content_parts import READ, read_part
from disttrain_cli.data.sources.refusals import (
    FLAGS,
    MASK_HISTORY,
    OF_TURNS,
    ON_PROMPTS,
    TOOLS,
    check_conversation,
    check_document,
    check_files,
    check_turn,
    file_keys,
    is_plain,
    is_trained,
    prompted,
)
from disttrain_cli.data.sources.samples import (
    ENDED,
    KIND,
    TRAINED,
    ChatForm,
    ImageName,
    Measure,
    Measured,
    Part,
    PartFile,
    SoundName,
    Turn,
    VideoName,
    clean,
    holds,
    media_of,
    part_of,
    printable,
    unread_of,
)
from disttrain_cli.data.sources.turn_forms import TURNS
from disttrain_cli.spec.heads import Numbers
from disttrain_cli.spec.image_processor import PixelBudget
from disttrain_cli.spec.index import AUDIO, IMAGE, TEXT

MARK = "<image>"
#: Marks of videos and clips in a record's texts, and their replacements after reading, which no
#: text contains otherwise.
WRITTEN_FILM, FILM = "<video>", chr(0x10FFFD)
WRITTEN_SOUND, SOUND = "<audio>", chr(0x10FFFC)
#: Marks by type of file, and their forms in records.
MARK_OF = {"image": MARK, "video": FILM, "audio": SOUND}
WRITTEN_OF = {"image": MARK, "video": WRITTEN_FILM, "audio": WRITTEN_SOUND}
MEDIA_OF_MARK = {mark: media for media, mark in MARK_OF.items()}
MARKS = re.compile("|".join(MARK_OF.values()))
#: Marks of files in a text without turns.
WRITTEN_MARKS = re.compile("|".join(WRITTEN_OF.values()))
#: Names of files in turns, by their type.
NAME_OF: dict[str, type[str]] = {"image": str, "video": VideoName, "audio": SoundName}
#: A file named inside a text, as in Qwen-VL's first format.
TAGGED = re.compile(
    r"<img>[^<>]+</img>|<(image|video|audio)>[^<>]+\.[A-Za-z0-9]{2,4}</\1>", re.IGNORECASE
)
USER, ASSISTANT = "USER: ", "ASSISTANT:"
ROLES = {"human": "user", "gpt": "assistant"}  # names of LLaVA and ShareGPT
SIDES = {role: role for role in ("system", "user", "assistant")} | ROLES
BEFORE = {"system": "", "user": USER, "assistant": ASSISTANT}  # text before a turn
# keys of a turn that are read without a template
WORDS = {"from", "role", "value", "content"}
SAID = {*WORDS, *OF_TURNS}
IMAGES = ("image", "images", "file_name")  # the last one of Hugging Face's imagefolder
VIDEOS = ("video", "videos")
SOUNDS = ("audio", "audios")
FIELDS_OF = {"image": IMAGES, "video": VIDEOS, "audio": SOUNDS}
KEYS = ("id", "__key__", "__url__")  # identify the sample
#: Keys of a record with turns that are read.
OF_RECORD = {
    *TURNS,
    "system",
    *IMAGES,
    *VIDEOS,
    *SOUNDS,
    *KEYS,
    *TOOLS,
    *FLAGS,
    MASK_HISTORY,
    *ON_PROMPTS,
}


def no_numbers(names: Sequence[str]) -> Sequence[Numbers]:
    """Return placeholders for the sizes of images that are not measured."""
    return [(0, 0)] * len(names)


def conversation(
    record: Any,
    chat: ChatForm | None = None,
    media_files: Sequence[str] = (),
    measure: Measure = no_numbers,
) -> list[Part]:
    """Return the texts, images, videos and clips (by name) of a record, in order.

    Index and loader both read records by this function.

    Args:
        chat: renders the turns, if there are any.
        media_files: images and videos stored next to the record, used if it names none.
        measure: returns the sizes of files, which `chat` may need.

    Raises:
        ValueError: the record is not valid; the message has the reason.
    """
    turns, names = _said(record, media_files)
    if not turns:
        text = document_text(record, bool(names))
        check_document(record)
        if not names:
            check_files(record)
        return with_files(text, names)
    check_conversation(record, [turn.said for turn in turns])
    if not names:
        check_files(record)
    parts = _written(turns, names, chat, measure)
    if not any(part.trained for part in parts if part.kind == TEXT):
        raise ValueError("no token of it is trained")
    return parts


def with_files(text: str, names: Sequence[str]) -> list[Part]:
    """Return the parts of a document or caption, its images and videos at their marks.

    In a text without marks, all files precede it.

    Raises:
        ValueError: the numbers of marks and files differ.
    """
    marks = WRITTEN_MARKS.findall(text) if names else []
    if not marks:
        return [*map(part_of, names), Part(TEXT, text)]
    each = {mark: _only(media, names) for media, mark in WRITTEN_OF.items()}
    for media, mark in WRITTEN_OF.items():
        if (count := marks.count(mark)) != len(each[mark]):
            raise ValueError(f"{count} occurrences of {mark} for {len(each[mark])} {media}s")
    pieces = WRITTEN_MARKS.split(text)
    if not any(piece.strip() for piece in pieces):
        raise ValueError("the text consists only of markers")
    files = {mark: iter(own) for mark, own in each.items()}
    parts = [Part(TEXT, pieces[0])]
    for mark, piece in zip(marks, pieces[1:], strict=True):
        parts += [part_of(next(files[mark])), Part(TEXT, piece)]
    return [part for part in parts if part.value]


def text_pieces(text: str) -> list[str]:
    """Return the texts of `with_files` from a text that has files."""
    return [piece for piece in WRITTEN_MARKS.split(text) if piece]


def _written(
    turns: list[Turn], names: list[str], chat: ChatForm | None, measure: Measure
) -> list[Part]:
    """Return turns with these images and videos, rendered by `chat` or without a template."""
    if chat is not None:
        return chat.parts(turns, names, measure)
    form, said = _plain((turn.role, turn.said, turn.trained) for turn in turns)
    texts, files = iter(said), iter(names)
    return [
        part_of(next(files))
        if one & KIND
        else Part(TEXT, next(texts), bool(one & TRAINED), bool(one & ENDED))
        for one in form
    ]


def compact(record: Any) -> tuple[bytes, list[str], list[str], tuple[str, ...]] | None:
    """Return the common form of a conversation, rendered without a template.

    It equals the result of `conversation` in less than half the time, for records whose turns have
    only a side and a text, and that list their images.

    Returns:
        (form and texts as of `Compact`, names of images, `unread_keys`); None if the record needs
        the closer look of `conversation`, or is not valid.
    """
    if not isinstance(record, dict):
        return None
    others = _others(tuple(record))
    if others is None or record.get("system"):
        return None
    given, (who, what) = record.get(TURNS[0]), ("from", "value")
    if given is None:
        given, (who, what) = record.get(TURNS[1]), ("role", "content")
    elif record.get(TURNS[1]) is not None:
        return None
    if not isinstance(given, list):
        return None
    turns, marks = list[tuple[str, str, bool]](), 0
    for turn in given:
        try:
            side, said = SIDES[turn[who]], turn[what]
        except (LookupError, TypeError):
            return None
        if len(turn) != 2 or not isinstance(said, str) or FILM in said or SOUND in said:
            return None
        if "</" in said and TAGGED.search(said):
            return None
        marks += said.count(MARK)
        turns.append((side, said if said.isascii() else clean(said), True))
    try:
        names = _listed(record, IMAGES)
    except ValueError:
        return None
    form, texts = _plain(turns)
    if marks != len(names) or not form or not max(form) & TRAINED:
        return None
    return (
        form,
        texts,
        names,
        tuple([shown for key, shown in others if holds(record[key])] if others else ()),
    )


@lru_cache(maxsize=4096)
def _others(keys: tuple[str, ...]) -> list[tuple[str, str]] | None:
    """Return the keys of a record that `compact` does not read, with their names in messages.

    None if they may change the record's meaning.
    """
    if not is_plain(keys) or any(name in keys for name in (*VIDEOS, *SOUNDS)):
        return None
    others = sorted({*keys} - OF_RECORD)
    if not {*file_keys(keys)} <= OF_RECORD:
        return None
    return list(zip(others, unread_of(dict.fromkeys(others, True), ()), strict=True))


def unread_keys(record: Mapping[str, Any], chat: ChatForm | None = None) -> tuple[str, ...]:
    """Return the names, for messages, of keys of a valid record that are not read.

    Keys of its turns and of their parts are included.
    """
    field = next((name for name in TURNS if record.get(name) is not None), None)
    if field is None:
        caption = record.get("text") is None
        return tuple(unread_of(record, {"caption" if caption else "text", *IMAGES, *KEYS}))
    names = unread_of(record, OF_RECORD)
    for turn in record[field]:
        if not turn.keys() <= SAID:
            known = SAID if chat is None else SAID | {key for key in turn if chat.reads(key)}
            names += unread_of(turn, known, "turn key ")
        said = turn.get("value") or turn.get("content")
        for part in said if isinstance(said, list) else ():
            if isinstance(part, dict):
                names += unread_of(part, READ, "part key ")
    return tuple(dict.fromkeys(names))


def _plain(turns: Iterable[tuple[str, str, bool]]) -> tuple[bytes, list[str]]:
    """Return (form, texts) as of `Compact` of turns rendered without a chat template.

    Args:
        turns: (side, text, True if it is trained) of each.
    """
    form, texts = bytearray(), list[str]()
    before, answers = "", True  # `before`: an untrained text that is not in `texts` yet
    for role, said, trained in turns:
        if answers and form and not form[-1] & KIND:
            form[-1] |= ENDED
        before += BEFORE[role] if answers else " " + BEFORE[role]
        answers = role == "assistant"
        marks = _marks(said)
        pieces = MARKS.split(said) if marks else (said,)
        for index, piece in enumerate(pieces):
            if before and (index or answers):
                texts.append(before)
                form.append(TEXT)
                before = ""
            if index:
                form.append(AUDIO if marks[index - 1] == SOUND else IMAGE)
            if not answers:
                before += piece
            elif piece or not index:
                texts.append(piece if index else " " + piece)
                form.append(TEXT | TRAINED if trained else TEXT)
    if before:
        texts.append(before)
        form.append(TEXT)
    return bytes(form), texts


def plain_message(text: str) -> str:
    """Return the user's message in the text before an answer, rendered without a template."""
    return text.strip().removesuffix(ASSISTANT.strip()).rpartition(USER)[2].strip()


def texts_of(
    record: Any, chat: ChatForm | None = None, files: Sequence[Measured] = ()
) -> list[str | tuple[int, ...]]:
    """Return the texts of a record, in order, whose images and videos exist with these sizes."""
    marks = sum(turn.said.count(MARK) for turn in _turns(record))
    media_files = [
        SoundName() if kind == AUDIO else VideoName() if len(numbers) > 2 and numbers[2] else ""
        for kind, numbers in files
    ]
    turns, names = _said(record, media_files or [""] * marks, used=False)
    parts = (
        _written(turns, names, chat, lambda _: [one for _, one in files])
        if turns
        else conversation(record)
    )
    return [part.text for part in parts if part.kind == TEXT]


def has_turns(record: Any) -> bool:
    """Return True if a record is a conversation."""
    return isinstance(record, dict) and any(record.get(name) is not None for name in TURNS)


def file_names(record: Any, media_files: Sequence[str] = ()) -> list[str]:
    """Return the names of a record's images, videos and clips in the order of their marks.

    In a record without turns, images come first.

    Raises:
        ValueError: the record is not valid, or the numbers of marks and files differ.
    """
    return _said(record, media_files)[1]


def _said(
    record: Any, media_files: Sequence[str], used: bool = True
) -> tuple[list[Turn], list[str]]:
    """Return (the turns of a record, `file_names`).

    Args:
        used: True = every file must be that of a part.
    """
    if not isinstance(record, dict):
        raise ValueError("a record must be a mapping")
    turns = _turns(record)
    parts = [file for turn in turns for file in turn.files]
    files = {
        media: [
            NAME_OF[media](name)
            for name in _files(
                media, _listed(record, fields), parts, _only(media, media_files), used
            )
        ]
        for media, fields in FIELDS_OF.items()
    }
    if not turns:
        return [], [name for names in files.values() for name in names]
    turns = _marked(turns, files)
    marks = [mark for turn in turns for mark in _marks(turn.said)]
    for media, names in files.items():
        if (count := marks.count(MARK_OF[media])) != len(names):
            raise ValueError(
                f"{count} occurrences of {WRITTEN_OF[media]} for {len(names)}"
                f" {media}s{_unread_parts(record)}"
            )
    files["image"] = _with_budgets(turns, files["image"])
    each = {MARK_OF[media]: iter(names) for media, names in files.items()}
    return turns, [next(each[mark]) for mark in marks]


def _files(
    media: str, listed: list[str], parts: list[PartFile], media_files: list[str], used: bool
) -> list[str]:
    """Return the names of a record's files of one type.

    They are those that the record lists, those of its parts, or those stored next to it; if its
    parts have an index, in the order of these.
    """
    parts = [part for part in parts if part.media == media]
    named = [part.name for part in parts if part.name]
    if listed and named and listed != named:
        raise ValueError(f"the record and the parts of its turns name different {media}s")
    names = listed or named or media_files
    indices = [part.place for part in parts if part.place is not None]
    if not indices:
        return names
    if len(indices) < len(parts):
        raise ValueError(f"some parts have the index of their {media}, others have none")
    if wrong := [index for index in indices if not 0 <= index < len(names)]:
        raise ValueError(f"a part has the index {wrong[0]} of {len(names)} {media}s")
    if used and (unused := sorted({*range(len(names))} - {*indices})):
        raise ValueError(f"no part has the index {unused[0]} of {len(names)} {media}s")
    return [names[index] for index in indices]


def _with_budgets(turns: list[Turn], images: list[str]) -> list[str]:
    """Return the names of images, one for each mark, with the pixel budgets of the turns' parts."""
    if not any(turn.budgets for turn in turns):
        return images
    budgets = (turn.budgets.get(at) for turn in turns for at in range(turn.said.count(MARK)))
    return [ImageName.of(*one) for one in zip(images, budgets, strict=True)]


def _marks(text: str) -> list[str]:
    """Return the marks of a text in order; texts without marks are not searched by the pattern."""
    return MARKS.findall(text) if MARK in text or FILM in text or SOUND in text else []


def _unread_parts(record: dict[str, Any]) -> str:
    """Return an addition to messages if parts have unread keys, which may name their files."""
    names = [name for name in unread_keys(record) if name.startswith("part")]
    return f"; ignored: {', '.join(names)}" if names else ""


def _listed(record: dict[str, Any], fields: Sequence[str]) -> list[str]:
    """Return the names in these fields, which must agree."""
    found: list[str] = []
    for field in fields:
        if not (value := record.get(field)):
            continue
        names = value if isinstance(value, list) else [value]
        names = [_path(name) for name in names]
        if not all(isinstance(name, str) for name in names):
            raise ValueError(f"`{field}` must be a name or a list of names")
        if found and names != found:
            raise ValueError(f"`{field}` and another key of the record name different files")
        found = names
    return found


def _path(name: Any) -> Any:
    """Return the path in `{path}` or `{bytes: null, path}`; other values unchanged."""
    given = (
        {key: value for key, value in name.items() if value is not None}
        if isinstance(name, dict)
        else {}
    )
    return given["path"] if [*given] == ["path"] else name


def _only(media: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if media_of(name) == media]


def _marked(turns: list[Turn], files: Mapping[str, Sequence[str]]) -> list[Turn]:
    """Return the turns of a record with these files.

    The text of a video's or clip's mark is a mark only if there are such files.
    """
    for media, names in files.items():
        if media != "image" and names:
            written, mark = WRITTEN_OF[media], MARK_OF[media]
            turns = [
                turn._replace(texts=[text.replace(written, mark) for text in turn.texts])
                for turn in turns
            ]
    return turns


def _turns(record: dict[str, Any]) -> list[Turn]:
    """Return the turns of a record, none if it has a text instead.

    Raises:
        ValueError: the turns are not valid.
    """
    fields = [name for name in TURNS if record.get(name) is not None]
    if not fields:
        return []
    field, given, system = fields[0], record[fields[0]], record.get("system")
    if record[fields[-1]] != given:
        raise ValueError(f"`{fields[0]}` and `{fields[1]}` differ: keep the intended one")
    if not isinstance(given, list) or not given:
        raise ValueError(f"`{field}` must be a list with at least one turn")
    turns = [_turn(turn, f"{field}[{number}]") for number, turn in enumerate(given)]
    if record.get(MASK_HISTORY):
        last = max((at for at, turn in enumerate(turns) if turn.role == "assistant"), default=0)
        turns = [
            turn._replace(trained=turn.trained and at == last) for at, turn in enumerate(turns)
        ]
    if not system:
        return turns
    first = _turn({"from": "system", "value": system}, "system")
    if turns[0].role != "system":
        return [first, *turns]
    if turns[0].said != first.said:
        raise ValueError(f"`system` and the system turn of `{field}` differ: keep the intended one")
    return turns


def _turn(turn: Any, where: str) -> Turn:
    fields = (
        {key: value for key, value in turn.items() if value is not None}
        if isinstance(turn, dict)
        else {}
    )
    who, said = fields.get("from", fields.get("role")), fields.get("value", fields.get("content"))
    role = ROLES.get(who, who) if isinstance(who, str) else None
    flagged = not fields.keys() <= WORDS
    if flagged:
        check_turn(fields, where)
    if role not in BEFORE or not isinstance(said, str | list):
        known = "system, human, gpt, user, assistant"
        if isinstance(who, str) and role not in BEFORE:
            raise ValueError(f"{where} is of {who!r}, which is not supported; known: {known}")
        raise ValueError(
            f"{where} must have `from` or `role` ({known}), and `value` or `content` (a text, or a"
            " list of texts and images)"
        )
    for one, other in (("from", "role"), ("value", "content")):
        if fields.get(one, fields.get(other)) != fields.get(other, fields.get(one)):
            raise ValueError(f"{where} has a `{one}` and another `{other}`")
    parts = [said] if isinstance(said, str) else said
    read = [read_part(part, where) for part in parts]
    texts = [part if isinstance(part, str) else MARK_OF[part.media] for part in read]
    for text in texts:
        if "</" in text and (tagged := TAGGED.search(text)):
            named = printable(tagged[0], 80)
            raise ValueError(
                f"{where} names a file in its text ({named}): write `image` and {MARK}"
            )
    files = [part for part in read if not isinstance(part, str)]
    others = {}
    if not fields.keys() <= SAID:
        others = {key: fields[key] for key in fields.keys() - SAID}
    trained = not flagged or is_trained(fields, role, where)
    return Turn(role, texts, files, isinstance(said, list), others, trained, _budgets(read))


def _budgets(parts: list[str | PartFile]) -> dict[int, PixelBudget]:
    """Return the pixel budgets of a turn's image parts, by the index of their mark in it."""
    budgets, marks = dict[int, PixelBudget](), 0
    for part in parts:
        if isinstance(part, str):
            marks += part.count(MARK)
        elif part.media == "image":
            if part.budget is not None:
                budgets[marks] = part.budget
            marks += 1
    return budgets


def document_text(record: Mapping[str, Any], caption: bool) -> str:
    """Return the text of a record without turns, with `caption` also that of its files.

    Raises:
        ValueError: it has no text.
    """
    field = "caption" if caption and record.get("text") is None else "text"
    if record.get(field) is None and field not in record:
        form = prompted(record)
        raise ValueError(
            "a record has a list `conversations` or `messages` with at least one turn, or a `text`"
            + (f"; {form} are not read: write them as turns" if form else "")
        )
    if not isinstance(record[field], str) or not record[field].strip():
        raise ValueError(f"`{field}` must be a non-empty text")
    return clean(record[field])

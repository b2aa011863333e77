"""What a record of a JSON says: turns of a conversation, a document, or a caption, with the images
it names.

Turns are those of `conversations` or `messages`: `{from, value}` (LLaVA, ShareGPT) or `{role,
content}` (chat templates), whose content may be a list of parts `{type: text, text}` and `{type:
image, image: NAME}`. `<image>` in a text marks where one of the record's images stands. They are
written as `USER: … ASSISTANT: …EOS` behind what the system says; only what stands behind
`ASSISTANT:`, EOS with it, is trained (LLaVA, Liu et al. 2023, arXiv 2304.08485, section 4.2). The
last EOS is the sample's own.

Without turns all of `text` is trained: a document, or, as `caption` too, that of the record's
images.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from disttrain_cli.data.sources.samples import Part, clean
from disttrain_cli.spec.index import IMAGE, TEXT

MARK = "<image>"
USER, ASSISTANT = "USER: ", "ASSISTANT:"
ROLES = {"system": "", "human": USER, "gpt": ASSISTANT, "user": USER, "assistant": ASSISTANT}
TURNS = ("conversations", "messages")
IMAGES = ("image", "images", "file_name")  # the last one of Hugging Face's imagefolder


class Turn(NamedTuple):
    """What one side says."""

    role: str  # what it is written behind
    said: str  # with a mark for each image
    images: list[str]  # that the turn itself names


def conversation(record: Any) -> list[Part]:
    """Texts and images (by name) of a record, in order; index and loader both read it by this
    function.

    Raises ValueError with the reason.
    """
    names, turns = image_names(record), _turns(record)
    if not turns:
        return [*(Part(IMAGE, name) for name in names), Part(TEXT, _document(record, bool(names)))]
    parts: list[Part] = []
    marks, before, answers = (
        0,
        "",
        True,
    )  # `before`: a text that is not trained and not in `parts` yet
    for turn in turns:
        if answers and parts and parts[-1].kind == TEXT:
            parts[-1] = parts[-1]._replace(ended=True)
        before += "" if answers else " "
        answers = turn.role == ASSISTANT
        before += turn.role
        for index, piece in enumerate(clean(turn.said).split(MARK)):
            if index:
                before = _text(parts, before, trained=False)
                marks += 1
                if marks <= len(names):
                    parts.append(Part(IMAGE, names[marks - 1]))
            if answers:
                before = _text(parts, before, trained=False)
                _text(parts, piece if index else " " + piece, trained=True)
            else:
                before += piece
    _text(parts, before, trained=False)
    if marks != len(names):
        raise ValueError(f"{marks} marks {MARK} for {len(names)} images")
    return parts


def image_names(record: Any) -> list[str]:
    """Names of a record's images; ValueError where it has no such form."""
    if not isinstance(record, dict):
        raise ValueError("a record must be a mapping")
    field = next((name for name in IMAGES if record.get(name) is not None), None)
    if field is None:
        return [name for turn in _turns(record) for name in turn.images]
    names = [record[field]] if isinstance(record[field], str) else record[field]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"`{field}` must be a name or a list of names")
    return names


def _turns(record: dict[str, Any]) -> list[Turn]:
    """The turns of a record, none where it has a text instead; ValueError where they have no such
    form."""
    field = next((name for name in TURNS if record.get(name) is not None), None)
    if field is None:
        return []
    given, system = record[field], record.get("system")
    if not isinstance(given, list) or not given:
        raise ValueError(f"`{field}` must be a list with at least one turn")
    turns = [_turn(turn, f"{field}[{number}]") for number, turn in enumerate(given)]
    return [_turn({"from": "system", "value": system}, "system"), *turns] if system else turns


def _turn(turn: Any, where: str) -> Turn:
    given = turn if isinstance(turn, dict) else {}
    who, said = given.get("from", given.get("role")), given.get("value", given.get("content"))
    parts = said if isinstance(said, list) else [{"type": "text", "text": said}]
    images: list[str] = []
    texts: list[str] = []
    for part in parts:
        match part:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "image", **others}:
                texts.append(MARK)
                images += [name for name in (others.get("image"),) if isinstance(name, str)]
            case _:
                texts = []
                break
    if not isinstance(who, str) or who not in ROLES or (parts and not texts):
        raise ValueError(
            f"{where} must have `from` or `role` ({', '.join(ROLES)}), and `value` or `content` (a"
            " text, or a list of texts and images)"
        )
    return Turn(ROLES[who], "".join(texts), images)


def _document(record: dict[str, Any], caption: bool) -> str:
    field = "caption" if caption and "text" not in record else "text"
    if field not in record:
        raise ValueError(
            "a record has a list `conversations` or `messages` with at least one turn, or a `text`"
        )
    if not isinstance(record[field], str) or not record[field]:
        raise ValueError(f"`{field}` must be a text that is not empty")
    return clean(record[field])


def _text(parts: list[Part], text: str, trained: bool) -> str:
    """Append a text, unless it is empty; what is left of it: nothing."""
    if text:
        parts.append(Part(TEXT, text, trained))
    return ""

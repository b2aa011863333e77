"""What a record says: turns of a conversation, a document, or a caption, with the images it names.

Turns are those of `conversations` or `messages`: `{from, value}` (LLaVA, ShareGPT) or `{role,
content}` (OpenAI, chat templates), whose content may be a list of parts `{type: text, text}`,
`{type: image, image: NAME}` and `{type: image_url, image_url: {url: NAME}}`. `<image>` in a text
marks where one of the record's images stands. An assistant's turn with `weight: 0` is not trained
(OpenAI's form). A chat template writes them (`data.chat`); where the
tokenizer has none, they are `USER: … ASSISTANT: …EOS` behind what the system says, and only what
stands behind `ASSISTANT:`, EOS with it, is trained (LLaVA, Liu et al. 2023, arXiv 2304.08485,
section 4.2). The last EOS is the sample's own.

Without turns all of `text` is trained: a document, or, as `caption` too, that of the record's
images.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from disttrain_cli.data.sources.samples import ChatForm, Measure, Part, Turn, clean
from disttrain_cli.spec.heads import Numbers
from disttrain_cli.spec.index import IMAGE, TEXT

MARK = "<image>"
USER, ASSISTANT = "USER: ", "ASSISTANT:"
ROLES = {"human": "user", "gpt": "assistant"}  # names of LLaVA and ShareGPT
BEFORE = {"system": "", "user": USER, "assistant": ASSISTANT}  # what a turn is written behind
# keys of a turn that are read without a template
SAID = {"from", "role", "value", "content", "weight"}
NO_TOOLS = "`tools` and `tool_calls` are not read"
TURNS = ("conversations", "messages")
IMAGES = ("image", "images", "file_name")  # the last one of Hugging Face's imagefolder


def no_numbers(names: Sequence[str]) -> Sequence[Numbers]:
    """Of images that nobody measures."""
    return [(0, 0)] * len(names)


def conversation(
    record: Any,
    chat: ChatForm | None = None,
    beside: Sequence[str] = (),
    measure: Measure = no_numbers,
) -> list[Part]:
    """Texts and images (by name) of a record, in order; index and loader both read it by this
    function.

    `chat` writes its turns, if it has any; `beside`: images that lie beside it, which are meant
    where it names none; `measure`: says their numbers, which it may need. Raises ValueError with
    the reason.
    """
    names, turns = image_names(record) or list(beside), _turns(record)
    if not turns:
        return [*(Part(IMAGE, name) for name in names), Part(TEXT, _document(record, bool(names)))]
    if (marks := sum(turn.said.count(MARK) for turn in turns)) != len(names):
        raise ValueError(f"{marks} marks {MARK} for {len(names)} images")
    if chat is None:
        return _plain(turns, names)
    if record.get("tools"):
        raise ValueError(NO_TOOLS)
    return chat.parts(turns, names, measure)


def _plain(turns: list[Turn], names: list[str]) -> list[Part]:
    """Turns as they are written where the tokenizer does not say how."""
    parts: list[Part] = []
    images = iter(names)
    before, answers = "", True  # `before`: a text that is not trained and not in `parts` yet
    for turn in turns:
        if answers and parts and parts[-1].kind == TEXT:
            parts[-1] = parts[-1]._replace(ended=True)
        before += "" if answers else " "
        answers = turn.role == "assistant"
        before += BEFORE[turn.role]
        for index, piece in enumerate(turn.said.split(MARK)):
            if index:
                before = _text(parts, before, trained=False)
                parts.append(Part(IMAGE, next(images)))
            if answers:
                before = _text(parts, before, trained=False)
                _text(parts, piece if index else " " + piece, trained=turn.trained)
            else:
                before += piece
    _text(parts, before, trained=False)
    return parts


def texts_of(
    record: Any, chat: ChatForm | None = None, files: Sequence[Numbers] = ()
) -> list[str | tuple[int, ...]]:
    """Texts of a record whose images are known to be there, with these numbers, in order."""
    marks = sum(turn.said.count(MARK) for turn in _turns(record))
    parts = conversation(record, chat, [""] * marks, lambda names: files)
    return [part.text for part in parts if part.kind == TEXT]


def has_turns(record: Any) -> bool:
    """Whether a record is a conversation."""
    return isinstance(record, dict) and any(record.get(name) is not None for name in TURNS)


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
    role = ROLES.get(who, who) if isinstance(who, str) else None
    parts = said if isinstance(said, list) else [{"type": "text", "text": said}]
    images: list[str] = []
    texts: list[str] = []
    for part in parts:
        match part:
            case {"type": "text", "text": str(text)} | str(text):
                texts.append(clean(text))
            case {"text": str(text)} if len(part) == 1:
                texts.append(clean(text))
            case {"type": "image" | "image_url"}:
                texts.append(MARK)
                images += _named(part)
            case {"type": str(kind)} if kind not in ("text", "image"):
                raise ValueError(f"{where} has a part of the type {kind!r}, which is not read")
            case _:
                texts = []
                break
    if given.get("tool_calls"):
        raise ValueError(NO_TOOLS)
    if role not in BEFORE or (parts and not texts):
        known = "system, human, gpt, user, assistant"
        if isinstance(who, str) and role not in BEFORE:
            raise ValueError(f"{where} is of {who!r}, which is not read; known: {known}")
        raise ValueError(
            f"{where} must have `from` or `role` ({known}), and `value` or `content` (a text, or a"
            " list of texts and images)"
        )
    weight = given.get("weight", 1)
    if isinstance(weight, bool) or weight not in (0, 1, None):
        raise ValueError(f"{where} has the weight {weight!r}; read are 0 and 1")
    others = {key: given[key] for key in given.keys() - SAID if given[key] is not None}
    return Turn(role, texts, images, isinstance(said, list), others, weight != 0)


def _named(part: dict[str, Any]) -> list[str]:
    """The name of an image that a part of a turn has, unless the record has it."""
    url = part.get("image_url")
    given = [
        part.get("image"),
        url.get("url") if isinstance(url, dict) else url,
        part.get("url"),
        part.get("path"),
    ]
    return [name for name in given if isinstance(name, str)][:1]


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

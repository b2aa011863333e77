"""Keys that change a record's meaning: flags, and keys for which a record is refused by name.

Reading such a record without these keys would change its meaning.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from disttrain_cli.data.sources.samples import MOST_KEY, printable
from disttrain_cli.data.sources.turn_forms import TEXTS, parsed

#: Keys of tool calls in a record or a turn.
TOOLS = ("tools", "tool_calls", "functions", "function_call", "function_calls")
#: Keys of a turn that leave it untrained if 0 or false: of OpenAI (`weight`), ms-swift and ChatGLM
#: (`loss`), axolotl (`train`, `training`), LLaMA-Factory (`loss_weight`), verl (`loss_mask`).
FLAGS = ("weight", "loss", "train", "training", "loss_weight", "loss_mask", "loss_scale")
MASKED = "masked"  # torchtune's: true leaves a turn untrained
#: Spans of a turn that are trained (axolotl).
DETAILS = ("train_detail", "training_detail")
#: If true in a record, only its last answer is trained (LLaMA-Factory).
MASK_HISTORY = "mask_history"
#: If true in a record, the user's turns are trained, too (LLaMA-Factory, axolotl, torchtune).
ON_PROMPTS = ("train_on_prompt", "train_on_prompts", "train_on_input", "train_on_inputs")
#: Prefixes of keys of preference data: `rejected_response`, `chosen_messages`, …
PREFERENCES = ("chosen", "rejected", "preferred_", "non_preferred_")
#: True or false: the answer is a good one (KTO).
DESIRED = ("label", "kto_tag", "desirable", "is_desirable", "chosen", "rejected")
CLIPS = ("sound", "sounds")
MEDIA_OF_TURNS = ("image", "images", "video", "videos", "audio", "audios", *CLIPS)
#: Marks in texts that ms-swift replaces with the contents of `objects`.
OBJECTS, OBJECT_MARKS = "objects", ("<ref-object>", "<bbox>")
#: Keys of a turn, or of one with both sides.
TURN_KEYS = (
    *({"role", "content"}, {"from", "value"}),
    *({"user", "assistant"}, {"human", "assistant"}, {"human", "gpt"}),
)
#: Keys that may name files, and values that do: with their suffixes, or addresses.
FILE_KEY = re.compile(r"image|img|picture|photo|thumbnail|video|audio|file_names?$", re.IGNORECASE)
FILE_VALUE = re.compile(
    r"^(data:image|data:video|data:audio|[a-z][a-z0-9+.-]*://)|"
    r"\.(jpe?g|png|webp|gif|bmp|tiff?|avif|heic|mp4|mkv|webm|mov|avi|wav|flac|ogg|mp3)([?#].*)?$",
    re.IGNORECASE,
)
OF_TEMPLATE = ("chat_template", "chat_template_kwargs")
#: Other programs' keys of a question and its answer.
QUESTIONS = ("prompt", "instruction", "query", "question", "problem")
ANSWERS = ("completion", "output", "response", "answer", "solution")

#: Values without content, of JSON in strings, too.
EMPTY: tuple[Any, ...] = ("", b"", [], "[]", "{}", "null")

#: All keys for which a record with turns needs a closer look, except those of `PREFERENCES`.
OF_RECORDS = frozenset(
    (*TOOLS, *FLAGS, MASK_HISTORY, *ON_PROMPTS, *DESIRED, *CLIPS, OBJECTS, *OF_TEMPLATE)
)
#: Keys of a turn that are read, or for which it is refused.
OF_TURNS = frozenset((*TOOLS, *FLAGS, MASKED, *DETAILS, *MEDIA_OF_TURNS))


def is_plain(keys: Iterable[str]) -> bool:
    """Return True if no key of a record with turns changes its meaning."""
    lower = [key.lower() for key in keys]
    return OF_RECORDS.isdisjoint(lower) and not any(key.startswith(PREFERENCES) for key in lower)


def says(value: Any) -> bool:
    """Return True if a value is a text, list or mapping with any content."""
    if isinstance(value, Mapping):
        return any(map(says, value.values()))
    if isinstance(value, list):
        return not all(map(_is_empty, value))
    return isinstance(value, str | bytes) and value not in EMPTY


def _is_empty(value: Any) -> bool:
    """Return True if a value is null or empty, or a list of only such values."""
    return (
        all(map(_is_empty, value)) if isinstance(value, list) else value is None or value in EMPTY
    )


def check_conversation(record: Mapping[str, Any], texts: Sequence[str]) -> None:
    """Raise ValueError if other keys change the meaning of a record with turns.

    Args:
        texts: the texts of the turns.
    """
    if is_plain(record):
        return
    record = {key.lower(): value for key, value in record.items()}
    _check_tools(record)
    _check_preferences(record)
    _check_clips(record)
    for key in DESIRED:
        if isinstance(value := record.get(key), bool) or str(value).lower() in ("true", "false"):
            raise ValueError(
                f"`{key}: {str(value).lower()}` rates the answer (KTO): preference data are not"
                " read"
            )
    for key in (*FLAGS, *ON_PROMPTS):
        value = record.get(key)
        if value is not None and value != (key in FLAGS):
            raise ValueError(f"`{key}` of a whole record is not read: set it in the turns")
    if record.get(MASK_HISTORY) not in (None, 0, 1):
        raise ValueError(f"`{MASK_HISTORY}` must be true or false")
    if says(record.get(OBJECTS)):
        for mark in OBJECT_MARKS:
            if any(mark in text for text in texts):
                raise ValueError(f"`{OBJECTS}` is not read, and {mark} in a text refers to it")
    for key in OF_TEMPLATE:
        if says(record.get(key)):
            raise ValueError(f"`{key}` of a record is not read")


def check_document(record: Mapping[str, Any]) -> None:
    """Raise ValueError if a record without turns means more than its text and its images."""
    _check_clips({key.lower(): value for key, value in record.items()})
    check_text(record)


def check_text(record: Mapping[str, Any]) -> None:
    """Raise ValueError if a record means more than its text."""
    record = {key.lower(): value for key, value in record.items()}
    inside = parsed(next((record[key] for key in TEXTS if record.get(key) is not None), None))
    for one in inside if isinstance(inside, list) else [inside]:
        if isinstance(one, Mapping):
            _check_preferences(one)
            if form := prompted(key for key in one if says(one[key])):
                raise ValueError(f"a text that is a JSON of {form}: write them as turns")
    _check_preferences(record)
    if form := prompted(key for key in record if says(record[key])):
        raise ValueError(f"a text next to {form}: keep the intended one")
    for key, value in record.items():
        if _holds_turns(value):
            raise ValueError(f"`{key}` has turns: they are read from `messages`")


def check_files(record: Mapping[str, Any]) -> None:
    """Raise ValueError if another key names files in a record of which none is read."""
    for key in file_keys(record):
        if _names_files(record[key]):
            other = (media for media in ("video", "audio") if media in key.lower())
            media = next(other, "image")
            raise ValueError(f"`{printable(key, MOST_KEY)}` names {media}s: call it `{media}`")


def file_keys(keys: Collection[str]) -> list[str]:
    """Return the keys that may name files; a `url` does next to a caption or sizes."""
    captioned = "caption" in keys or ("width" in keys and "height" in keys)
    return [key for key in keys if FILE_KEY.search(key) or (captioned and "url" in key.lower())]


def _names_files(value: Any) -> bool:
    """Return True if a value, or the first one of a list, is the name of a file."""
    if isinstance(value, list):
        value = next(filter(None, value), None)
    if isinstance(value, Mapping):
        value = value.get("url") or value.get("path") or value.get("file_name")
    return isinstance(value, str) and FILE_VALUE.search(value.strip()) is not None


def prompted(keys: Iterable[str]) -> str:
    """Return the names of a question's and its answer's keys for messages; "" if there are none."""
    known = set(keys)
    question, answer = (
        next((key for key in of if key in known), "") for of in (QUESTIONS, ANSWERS)
    )
    return f"`{question}` and `{answer}`" if question and answer else ""


def check_turn(turn: Mapping[str, Any], where: str) -> None:
    """Raise ValueError if other keys change the meaning of a turn."""
    _check_tools(turn)
    _check_preferences(turn)
    for key in MEDIA_OF_TURNS:
        if says(turn.get(key)):
            raise ValueError(f"{where} has `{key}`: it is supported next to the turns, not in them")
    for key in DETAILS:
        if says(turn.get(key)):
            raise ValueError(f"{where} has `{key}`: a turn is trained as a whole or not at all")


def is_trained(turn: Mapping[str, Any], role: str, where: str) -> bool:
    """Return False if a flag of a turn leaves it untrained; ValueError if flags are unclear."""
    flags = {key: turn[key] for key in (*FLAGS, MASKED) if turn.get(key) is not None}
    for key, value in flags.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise ValueError(f"{where} has the {key} {value!r}; supported are 0 and 1")
    trained = {bool(value) != (key == MASKED) for key, value in flags.items()}
    if len(trained) > 1:
        named = " and ".join(f"`{key}: {value}`" for key, value in flags.items())
        raise ValueError(f"{where} has {named}, which contradict each other")
    if True in trained and role != "assistant":
        raise ValueError(
            f"{where} has `{next(iter(flags))}: true`, but only turns of the assistant are trained"
        )
    return False not in trained


def _check_tools(mapping: Mapping[str, Any]) -> None:
    for key in TOOLS:
        if says(mapping.get(key)):
            raise ValueError(f"`{key}`: tool calls are not read")


def _check_clips(record: Mapping[str, Any]) -> None:
    """Raise ValueError if a record names clips."""
    for key in CLIPS:
        if says(record.get(key)):
            raise ValueError(f"`{key}`: clips are read from `audio`")


def _check_preferences(record: Mapping[str, Any]) -> None:
    """Raise ValueError if a record rates two answers as better and worse."""
    for key, value in record.items():
        if key.startswith(PREFERENCES) and says(value):
            raise ValueError(f"`{key}`: preference data are not read")


def _holds_turns(value: Any) -> bool:
    """Return True if a value is a list of turns."""
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, dict) and any(keys <= first.keys() for keys in TURN_KEYS)

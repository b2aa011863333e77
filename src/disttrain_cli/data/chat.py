"""Conversations rendered by the tokenizer's chat template: token ids and a mask of trained tokens.

The whole conversation is rendered once and tokenized as a whole, so that its tokens are those of
transformers' `apply_chat_template`. Each image is one placeholder in the text, which becomes a
segment; where the model's processor cuts images into parts, each part has a placeholder, with the
texts that the processor writes around it, inserted before tokenization, as the processor does.

The trained tokens are those between the template's `{% generation %}` marks. A template without
marks is rendered again for each answer, with the answer replaced by a character that occurs nowhere
else: the trained span runs from the end of the header to the special token that ends the turn. The
header is the text that `add_generation_prompt` adds; if that pre-fills a text with which the answer
does not begin, such as an empty block of thinking, the header is the part that names the role. This
works for templates that leave out the thinking of earlier turns or move the system message. If an
answer cannot be located in the rendered text, the conversation is refused.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property
from itertools import groupby, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.data.chat_templates import ChatTemplate, Message
from disttrain_cli.data.parts import written_around
from disttrain_cli.data.sources.chats import (
    FILM,
    MARK,
    MARK_OF,
    MARKS,
    MEDIA_OF_MARK,
    SOUND,
    no_numbers,
)
from disttrain_cli.data.sources.samples import Measure, Part, Turn, media_of, part_of
from disttrain_cli.spec.cutting import ALONE
from disttrain_cli.spec.cutting import Written as Around
from disttrain_cli.spec.heads import Head, Numbers
from disttrain_cli.spec.index import TEXT
from disttrain_cli.spec.inputs import ModelInputs

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Rules

ABSENT = range(0xE000, 0xF8FF)  # private-use characters, to mark an answer in a text
ASKED = "What?"  # a user's message in conversations that probe the template
#: Keys of an assistant's reasoning, the standard one first; templates read the first two.
REASONING = ("reasoning_content", "thinking", "reasoning")
Span = tuple[int, int]  # (first, last + 1) character
#: What a mark stands for, in messages.
PLACED = {MARK: "an image", FILM: "a video", SOUND: "a clip"}
IMAGE_ROW = -1  # among token ids: an image placeholder


class Written(NamedTuple):
    """A conversation in tokens."""

    ids: NDArray[np.int64]  # [N]; `IMAGE_ROW` for an image, or a part of one
    trained: NDArray[np.bool_]  # [N]


class Chat:
    """Tokenizer of conversations; safe to use from several threads."""

    def __init__(
        self,
        template: ChatTemplate,
        rules: Rules,
        image: str | None,
        processor: bool = False,
        video: str | None = None,
        audio: str | None = None,
    ) -> None:
        """
        Args:
            image, video, audio: the tokenizer's placeholders, if it has any.
            processor: tokens are those of a processor's `apply_chat_template`, which adds the
                tokenizer's special tokens (BOS) unless the template begins with BOS; a tokenizer's
                adds none.
        """
        self._template, self._rules, self._image = template, rules, image
        self._processor = processor
        self._mark = image or MARK
        #: by the mark in a conversation: the token of its rows, if the tokenizer has one
        self._row_tokens = {MARK: image, FILM: video, SOUND: audio}
        #: by the mark in a conversation: the placeholder that replaces it in the template's output
        self._placeholders = {mark: own or mark for mark, own in self._row_tokens.items()}
        self._inputs: ModelInputs | None = None
        self.fingerprint = template.fingerprint

    def of_model(self, inputs: ModelInputs) -> Chat:
        """Return a copy for a model, whose processor may cut files into parts."""
        adapted = copy(self)
        adapted._inputs = inputs
        for head in inputs.heads:
            for media, written in head.placeholders.items():
                adapted._placeholders = adapted._placeholders | {MARK_OF[media]: written}
        adapted._mark = adapted._placeholders[MARK]
        return adapted

    @property
    def end(self) -> int | None:
        """Id of the token that ends an answer; None if no token does."""
        closing = self._specials.findall(self._endings[0])[-1:] if self._endings else []
        return self._rules.token_to_id(closing[0]) if closing else None

    def parts(
        self, turns: list[Turn], names: list[str], measure: Measure = no_numbers
    ) -> list[Part]:
        """Return the texts and images (with these names), or the images' parts, in order.

        Raises:
            ValueError: the conversation cannot be rendered; the message has the reason.
        """
        media = {media_of(name) for name in names}
        self._check_read(media)
        cut = any(head is not None and head.cuts for head in map(self._head, media))
        around = self._around(names, measure(names)) if cut else [ALONE] * len(names)
        ids, trained = self.written(turns, around)
        images, parts = _parts_of(names, around), list[Part]()
        for (is_image, is_trained), group in groupby(
            zip(ids.tolist(), trained.tolist(), strict=True),
            key=lambda one: (one[0] == IMAGE_ROW, one[1]),
        ):
            own = tuple(id_ for id_, _ in group)
            if is_image:
                parts += [next(images) for _ in own]
            else:
                parts.append(Part(TEXT, "", is_trained, ids=own))
        if parts and parts[0].kind == TEXT and parts[0].trained:
            raise ValueError("the chat template starts with the answer: no prompt precedes it")
        return parts

    def message(self, ids: list[int]) -> str:
        """Return the user's message before an answer, without role words and special tokens.

        Args:
            ids: tokens from the end of the answer before, if any, to the answer's first.
        """
        text = str(self._rules.decode(ids, skip_special_tokens=False))
        before, after = self._around_message
        text = text.rpartition(before)[2] if before else text
        text = text.rpartition(after)[0] if after and after in text else text
        return self._specials.sub("", text).strip()

    def reads(self, key: str) -> bool:
        """Return True if the template may read this key of a turn."""
        names = {key, *REASONING[:2]} if key in REASONING else {key}
        return not self._template.words.isdisjoint(names)

    def _head(self, media: str) -> Head | None:
        """Return the specification of the modality that reads files of a type."""
        item = "audio" if media == "audio" else "image"
        return None if self._inputs is None else next(iter(self._inputs.of(item)), None)

    def _around(self, names: Sequence[str], numbers: Sequence[Numbers]) -> list[Around]:
        """Return the texts that the processor writes around the parts of files of these sizes."""
        assert self._inputs is not None
        kinds = (part_of(name).kind for name in names)
        return list(written_around(list(zip(kinds, numbers, strict=True)), self._inputs))

    def _check_read(self, media: Iterable[str]) -> None:
        """Raise ValueError if the model or the tokenizer does not support videos or clips."""
        for one in sorted(media):
            what = "a clip" if one == "audio" else f"a {one}"
            head = self._head(one)
            if one == "video" and getattr(head, "video", None) is None:
                raise ValueError("a video: videos are not read without data.video in the run file")
            if one == "audio" and head is None:
                raise ValueError("a clip: no encoder of this model reads audio")
            if one != "image" and self._row_tokens[MARK_OF[one]] is None:
                raise ValueError(f"{what}, for which the tokenizer has no placeholder")

    def written(
        self, turns: list[Turn], around: Sequence[Around] = (), prompt: bool = False
    ) -> Written:
        """Tokenize a conversation; with `prompt`, up to the beginning of an assistant's answer.

        Args:
            around: the texts around the parts of each image, in the images' order; empty: no image
                is cut.

        Raises:
            ValueError: the conversation cannot be rendered; the message has the reason.
        """
        said = "".join(turn.said for turn in turns)
        reserved = [*self._row_tokens.items(), *self._placeholders.items()]
        for mark, own in reserved:
            if own and own in MARKS.sub("", said):
                raise ValueError(f"a text contains {own}, the placeholder of {PLACED[mark]}")
        messages = [self._message(turn) for turn in turns]
        text, spans = self._template.render_marked(messages, prompt)
        for mark, placeholder in self._placeholders.items():
            if (count := text.count(placeholder)) != (marks := said.count(mark)):
                raise ValueError(
                    f"the chat template writes {placeholder} {count} times for {marks}"
                    f" {MEDIA_OF_MARK[mark]}s"
                )
        marks_of = {own: mark for mark, own in self._placeholders.items()}
        found = re.findall("|".join(map(re.escape, marks_of)), text)
        if [marks_of[own] for own in found] != MARKS.findall(said):
            raise ValueError("the chat template writes files in a different order")
        spans = spans if self._template.marks else self._answers(messages, text)
        spans = _trained(turns, spans)
        around = around or [ALONE] * len(MARKS.findall(said))
        text, spans, inside = _with_parts(text, self._rows, around, spans)
        ids, begins, ends = self._tokens(text)
        if (rows := np.count_nonzero(ids == IMAGE_ROW)) != sum(len(one) - 1 for one in around):
            raise ValueError(
                f"the tokenizer splits {', '.join(marks_of)}: only {rows} are single tokens"
            )
        trained = np.zeros(len(ids), dtype=bool)
        for first, end in spans:
            trained |= (begins < end) & (ends > first) & (ids != IMAGE_ROW)
        for first, end in inside:
            trained &= (begins >= end) | (ends <= first)
        return Written(ids, trained)

    def _answers(self, messages: list[Message], text: str) -> list[tuple[int, int]]:
        """Return (first, last + 1) character of every answer in the rendered text.

        The span includes the token that ends the answer.
        """
        spans: list[tuple[int, int]] = []
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                spans.append(self._answer(messages, number, text, spans[-1][1] if spans else 0))
        return spans

    def _answer(
        self, messages: list[Message], number: int, text: str, begin: int
    ) -> tuple[int, int]:
        """Return the span of the answer in message `number`, its end token included.

        Args:
            begin: end of the answer before it; this one cannot begin earlier.
        """
        absent = _absent(text)
        content = messages[number]["content"]
        replaced = absent if isinstance(content, str) else [{"type": "text", "text": absent}]
        other = self._template.render(
            [*messages[:number], {**messages[number], "content": replaced}, *messages[number + 1 :]]
        )
        before, found, after = other.partition(absent)
        end = len(text) - len(after)
        first = self._begin(messages[:number], text, before)
        if (
            not found
            or absent in after
            or not begin <= first <= end
            or not text.startswith(before[:first])
            or not text.endswith(after)
        ):
            raise ValueError(
                f"the chat template omits or rewrites the assistant's text of turn {number + 1}"
            )
        closing = (ending for ending in self._endings if after.startswith(ending))
        return first, end + len(next(closing, ""))

    def _begin(self, messages: list[Message], text: str, before: str) -> int:
        """Return the first character of the answer to `messages`, which is the end of its header.

        Args:
            text: the rendered conversation.
            before: the rendered conversation up to the content of the answer; it may end in a text
                that the template writes between header and content, such as a block of thinking.
        """
        prompt = before
        if not before.endswith(self._header):
            prompt = self._tried(messages, prompt=True)
        if self._header and prompt.endswith(self._header):
            if text.startswith(prompt):
                return len(prompt)
            role = prompt.removesuffix(self._header) + self._role
            if self._role and before.startswith(role) and text.startswith(role):
                return len(role)
        return len(before)

    def _message(self, turn: Turn) -> Message:
        """Return a turn as the template's input, with its content as parts or as one text.

        The content is a list of parts if the template reads such, else a text with placeholders.
        """
        pictured = MARKS.search(turn.said) is not None
        if MARK in turn.said and self._images_elsewise:
            raise ValueError(
                f"the chat template writes an image in another form than {self._mark}, which is not"
                " supported"
            )
        takes = all(self._takes[mark] for mark in set(MARKS.findall(turn.said)))
        listed = takes if pictured else turn.listed and self._takes_parts
        if not listed and (pictured or self._takes_texts):
            content: Any = MARKS.sub(lambda mark: self._placeholders[mark[0]], turn.said)
        else:
            content = [part for text in turn.texts for part in _content(text)]
        message = {**turn.others, "role": turn.role, "content": content}
        thought = next((message[name] for name in REASONING if name in message), None)
        named = ("thinking", "reasoning_content")
        return message if thought is None else dict.fromkeys(named, thought) | message

    def _tokens(self, text: str) -> tuple[NDArray[np.int64], ...]:
        """Return (ids, first character, last + 1) of each token, [N] each."""
        pieces = [text] if self._image else text.split(self._mark)
        begins = self._template.bos
        specials = self._processor and not (begins and text.startswith(begins))
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        at = 0
        for number, piece in enumerate(pieces):
            if number:
                ids.append(IMAGE_ROW)
                offsets.append((at - len(self._mark), at))
            encoding = self._rules.encode(piece, add_special_tokens=specials and len(pieces) == 1)
            ids += encoding.ids
            offsets += [(first + at, end + at) for first, end in encoding.offsets]
            at += len(piece) + len(self._mark)
        array, places = np.array(ids, np.int64), np.array(offsets, np.int64).reshape(-1, 2)
        for own in filter(None, self._row_tokens.values()):
            array[array == self._rules.token_to_id(own)] = IMAGE_ROW
        return array, places[:, 0], places[:, 1]

    @property
    def _rows(self) -> dict[str, str]:
        """Tokens of rows, by the placeholder that the template writes."""
        return {
            placeholder: self._row_tokens[mark] or placeholder
            for mark, placeholder in self._placeholders.items()
        }

    @cached_property
    def _specials(self) -> re.Pattern[str]:
        """Pattern of any special token."""
        added = self._rules.get_added_tokens_decoder().values()
        texts = sorted((one.content for one in added if one.special), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) or r"(?!)")

    @cached_property
    def _header(self) -> str:
        """Header of an answer: the text that the template adds for a generation prompt."""
        asked = [self._asked(ASKED)]
        without, prompted = self._tried(asked), self._tried(asked, prompt=True)
        return prompted[len(without) :] if prompted.startswith(without) else ""

    @cached_property
    def _role(self) -> str:
        """Part of the header that every answer has, whatever reasoning precedes it.

        It lacks an empty block of thinking that only the last answer has or that a prompt
        pre-fills.
        """
        thought, answer = map(chr, ABSENT[:2])
        asked = [self._asked(ASKED)]
        said = self._asked(answer) | {"role": "assistant"}
        without = self._tried(asked)
        thinking = self._tried([*asked, said | dict.fromkeys(REASONING, thought)])
        headers = [
            text.removeprefix(without)[: text.index(mark) - len(without)]
            for text, mark in ((self._tried([*asked, said, *asked]), answer), (thinking, thought))
            if text.startswith(without) and mark in text
        ]
        shared = min(headers, key=len, default="")
        return shared if all(one.startswith(shared) for one in (self._header, *headers)) else ""

    @cached_property
    def _around_message(self) -> tuple[str, str]:
        """Texts before and after any user's message: its header, and its end or the next header."""
        absent = chr(ABSENT[0])
        asked, mine = self._asked(ASKED), self._asked(absent)
        (first, _, end), (later, _, later_end) = (
            self._tried(messages).partition(absent)
            for messages in ([mine], [asked, asked | {"role": "assistant"}, mine])
        )
        before = _shared(first[::-1], later[::-1])[::-1]
        for ending in self._endings:
            before = before.rpartition(ending)[2]
        if special := self._specials.search(before):  # before it, the end of another one
            before = before[special.start() :]
        after = _shared(end, later_end).strip()
        return before.strip(), after or (self._role or self._header).strip()

    @cached_property
    def _endings(self) -> list[str]:
        """Texts that may follow an answer, up to a special token; the longest first.

        They are prefixes of the text after the last answer of a conversation; other answers may be
        followed by a shorter one.
        """
        absent = chr(ABSENT[0])
        answer = self._asked(absent) | {"role": "assistant"}
        after = self._tried([self._asked(ASKED), answer]).rpartition(absent)[2]
        return [after[: match.end()] for match in self._specials.finditer(after)][::-1]

    @cached_property
    def _takes_texts(self) -> bool:
        return ASKED in self._tried([{"role": "user", "content": ASKED}]) or not self._takes_parts

    @cached_property
    def _takes_parts(self) -> bool:
        said = self._tried([{"role": "user", "content": _content(ASKED)}])
        return ASKED in said and "'type'" not in said

    @cached_property
    def _takes(self) -> dict[str, bool]:
        """By mark: True if the template itself writes the placeholder of such a file."""
        said = {
            mark: self._tried([{"role": "user", "content": _content(mark + ASKED)}])
            for mark in self._placeholders
        }
        return {
            mark: self._takes_parts and said[mark].count(placeholder) == 1
            for mark, placeholder in self._placeholders.items()
        }

    @cached_property
    def _images_elsewise(self) -> bool:
        """True if the template writes some other text for an image.

        A processor would replace such a text.
        """
        said, without = (
            self._tried([{"role": "user", "content": _content(text)}])
            for text in (MARK + ASKED, ASKED)
        )
        return self._takes_parts and not self._takes[MARK] and said not in ("", without)

    def _asked(self, text: str) -> dict[str, Any]:
        return {"role": "user", "content": text if self._takes_texts else _content(text)}

    def _tried(self, messages: Sequence[Message], prompt: bool = False) -> str:
        """Return the rendered messages, or "" if the template refuses them."""
        try:
            return self._template.render(list(messages), prompt)
        except ValueError:
            return ""


def _parts_of(names: Sequence[str], around: Sequence[Around]) -> Iterator[Part]:
    """Yield every part of every file."""
    for name, texts in zip(names, around, strict=True):
        yield from (part_of(name, part) for part in range(len(texts) - 1))


def _with_parts(
    text: str, rows: Mapping[str, str], around: Sequence[Around], spans: Sequence[Span]
) -> tuple[str, list[Span], list[Span]]:
    """Replace placeholders of images and videos by their parts and the texts around the parts.

    Args:
        rows: by placeholder the token that stands for a part.

    Returns:
        (the text, `spans` shifted accordingly, the spans of the inserted placeholders and texts).
    """
    found = list(re.finditer("|".join(map(re.escape, rows)), text))
    begins = [one.end() for one in found]
    pieces = [text[a:b] for a, b in zip([0, *begins], [one.start() for one in found], strict=False)]
    pieces.append(text[begins[-1] if begins else 0 :])
    joined = [rows[one[0]].join(texts) for one, texts in zip(found, around, strict=True)]
    grown = [len(one) - len(mark[0]) for one, mark in zip(joined, found, strict=True)]

    def moved(place: int) -> int:
        return place + sum(grown[: bisect_right(begins, place)])

    ends = [moved(place) for place in begins]
    inside = [(end - len(one), end) for end, one in zip(ends, joined, strict=True)]
    whole = "".join(one for pair in zip(pieces, [*joined, ""], strict=True) for one in pair)
    return whole, [(moved(first), moved(end)) for first, end in spans], inside


def _trained(turns: list[Turn], spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the spans of the answers that are trained, without those of weight 0."""
    trained = [turn.trained for turn in turns if turn.role == "assistant"]
    if all(trained):
        return spans
    if len(trained) != len(spans):
        raise ValueError(
            f"a turn has the weight 0, but the chat template marks {len(spans)} parts of"
            f" {len(trained)} answers"
        )
    return [span for span, kept in zip(spans, trained, strict=True) if kept]


def _content(text: str) -> list[dict[str, str]]:
    """Return a text with marks as content parts of a turn.

    A line break after a mark, or before a mark at the end, belongs to the mark and is dropped.
    """
    types = MEDIA_OF_MARK
    for mark in types:
        text = text.replace(mark + "\n", mark)
        text = text.removesuffix("\n" + mark) + mark if text.endswith("\n" + mark) else text
    if not MARKS.search(text):
        return [{"type": "text", "text": text}]
    pieces = re.split(f"({MARKS.pattern})", text)
    return [
        {"type": types[piece]} if piece in types else {"type": "text", "text": piece}
        for piece in pieces
        if piece
    ]


def _absent(text: str) -> str:
    """Return a character that a text does not contain."""
    return next(character for character in map(chr, ABSENT) if character not in text)


def _shared(one: str, other: str) -> str:
    """Return the longest text with which both begin."""
    pairs = zip(one, other, strict=False)
    return "".join(first for first, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

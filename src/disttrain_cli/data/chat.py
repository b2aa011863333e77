"""Conversations as the tokenizer's chat template writes them, in tokens, with what of them is
trained.

The whole conversation is rendered once and tokenized as a whole, so that its tokens are those of
transformers' `apply_chat_template`. Each image stands as one placeholder in the text, which becomes
a segment of its own; where the model's processor cuts images, as one for each part with what it
writes around them, put into the text before it is tokenized, as the processor does. Trained is what
lies between the template's `{% generation %}` marks. Where it has none, each answer is found by
rendering the conversation again with a character in its place that nothing else has: trained is
what follows the header, up to the special token that ends the turn. The header is what
`add_generation_prompt` adds; where that pre-fills what the answer does not begin with, such as an
empty block of thinking, the part of it that names the role. That holds where a template leaves out
the thinking of earlier turns or moves the system's words; where an answer is not found in what was
rendered, the conversation is refused.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from copy import copy
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.data.chat_templates import ChatTemplate, Message
from disttrain_cli.data.sources.chats import FILM, MARK, MARKS, no_numbers
from disttrain_cli.data.sources.samples import Measure, Part, Turn, VideoName
from disttrain_cli.spec.cutting import ALONE
from disttrain_cli.spec.cutting import Written as Around
from disttrain_cli.spec.heads import ImageInput, Numbers
from disttrain_cli.spec.index import IMAGE, TEXT
from disttrain_cli.spec.inputs import ModelInputs

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Rules

ABSENT = range(0xE000, 0xF8FF)  # characters of private use, one of which no text has
ASKED = "What?"  # said by a user where the template itself is looked at
#: Names of what an assistant thought, the standard one first; templates know two of them.
REASONING = ("reasoning_content", "thinking", "reasoning")
Span = tuple[int, int]  # (first, last + 1) character
IMAGE_ROW = -1  # among token ids: where an image stands


class Written(NamedTuple):
    """A conversation in tokens."""

    ids: NDArray[np.int64]  # [N]; `IMAGE_ROW` where an image stands, or a part of one
    trained: NDArray[np.bool_]  # [N]


class Chat:
    """What writes conversations; safe to use from several threads."""

    def __init__(
        self,
        template: ChatTemplate,
        rules: Rules,
        image: str | None,
        processor: bool = False,
        video: str | None = None,
    ) -> None:
        """
        Args:
            image, video: the tokenizer's own placeholders, if it has any.
            processor: tokens are those of a processor's `apply_chat_template`, which adds the
                tokenizer's special ones (BOS) unless the template begins with BOS; a tokenizer's
                adds none.
        """
        self._template, self._rules, self._image, self._video = template, rules, image, video
        self._processor = processor
        self._mark = image or MARK
        #: by the marks of a conversation, what stands for them in what a template writes
        self._placeholders = {MARK: self._mark, FILM: video or FILM}
        self._head: ImageInput | None = None
        self.fingerprint = template.fingerprint

    def of_model(self, inputs: ModelInputs) -> Chat:
        """The same for a model, whose processor may cut images into parts."""
        made = copy(self)
        made._head = inputs.image
        return made

    @property
    def end(self) -> int | None:
        """The token that ends an answer, if one does."""
        closing = self._specials.findall(self._endings[0])[-1:] if self._endings else []
        return self._rules.token_to_id(closing[0]) if closing else None

    def parts(
        self, turns: list[Turn], names: list[str], measure: Measure = no_numbers
    ) -> list[Part]:
        """Texts and images (of these names), or their parts, in order.

        Raises:
            ValueError: with the reason why it cannot be written.
        """
        if any(isinstance(name, VideoName) for name in names):
            self._check_films()
        cut = self._head is not None and self._head.cuts
        around = self.around(measure(names)) if cut else [ALONE] * len(names)
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
            raise ValueError("the chat template begins with the answer: nothing leads to it")
        return parts

    def reads(self, key: str) -> bool:
        """Return True if the template may read this key of a turn."""
        names = {key, *REASONING[:2]} if key in REASONING else {key}
        return not self._template.words.isdisjoint(names)

    def around(self, images: Sequence[Numbers]) -> list[Around]:
        """What the model's processor writes around the parts of images of these sizes."""
        return [ALONE] * len(images) if self._head is None else self._head.written(images)

    def _check_films(self) -> None:
        """ValueError where videos are not read."""
        if self._head is None or self._head.video is None:
            raise ValueError("a video: none are read, unless the run file has data.video")
        if self._video is None:
            raise ValueError("a video, of which the tokenizer has no placeholder")

    def written(
        self, turns: list[Turn], around: Sequence[Around] = (), prompt: bool = False
    ) -> Written:
        """A conversation; with `prompt` up to where an assistant's answer begins.

        Args:
            around: of each image in its order the texts around its parts; empty: all are whole.

        Raises:
            ValueError: with the reason why it cannot be written.
        """
        said = "".join(turn.said for turn in turns)
        for own, what in ((self._image, "an image"), (self._video, "a video")):
            if own and own in MARKS.sub("", said):
                raise ValueError(f"a text contains {own}, which stands for {what}")
        messages = [self._message(turn) for turn in turns]
        text, spans = self._template.render_marked(messages, prompt)
        for mark, what in ((MARK, "images"), (FILM, "videos")):
            placeholder = self._placeholders[mark]
            if (count := text.count(placeholder)) != (marks := said.count(mark)):
                raise ValueError(
                    f"the chat template writes {placeholder} {count} times for {marks} {what}"
                )
        marks_of = {own: mark for mark, own in self._placeholders.items()}
        found = re.findall("|".join(map(re.escape, marks_of)), text)
        if [marks_of[own] for own in found] != MARKS.findall(said):
            raise ValueError("the chat template writes images and videos in another order")
        spans = spans if self._template.marks else self._answers(messages, text)
        spans = _trained(turns, spans)
        around = around or [ALONE] * len(MARKS.findall(said))
        text, spans, inside = _with_parts(text, [*self._placeholders.values()], around, spans)
        ids, begins, ends = self._tokens(text)
        if (rows := np.count_nonzero(ids == IMAGE_ROW)) != sum(len(one) - 1 for one in around):
            raise ValueError(f"the tokenizer does not keep {', '.join(marks_of)} whole: {rows} are")
        trained = np.zeros(len(ids), dtype=bool)
        for first, end in spans:
            trained |= (begins < end) & (ends > first) & (ids != IMAGE_ROW)
        for first, end in inside:
            trained &= (begins >= end) | (ends <= first)
        return Written(ids, trained)

    def _answers(self, messages: list[Message], text: str) -> list[tuple[int, int]]:
        """(first, last + 1) character of every answer with its end in what was rendered."""
        spans: list[tuple[int, int]] = []
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                spans.append(self._answer(messages, number, text, spans[-1][1] if spans else 0))
        return spans

    def _answer(
        self, messages: list[Message], number: int, text: str, begin: int
    ) -> tuple[int, int]:
        """The same of the answer that is message `number`; answers before it end at `begin`."""
        absent = _absent(text)
        content = messages[number]["content"]
        replaced = absent if isinstance(content, str) else [{"type": "text", "text": absent}]
        other = self._template.render(
            [
                *messages[:number],
                {**messages[number], "content": replaced},
                *messages[number + 1 :],
            ]
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
                f"the chat template leaves out or rewrites what the assistant says in turn"
                f" {number + 1}"
            )
        closing = (ending for ending in self._endings if after.startswith(ending))
        return first, end + len(next(closing, ""))

    def _begin(self, messages: list[Message], text: str, before: str) -> int:
        """First character of the answer to `messages`: the end of its header.

        Args:
            text: the rendered conversation.
            before: the same up to the words of the answer, which may end in what the template
                writes between header and words, such as a block of thinking.
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
        """A turn as the template takes it: its content as parts where it knows such, or as a
        text."""
        pictured = MARKS.search(turn.said) is not None
        if MARK in turn.said and self._images_elsewise:
            raise ValueError(
                f"the chat template writes an image otherwise than as {self._mark}, which is not"
                " read"
            )
        takes = (MARK not in turn.said or self._takes_images) and (
            FILM not in turn.said or self._takes_videos
        )
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
        """(ids, first character, last + 1) of each token, [N]."""
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
        for own in filter(None, (self._image, self._video)):
            array[array == self._rules.token_to_id(own)] = IMAGE_ROW
        return array, places[:, 0], places[:, 1]

    @cached_property
    def _specials(self) -> re.Pattern[str]:
        """Any special token, in a text."""
        added = self._rules.get_added_tokens_decoder().values()
        texts = sorted((one.content for one in added if one.special), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) or r"(?!)")

    @cached_property
    def _header(self) -> str:
        """What stands before an answer: what the template adds where one may follow."""
        asked = [self._asked(ASKED)]
        without, prompted = self._tried(asked), self._tried(asked, prompt=True)
        return prompted[len(without) :] if prompted.startswith(without) else ""

    @cached_property
    def _role(self) -> str:
        """The part of the header that every answer has, whatever is thought before it: without an
        empty block of thinking that only the last answer has, or that a prompt pre-fills."""
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
    def _endings(self) -> list[str]:
        """What may stand behind an answer, up to a special token; the longest first.

        It is what follows the last answer of a conversation, of which less may follow others.
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
    def _takes_images(self) -> bool:
        """Whether the template itself writes the placeholder of an image."""
        said = self._tried([{"role": "user", "content": _content(MARK + ASKED)}])
        return self._takes_parts and said.count(self._mark) == 1

    @cached_property
    def _takes_videos(self) -> bool:
        """The same of a video."""
        said = self._tried([{"role": "user", "content": _content(FILM + ASKED)}])
        return self._takes_parts and said.count(self._placeholders[FILM]) == 1

    @cached_property
    def _images_elsewise(self) -> bool:
        """Whether it writes something else for an image, which a processor would replace."""
        said, without = (
            self._tried([{"role": "user", "content": _content(text)}])
            for text in (MARK + ASKED, ASKED)
        )
        return self._takes_parts and not self._takes_images and said not in ("", without)

    def _asked(self, text: str) -> dict[str, Any]:
        return {"role": "user", "content": text if self._takes_texts else _content(text)}

    def _tried(self, messages: Sequence[Message], prompt: bool = False) -> str:
        """A rendering, or nothing where the template does not take such messages."""
        try:
            return self._template.render(list(messages), prompt)
        except ValueError:
            return ""


def _parts_of(names: Sequence[str], around: Sequence[Around]) -> Iterator[Part]:
    """Every part of every image."""
    for name, texts in zip(names, around, strict=True):
        yield from (Part(IMAGE, name, part=part) for part in range(len(texts) - 1))


def _with_parts(
    text: str, marks: Sequence[str], around: Sequence[Around], spans: Sequence[Span]
) -> tuple[str, list[Span], list[Span]]:
    """(text with a mark for each part of an image or video and the texts around them, the spans
    moved along, where what belongs to them stands)."""
    found = list(re.finditer("|".join(map(re.escape, marks)), text))
    begins = [one.end() for one in found]
    pieces = [text[a:b] for a, b in zip([0, *begins], [one.start() for one in found], strict=False)]
    pieces.append(text[begins[-1] if begins else 0 :])
    joined = [one[0].join(texts) for one, texts in zip(found, around, strict=True)]
    grown = [len(one) - len(mark[0]) for one, mark in zip(joined, found, strict=True)]

    def moved(place: int) -> int:
        return place + sum(grown[: bisect_right(begins, place)])

    ends = [moved(place) for place in begins]
    inside = [(end - len(one), end) for end, one in zip(ends, joined, strict=True)]
    whole = "".join(one for pair in zip(pieces, [*joined, ""], strict=True) for one in pair)
    return whole, [(moved(first), moved(end)) for first, end in spans], inside


def _trained(turns: list[Turn], spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans of the answers that are trained: not those of weight 0."""
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
    """A text with marks as parts of a turn; the line break behind a mark, or before the last, is
    the mark's."""
    types = {MARK: "image", FILM: "video"}
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
    """A character that a text does not have."""
    return next(character for character in map(chr, ABSENT) if character not in text)

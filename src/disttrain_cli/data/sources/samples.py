"""Samples of segments with their sizes, and skipped samples: the result of reading any format."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol

from disttrain_cli.spec.heads import Numbers
from disttrain_cli.spec.image_processor import PixelBudget
from disttrain_cli.spec.index import AUDIO, IMAGE, TEMPLATED, TEXT

MAX_TEXT_BYTES = 16 * 1024 * 1024  # a larger json, txt or record is no sample
DATA = "data:"  # prefix of a name that contains the image itself
#: Base64 prefixes of JPEG, PNG and WebP, and the least length of such a name.
HELD, LEAST_HELD = ("/9j/", "iVBORw0KGgo", "UklGR"), 64
BASE64 = re.compile(r"[A-Za-z0-9+/\s]+={0,2}\s*")
MOST_SHOWN = 200  # characters of a name in a message
MOST_KEY = 40  # of a key
NOTHING: tuple[Any, ...] = (None, "", [])  # values of a key without content


class Skipped(NamedTuple):
    """A sample or image that is skipped, or samples lost with a shard's damage, and the reason.

    Attributes:
        key: name of the sample, or "" for damage of the shard.
        samples: number of samples lost; None if the reader cannot know it
            (`data.indexing.lost_samples` estimates it).
        unread_bytes: bytes of the file after the damage.
        cut: True if the end of the file is missing, so that more is lost than `unread_bytes`.
    """

    shard: str
    key: str
    reason: str
    samples: int | None = 1
    unread_bytes: int = 0
    cut: bool = False


def samples_lost(skipped: Iterable[Skipped]) -> int:
    """Return the number of samples skipped; an unknown number counts as one."""
    return sum(1 if one.samples is None else one.samples for one in skipped)


def shown_skipped(one: Skipped) -> str:
    """Return the name of a skipped entry in messages."""
    return f"{one.shard}/{one.key}".rstrip("/")


def largest_first(skipped: Iterable[Skipped]) -> list[Skipped]:
    """Sort entries for messages that list a few: unknown numbers of samples, then the largest."""
    return sorted(skipped, key=lambda one: -math.inf if one.samples is None else -one.samples)


class Location(NamedTuple):
    """Location of a segment in its shard: two numbers, whose meaning depends on the format."""

    offset: int
    size: int


class VideoName(str):
    """Name of a video file, among those of images."""


class SoundName(str):
    """Name of a sound file, among those of images."""


class ImageName(str):
    """Name of an image file for which a content part states a pixel budget."""

    budget: PixelBudget

    @classmethod
    def of(cls, name: str, budget: PixelBudget | None) -> str:
        """Return a name with its budget, if it has one."""
        if budget is None:
            return name
        made = cls(name)
        made.budget = budget
        return made


def media_of(name: str) -> str:
    """Return the type of file (`data.modalities.media.Media`) of a name."""
    if isinstance(name, SoundName):
        return "audio"
    return "video" if isinstance(name, VideoName) else "image"


#: Kind of a file's item, and the sizes in its header.
Measured = tuple[int, Numbers]


class Segment(NamedTuple):
    """A piece of a sample: a text, or a file or part of it.

    `trained`: the tokens of this text are labels; `ended`: EOS follows inside the sample. Width and
    height hold other values for some segments: the two numbers of a type of file that is no image
    (`data.modalities.media.Media`); the first character and the length of a piece of a document
    (`data.indexing.documents`); `TEMPLATED` as the height of a text of a chat template, with tokens
    in `ids`. A video has the size of a frame, its `frames` and their rate
    (`spec.video_processor.Film`). `part`: as in the index's column `parts`. `budget`: of an image
    whose record states a pixel budget.
    """

    kind: int
    location: Location
    text: str = ""
    width_px: int = 0
    height_px: int = 0
    trained: bool = False
    ended: bool = False
    ids: tuple[int, ...] | None = None
    part: int = 0
    frames: int = 0
    rate_nhz: int = 0
    budget: PixelBudget | None = None

    @property
    def numbers(self) -> Numbers:
        """Sizes in the header of its file."""
        of_all = (self.width_px, self.height_px)
        return (*of_all, self.frames, self.rate_nhz) if self.frames else of_all


class Sample(NamedTuple):
    """One sample of a shard."""

    key: str
    segments: list[Segment]
    unread: tuple[str, ...] = ()  # keys of its record that no reader reads, as named in messages


LONG = "q"  # type of the numbers of a `Compact`: 64-bit integers
#: Bits of a segment's byte in `Compact.form`: two flags, and the mask of its kind.
TRAINED, ENDED, KIND = 64, 128, 63


class Compact(NamedTuple):
    """Consecutive samples of equal form, without an object for each of their segments.

    Each has texts from one location, and complete images or clips. Most samples are like that, and
    are indexed in less than half the time. `form` has a byte for each segment of a sample: its
    kind, with `TRAINED` and `ENDED`. Lists are concatenated over all samples.
    """

    keys: list[str]
    form: bytes
    texts: list[str]
    records: array[int]  # location of all texts of each sample, two numbers
    files: array[int]  # location and two sizes of each file, four numbers
    unread: tuple[str, ...] = ()  # as in each `Sample`

    @property
    def samples(self) -> list[Sample]:
        """The samples, with an object for each segment."""
        texts, numbers, records = iter(self.texts), iter(self.files), iter(self.records)
        samples = list[Sample]()
        for key in self.keys:
            record, segments = Location(*islice(records, 2)), list[Segment]()
            for one in self.form:
                if one & KIND:
                    place = Location(*islice(numbers, 2))
                    segments.append(file_segment(one & KIND, place, tuple(islice(numbers, 2))))
                else:
                    flags = bool(one & TRAINED), bool(one & ENDED)
                    segments.append(Segment(TEXT, record, next(texts), 0, 0, *flags))
            samples.append(Sample(key, segments, self.unread))
        return samples


class Part(NamedTuple):
    """A segment in a sample's json: a text, or the name of a file.

    A text that a chat template rendered has its tokens (`ids`). A name may be a `VideoName`,
    `SoundName` or `ImageName`; `part` is the index of a file's part if the processor writes parts.
    """

    kind: int
    value: str
    trained: bool = True
    ended: bool = False
    ids: tuple[int, ...] | None = None
    part: int = 0

    @property
    def text(self) -> str | tuple[int, ...]:
        """The text, or its tokens."""
        return self.value if self.ids is None else self.ids


def part_of(name: str, part: int = 0) -> Part:
    """Return the segment of a file, or of a part of it."""
    return Part(AUDIO if isinstance(name, SoundName) else IMAGE, name, part=part)


class PartFile(NamedTuple):
    """The image, video or clip of a part of a turn.

    It is given by name, by index among those of the record, or is the next one of these.
    """

    media: str
    name: str = ""
    place: int | None = None
    budget: PixelBudget | None = None


class Turn(NamedTuple):
    """One side's turn in a conversation."""

    role: str  # system, user, assistant
    texts: list[str]  # concatenated when read, with a mark for each image
    files: list[PartFile]  # of its parts
    listed: bool = False  # True if the content was a list of parts
    others: Mapping[str, Any] = {}  # the other keys of its record, for a chat template
    trained: bool = True  # the answer is trained; of an assistant's turn
    #: of images whose parts state a pixel budget, by the index of their mark in the turn
    budgets: Mapping[int, PixelBudget] = {}

    @property
    def said(self) -> str:
        """The whole text."""
        return "".join(self.texts)


#: Sizes of images (`spec.heads.Numbers`) by their names, all of a record.
Measure = Callable[[Sequence[str]], Sequence[Numbers]]


class ChatForm(Protocol):
    """Interface of a chat template that renders conversations (`data.chat`)."""

    def parts(self, turns: list[Turn], names: list[str], measure: Measure) -> list[Part]:
        """Return texts and images (with these names) in order.

        Raises ValueError with the reason if the conversation cannot be rendered. `measure` is
        called if the images' sizes are needed.
        """

    def reads(self, key: str) -> bool:
        """Return True if the template may read this key of a turn."""


class Shard(NamedTuple):
    """One file of a source: a local path or a URL, and its name relative to the source."""

    form: str
    path: str
    name: str
    images: str = ""  # folder of the images that a LLaVA JSON names
    #: Range of the row groups to read of a Parquet file, the end excluded; None = all.
    groups: tuple[int, int] | None = None
    held_out: bool = False  # of a validation split: evaluated, never trained on
    text: str = ""  # column of texts or turns, if the run file names one


class OpenShard(Protocol):
    """A shard whose samples are read in any order, by any thread.

    `record` is the location of a sample's first text, (-1, 0) without a text. All methods raise
    OSError (DataError for a URL) if the file cannot be read, ValueError or IndexError if the
    location has other content than was indexed, and pyarrow's errors (ValueErrors, OSErrors).
    """

    def file(self, media: str, location: Location, record: Location) -> bytes:
        """Return the file at `location`, of a type (`data.modalities.media.Media`)."""

    def file_name(self, media: str, location: Location, record: Location) -> str:
        """Return the name of a file, for messages."""

    def texts(
        self, record: Location, files: Sequence[Measured] = ()
    ) -> list[str | tuple[int, ...]]:
        """Return all texts of a sample, in order; those of a chat template as tokens.

        Texts around the parts of its `files`, whose sizes are passed, are included.
        """


def file_segment(
    kind: int, location: Location, numbers: Numbers, part: Part | None = None
) -> Segment:
    """Return the segment of a file, or of the part of it that is named."""
    width, height, *film = numbers
    frames, rate = film or (0, 0)
    number, name = (part.part, part.value) if part else (0, "")
    budget = name.budget if isinstance(name, ImageName) else None
    whole = (False, False, None, number, frames, rate, budget)
    return Segment(kind, location, "", width, height, *whole)


def text_segment(part: Part, location: Location) -> Segment:
    """Return the segment of a text."""
    height = 0 if part.ids is None else TEMPLATED
    return Segment(TEXT, location, part.value, 0, height, part.trained, part.ended, part.ids)


def clean(text: str) -> str:
    """Replace unpaired surrogates, which JSON may escape and no tokenizer accepts."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def is_held(name: str) -> bool:
    """Return True if the name of a file contains the file itself, in base64."""
    if name[: len(DATA)].lower() == DATA:
        return True
    return name.startswith(HELD) and len(name) >= LEAST_HELD and BASE64.fullmatch(name) is not None


def shown_name(name: str) -> str:
    """Return an image's name in messages; the name may contain the image itself."""
    if is_held(name):
        return DATA + "…" if name[: len(DATA)].lower() == DATA else "an image in base64"
    return printable(name)


def unread_of(mapping: Mapping[str, Any], known: Iterable[str], what: str = "") -> list[str]:
    """Return the non-empty keys of a mapping that are not `known`, as named in messages."""
    return [
        f"{what}`{printable(key, MOST_KEY)}`"
        for key in sorted(mapping.keys() - known)
        if holds(mapping[key])
    ]


def holds(value: Any) -> bool:
    """Return True if a value is neither null nor empty, nor a mapping of only such values.

    Tables give such mappings in place of absent values.
    """
    return any(map(holds, value.values())) if isinstance(value, dict) else value not in NOTHING


def printable(name: str, most: int | float = MOST_SHOWN) -> str:
    """Return a name or reason as one line, with control characters escaped for terminals."""
    if len(name) <= most and name.isprintable():
        return name
    shown = name if most == math.inf else name[: int(most)]
    escaped = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)
    return escaped + ("…" if len(name) > most else "")

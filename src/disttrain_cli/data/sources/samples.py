"""What every form of dataset is read into: samples of segments with their sizes, and what is left
out, by name."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol

from disttrain_cli.spec.heads import Numbers
from disttrain_cli.spec.image_processor import PixelBudget
from disttrain_cli.spec.index import TEMPLATED, TEXT

MAX_TEXT_BYTES = 16 * 1024 * 1024  # a larger json, txt or record is no sample
DATA = "data:"  # begins a name that holds the image itself
#: Beginnings of JPEG, PNG and WebP in base64, and how long such a name is at least.
HELD, LEAST_HELD = ("/9j/", "iVBORw0KGgo", "UklGR"), 64
BASE64 = re.compile(r"[A-Za-z0-9+/\s]+={0,2}\s*")
MOST_SHOWN = 200  # characters of a name in a message
MOST_KEY = 40  # of a key
NOTHING: tuple[Any, ...] = (None, "", [])  # values by which a key says nothing


class Skipped(NamedTuple):
    """A sample or image that is left out, or samples that a shard's own damage loses, and why.

    Attributes:
        key: name of the sample, or "" of a shard's own damage.
        samples: how many are lost; None where the reader cannot know (`data.lost_samples`
            estimates them).
        unread_bytes: of the file that lie behind the damage.
        cut: True if the end of the file is missing, so that more is lost than `unread_bytes`.
    """

    shard: str
    key: str
    reason: str
    samples: int | None = 1
    unread_bytes: int = 0
    cut: bool = False


def samples_lost(skipped: Iterable[Skipped]) -> int:
    """Number of samples left out; an unknown number counts as one."""
    return sum(1 if one.samples is None else one.samples for one in skipped)


def shown_skipped(one: Skipped) -> str:
    """Name of what is left out, as messages list it."""
    return f"{one.shard}/{one.key}".rstrip("/")


def largest_first(skipped: Iterable[Skipped]) -> list[Skipped]:
    """Unknown numbers of samples, then the largest, for messages that list a few."""
    return sorted(skipped, key=lambda one: -math.inf if one.samples is None else -one.samples)


class Location(NamedTuple):
    """Where a segment lies in its shard: two numbers, whose meaning is the form's own."""

    offset: int
    size: int


class VideoName(str):
    """The name of a video file, among those of images."""


class ImageName(str):
    """The name of an image file of which a content part states the size."""

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
    """The type of file (`data.modalities.media.Media`) that a name is of."""
    return "video" if isinstance(name, VideoName) else "image"


class Segment(NamedTuple):
    """A piece of a sample. `trained`: the tokens of this text are labels; `ended`: EOS follows
    inside the sample.

    A file that is no image has the two numbers of its type (`data.modalities.media.Media`) in the
    place of width and height; a video its `frames` and their rate (`spec.video_processor.Film`)
    beside those of a frame; a piece of a document (`data.documents`) its first character, and how
    many it has; a text of a chat template `TEMPLATED` in that of the height, and its tokens.
    `part`: as in the index's column `parts`. `budget`: of an image whose record states its size.
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
        """What its file's header says."""
        of_all = (self.width_px, self.height_px)
        return (*of_all, self.frames, self.rate_nhz) if self.frames else of_all


class Sample(NamedTuple):
    """One sample of a shard."""

    key: str
    segments: list[Segment]
    unread: tuple[str, ...] = ()  # keys of its record that no reader knows, as messages name them


LONG = "q"  # type of the numbers of a `Compact`: 64 bits
#: Of a byte that stands for a segment, in `Compact.form`: beside its kind.
TRAINED, ENDED, KIND = 64, 128, 63


class Compact(NamedTuple):
    """Consecutive samples of one form, each of texts from one place and whole images or clips,
    without an object for each of their segments: what most samples are, indexed in less than half
    the time.

    `form` has a byte for each segment of a sample: its kind, with `TRAINED` and `ENDED`. Lists
    are of all samples, one after the other.
    """

    keys: list[str]
    form: bytes
    texts: list[str]
    records: array[int]  # location of all texts of each sample, two numbers
    files: array[int]  # location and two numbers of each, four
    unread: tuple[str, ...] = ()  # as of each `Sample`

    @property
    def samples(self) -> list[Sample]:
        """The same with an object for each."""
        texts, numbers, records = iter(self.texts), iter(self.files), iter(self.records)
        made = list[Sample]()
        for key in self.keys:
            record, segments = Location(*islice(records, 2)), list[Segment]()
            for one in self.form:
                if one & KIND:
                    place = Location(*islice(numbers, 2))
                    segments.append(file_segment(one & KIND, place, tuple(islice(numbers, 2))))
                else:
                    flags = bool(one & TRAINED), bool(one & ENDED)
                    segments.append(Segment(TEXT, record, next(texts), 0, 0, *flags))
            made.append(Sample(key, segments, self.unread))
        return made


class Part(NamedTuple):
    """A segment as a sample's json says it: a text, its tokens (`ids`) where a chat template wrote
    it, or the name of a file (`VideoName`, `ImageName`), with the number of its `part` where the
    template's processor writes it in parts."""

    kind: int
    value: str
    trained: bool = True
    ended: bool = False
    ids: tuple[int, ...] | None = None
    part: int = 0

    @property
    def text(self) -> str | tuple[int, ...]:
        """What it says, or the tokens of that."""
        return self.value if self.ids is None else self.ids


class PartFile(NamedTuple):
    """The image or video that a part of a turn stands for: by name, by its number among those of
    the record, or the next one of these."""

    media: str
    name: str = ""
    place: int | None = None
    budget: PixelBudget | None = None


class Turn(NamedTuple):
    """What one side of a conversation says."""

    role: str  # system, user, assistant
    texts: list[str]  # to be read as one, with a mark for each image
    files: list[PartFile]  # of its parts
    listed: bool = False  # whether it was given as a list of parts
    others: Mapping[str, Any] = {}  # what else its record says, for a chat template
    trained: bool = True  # an assistant's
    #: of images whose parts state their size, by the number of their mark in the turn
    budgets: Mapping[int, PixelBudget] = {}

    @property
    def said(self) -> str:
        """All of it."""
        return "".join(self.texts)


#: The numbers of images (`spec.heads.Numbers`) by their names, all of a record.
Measure = Callable[[Sequence[str]], Sequence[Numbers]]


class ChatForm(Protocol):
    """How conversations are written where the tokenizer says it (`data.chat`)."""

    def parts(self, turns: list[Turn], names: list[str], measure: Measure) -> list[Part]:
        """Texts and images (of these names) in order; ValueError with the reason where it cannot
        be written. `measure` is called where their numbers are needed."""

    def reads(self, key: str) -> bool:
        """Return True if what writes a turn may read this key of it."""


class Shard(NamedTuple):
    """One file of a source: a local path or a URL, and its name relative to the source."""

    form: str
    path: str
    name: str
    images: str = ""  # folder of the images that a LLaVA JSON names
    #: Row groups of Parquet that are read of it, the first and the one behind the last; None = all.
    groups: tuple[int, int] | None = None
    held_out: bool = False  # of a validation split: evaluated, never trained on
    text: str = ""  # column of texts or turns, where the run file names it


class OpenShard(Protocol):
    """A shard whose samples are read again in any order, by any thread.

    `record` is the location of a sample's first text, (-1, 0) where it has none. All methods raise
    OSError (DataError for a URL) where the file cannot be read, ValueError or IndexError where what
    lies there is not what was indexed, and pyarrow's own errors (ValueErrors, OSErrors).
    """

    def file(self, media: str, location: Location, record: Location) -> bytes:
        """The file at `location`, of a type (`data.modalities.media.Media`)."""

    def file_name(self, media: str, location: Location, record: Location) -> str:
        """Name of that file, for messages."""

    def texts(self, record: Location, files: Sequence[Numbers] = ()) -> list[str | tuple[int, ...]]:
        """All texts of a sample, in order; of a chat template their tokens, those around the parts
        of its `files` with them, of which the numbers are given."""


def file_segment(
    kind: int, location: Location, numbers: Numbers, part: Part | None = None
) -> Segment:
    """The segment of a file, or of the part of it that is named so."""
    width, height, *film = numbers
    frames, rate = film or (0, 0)
    number, name = (part.part, part.value) if part else (0, "")
    budget = name.budget if isinstance(name, ImageName) else None
    whole = (False, False, None, number, frames, rate, budget)
    return Segment(kind, location, "", width, height, *whole)


def text_segment(part: Part, location: Location) -> Segment:
    """The segment of a text."""
    height = 0 if part.ids is None else TEMPLATED
    return Segment(TEXT, location, part.value, 0, height, part.trained, part.ended, part.ids)


def clean(text: str) -> str:
    """JSON may escape half a character, which no tokenizer takes."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def is_held(name: str) -> bool:
    """Return True if the name of a file holds the file itself, in base64."""
    if name[: len(DATA)].lower() == DATA:
        return True
    return name.startswith(HELD) and len(name) >= LEAST_HELD and BASE64.fullmatch(name) is not None


def shown_name(name: str) -> str:
    """How messages name an image, which may be in its name itself."""
    if is_held(name):
        return DATA + "…" if name[: len(DATA)].lower() == DATA else "an image in base64"
    return printable(name)


def unread_of(mapping: Mapping[str, Any], known: Iterable[str], what: str = "") -> list[str]:
    """Return the keys of a mapping, as messages name them, that hold something and are not
    `known`."""
    return [
        f"{what}`{printable(key, MOST_KEY)}`"
        for key in sorted(mapping.keys() - known)
        if holds(mapping[key])
    ]


def holds(value: Any) -> bool:
    """Return True if a value is neither null nor empty, nor a mapping of such alone, as tables give
    it where there is none."""
    return any(map(holds, value.values())) if isinstance(value, dict) else value not in NOTHING


def printable(name: str, most: int | float = MOST_SHOWN) -> str:
    """A name or reason as one line that no terminal takes for a command: control characters are
    written out."""
    if len(name) <= most and name.isprintable():
        return name
    shown = name if most == math.inf else name[: int(most)]
    escaped = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)
    return escaped + ("…" if len(name) > most else "")

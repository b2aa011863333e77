"""Modality specs of files for towers that run as one layer, as the library's own processor prepares
them: images with videos, and clips.

An item is a file with all its tiles or frames; its grid is (rows in the LLM, 1). Its tokens in the
LLM are those from its first row to its last, with what the processor writes between them; the text
before and after belongs to the sample's text (`cutting.Written`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import (
    Field,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    WithJsonSchema,
    model_serializer,
)

from disttrain_cli.spec.cutting import Written
from disttrain_cli.spec.files import IDENTITY, Strict
from disttrain_cli.spec.heads import LARGE_IMAGE_PX, Grid, Head, Numbers, Rows
from disttrain_cli.spec.library_calls import RATE_HZ, AudioCall, ImageCall, VideoCall
from disttrain_cli.spec.library_processor import ROW, LibraryProcessor, library_processor
from disttrain_cli.spec.places import Places

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from disttrain_cli.spec.library_processor import Inputs

#: Sides of the square images among which one of about a number of rows is searched.
SIDES_PX = tuple(round(16 * 2 ** (step / 4)) for step in range(33))  # 16 to 4096
#: Durations of clips, likewise.
CLIPS_MS = tuple(round(100 * 2 ** (step / 4)) for step in range(36))  # 0.1 s to 43 s
LARGE_CLIP_MS = 10_000

#: Kinds of inputs: one that a file does not have, integers, floating-point values, flags.
ABSENT, NUMBERS, VALUES, FLAGS = -1, 0, 1, 2


class Packed(NamedTuple):
    """Inputs of a file as two arrays."""

    values: NDArray[np.float32]  # [E] of all floating-point inputs, one after another
    #: [I] rows in the LLM; then by input: its kind, its number of dimensions, its shape, and,
    #: unless it is among the values, its numbers
    table: NDArray[np.int64]


class LibraryItems(Head):
    """Preprocessing of files by the processor of a published folder."""

    #: Sizes of a small, a medium and a large file, at which costs are counted.
    spread_sizes: ClassVar[tuple[Numbers, Numbers, Numbers]]

    form: Literal["library"] = "library"
    folder: str = Field(description="Folder of the published model, with its processor.")
    inputs: tuple[str, ...] = Field(
        (), description="Outputs of the processor that the tower reads."
    )
    digest: str = Field(description="Hash of the processor's files.")
    mrope: bool = Field(
        False, description="The LLM's tokens have three positions, of items from the library."
    )

    @model_serializer(mode="wrap")
    def _serialized(
        self, serialize: SerializerFunctionWrapHandler, info: SerializationInfo
    ) -> dict[str, Any]:
        """Leave the folder out of an identity: `digest` is of its content."""
        fields: dict[str, Any] = serialize(self)
        if info.context == IDENTITY:
            fields.pop("folder")
        return fields

    def processor_of(self, numbers: Numbers) -> LibraryProcessor:
        """Return the folder's processor for files of this type."""
        raise NotImplementedError

    @property
    def sizes(self) -> Sequence[Numbers]:
        """Sizes of blank files, from the fewest rows to the most."""
        raise NotImplementedError

    @property
    def large(self) -> Numbers:
        """Size of the blank file at which memory is recorded."""
        raise NotImplementedError

    @property
    def alike(self) -> bool:
        return False

    @property
    def packed(self) -> bool:
        return True

    @property
    def cuts(self) -> bool:
        return True

    def written(self, files: Sequence[Numbers]) -> list[Written]:
        spelled = [self.processor_of(numbers).spelled(numbers) for numbers in files]
        return [(one.before, one.after) for one in spelled]

    def grids(self, sizes: Any) -> Any:
        import numpy as np

        files = [_numbers(numbers) for numbers in np.asarray(sizes)]
        rows = dict[Numbers, int]()
        for processor in dict.fromkeys(map(self.processor_of, files)):
            own = [numbers for numbers in files if self.processor_of(numbers) is processor]
            rows |= zip(own, processor.rows(own), strict=True)
        return np.array([(rows[numbers], 1) for numbers in files], dtype=np.int64).reshape(-1, 2)

    def rows_in_llm(self, numbers: Numbers) -> int:
        """Return the rows of a file of this size."""
        return self.processor_of(numbers).spelled(numbers).rows

    def misfit(self, width: int, height: int, *film: int) -> str | None:
        return self.processor_of((width, height, *film)).misfit((width, height, *film))

    def tokens_of(self, sizes: Any, part: Any, parts: Any) -> Any:
        import numpy as np

        each = [len(self.ids(_numbers(numbers))) for numbers in np.asarray(sizes)]
        return np.array(each, dtype=np.int64)

    def places(self, numbers: Numbers, parts: int) -> list[Places]:
        import numpy as np

        return [Places(np.flatnonzero(np.array(self.ids(numbers)) == ROW))]

    def ids(self, numbers: Numbers) -> tuple[int, ...]:
        return self.processor_of(numbers).spelled(numbers).ids

    def row_id(self, numbers: Numbers) -> int:
        return self.processor_of(numbers).row

    def positions(self, numbers: Numbers) -> tuple[NDArray[np.int64], int]:
        """Return `LibraryProcessor.positions`, counted like those of text without M-RoPE."""
        import numpy as np

        if not self.mrope:
            tokens = len(self.ids(numbers))
            return np.tile(np.arange(tokens), (3, 1)), tokens
        return self.processor_of(numbers).turned(numbers)

    def size(self, area: Any) -> Any:
        """Return the rows in the LLM."""
        return area

    def rows(self, column: str) -> Rows:
        """Return the rows of "tokens"."""
        return {"tokens": Rows(0, 1)}[column]

    def shape_of(self, grid: Grid) -> tuple[int, ...]:
        """Return the number of values of a file of about as many rows."""
        return (len(self.example(grid[0] * grid[1]).values),)

    def grid_of(self, rows: int, columns: int) -> Grid:
        """Return the grid of a file of about rows · columns times the fewest rows."""
        fewest = self.rows_in_llm(self.sizes[0])
        return self.rows_in_llm(self.example_size(rows * columns * fewest)), 1

    @cached_property
    def spread(self) -> tuple[Grid, Grid, Grid]:
        """Grids of a small, a medium and a large file, as far as the processor keeps their sizes.

        Some have a budget that every image fills.
        """
        small, medium, large = map(self.rows_in_llm, self.spread_sizes)
        return (small, 1), (medium, 1), (large, 1)

    @property
    def largest(self) -> Grid:
        """Grid of the file at which memory is recorded, in multiples of the fewest rows."""
        fewest, most = map(self.rows_in_llm, (self.sizes[0], self.large))
        return max(1, most // fewest), 1

    def pack(self, made: Inputs, rows: int) -> Packed:
        """Return the inputs of a file of `rows` rows as two arrays."""
        import numpy as np

        values, table = [], [rows]
        for name in self.inputs:
            if name not in made:  # tiles that a small image has not, say
                table += [ABSENT, 0]
                continue
            given = made[name]
            kind = {"f": VALUES, "b": FLAGS}.get(given.dtype.kind, NUMBERS)
            table += [kind, given.ndim, *given.shape]
            if kind == VALUES:
                values.append(given.reshape(-1).astype(np.float32))
            else:
                table += given.reshape(-1).astype(np.int64).tolist()
        together = np.concatenate(values) if values else np.zeros(0, np.float32)
        return Packed(together, np.array(table, dtype=np.int64))

    def blank(self, numbers: Numbers) -> Packed:
        """Return the inputs of a blank file."""
        return self.pack(self.processor_of(numbers).blank(numbers), self.rows_in_llm(numbers))

    def example(self, rows: int) -> Packed:
        """Return the inputs of a blank file of about as many rows.

        Where it has others, the tower repeats or omits some of its rows.
        """
        return self.blank(self.example_size(rows))

    def example_size(self, rows: int) -> Numbers:
        """Return the size whose rows are nearest to a number."""
        return min(self.sizes, key=lambda one: (abs(self.rows_in_llm(one) - rows), one))


class LibraryVideos(Strict):
    """Reading of videos by the processor of a published folder."""

    token: int = Field(ge=0, description="Id of the token of a video's row in the LLM.")
    fps: float | None = Field(
        None, gt=0, description="Frames sampled per second; null = the processor's own."
    )
    max_frames: int | None = Field(
        None, ge=1, description="Maximum number of sampled frames; null = the processor's own."
    )


class LibraryImages(LibraryItems):
    """Preprocessing of images and videos by the processor of a published folder."""

    kind: ClassVar[int] = 1
    what: ClassVar[str] = "images to read"
    spread_sizes: ClassVar[tuple[Numbers, Numbers, Numbers]] = ((16, 16), (724, 724), (1024, 1024))

    item: Literal["image"] = "image"
    image_token: int = Field(ge=0, description="Id of the token of an image's row in the LLM.")
    video: Annotated[
        LibraryVideos | None,
        WithJsonSchema({"anyOf": [LibraryVideos.model_json_schema(), {"type": "null"}]}),
    ] = Field(None, description="Reading of videos, if they are read.")

    @cached_property
    def processor(self) -> LibraryProcessor:
        """The folder's processor for images."""
        return library_processor(Path(self.folder), self.image_token, ImageCall())

    @cached_property
    def of_videos(self) -> LibraryProcessor:
        """The folder's processor for videos."""
        assert self.video is not None
        call = VideoCall(self.video.fps, self.video.max_frames)
        return library_processor(Path(self.folder), self.video.token, call)

    def processor_of(self, numbers: Numbers) -> LibraryProcessor:
        return self.of_videos if len(numbers) > 2 else self.processor

    def drawn(self, sizes: Any) -> Any:
        """Return sizes with sides rounded to quarter octaves where each costs a blank file."""
        import numpy as np

        if self.processor.counts_rows:
            return sizes
        return np.exp2(np.round(np.log2(sizes) * 4) / 4).astype(np.int64)

    @property
    def row_ids(self) -> Sequence[int]:
        return (self.image_token, *(() if self.video is None else (self.video.token,)))

    @property
    def sizes(self) -> Sequence[Numbers]:
        return [(side, side) for side in SIDES_PX]

    @property
    def large(self) -> Numbers:
        return (round(LARGE_IMAGE_PX**0.5),) * 2

    @property
    def placeholders(self) -> Mapping[str, str]:
        own = {"image": self.processor.placeholder}
        return own | ({} if self.video is None else {"video": self.of_videos.placeholder})

    def misfit(self, width: int, height: int, *film: int) -> str | None:
        if film and self.video is None:
            return "a video: videos are not read without data.video in the run file"
        what = "a video" if film else "an image"
        reason = super().misfit(width, height, *film)
        return reason and f"{what} of {width} × {height} pixels: {reason}"


class LibraryClips(LibraryItems):
    """Preprocessing of clips by the processor of a published folder."""

    kind: ClassVar[int] = 3
    what: ClassVar[str] = "audio clips"
    spread_sizes: ClassVar[tuple[Numbers, Numbers, Numbers]] = (
        (CLIPS_MS[0], RATE_HZ),
        (LARGE_CLIP_MS // 2, RATE_HZ),
        (LARGE_CLIP_MS, RATE_HZ),
    )

    item: Literal["audio"] = "audio"
    audio_token: int = Field(ge=0, description="Id of the token of a clip's row in the LLM.")

    @cached_property
    def processor(self) -> LibraryProcessor:
        """The folder's processor for clips."""
        return library_processor(Path(self.folder), self.audio_token, AudioCall())

    def processor_of(self, numbers: Numbers) -> LibraryProcessor:
        return self.processor

    @property
    def row_ids(self) -> Sequence[int]:
        return (self.audio_token,)

    @property
    def sizes(self) -> Sequence[Numbers]:
        return [(ms, RATE_HZ) for ms in CLIPS_MS if self.processor.misfit((ms, RATE_HZ)) is None]

    @property
    def large(self) -> Numbers:
        return LARGE_CLIP_MS, RATE_HZ

    @property
    def placeholders(self) -> Mapping[str, str]:
        return {"audio": self.processor.placeholder}


#: The spec of a modality's files by the library, by its item.
LIBRARY_HEADS: dict[str, type[LibraryItems]] = {"image": LibraryImages, "audio": LibraryClips}


def _numbers(given: Any) -> Numbers:
    """Return a file's numbers from a row of an array in which those of images have two zeros."""
    numbers = tuple(int(one) for one in given)
    return numbers if any(numbers[2:]) else numbers[:2]

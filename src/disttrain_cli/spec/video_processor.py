"""Rule of a published video processor: sampled frames, their size, and texts between them.

Two consecutive frames are a temporal patch, and each patch is an item of its own to the tower: a
grid of patches of its own, attention inside it.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Literal, NamedTuple

from pydantic import Field, model_validator

from disttrain_cli.spec.cutting import Written
from disttrain_cli.spec.files import Strict
from disttrain_cli.spec.image_processor import MOST_RATIO, Filter

VideoRule = Literal["qwen2_vl", "qwen3_vl"]
TEMPORAL = 2  # frames of a temporal patch
BEGIN, END = "<|vision_start|>", "<|vision_end|>"  # around one, if its time is written
#: A rate in frames per second is stored as an integer number of these; rates with denominators up
#: to 30,000 are recovered exactly.
NHZ = 10**9
MOST_DENOMINATOR = 30_000


class Film(NamedTuple):
    """Header of a video: pixels of a frame, frames, and their rate in billionths per second."""

    width_px: int
    height_px: int
    frames: int
    rate_nhz: int

    @property
    def fps(self) -> float:
        """Frames per second."""
        return float(Fraction(self.rate_nhz, NHZ).limit_denominator(MOST_DENOMINATOR))


class VideoProcessor(Strict):
    """Rule of a published video processor.

    qwen2_vl: `min_pixels` and `max_pixels` are of each frame (transformers'
    `Qwen2VLVideoProcessor`); the positions of a patch's tokens encode its time. qwen3_vl: they are
    of all frames together (`Qwen3VLVideoProcessor`); a text before each patch states its time.
    """

    rule: VideoRule
    resample: Filter = "bicubic"
    fps: float = Field(2.0, gt=0, le=1000, description="Frames sampled per second.")
    min_frames: int = Field(
        4, ge=TEMPORAL, description="Minimum number of sampled frames, if the video has as many."
    )
    max_frames: int = Field(768, ge=TEMPORAL, description="Maximum number of sampled frames.")
    min_pixels: int = Field(
        ge=1, description="Minimum number of pixels; smaller frames are enlarged to it."
    )
    max_pixels: int = Field(
        ge=1, description="Maximum number of pixels; larger frames are reduced to it."
    )
    most_pixels: int | None = Field(
        None,
        ge=1,
        description="Limit on the pixels of all frames together, in any case; null = none.",
    )
    most_frame_pixels: int = Field(
        ge=1, description="Limit on the pixels of one frame, in any case."
    )
    most_tokens: int | None = Field(
        None,
        ge=1,
        description="Token budget by which the processor caps the pixels of a frame"
        " (cap_pixels_per_frame): of all frames (qwen2_vl), or of each (qwen3_vl).",
    )
    tokens_per_second: float = Field(
        0.0, ge=0, description="qwen2_vl: increment of positions per second."
    )

    @model_validator(mode="after")
    def _order(self) -> VideoProcessor:
        if self.min_frames > self.max_frames:
            raise ValueError("min_frames must not be more than max_frames")
        if self.min_pixels > self.max_pixels:
            raise ValueError("min_pixels must not be more than max_pixels")
        return self

    def numbers(self, film: Film) -> list[int]:
        """Return the indices of sampled frames, padded to whole temporal patches by the last one.

        Raises:
            ValueError: the video has too few frames.
        """
        if film.frames < TEMPORAL:
            raise ValueError(f"a video of {film.frames} frame, at least {TEMPORAL} are needed")
        numbers = self._even(film) if self.rule == "qwen2_vl" else self._from_end_to_end(film)
        return numbers + numbers[-1:] * (len(numbers) % TEMPORAL)

    def _even(self, film: Film) -> list[int]:
        """Return sampled frames as `Qwen2VLVideoProcessor.sample_frames`, without padding."""
        most = min(self.max_frames, film.frames) // TEMPORAL * TEMPORAL
        wanted = min(max(film.frames / film.fps * self.fps, self.min_frames), most)
        count = math.floor(wanted / TEMPORAL) * TEMPORAL
        step = film.frames / count
        # values of torch.arange, in double precision and rounded to single
        return [int(_single(at * step)) for at in range(math.ceil(film.frames / step))]

    def _from_end_to_end(self, film: Film) -> list[int]:
        """Return sampled frames as `Qwen3VLVideoProcessor.sample_frames`, without padding."""
        import numpy as np

        wanted = int(film.frames / film.fps * self.fps)
        count = min(max(wanted, self.min_frames), self.max_frames, film.frames)
        numbers: list[int] = np.linspace(0, film.frames - 1, count).round().astype(int).tolist()
        return numbers

    def misfit(self, film: Film, block_px: int) -> str | None:
        """Return why a video is not read; None if it is."""
        try:
            self.size_px(film, block_px)
        except ValueError as error:
            return str(error)
        return None

    def written(self, film: Film) -> Written:
        """Return the texts before, between and after its temporal patches."""
        if self.rule == "qwen2_vl":
            return ("",) * (self.patches(film) + 1)
        times = [f"<{seconds:.1f} seconds>{BEGIN}" for seconds in self.seconds(film)]
        return (times[0], *(END + time for time in times[1:]), END)

    def patches(self, film: Film) -> int:
        """Return the number of temporal patches."""
        return len(self.numbers(film)) // TEMPORAL

    def size_px(self, film: Film, block_px: int) -> tuple[int, int]:
        """Return height and width of its frames, whole blocks.

        Raises:
            ValueError: it has too few frames, or an extreme aspect ratio.
        """
        self.numbers(film)
        seen = self._seen(film)
        width, height = film.width_px, film.height_px
        if self.rule == "qwen3_vl" and min(width, height) < block_px:
            scale = max(block_px / height, block_px / width)
            height, width = int(height * scale), int(width * scale)
        if max(width, height) > MOST_RATIO * min(width, height):
            raise ValueError(
                f"a video of {film.width_px} × {film.height_px} pixels: one side is more than"
                f" {MOST_RATIO} times the other"
            )
        least, most = self._budget(seen, block_px)
        return _smart_size(
            (height, width), 1 if self.rule == "qwen2_vl" else seen, block_px, least, most
        )

    def _seen(self, film: Film) -> int:
        """Return the number of sampled frames, without padding."""
        rule = self._even if self.rule == "qwen2_vl" else self._from_end_to_end
        return len(rule(film))

    def _budget(self, seen: int, block_px: int) -> tuple[int, int]:
        """Return the least and most pixels: of a frame (qwen2_vl), or of all (qwen3_vl)."""
        least, most, area = self.min_pixels, self.max_pixels, block_px**2
        bound = self.most_frame_pixels
        if self.most_pixels is not None:
            bound = min(bound, self.most_pixels // seen)
        if self.rule == "qwen2_vl":
            if self.most_tokens is not None:
                share = int(self.most_tokens * area * 0.9) * TEMPORAL // seen
                most = max(min(most, share), int(least * 1.05))
        else:
            if self.most_tokens is not None:
                share = min(self.most_tokens * area, most // seen)
                most = max(share, int(least * 1.05)) * seen
            bound *= seen
        most = max(1, min(most, bound))
        return min(least, most), most

    def seconds(self, film: Film) -> list[float]:
        """Return the middle of each temporal patch, in seconds."""
        numbers = self.numbers(film)
        times = [number / film.fps for number in numbers]
        return [(times[at] + times[at + TEMPORAL - 1]) / 2 for at in range(0, len(times), TEMPORAL)]

    def times(self, film: Film) -> list[int]:
        """Return the temporal position offset of each temporal patch's tokens."""
        if self.rule != "qwen2_vl":
            return [0] * self.patches(film)
        # as `get_rope_index`, whose seconds are a tensor in single precision
        rate = self._seen(film) / film.frames * film.fps
        every = _single(self.tokens_per_second * _single(TEMPORAL / rate))
        return [int(_single(at * every)) for at in range(self.patches(film))]


def _smart_size(
    sides: tuple[int, int], frames: int, block_px: int, least: int, most: int
) -> tuple[int, int]:
    """Return the size by the operations of both `smart_resize` in their order, to round alike."""
    height, width = sides
    rows, columns = round(height / block_px) * block_px, round(width / block_px) * block_px
    of_all = (1 if frames == 1 else round(frames / TEMPORAL) * TEMPORAL) * rows * columns
    if of_all > most:
        shrink = math.sqrt((frames * height * width) / most)
        rows, columns = (
            max(block_px, math.floor(side / shrink / block_px) * block_px) for side in sides
        )
    elif of_all < least:
        grow = math.sqrt(least / (frames * height * width))
        rows, columns = (math.ceil(side * grow / block_px) * block_px for side in sides)
    return rows, columns


def _single(value: float) -> float:
    """Return the value rounded to single precision."""
    import numpy as np

    return float(np.float32(value))

"""Calls of the library's processors with images, videos and clips, and blank ones of a size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

from disttrain_cli.spec.video_processor import NHZ, Film

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from disttrain_cli.spec.heads import Numbers

Media = Literal["image", "video", "audio"]
#: Frames per second of processors that sample none by themselves, as of qwen-vl-utils.
USUAL_FPS = 2.0
RATE_HZ = 16_000
#: Heights that the library takes for the channels of an image with channels first
#: (`transformers.image_utils.infer_channel_dimension_format`).
CHANNELS = (1, 3)


class Call(Protocol):
    """Arguments of a processor's call for files of one type."""

    media: ClassVar[Media]
    number: ClassVar[int]  # in `mm_token_type_ids`
    sizes: ClassVar[tuple[Numbers, Numbers]]  # with which a processor is tried
    #: for which its own count is compared with its texts
    counted: ClassVar[tuple[Numbers, ...]]

    def blank(self, processor: Any, numbers: Numbers) -> Any:
        """Return contents of this size without anything to see or hear."""

    def arguments(self, processor: Any, contents: Sequence[Any]) -> dict[str, Any]:
        """Return the arguments of the processor's call."""

    def counts(self, processor: Any, sizes: Sequence[Numbers]) -> list[int]:
        """Return the processor's own counts of files' rows; a call takes a millisecond."""


@dataclass(frozen=True)
class ImageCall:
    """Images: contents are PIL's."""

    media: ClassVar[Media] = "image"
    number: ClassVar[int] = 1
    sizes: ClassVar[tuple[Numbers, Numbers]] = ((96, 64), (1920, 1280))
    counted: ClassVar[tuple[Numbers, ...]] = (
        (64, 64),
        (640, 480),
        (480, 640),
        (211, 37),
        (97, 1024),
        (1600, 900),
        (2048, 2048),
    )

    def blank(self, processor: Any, numbers: Numbers) -> Any:
        _check_heights([numbers])
        return import_module("PIL.Image").new("RGB", numbers)

    def arguments(self, processor: Any, contents: Sequence[Any]) -> dict[str, Any]:
        return {"images": list(contents)}

    def counts(self, processor: Any, sizes: Sequence[Numbers]) -> list[int]:
        _check_heights(sizes)
        counted = processor._get_num_multimodal_tokens(image_sizes=[one[::-1] for one in sizes])
        return list(map(int, counted.num_image_tokens))


class Frames(NamedTuple):
    """Sampled frames of a video."""

    pixels: NDArray[np.uint8]  # [T, H, W, RGB]
    film: Film
    numbers: list[int]


@dataclass(frozen=True)
class VideoCall:
    """Videos: contents are `Frames`, sampled by the processor's own rule."""

    fps: float | None = None  # sampled per second; None = the processor's own
    max_frames: int | None = None
    media: ClassVar[Media] = "video"
    number: ClassVar[int] = 2
    sizes: ClassVar[tuple[Numbers, Numbers]] = ((96, 64, 16, 4 * NHZ), (320, 240, 24, 3 * NHZ))
    counted: ClassVar[tuple[Numbers, ...]] = (
        (64, 64, 8, 4 * NHZ),
        (320, 240, 24, 3 * NHZ),
        (211, 97, 5, 2 * NHZ),
    )

    def frames(self, processor: Any, film: Film) -> list[int]:
        """Return the numbers of the frames that are sampled; ValueError if it has too few."""
        given = {"fps": self._fps(processor), "max_frames": self.max_frames}
        try:
            frames = processor.video_processor.sample_frames(
                metadata=self._metadata(film),
                **{name: value for name, value in given.items() if value is not None},
            )
        except Exception as error:  # classes of many authors raise anything
            raise ValueError(f"its frames are not sampled: {error}") from None
        return [int(number) for number in frames]

    def blank(self, processor: Any, numbers: Numbers) -> Any:
        import numpy as np

        film = Film(*numbers)
        chosen = self.frames(processor, film)
        shape = (len(chosen), film.height_px, film.width_px, 3)
        return Frames(np.zeros(shape, np.uint8), film, chosen)

    def arguments(self, processor: Any, contents: Sequence[Frames]) -> dict[str, Any]:
        fps = self._fps(processor)  # classes compute positions of it, each with another default
        return {
            "videos": [one.pixels for one in contents],
            "video_metadata": [self._metadata(one.film, one.numbers) for one in contents],
            "do_sample_frames": False,
            **({} if fps is None else {"fps": fps}),
        }

    def counts(self, processor: Any, sizes: Sequence[Numbers]) -> list[int]:
        films = [Film(*numbers) for numbers in sizes]
        sampled = [(len(self.frames(processor, one)), one.height_px, one.width_px) for one in films]
        counted = processor._get_num_multimodal_tokens(video_sizes=sampled)
        return list(map(int, counted["num_video_tokens"]))

    def _fps(self, processor: Any) -> float | None:
        own = processor.video_processor
        if self.fps is None and getattr(own, "num_frames", None) is not None:
            return None
        return self.fps or getattr(own, "fps", None) or USUAL_FPS

    def _metadata(self, film: Film, numbers: Sequence[int] | None = None) -> Any:
        return import_module("transformers.video_utils").VideoMetadata(
            total_num_frames=film.frames,
            fps=film.fps,
            width=film.width_px,
            height=film.height_px,
            duration=film.frames / film.fps,
            frames_indices=None if numbers is None else list(numbers),
        )


@dataclass(frozen=True)
class AudioCall:
    """Clips: contents are samples at 16 kHz, of a whole number of milliseconds."""

    media: ClassVar[Media] = "audio"
    number: ClassVar[int] = 3
    sizes: ClassVar[tuple[Numbers, Numbers]] = ((1270, RATE_HZ), (5830, RATE_HZ))
    counted: ClassVar[tuple[Numbers, ...]] = (
        (310, RATE_HZ),
        (1270, RATE_HZ),
        (2005, RATE_HZ),
        (7770, RATE_HZ),
    )

    def blank(self, processor: Any, numbers: Numbers) -> Any:
        import numpy as np

        return np.zeros(numbers[0] * RATE_HZ // 1000, np.float32)

    def arguments(self, processor: Any, contents: Sequence[Any]) -> dict[str, Any]:
        return {"audio": list(contents)}

    def counts(self, processor: Any, sizes: Sequence[Numbers]) -> list[int]:
        lengths = [numbers[0] * RATE_HZ // 1000 for numbers in sizes]
        counted = processor._get_num_multimodal_tokens(audio_lengths=lengths)
        return list(map(int, counted["num_audio_tokens"]))

    def longest_ms(self, processor: Any) -> float:
        """Return the duration beyond which the processor drops what follows."""
        own = getattr(processor, "feature_extractor", None)
        samples = getattr(own, "n_samples", None)
        return math.inf if samples is None else samples * 1000 / RATE_HZ


def _check_heights(sizes: Sequence[Numbers]) -> None:
    """Raise ValueError for a size whose axis of channels the library would guess wrongly."""
    if any(numbers[1] in CHANNELS for numbers in sizes):
        raise ValueError("its height would be taken for a number of channels")

"""Videos as an image encoder reads them: sampled frames, two to an item, resized.

The resize rule is that of the published video processor. Its class resizes byte tensors by
torchvision's antialiased bicubic filter; here it is PIL's, as for images. Both compute in fixed
point and differ by one level of 255 at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.data.videos import VideoHeader, decode_frames, stored_header, video_header
from disttrain_cli.spec.heads import ImageInput
from disttrain_cli.spec.library_calls import Frames
from disttrain_cli.spec.library_processor import LibraryProcessor
from disttrain_cli.spec.video_processor import NHZ, TEMPORAL, Film

Bytes = NDArray[np.uint8]


def film_of(data: bytes) -> Film:
    """Return the size, number of frames and frame rate in a video file's header."""
    return _film(video_header(data))


def _film(header: VideoHeader) -> Film:
    return Film(*header[:3], round(header.fps * NHZ))


def decode_patches(
    data: bytes, image: ImageInput, parts: int, outs: Sequence[tuple[int, NDArray[Any]]]
) -> None:
    """Decode some of the `parts` [2 · C, H, W] of a video into `outs`.

    `outs` has pairs of a part's number and its array; arrays are written once nothing can fail any
    more.
    """
    assert image.video is not None
    numbers = image.video.numbers(_film(stored_header(data)))
    if len(numbers) != parts * TEMPORAL:
        raise ValueError(f"{len(numbers)} frames are sampled instead of {parts * TEMPORAL}")
    wanted = {part: numbers[part * TEMPORAL : (part + 1) * TEMPORAL] for part, _ in outs}
    height, width = outs[0][1].shape[1:] if outs else (0, 0)
    each = sorted({number for pair in wanted.values() for number in pair})
    frames = {
        number: resized(pixels, height, width, image.video.resample)
        for number, pixels in decode_frames(data, each)
    }
    for part, out in outs:
        for place, number in zip(np.split(out, TEMPORAL), wanted[part], strict=True):
            place[:] = frames[number].transpose(2, 0, 1)


def check_patches(data: bytes, image: ImageInput) -> None:
    """Decode all sampled frames, only to raise their errors."""
    assert image.video is not None
    numbers = image.video.numbers(_film(stored_header(data)))
    for _ in decode_frames(data, sorted(set(numbers))):
        pass


def sampled_frames(data: bytes, processor: LibraryProcessor) -> Frames:
    """Return the frames of a video that the library's processor samples, upright.

    Raises:
        ValueError: the video is damaged, or has too few frames.
    """
    film = _film(stored_header(data))
    numbers = processor.frames(film)
    frames = dict(decode_frames(data, sorted(set(numbers))))
    pixels = np.stack([frames[number] for number in numbers])
    height, width = pixels.shape[1:3]
    return Frames(pixels, film._replace(width_px=width, height_px=height), numbers)


def resized(pixels: Bytes, height: int, width: int, how: str) -> Bytes:
    """Resize pixels [H, W, C] to [height, width, C] by one of PIL's filters."""
    from PIL import Image

    if pixels.shape[:2] == (height, width):
        return pixels
    image = Image.fromarray(pixels)
    return np.asarray(image.resize((width, height), Image.Resampling[how.upper()]))

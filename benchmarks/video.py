"""Chosen frames of a video on one core, against the plain loop over PyAV, in turns.

`plain loop` is what transformers' `read_video_pyav` does, with one thread: decode every frame up to
the last one that is wanted, keep those, then convert them to RGB. `disttrain` is
`data.videos.decode_frames`. Both give the same bytes, which is checked. CPU seconds of the process;
a ratio above 1 means that disttrain is faster. Films are noise of amplitude 1/f that drifts, ten
seconds at 30 frames per second, a keyframe at least every 250 frames as encoders have it, or every
48. `header` is what indexing reads of a film.
"""

from __future__ import annotations

import io
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import Tables, alternate, main, paired_ratio
from benchmarks.decode import noise
from disttrain_cli.data.videos import decode_frames, read_video_header

SECONDS, FPS = 10, 30
CODECS = {"H.264": ("libx264", "mp4"), "MPEG-4": ("mpeg4", "mp4"), "VP9": ("libvpx-vp9", "webm")}

Frames = list[NDArray[np.uint8]]


def film(codec: str, form: str, width: int, height: int, seconds: float, every: int) -> bytes:
    """A video file."""
    import av

    buffer, picture = io.BytesIO(), noise(width, height)
    with av.open(buffer, "w", format=form) as container:
        stream: Any = container.add_stream(codec, rate=FPS)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.gop_size = every
        for at in range(round(seconds * FPS)):
            moved = np.roll(picture, (2 * at, 3 * at), axis=(0, 1))
            container.mux(stream.encode(av.VideoFrame.from_ndarray(moved, format="bgr24")))
        container.mux(stream.encode())
    return buffer.getvalue()


def plain(data: bytes, numbers: list[int]) -> Frames:
    """The loop of transformers' `read_video_pyav`."""
    import av

    frames = []
    with av.open(io.BytesIO(data)) as container:
        container.streams.video[0].thread_type = "NONE"
        for number, frame in enumerate(container.decode(video=0)):
            if number > numbers[-1]:
                break
            if number in numbers:
                frames.append(frame)
    return [frame.to_ndarray(format="rgb24") for frame in frames]


def ours(data: bytes, numbers: list[int]) -> Frames:
    """The same frames."""
    return [pixels for _, pixels in decode_frames(data, numbers)]


def measure(small: bool = False) -> Tables:
    """A row for every film and number of frames."""
    seconds, rounds = (1.0, 1) if small else (SECONDS, 7)
    width, height = (64, 48) if small else (640, 480)
    rows = []
    for name, (codec, form) in CODECS.items():
        for every in (250, 48):
            data = film(codec, form, width, height, seconds, every)
            last = round(seconds * FPS) - 1
            for wanted in (4, 20, last + 1):
                numbers = np.linspace(0, last, wanted).round().astype(int).tolist()
                expected = plain(data, numbers)
                assert all(map(np.array_equal, ours(data, numbers), expected)), "other frames"
                taken = alternate(
                    {
                        "ours": lambda data=data, numbers=numbers: ours(data, numbers),
                        "plain": lambda data=data, numbers=numbers: plain(data, numbers),
                        "header": lambda data=data: read_video_header(
                            lambda offset, length: data[offset : offset + length], len(data)
                        ),
                    },
                    rounds,
                )
                rows.append(
                    {
                        "codec": name,
                        "keyframe every": every,
                        "frames": wanted,
                        "disttrain, ms": 1e3 * median(taken["ours"]),
                        "plain loop, ms": 1e3 * median(taken["plain"]),
                        "speed over it": paired_ratio(taken["plain"], taken["ours"]),
                        "header, ms": 1e3 * median(taken["header"]),
                    }
                )
    return {f"{width}x{height}, {seconds:g} s of {FPS} frames per second, one core": rows}


if __name__ == "__main__":
    main(__doc__, measure)

"""Small videos, written by PyAV."""

import io
import struct

import numpy as np
import pytest
from numpy.typing import NDArray

av = pytest.importorskip("av")


def pictures(frames: int, width: int, height: int) -> list[NDArray[np.uint8]]:
    """[H, W, RGB] of frames that all differ, smooth but for a corner of noise."""
    random = np.random.default_rng(0)
    y, x = np.mgrid[:height, :width]
    made = []
    for at in range(frames):
        planes = np.stack([x * 2 + at * 3, y * 2 + at * 5, x + y + at * 7], axis=-1) % 256
        planes[: height // 4, : width // 4] = random.integers(0, 256, (height // 4, width // 4, 3))
        made.append(planes.astype(np.uint8))
    return made


def film(
    frames: int = 30,
    width: int = 64,
    height: int = 48,
    fps: int = 30,
    codec: str = "libx264",
    form: str = "mp4",
    every: int = 12,
    degrees: int = 0,
) -> bytes:
    """A video file with a keyframe at least every so many frames, to be turned counterclockwise."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=form) as container:
        stream = container.add_stream(codec, rate=fps)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.gop_size = every
        if degrees:
            stream.set_display_rotation(degrees)
        for picture in pictures(frames, width, height):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return buffer.getvalue()


def trimmed(data: bytes, frames: int) -> bytes:
    """An MP4 without its first frames, by an edit list: what others need of them stays in it."""
    buffer = io.BytesIO()
    options = {"use_editlist": "1", "avoid_negative_ts": "disabled"}
    with (
        av.open(io.BytesIO(data)) as source,
        av.open(buffer, "w", format="mp4", container_options=options) as made,
    ):
        video = source.streams.video[0]
        stream = made.add_stream_from_template(video)
        for packet in source.demux(video):
            if packet.dts is None:
                continue
            cut = int(frames / video.average_rate / packet.time_base)
            packet.pts, packet.dts, packet.stream = packet.pts - cut, packet.dts - cut, stream
            made.mux(packet)
    return buffer.getvalue()


#: Of the display matrix a, b, c and d by how frames are stored, in EXIF's numbers.
MATRICES = {
    1: (1, 0, 0, 1),
    2: (-1, 0, 0, 1),
    3: (-1, 0, 0, -1),
    4: (1, 0, 0, -1),
    5: (0, 1, 1, 0),
    6: (0, 1, -1, 0),
    7: (0, -1, -1, 0),
    8: (0, -1, 1, 0),
}


def turned(data: bytes, a: float, b: float, c: float, d: float) -> bytes:
    """An MP4 or QuickTime file with another display matrix (ISO 14496-12, 8.3.2)."""
    place = data.index(b"tkhd") + 44
    numbers = [round(65536 * one) for one in (a, b, 0, c, d, 0, 0, 0)]
    return data[:place] + struct.pack(">9i", *numbers, 1 << 30) + data[place + 36 :]


def sound_only() -> bytes:
    """An MP4 of sound."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=16_000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
        frame.rate = 16_000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return buffer.getvalue()


def all_frames(data: bytes) -> list[NDArray[np.uint8]]:
    """Every frame, by the plain loop."""
    with av.open(io.BytesIO(data)) as container:
        container.streams.video[0].thread_type = "NONE"
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]

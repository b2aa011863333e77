"""Video files: sizes from headers, and chosen frames as pixels.

MP4 and QuickTime, Matroska and WebM, and AVI are read by the `av` package (FFmpeg's libraries); the
content of a file determines its format, never its name. Frames are numbered in display order, from
0. Decoding begins at the keyframe before a requested frame; of the frames between, only those that
others depend on are decoded. The model sees:

- 8 bits of RGB, as `av` converts to them; the first video of a file that has several.
- Upright frames: the display matrix of a file, the camera's orientation, is applied as by `ffmpeg`
  and torchcodec (from 0.11 on).

Every function raises ValueError with the reason if the bytes are no complete video within the
limits below, and DataError if the package is missing. In addition to the file's bytes, a call holds
its packets once, the decoder's frames (up to 17, at 1.5 bytes per pixel), and one frame at 3 bytes
per pixel.
"""

from __future__ import annotations

import functools
import io
import math
import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.data.decoding import upright
from disttrain_cli.data.headers import Read
from disttrain_cli.data.muting import mute_libraries
from disttrain_cli.data.streams import ReadStream
from disttrain_cli.errors import DataError
from disttrain_cli.spec.extras import install_command

Bytes = NDArray[np.uint8]

#: Videos beyond these limits are refused before anything is decoded.
MOST_PIXELS, MOST_FRAMES, MOST_FPS = 8192 * 4320, 2_000_000, 1_000
#: FFmpeg's names of the supported formats, by the first bytes of their files: none of them opens
#: other files.
FORMS = {b"ftyp": "mov", b"\x1aE\xdf\xa3": "matroska", b"RIFF": "avi"}
READ_BYTES = 1 << 16  # read at once from a shard
#: Degrees by which a rotation may deviate from a quarter turn, as in ffmpeg.
MOST_OFF = 1.0


class VideoHeader(NamedTuple):
    """Size of a video file; width and height are those of an upright frame."""

    width_px: int
    height_px: int
    frames: int
    fps: float  # mean frame rate per second


def is_installed() -> bool:
    """Return True if videos can be read."""
    try:
        _av()
    except DataError:
        return False
    return True


def check_installed() -> None:
    """Raise DataError if videos cannot be read."""
    _av()


def suffix_of(data: bytes) -> str:
    """Return the usual suffix of a video file."""
    return {"mov": "mp4", "matroska": "mkv", "avi": "avi"}[_form(_of(data))]


def is_video(data: bytes) -> bool:
    """Return True if a file begins as a video does."""
    try:
        return bool(_form(_of(data)))
    except ValueError:
        return False


def video_header(data: bytes) -> VideoHeader:
    """Return `read_video_header` of a file in memory."""
    return read_video_header(_of(data), len(data))


def stored_header(data: bytes) -> VideoHeader:
    """Return the header with width and height as stored, for which no frame is decoded."""
    with _opened(_form(_of(data)), io.BytesIO(data)) as container:
        return _header(container)


def read_video_header(read: Read, file_bytes: int) -> VideoHeader:
    """Return the size of a video file of `file_bytes` bytes.

    Only headers (of Matroska, WebM and MP4 in fragments those of all packets) and the first frame
    are read.
    """
    form = _form(read)
    if form == "mov":
        _check_boxes(read, file_bytes)
    if form == "avi" and file_bytes < (claimed := int.from_bytes(read(4, 4), "little") + 8):
        raise ValueError(f"truncated AVI file: {file_bytes} bytes of {claimed}")
    with _opened(form, io.BufferedReader(ReadStream(read, file_bytes), READ_BYTES)) as container:
        header = _header(container)
        container.seek(0)
        if _orientation(_first_frame(container)) < 5:
            return header
        return header._replace(width_px=header.height_px, height_px=header.width_px)


def decode_frames(data: bytes, numbers: Sequence[int]) -> Iterator[tuple[int, Bytes]]:
    """Yield (number, pixels [H, W, RGB]) of the frames of these numbers, upright, in order.

    Args:
        numbers: ascending, without duplicates.
    """
    with _opened(_form(_of(data)), io.BytesIO(data)) as container:
        stream = _stream(container)
        packets = [packet for packet in container.demux(stream) if packet.size]
        at_hand = _found(stream.codec_context, packets, numbers, _timed(container))
        from av.video.reformatter import VideoReformatter

        convert: Any = VideoReformatter().reformat
        for number, frame in at_hand:
            if frame.is_corrupt:
                raise ValueError(f"frame {number} is damaged")
            pixels = convert(frame, format="rgb24", threads=1).to_ndarray()
            yield number, upright(pixels, _orientation(frame))


def _first_frame(container: Any) -> Any:
    """Decode the first frame that can be decoded."""
    stream = _stream(container)
    for packet in container.demux(stream):
        with suppress(_av().FFmpegError):
            for frame in packet.decode():
                return frame
    raise ValueError("no frame of the video can be decoded")


def _orientation(frame: Any) -> int:
    """Return a frame's stored orientation in EXIF's numbers.

    The matrix [a b u; c d v; x y w] maps the point (p, q) to (a p + c q + x, b p + d q + y).

    Raises:
        ValueError: no quarter turns and no mirroring make the frame upright.
    """
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return 1
    a, b, _, c, d, *_ = struct.unpack("=9i", bytes(matrix))
    straight, crossed = math.hypot(a, d), math.hypot(b, c)
    if math.degrees(math.atan2(min(straight, crossed), max(straight, crossed))) > MOST_OFF:
        turn = math.degrees(math.atan2(b, a))
        raise ValueError(f"a video rotated by {turn:.0f} degrees; supported are multiples of 90")
    if straight >= crossed:
        return {(0, 0): 1, (1, 0): 2, (1, 1): 3, (0, 1): 4}[a < 0, d < 0]
    return {(0, 0): 5, (0, 1): 6, (1, 1): 7, (1, 0): 8}[b < 0, c < 0]


def _stream(container: Any) -> Any:
    """Return the video stream, set to be decoded by one thread."""
    stream = _video(container)
    stream.codec_context.thread_count = 1
    stream.codec_context.options = {"max_pixels": str(MOST_PIXELS)}
    return stream


def _timed(container: Any) -> bool:
    """Return True if packets have display times; those of an AVI have decoding times."""
    return container.format.name != "avi" or not _video(container).codec_context.has_b_frames


def _found(
    context: Any, packets: list[Any], numbers: Sequence[int], timed: bool
) -> Iterator[tuple[int, Any]]:
    """Yield (number, frame) of the frames of these numbers.

    Args:
        timed: as returned by `_timed`.
    """
    shown = sorted(packet.pts for packet in packets if packet.pts is not None)
    if not timed or len(set(shown)) < len(packets) or any(packet.is_discard for packet in packets):
        yield from _counted(context, packets, numbers)
        return
    for first, last, wanted in _passes(packets, shown, numbers):
        got = {}
        for frame in _decoded(context, packets[first : last + 1], set(wanted)):
            if frame.pts in wanted:
                got[frame.pts] = frame
            while wanted and next(iter(wanted)) in got:
                pts = next(iter(wanted))
                yield wanted.pop(pts), got.pop(pts)
        if wanted:
            raise ValueError(f"frame {next(iter(wanted.values()))} cannot be decoded")


def _passes(
    packets: list[Any], shown: list[int], numbers: Sequence[int]
) -> Iterator[tuple[int, int, dict[int, int]]]:
    """Yield (first, last packet to decode, numbers of the requested frames by their time).

    There is a pass for each keyframe at which decoding begins.
    """
    if numbers and numbers[-1] >= len(shown):
        raise ValueError(f"truncated: {len(shown)} frames, of which frame {numbers[-1]} is read")
    place = {packet.pts: at for at, packet in enumerate(packets)}
    keys = sorted((packet.pts, at) for at, packet in enumerate(packets) if packet.is_keyframe)
    times = [pts for pts, _ in keys]
    first, last, wanted = 0, 0, dict[int, int]()
    for number in numbers:
        pts = shown[number]
        behind = bisect_right(times, pts)
        start = keys[behind - 1][1] if behind else 0
        if wanted and start > first:
            yield first, last, wanted
            last, wanted = 0, {}
        if not wanted:
            first = start
        last, wanted[pts] = max(last, place[pts]), number
    if wanted:
        yield first, last, wanted


def _decoded(context: Any, packets: list[Any], wanted: set[int]) -> Iterator[Any]:
    """Yield the frames of a run of packets that begins with a keyframe.

    Frames that are not requested are decoded only if others depend on them.
    """
    for packet in packets:
        context.skip_frame = "DEFAULT" if packet.pts in wanted else "NONREF"
        yield from context.decode(packet)
    yield from context.decode(None)
    context.flush_buffers()


def _counted(context: Any, packets: list[Any], numbers: Sequence[int]) -> Iterator[tuple[int, Any]]:
    """Yield (number, frame) without display times: every frame is decoded and counted."""
    wanted = iter(numbers)
    number, last = next(wanted, None), -1
    for last, frame in enumerate(
        frame for packet in [*packets, None] for frame in context.decode(packet)
    ):
        if last == number:
            yield last, frame
            if (number := next(wanted, None)) is None:
                return
    if number is not None:
        raise ValueError(f"truncated: {last + 1} frames, of which frame {number} is read")


def _header(container: Any) -> VideoHeader:
    stream = _video(container)
    width, height, rate = stream.codec_context.width, stream.codec_context.height, _rate(stream)
    if width < 1 or height < 1:
        raise ValueError(f"a video of {width}x{height} pixels")
    if width * height > MOST_PIXELS:
        raise ValueError(
            f"oversized video: {width}x{height} pixels per frame, at most {MOST_PIXELS} are"
            " supported"
        )
    if not 0 < rate <= MOST_FPS:
        raise ValueError(f"{rate:g} frames per second, up to {MOST_FPS} are supported")
    frames = _frames(container, stream)
    if not 1 <= frames <= MOST_FRAMES:
        raise ValueError(f"a video of {frames} frames, 1 to {MOST_FRAMES} are supported")
    return VideoHeader(width, height, frames, rate)


def _frames(container: Any, stream: Any) -> int:
    """Return the number of frames that are shown.

    A trimmed MP4 or QuickTime file has frames before the cut on which others depend; its index
    marks them.
    """
    if not stream.frames:
        return sum(bool(one.size) and not one.is_discard for one in container.demux(stream))
    if container.format.name == "avi":
        return int(stream.frames)
    return sum(not entry.is_discard for entry in stream.index_entries)


def _video(container: Any) -> Any:
    """Return the first video stream that is not a cover picture."""
    cover = _av().stream.Disposition.attached_pic
    stream = next((one for one in container.streams.video if not one.disposition & cover), None)
    if stream is None:
        raise ValueError("no video in the file, only sound, texts or a cover")
    if stream.codec_context is None:
        raise ValueError("a video with an unknown codec")
    return stream


def _rate(stream: Any) -> float:
    return float(stream.average_rate or stream.guessed_rate or 0)


def _form(read: Read) -> str:
    """Return FFmpeg's name of a file's format."""
    head = read(0, 12)
    named = {FORMS.get(head[:4]), FORMS.get(head[4:8])} - {None}
    form = next(iter(named), None)
    if form is None or (form == "avi" and head[8:] != b"AVI "):
        raise ValueError(
            f"{'an empty file, ' if not head else ''}not an MP4, QuickTime, Matroska, WebM or AVI"
            " video"
        )
    return form


def _check_boxes(read: Read, file_bytes: int) -> None:
    """Raise ValueError if a box of an MP4 ends after the end of the file (ISO 14496-12, 4.2)."""
    at = 0
    while at + 8 <= file_bytes:
        size, kind = struct.unpack(">I4s", read(at, 8))
        if size == 1:
            size = int.from_bytes(read(at + 8, 8), "big")
        elif size == 0:  # up to the end
            return
        if size < 8 or at + size > file_bytes:
            name = kind.decode("latin-1")
            raise ValueError(f"truncated MP4 file: its box {name!r} ends at byte {at + size}")
        at += size


@contextmanager
def _opened(form: str, stream: Any) -> Iterator[Any]:
    """Open a stream with FFmpeg; its errors become ValueError."""
    av = _av()
    try:
        with av.open(stream, format=form, io_open=_refuse, metadata_errors="replace") as container:
            yield container
    except av.FFmpegError as error:
        raise ValueError(f"not a complete video: {error.strerror or error}") from None


def _refuse(url: str, flags: int, options: Any) -> Any:
    raise ValueError("the file refers to others, which are not read")


@functools.cache
def _av() -> Any:
    try:
        import av
    except (ImportError, OSError) as error:  # the package, or a library that it loads
        raise DataError(
            "Videos are read by the package av (PyAV), which is not installed",
            str(error),
            f"Install it with: {install_command('video')}",
        ) from None
    av.logging.set_level(None)
    mute_libraries()
    return av


def _of(data: bytes) -> Read:
    return lambda offset, length: data[offset : offset + length]

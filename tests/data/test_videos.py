"""Video files: sizes from headers, chosen frames equal to those of PyAV's plain loop, and what is
no whole video refused with its reason."""

import io
import math
import subprocess
import sys
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from disttrain_cli.data import videos
from disttrain_cli.data.videos import VideoHeader, decode_frames, read_video_header, stored_header
from tests.cases import first_fast
from tests.data.films import MATRICES, all_frames, av, film, sound_only, trimmed, turned

FORMS = {
    "h264": ("libx264", "mp4"),
    "quicktime": ("libx264", "mov"),
    "mpeg4": ("mpeg4", "mp4"),
    "vp9": ("libvpx-vp9", "webm"),
    "vp8": ("libvpx", "webm"),
    "avi": ("mpeg4", "avi"),
    "h264 in avi": ("libx264", "avi"),  # whose packets say when they are decoded
    "hevc": ("libx265", "matroska"),
}


def header_of(data: bytes) -> VideoHeader:
    return read_video_header(lambda offset, length: data[offset : offset + length], len(data))


@pytest.mark.parametrize("name", first_fast(FORMS, 3))
def test_chosen_frames_are_those_of_the_plain_loop(name: str) -> None:
    codec, form = FORMS[name]
    data = film(40, codec=codec, form=form, every=7)
    assert header_of(data) == (64, 48, 40, 30.0)
    expected = all_frames(data)
    assert len(expected) == 40
    choices: list[Sequence[int]] = [range(40), [0], [39], [6, 7, 8], [3, 4, 21, 22, 30], []]
    for numbers in choices:
        made = list(decode_frames(data, numbers))
        assert [number for number, _ in made] == list(numbers)
        for number, pixels in made:
            assert pixels.dtype == np.uint8 and (pixels == expected[number]).all()


def test_far_frames_cost_their_own_keyframes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    data, decoded = film(60, every=6), list[int]()
    plain = videos._decoded

    def counted(context: object, packets: list[object], wanted: set[int]) -> object:
        decoded.append(len(packets))
        return plain(context, packets, wanted)

    monkeypatch.setattr(videos, "_decoded", counted)
    assert len(list(decode_frames(data, [0, 30, 54]))) == 3
    assert len(decoded) == 3 and sum(decoded) < 18


def test_frames_without_times_are_counted() -> None:
    data = film(20, codec="mpeg4")
    with videos._opened("mov", io.BytesIO(data)) as container:
        stream = container.streams.video[0]
        packets = [packet for packet in container.demux(stream) if packet.size]
        for packet in packets:
            packet.pts = None
        found = list(videos._found(stream.codec_context, packets, [2, 11, 19], True))
        assert [number for number, _ in found] == [2, 11, 19]
        expected = all_frames(data)
        for number, frame in found:
            assert (frame.to_ndarray(format="rgb24") == expected[number]).all()


def test_a_trimmed_film_has_the_frames_that_are_shown() -> None:
    data = trimmed(film(40, every=10), 7)
    expected = all_frames(data)
    assert header_of(data).frames == len(expected) == 33
    for number, pixels in decode_frames(data, [0, 5, 32]):
        assert (pixels == expected[number]).all()


#: What makes frames [H, W, C] upright that are stored so.
UPRIGHT: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    1: lambda pixels: pixels,
    2: np.fliplr,
    3: lambda pixels: np.rot90(pixels, 2),
    4: np.flipud,
    5: lambda pixels: pixels.transpose(1, 0, 2),
    6: lambda pixels: np.rot90(pixels, -1),
    7: lambda pixels: np.rot90(pixels.transpose(1, 0, 2), 2),
    8: np.rot90,
}


@pytest.mark.parametrize("scale", [1, 2, 0.9999])
@pytest.mark.parametrize("orientation", MATRICES)
@pytest.mark.parametrize("form", ["mp4", "mov"])
def test_frames_are_upright_as_the_display_matrix_says(
    form: str, orientation: int, scale: float
) -> None:
    plain = film(12, codec="mpeg4", form=form)
    data = turned(plain, *(scale * number for number in MATRICES[orientation]))
    expected = [UPRIGHT[orientation](pixels) for pixels in all_frames(plain)]
    height, width = expected[0].shape[:2]
    assert (height, width) == ((64, 48) if orientation >= 5 else (48, 64))
    assert header_of(data) == (width, height, 12, 30.0)
    assert stored_header(data) == (64, 48, 12, 30.0)
    for number, pixels in decode_frames(data, [0, 5, 11]):
        assert np.array_equal(pixels, expected[number])


def test_turns_are_those_that_ffmpeg_finds() -> None:
    for orientation, quarters in {3: 2, 6: -1, 8: 1}.items():
        data = turned(film(4), *MATRICES[orientation])
        with av.open(io.BytesIO(data)) as container:
            frame = next(container.decode(video=0))
        assert frame.rotation % 360 == 90 * quarters % 360
        assert np.array_equal(
            next(pixels for _, pixels in decode_frames(data, [0])),
            np.rot90(frame.to_ndarray(format="rgb24"), quarters),
        )


@pytest.mark.skipif(not hasattr(av.VideoStream, "set_display_rotation"), reason="PyAV before 18")
@pytest.mark.parametrize("form", ["mp4", "mov", "matroska"])
@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_turns_of_every_form(form: str, degrees: int) -> None:
    plain, data = (film(4, codec="mpeg4", form=form, degrees=turn) for turn in (0, degrees))
    expected = [np.rot90(pixels, degrees // 90) for pixels in all_frames(plain)]
    assert header_of(data)[:2] == expected[0].shape[1::-1]
    for number, pixels in decode_frames(data, range(4)):
        assert np.array_equal(pixels, expected[number])


@pytest.mark.parametrize("degrees", [30, 45, 88, 272])
def test_other_turns_are_named(degrees: int) -> None:
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    with pytest.raises(ValueError, match=r"a video rotated by -?[0-9]+ degrees"):
        header_of(turned(film(4), cos, sin, -sin, cos))


def test_what_is_cut_off_or_no_video_is_named() -> None:
    whole = film(20)
    cases = {
        "an empty file": b"",
        "not an MP4": b"\xff\xd8\xff\xe0" + bytes(100),
        "truncated MP4": whole[:-1],
        "only sound": sound_only(),
        "truncated AVI": film(20, codec="mpeg4", form="avi")[:-8],
        "not a complete video": film(20, form="matroska")[:40],
    }
    for reason, data in cases.items():
        with pytest.raises(ValueError, match=reason):
            header_of(data)


def test_more_pixels_than_are_read_are_refused_from_the_header(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(videos, "MOST_PIXELS", 64 * 48 - 1)
    with pytest.raises(ValueError, match="oversized video: 64x48 pixels per frame"):
        header_of(film(4))
    monkeypatch.setattr(videos, "MOST_FRAMES", 3)
    monkeypatch.setattr(videos, "MOST_PIXELS", 64 * 48)
    with pytest.raises(ValueError, match="a video of 4 frames, 1 to 3 are supported"):
        header_of(film(4))


def test_damage_inside_is_named_and_no_frame_of_it_is_given() -> None:
    data = bytearray(film(20, every=20))
    begin = data.index(b"mdat") + 900
    data[begin : begin + 1500] = bytes(1500)
    assert header_of(bytes(data)).frames == 20
    with pytest.raises(ValueError, match=r"frame \d+ (is damaged|cannot be)|not a complete"):
        list(decode_frames(bytes(data), range(20)))


def test_more_frames_than_there_are_is_named() -> None:
    with pytest.raises(ValueError, match="truncated: 20 frames, of which frame 20 is read"):
        list(decode_frames(film(20), [0, 20]))


def test_without_pyav_the_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['av'] = None\n"
        "from disttrain_cli.data.videos import decode_frames\n"
        "try:\n    list(decode_frames(b'\\0\\0\\0 ftypisom', [0]))\n"
        "except Exception as error:\n    print(type(error).__name__, error)\n"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "DataError" in made.stdout and "pip install 'av>=14'" in made.stdout, made

"""Video files: sizes from headers, chosen frames equal to those of PyAV's plain loop, and what is
no whole video refused with its reason."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest

from disttrain_cli.data import videos
from disttrain_cli.data.videos import VideoHeader, decode_frames, read_video_header
from tests.data.films import all_frames, film, sound_only, trimmed

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


@pytest.mark.parametrize("name", FORMS)
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


def test_what_is_cut_off_or_no_video_is_named() -> None:
    whole = film(20)
    cases = {
        "an empty file": b"",
        "not an MP4": b"\xff\xd8\xff\xe0" + bytes(100),
        "truncated MP4": whole[:-1],
        "only sound": sound_only(),
        "truncated AVI": film(20, codec="mpeg4", form="avi")[:-8],
        "no whole video": film(20, form="matroska")[:40],
    }
    for reason, data in cases.items():
        with pytest.raises(ValueError, match=reason):
            header_of(data)


def test_more_pixels_than_are_read_are_refused_from_the_header(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(videos, "MOST_PIXELS", 64 * 48 - 1)
    with pytest.raises(ValueError, match="oversized video: 64x48 pixels a frame"):
        header_of(film(4))
    monkeypatch.setattr(videos, "MOST_FRAMES", 3)
    monkeypatch.setattr(videos, "MOST_PIXELS", 64 * 48)
    with pytest.raises(ValueError, match="a video of 4 frames, 1 to 3 are read"):
        header_of(film(4))


def test_damage_inside_is_named_and_no_frame_of_it_is_given() -> None:
    data = bytearray(film(20, every=20))
    begin = data.index(b"mdat") + 900
    data[begin : begin + 1500] = bytes(1500)
    assert header_of(bytes(data)).frames == 20
    with pytest.raises(ValueError, match=r"frame \d+ (is damaged|cannot be decoded)|no whole"):
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
    assert "DataError" in made.stdout and "disttrain[video]" in made.stdout, made

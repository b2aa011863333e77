"""Sound files: sizes from headers, samples at 16 kHz, and everything that is none refused with its
reason."""

import io
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from disttrain_cli.data.clips import decode_clip, read_clip_header

soundfile = pytest.importorskip("soundfile")
FORMS = {
    "wav": ("WAV", "PCM_16"),
    "float": ("WAV", "FLOAT"),
    "flac": ("FLAC", "PCM_16"),
    "ogg": ("OGG", "VORBIS"),
    "mp3": ("MP3", "MPEG_LAYER_III"),
}


def sound(
    form: str = "wav",
    rate_hz: int = 16_000,
    seconds: float = 0.5,
    channels: int = 1,
    hz: float = 440.0,
) -> bytes:
    """A sound file; its second channel is half as loud as the first."""
    times = np.arange(round(seconds * rate_hz)) / rate_hz
    signal = 0.5 * np.sin(2 * np.pi * hz * times)
    buffer, (kind, subtype) = io.BytesIO(), FORMS.get(form, (form.upper(), "PCM_16"))
    soundfile.write(
        buffer,
        np.stack([signal / (1 + c) for c in range(channels)], axis=1),
        rate_hz,
        format=kind,
        subtype=subtype,
    )
    return buffer.getvalue()


def header_of(data: bytes) -> tuple[int, int]:
    return read_clip_header(lambda offset, length: data[offset : offset + length], len(data))


@pytest.mark.parametrize("form", FORMS)
def test_durations_come_from_headers_and_samples_follow_them(form: str) -> None:
    data = sound(form, seconds=0.75, channels=2)
    assert header_of(data) == (750, 16_000)
    samples = decode_clip(data, 750)
    # the mean of both channels
    expected = 0.375 * np.sin(2 * np.pi * 440 * np.arange(12_000) / 16_000)
    assert samples.dtype == np.float32 and len(samples) == 12_000
    assert np.abs(samples - expected).max() < (1e-4 if form in ("wav", "float", "flac") else 0.05)


def test_a_header_is_read_without_the_samples() -> None:
    data, seen = sound("wav", seconds=30), [0]

    def read(offset: int, length: int) -> bytes:
        seen[0] += length
        return data[offset : offset + length]

    assert read_clip_header(read, len(data)).duration_ms == 30_000 and seen[0] < len(data) / 10


@pytest.mark.parametrize("rate_hz", [8_000, 22_050, 44_100, 48_000])
def test_other_rates_are_resampled(rate_hz: int) -> None:
    samples = decode_clip(sound("wav", rate_hz, seconds=1.0), 1000)
    expected = 0.5 * np.sin(2 * np.pi * 440 * np.arange(16_000) / 16_000)
    assert len(samples) == 16_000
    assert np.abs(samples - expected)[200:-200].max() < 0.01


def test_what_lies_above_half_the_rate_is_filtered_out() -> None:
    samples = decode_clip(sound("wav", 48_000, hz=10_000.0), 500)
    assert np.abs(samples[200:-200]).max() < 0.01


BAD = {
    "empty": (b"", "not a complete sound file"),
    "a picture": (b"\xff\xd8\xff\xe0" + bytes(200), "not a complete sound file"),
    "zeros": (bytes(5000), "not a complete sound file"),
    "cut wav": (sound("wav")[:-100], "truncated WAV"),
    "cut flac": (sound("flac")[:-200], "not a complete sound file"),
    "cut ogg": (sound("ogg")[:-200], "truncated Ogg"),
    "cut mp3": (sound("mp3")[:1000], "truncated"),
    "damaged flac": (
        sound("flac")[:900] + bytes(400) + sound("flac")[1300:],
        "not a complete sound file",
    ),
    "another form": (sound("aiff"), "AIFF"),
    "nothing to hear": (sound("wav", seconds=0), "without a sample"),
    "many channels": (sound("wav", channels=9), "9 channels"),
    "strange rate": (sound("wav", 400_000), "400000 samples per second"),
    "not finite": (sound("float")[:-4] + struct.pack("<f", np.nan), "finite"),
    "too long": (sound("wav", seconds=0.6), "0.6 s, longer than 0.5 s"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused_with_a_reason(name: str) -> None:
    data, reason = BAD[name]
    with pytest.raises(ValueError, match=reason):
        decode_clip(data, 500)


@pytest.mark.parametrize(
    "name",
    [
        "empty",
        "a picture",
        "zeros",
        "cut wav",
        "cut ogg",
        "another form",
        "nothing to hear",
        "many channels",
        "strange rate",
    ],
)
def test_most_of_them_are_known_from_their_headers(name: str) -> None:
    data, reason = BAD[name]
    with pytest.raises(ValueError, match=reason):
        header_of(data)


def test_a_header_may_claim_any_length() -> None:
    data = bytearray(sound("flac"))
    data[21:26] = bytes([data[21] | 0x0F, 0xFF, 0xFF, 0xFF, 0xFF])  # 2^36 - 1 samples
    assert header_of(bytes(data)).duration_ms > 4_000_000_000 // 1000
    with pytest.raises(ValueError, match="longer than"):
        decode_clip(bytes(data), 30_000)


def test_mpg123_keeps_to_itself_what_is_wrong(tmp_path: Path) -> None:
    """It writes to C's stderr, as libpng does; a process of its own, which nothing else has
    muted."""
    (tmp_path / "cut.mp3").write_bytes(sound("mp3")[:900])
    code = (
        "import sys; from disttrain_cli.data.clips import decode_clip\n"
        "try: decode_clip(open(sys.argv[1], 'rb').read(), 1000)\n"
        "except ValueError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "cut.mp3")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "truncated" in done.stdout and done.stderr == ""

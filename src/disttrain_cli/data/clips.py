"""Sound files: sizes from headers, and samples as the encoder reads them (one channel, 16 kHz).

WAV, FLAC, Ogg (Vorbis, Opus) and MP3 are read by the `soundfile` package (libsndfile), which
identifies the format by the content of a file, never by its name. Every function raises ValueError
with the reason if the bytes are no complete sound file within the limits below, and DataError if
the package is missing.
"""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.data.headers import Read
from disttrain_cli.data.muting import mute_libraries
from disttrain_cli.data.streams import ReadStream
from disttrain_cli.errors import DataError
from disttrain_cli.spec.extras import install_command
from disttrain_cli.spec.library_calls import RATE_HZ

Floats = NDArray[np.float32]

FORMATS = ("WAV", "WAVEX", "RF64", "FLAC", "OGG", "MP3")
#: Files beyond these limits are refused before decoding: a few bytes can claim gigabytes of
#: samples.
MOST_CHANNELS, RATES_HZ = 8, (1_000, 192_000)
LONGEST_MS = 2**31 - 1
UNKNOWN_BYTES = 2**32 - 1  # length in the header of a WAV file that was written to a pipe
OGG_PAGE_BYTES = 65_307  # at most (RFC 3533, section 6)
LAST_PAGE = 4  # flag of an Ogg page


class ClipHeader(NamedTuple):
    """Size of a sound file."""

    duration_ms: int  # rounded up
    rate_hz: int


def read_clip_header(read: Read, file_bytes: int) -> ClipHeader:
    """Return the size of a sound file of `file_bytes` bytes from its headers.

    Only headers are read; of MP3 and Ogg those of all packets.
    """
    head = read(0, 12)
    claimed = int.from_bytes(head[4:8], "little")
    if (
        head[:4] == b"RIFF"
        and head[8:] == b"WAVE"
        and file_bytes < claimed + 8
        and claimed != UNKNOWN_BYTES
    ):
        raise ValueError(f"truncated WAV file: {file_bytes} bytes of {claimed + 8}")
    if head[:4] == b"OggS" and not _ends(read(max(0, file_bytes - OGG_PAGE_BYTES), OGG_PAGE_BYTES)):
        raise ValueError("truncated Ogg file: its last page is incomplete")
    with _opened(io.BufferedReader(ReadStream(read, file_bytes))) as file:
        return _header(file)


def suffix_of(data: bytes) -> str | None:
    """Return the usual suffix of a sound file; None for other files."""
    if data[:4] in (b"RIFF", b"RF64") and data[8:12] == b"WAVE":
        return "wav"
    if data[:3] == b"ID3" or data[:2] in (b"\xff\xfb", b"\xff\xf3", b"\xff\xf2"):
        return "mp3"
    return {b"fLaC": "flac", b"OggS": "ogg"}.get(data[:4])


def decode_clip(data: bytes, longest_ms: int) -> Floats:
    """Return the samples of a sound file: the mean of its channels, resampled to 16 kHz."""
    read_clip_header(lambda offset, length: data[offset : offset + length], len(data))
    with _opened(io.BytesIO(data)) as file:
        header, frames = _header(file), file.frames
        if header.duration_ms > longest_ms:
            raise ValueError(
                f"a clip of {header.duration_ms / 1e3:.1f} s, longer than {longest_ms / 1e3:g} s"
            )
        samples = file.read(dtype="float32", always_2d=True)
    if len(samples) < frames:
        raise ValueError(f"truncated: {len(samples)} samples of {frames}")
    if not np.isfinite(samples).all():
        raise ValueError("samples that are not finite numbers")
    mono = samples.mean(axis=1)
    return mono if header.rate_hz == RATE_HZ else _resampled(mono, header.rate_hz)


def in_whole_ms(samples: Floats) -> Floats:
    """Return samples at 16 kHz with silence up to the next millisecond, as an index states them."""
    return np.pad(samples, (0, -len(samples) % (RATE_HZ // 1000)))


def _ends(tail: bytes) -> bool:
    """Return True if an Ogg file ends with a complete last page."""
    page = tail[max(0, tail.rfind(b"OggS")) :]
    return (
        len(page) > 27
        and bool(page[5] & LAST_PAGE)
        and len(page) >= 27 + page[26] + sum(page[27 : 27 + page[26]])
    )


def _header(file: Any) -> ClipHeader:
    if file.format not in FORMATS:
        raise ValueError(
            f"a sound file in another format: {file.format}; supported are WAV, FLAC, Ogg and MP3"
        )
    if file.frames < 1:
        raise ValueError("a sound file without a sample")
    if file.channels > MOST_CHANNELS:
        raise ValueError(f"{file.channels} channels, at most {MOST_CHANNELS} are supported")
    if not RATES_HZ[0] <= file.samplerate <= RATES_HZ[1]:
        raise ValueError(
            f"{file.samplerate} samples per second, {RATES_HZ[0]} to {RATES_HZ[1]} are supported"
        )
    return ClipHeader(min(LONGEST_MS, -(-1000 * file.frames // file.samplerate)), file.samplerate)


@contextmanager
def _opened(stream: Any) -> Iterator[Any]:
    """Open a stream with libsndfile; its errors become ValueError."""
    soundfile = _soundfile()
    try:
        with soundfile.SoundFile(stream) as file:
            yield file
    except soundfile.SoundFileError as error:
        reason = getattr(error, "error_string", str(error)).strip().rstrip(".")
        raise ValueError(f"not a complete sound file: {reason}") from None


@functools.cache
def _soundfile() -> Any:
    try:
        import soundfile
    except (ImportError, OSError) as error:  # the package, or the library that it loads
        raise DataError(
            "Audio clips are read by the package soundfile, which is not installed",
            str(error),
            f"Install it with: {install_command('audio')}",
        ) from None
    mute_libraries()
    return soundfile


def _resampled(samples: Floats, rate_hz: int) -> Floats:
    """Resample to 16 kHz.

    A polyphase filter removes frequencies above half the lower rate.
    """
    from scipy.signal import resample_poly

    common = math.gcd(RATE_HZ, rate_hz)
    return np.asarray(resample_poly(samples, RATE_HZ // common, rate_hz // common), np.float32)

"""Decoding gives RGB of the promised shape and range, close to an antialiased reference, for every
kind of file."""

import io
import math
import os
import struct
import zlib
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image, ImageOps

from benchmarks.decode import noise
from disttrain_cli.data import decoding
from disttrain_cli.data.headers import read_header
from disttrain_cli.spec.buckets import Buckets
from disttrain_cli.spec.heads import ImageInput, TargetInput
from tests.data.dataset import INPUTS, encoded, normalised

IMAGE, TARGET = INPUTS.image, INPUTS.target
assert IMAGE is not None and TARGET is not None


def decode_image(data: bytes, grid: tuple[int, int], image: ImageInput) -> Any:
    return normalised(decoding.decode_image(data, grid, image), image)


def decode_target(data: bytes, target: TargetInput, grid: tuple[int, int] = (1, 1)) -> Any:
    return normalised(decoding.decode_target(data, target, grid), target)


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp"])
@pytest.mark.parametrize("size", [(32, 48), (20, 17), (500, 700)])
def test_shape_range_and_channels(suffix: str, size: tuple[int, int]) -> None:
    assert IMAGE is not None
    planes = decode_image(encoded(*size, suffix, shade=255), (4, 6), IMAGE)
    assert planes.shape == (3, 32, 48) and planes.dtype == np.float32
    assert planes.min() >= -1 and planes.max() <= 1
    blue = planes[2]
    green = planes[1]
    red = planes[0]  # encoded() writes a gradient down, one across, and a shade
    assert red.mean() > 0.95
    assert blue[-1].mean() - blue[0].mean() > 1.5 and green[:, -1].mean() - green[:, 0].mean() > 1.5


def decibels(values: np.ndarray, want: np.ndarray) -> float:
    """PSNR of values in -1..1."""
    return 10 * math.log10(4 / np.mean(np.square(values - want, dtype=np.float64)))


@pytest.mark.parametrize(
    ("rows", "columns"),
    [(59, 79), (50, 67), (40, 53), (34, 45), (30, 40), (20, 27), (30, 53), (55, 40), (66, 88)],
)
def test_resizing_is_close_to_pillows_antialiased_bicubic(rows: int, columns: int) -> None:
    """At every factor: no more than a decibel behind averaging by area, which is several times
    slower."""
    image = ImageInput(module="e", patch_px=8, max_pixels=10**6)
    pixels = noise(640, 480)
    want = np.asarray(
        Image.fromarray(pixels).resize((columns * 8, rows * 8), Image.Resampling.BICUBIC)
    )
    area = cv2.resize(pixels, (columns * 8, rows * 8), interpolation=cv2.INTER_AREA)
    ours = decode_image(stored(Image.fromarray(pixels), "PNG"), (rows, columns), image)

    def planes(rgb: np.ndarray) -> np.ndarray:
        return rgb.transpose(2, 0, 1) / 127.5 - 1

    assert decibels(ours, planes(want)) > max(33.0, decibels(planes(area), planes(want)) - 1)


def stored(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def colours(data: bytes) -> np.ndarray:
    """[H, W, RGB] bytes of a file of 40x32 as decoding sees it, in whole patches of 8 pixels."""
    image = ImageInput(module="e", patch_px=8, mean=(0, 0, 0), std=(1, 1, 1), max_pixels=10**6)
    return np.rint(decode_image(data, (4, 5), image) * 255).astype(int).transpose(1, 2, 0)


PIXELS = cv2.resize(noise(160, 128), (40, 32), interpolation=cv2.INTER_AREA)
PICTURE = Image.fromarray(PIXELS)


def test_grey_and_cmyk_jpeg() -> None:
    grey = np.asarray(PICTURE.convert("L")).astype(int)
    assert (
        np.abs(colours(stored(PICTURE.convert("L"), "JPEG", quality=95)) - grey[:, :, None]).mean()
        < 3
    )
    assert np.abs(colours(stored(PICTURE.convert("CMYK"), "JPEG", quality=95)) - PIXELS).mean() < 4
    assert (
        np.abs(
            colours(stored(PICTURE, "JPEG", quality=95, progressive=True, subsampling=0)) - PIXELS
        ).mean()
        < 4
    )


def test_png_of_every_depth() -> None:
    grey = np.asarray(PICTURE.convert("L"))
    for image in (PICTURE.convert("L"), Image.fromarray(grey.astype(np.uint16) * 257)):
        assert np.array_equal(colours(stored(image, "PNG")), np.repeat(grey[:, :, None], 3, 2))
    deep = cv2.imencode(".png", PIXELS[:, :, ::-1].astype(np.uint16) * 257)[1].tobytes()
    assert np.array_equal(colours(deep), PIXELS)
    palette = PICTURE.quantize(16)
    assert np.array_equal(colours(stored(palette, "PNG")), np.asarray(palette.convert("RGB")))
    two = PICTURE.convert("1")
    assert np.array_equal(colours(stored(two, "PNG")), np.asarray(two.convert("RGB")))
    as_grey = ImageInput(module="e", patch_px=8, channels=1, mean=(0,), std=(1,), max_pixels=10**6)
    for file in (
        stored(PICTURE, "PNG"),
        stored(PICTURE.convert("L"), "PNG"),
        stored(PICTURE, "JPEG", quality=98),
    ):
        assert np.abs(decode_image(file, (4, 5), as_grey)[0] * 255 - grey).mean() < 2


def test_transparency_lies_over_white() -> None:
    alpha = np.tile(np.linspace(0, 255, 40).astype(np.uint8), (32, 1))
    veiled = np.dstack([PIXELS, alpha])
    over = Image.alpha_composite(
        Image.new("RGBA", (40, 32), "white"), Image.fromarray(veiled)
    ).convert("RGB")
    for file in (
        stored(Image.fromarray(veiled), "PNG"),
        stored(Image.fromarray(veiled), "WEBP", lossless=True, exact=True),
    ):
        assert np.abs(colours(file) - np.asarray(over).astype(int)).max() <= 1
    opaque = stored(Image.fromarray(np.dstack([PIXELS, np.full_like(alpha, 255)])), "PNG")
    assert np.array_equal(colours(opaque), PIXELS)
    palette = PICTURE.quantize(16)
    hidden = np.asarray(palette) == 3
    seen = colours(stored(palette, "PNG", transparency=3))
    assert (seen[hidden] == 255).all() and np.array_equal(
        seen[~hidden], np.asarray(palette.convert("RGB"))[~hidden]
    )


def grey_png(pixels: np.ndarray, bits: int, clear: int | None) -> bytes:
    """A grey PNG of so many bits a pixel, of which those of one value are transparent."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        body = kind + content
        return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))

    each = (pixels[:, :, None] >> np.arange(bits)[::-1]) & 1
    rows = np.packbits(each.reshape(len(pixels), -1).astype(np.uint8), axis=1)
    header = struct.pack(">IIBBBBB", *pixels.shape[::-1], bits, 0, 0, 0, 0)
    return b"".join(
        (
            b"\x89PNG\r\n\x1a\n",
            chunk(b"IHDR", header),
            b"" if clear is None else chunk(b"tRNS", struct.pack(">H", clear)),
            chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))),
            chunk(b"IEND", b""),
        )
    )


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("clear", [0, 1, None])
def test_transparency_of_grey_lies_over_white(bits: int, clear: int | None) -> None:
    levels = min(1 << bits, 256)
    values = (np.arange(32 * 40).reshape(32, 40) % levels) * (257 if bits == 16 else 1)
    value = clear and clear * (257 if bits == 16 else 1)
    data = grey_png(values, bits, value)
    grey = np.where(values == value, 255, values * 255 // ((1 << bits) - 1))
    assert np.array_equal(colours(data), np.repeat(grey[:, :, None], 3, 2))
    if bits in (1, 8):  # PIL does not scale the value of others
        white = Image.new("RGBA", (40, 32), "white")
        over = Image.alpha_composite(white, Image.open(io.BytesIO(data)).convert("RGBA"))
        assert np.array_equal(colours(data), np.asarray(over.convert("RGB")))
    head = ImageInput(module="e", patch_px=8, channels=1, mean=(0,), std=(1,), max_pixels=10**6)
    assert np.array_equal(np.rint(decode_image(data, (4, 5), head)[0] * 255), grey)


@pytest.mark.parametrize("kind", ["WEBP", "PNG"])
def test_animations_show_their_first_picture(kind: str) -> None:
    lossless = {"lossless": True} if kind == "WEBP" else {}
    file = stored(
        PICTURE, kind, save_all=True, append_images=[Image.new("RGB", (40, 32), "red")], **lossless
    )
    assert np.array_equal(colours(file), PIXELS)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("wanted", [(6, 4), (1, 1)])  # the file's size; decoded smaller
def test_images_are_seen_upright(orientation: int, wanted: tuple[int, int]) -> None:
    """As PIL's `exif_transpose`, which transformers and datasets read images by."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (6, 4, 3), np.uint8).repeat(8, 0).repeat(8, 1)
    exif = Image.Exif()
    exif[0x010F] = "a maker, before"
    exif[0x0112] = orientation
    upright = Image.fromarray(blocks)
    turn = Image.Transpose
    turns = {
        2: turn.FLIP_LEFT_RIGHT,
        3: turn.ROTATE_180,
        4: turn.FLIP_TOP_BOTTOM,
        5: turn.TRANSPOSE,
        6: turn.ROTATE_90,
        7: turn.TRANSVERSE,
        8: turn.ROTATE_270,
    }
    turned = upright if orientation == 1 else upright.transpose(turns[orientation])
    data = stored(turned, "jpeg", exif=exif, quality=100, subsampling=0)
    header = read_header(lambda offset, length: data[offset : offset + length])
    assert (header.width_px, header.height_px) == upright.size
    head = ImageInput(module="vision", patch_px=8, max_pixels=1 << 20)
    image = decode_image(data, wanted, head)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert np.abs(np.asarray(expected, float) - blocks).max() < 40
    if wanted == (6, 4):
        got = np.round((image.transpose(1, 2, 0) * 0.5 + 0.5) * 255)
        assert np.abs(got - np.asarray(expected)).max() <= 1


def test_broken_exif_turns_nothing() -> None:
    image = Image.fromarray(np.zeros((16, 24, 3), np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6
    data = stored(image, "jpeg", exif=exif)
    place = data.index(b"Exif\0\0") + 6
    for tags in (0, 1 << 31):
        broken = data[: place + 4] + tags.to_bytes(4, "big") + data[place + 8 :]
        header = read_header(lambda offset, length, of=broken: of[offset : offset + length])
        assert (header.width_px, header.height_px) == (24, 16)


def test_libpng_keeps_to_itself_what_is_wrong(capfd: pytest.CaptureFixture[str]) -> None:
    """It writes to C's stderr, beside the one document of --json --quiet."""
    damaged = bytearray(stored(Image.effect_noise((64, 64), 90), "png"))
    damaged[200] ^= 255
    with pytest.raises(ValueError, match="cannot be decoded"):
        colours(bytes(damaged))
    os.write(2, b"ours\n")
    assert capfd.readouterr() == ("", "ours\n")


def test_formats_are_told_by_content() -> None:
    """A JPEG is one under any name: nothing but the bytes is asked."""
    assert np.array_equal(colours(stored(PICTURE, "PNG")), PIXELS)
    for kind in ("GIF", "BMP", "TIFF"):
        with pytest.raises(ValueError, match="not a JPEG, PNG or WebP"):
            colours(stored(PICTURE, kind))


@pytest.mark.parametrize(
    "decode",
    [
        lambda data, out: decoding.decode_image(data, (4, 5), IMAGE, out),
        lambda data, out: decoding.decode_target(data, TARGET, (1, 1), out),
    ],
)
def test_written_in_place(decode: Any) -> None:
    """Into a part of a larger array, and not at all where decoding fails."""
    data = stored(PICTURE, "JPEG")
    want = decode(data, None)
    block = np.zeros((3, *want.shape), np.uint8)
    assert decode(data, block[1]).base is block
    assert np.array_equal(block[1], want) and not block[[0, 2]].any()
    with pytest.raises(ValueError, match="truncated"):
        decode(data[:-200], block[2])
    assert not block[2].any()


def test_scaled_decoding_is_close_to_the_whole_one() -> None:
    assert IMAGE is not None
    data = encoded(1000, 800)
    whole = cv2.resize(
        cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR),
        (80, 64),
        interpolation=cv2.INTER_AREA,
    )
    expected = whole[:, :, ::-1].transpose(2, 0, 1) / 127.5 - 1
    assert np.abs(decode_image(data, (8, 10), IMAGE) - expected).mean() < 0.01


def test_mean_std_and_grey() -> None:
    grey = ImageInput(module="e", patch_px=8, channels=1, mean=(0.25,), std=(0.5,), max_pixels=4096)
    data = cv2.imencode(".png", np.full((8, 16, 3), 128, np.uint8))[1].tobytes()
    assert np.allclose(
        decode_image(data, (1, 2), grey), np.full((1, 8, 16), (128 / 255 - 0.25) / 0.5)
    )


def test_every_channel_has_its_own_mean_and_std() -> None:
    means, stds = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    image = ImageInput(module="e", patch_px=8, mean=means, std=stds, max_pixels=4096)
    red, green, blue = decode_image(
        stored(Image.new("RGB", (8, 8), (255, 128, 0)), "PNG"), (1, 1), image
    )[:, 0, 0]
    assert np.allclose(
        [red, green, blue],
        [(v / 255 - m) / s for v, m, s in zip((255, 128, 0), means, stds, strict=True)],
    )


def test_target_is_the_middle_square() -> None:
    target = TargetInput(module="g", size_px=16, context_tokens=1, latent_pixels=1)
    pixels = np.zeros((40, 120, 3), np.uint8)
    pixels[:, 40:80] = 255
    planes = decode_target(cv2.imencode(".png", pixels)[1].tobytes(), target)
    assert planes.shape == (3, 16, 16) and planes.min() == 1 == planes.max()


def test_target_of_a_bucket_is_the_middle_at_its_aspect_ratio() -> None:
    """Of every size the nearest; what is cut off lies at both ends."""
    buckets = Buckets(grids=[(4, 4), (3, 6), (6, 3)], patch_px=4, patch=2)
    target = TargetInput(
        module="g", size_px=16, context_tokens=1, latent_pixels=64, buckets=buckets
    )
    sizes = [[30, 30], [120, 40], [30, 44], [40, 60], [1, 500], [42, 30]]
    expected = [[4, 4], [3, 6], [6, 3], [6, 3], [6, 3], [4, 4]]
    assert target.grids(np.array(sizes)).tolist() == expected
    pixels = np.zeros((40, 120, 3), np.uint8)
    pixels[:, 20:100] = 255
    planes = decode_target(cv2.imencode(".png", pixels)[1].tobytes(), target, (3, 6))
    assert planes.shape == (3, 12, 24) and planes.min() == 1 == planes.max()
    assert target.size(18) == 18 and target.rows("patches").of(18) == 18
    plain = target.model_copy(update={"buckets": None})
    assert plain.grids(np.array(sizes)).max() == 1

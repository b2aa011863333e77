"""Images as a published model's image processor makes them: PIL's filters, the same pixels."""

import io

import numpy as np
import pytest
from PIL import Image

from disttrain_cli.data.decoding import decode_image
from disttrain_cli.spec.heads import ImageInput
from disttrain_cli.spec.image_processor import ImageProcessor


def photograph(width, height, form):
    rows, columns = np.mgrid[0:height, 0:width]
    noise = np.random.default_rng(0).normal(0, 12, (height, width, 3))
    waves = [np.sin(rows / 9) * 90, np.cos(columns / 7) * 90, np.sin((rows + columns) / 5) * 90]
    pixels = np.clip(np.stack(waves, axis=2) + 128 + noise, 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form, **({"quality": 90} if form == "JPEG" else {}))
    return file


def made(file, processor, patch, merge, most, size):
    head = ImageInput(
        module="eye", patch_px=patch, merge=merge, max_pixels=most, processor=processor
    )
    return decode_image(file.getvalue(), head.grid(*size), head)


SIZES = [(640, 480), (231, 517), (50, 40), (337, 336)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_pixels_are_those_of_clip_siglip_and_qwen(size, form):
    """A PNG's and a WebP's bit by bit; a JPEG is decoded by another build of the same library."""
    from transformers import (
        CLIPImageProcessorPil,
        Qwen2VLImageProcessorPil,
        SiglipImageProcessorPil,
    )

    file = photograph(*size, form)
    image = Image.open(file).convert("RGB")
    plain = {"do_rescale": False, "do_normalize": False, "return_tensors": "np"}
    cut = ImageProcessor(resize="crop", height_px=112, width_px=112, shortest_px=126)
    found = made(file, cut, 14, 1, 112 * 112, size)
    clip = CLIPImageProcessorPil(
        size={"shortest_edge": 126}, crop_size={"height": 112, "width": 112}
    )
    pairs = [(found, clip(image, **plain)["pixel_values"][0])]
    stretch = ImageProcessor(resize="stretch", height_px=100, width_px=100)
    siglip = SiglipImageProcessorPil(size={"height": 100, "width": 100}, resample=3)
    expected = siglip(image, **plain)["pixel_values"][0][:, :98, :98]
    pairs.append((made(file, stretch, 14, 1, 10_000, size), expected))
    budget = ImageProcessor(resize="budget", min_pixels=3136, max_pixels=100_352)
    found = made(file, budget, 14, 2, 100_352, size)
    qwen = Qwen2VLImageProcessorPil(size={"shortest_edge": 3136, "longest_edge": 100_352})
    patches = qwen(image, **plain)["pixel_values"]
    blocks = found.reshape(3, found.shape[1] // 28, 2, 14, found.shape[2] // 28, 2, 14)
    blocks = blocks.transpose(1, 4, 2, 5, 0, 3, 6).reshape(len(patches), 3, 1, 196)
    pairs.append((np.repeat(blocks, 2, axis=2).reshape(patches.shape), patches))
    for ours, theirs in pairs:
        off = np.abs(ours.astype(int) - theirs.astype(int))
        print(form, size, off.max(), off.mean())
        assert off.max() <= (2 if form == "JPEG" else 0)

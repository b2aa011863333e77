"""How fast one core turns the dataset's own files into model inputs: images decoded, sequences put together.

These rates decide how many preprocessing cores a run needs. Files are read as training reads them, through the
index; broken images are passed over, as training does. A named distribution has no files: `decode_like` takes
synthetic ones of its mean image size.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from disttrain_cli.data.decoding import decode_image, decode_target
from disttrain_cli.data.packing import Packing
from disttrain_cli.data.reading import ShardReader
from disttrain_cli.data.sequences import SequencePlan
from disttrain_cli.data.tokenizer import read_tokenizer
from disttrain_cli.spec.index import IMAGE, TARGET, TEXT
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.profile import PreprocessProfile
from disttrain_cli.spec.runfile import Run

SECONDS = 0.5
JPEG_QUALITY = 90


def measure_preprocessing(run: Run, packing: Packing, seconds: float = SECONDS) -> PreprocessProfile:
    """Prepare the sequences of `packing`, one after the other, for about `seconds` (at least one of them).

    A sequence's time includes its images. The rate of images is 0 where the sequences have none.

    Raises:
        DataError: a shard is gone or changed.
    """
    index, tokenizer = packing.index, read_tokenizer(run)
    reader = ShardReader(index, tokenizer)
    images = sequences = 0
    image_s, begin = 0.0, time.perf_counter()
    for number in range(len(packing)):
        plan = SequencePlan(packing, number)
        plan.layout()
        plan.token_ids(tokenizer, reader.texts)
        image_begin = time.perf_counter()
        for sample in plan.samples.tolist():
            images += _decode_images(packing, reader, sample)
        image_s += time.perf_counter() - image_begin
        sequences += 1
        if time.perf_counter() - begin > seconds:
            break
    return PreprocessProfile(images_per_s_per_core=images / image_s if images else 0.0,
                             sequences_per_s_per_core=sequences / (time.perf_counter() - begin))


def _decode_images(packing: Packing, reader: ShardReader, sample: int) -> int:
    """Decode all images of a sample, read and generated; how many there were."""
    index = packing.index
    segments = range(int(index.segment_start[sample]), int(index.segment_start[sample + 1]))
    count = 0
    for segment in segments:
        if index.kinds[segment] == TEXT or (index.kinds[segment] == TARGET and _cached(index.inputs)):
            continue
        count += 1
        data = reader.image(sample, segment)
        rows, columns = index.grids[segment].tolist()
        try:
            if index.kinds[segment] == IMAGE:
                assert index.inputs.image is not None
                decode_image(data, (rows, columns), index.inputs.image)
            else:
                assert index.inputs.target is not None
                decode_target(data, index.inputs.target)
        except ValueError:
            continue
    return count


def decode_like(packing: Packing, seconds: float = SECONDS) -> PreprocessProfile:
    """The rates on synthetic JPEG files: images as large as the model reads on average, targets as it generates.

    Larger originals take longer, and putting tokens together takes nothing here: an upper bound of the rates. The
    rate of sequences is 0 where they have no images.
    """
    inputs = packing.index.inputs
    images_s, count = 0.0, 0
    if inputs.image is not None and len(packing.image_grid):
        image = inputs.image
        blocks = max(1, round(np.sqrt(packing.image_grid.prod(axis=1).mean()) / image.merge))
        grid = (blocks * image.merge, blocks * image.merge)
        data = _jpeg(grid[0] * image.patch_px)
        images_s += len(packing.image_grid) * _mean_s(lambda: decode_image(data, grid, image), seconds / 2.0)
        count += len(packing.image_grid)
    if inputs.target is not None and len(packing.target_segment) and not _cached(inputs):
        target = inputs.target
        file = _jpeg(target.size_px)
        images_s += len(packing.target_segment) * _mean_s(lambda: decode_target(file, target), seconds / 2.0)
        count += len(packing.target_segment)
    return PreprocessProfile(images_per_s_per_core=count / images_s if count else 0.0,
                             sequences_per_s_per_core=len(packing) / images_s if count else 0.0)


def _cached(inputs: ModelInputs) -> bool:
    """Whether latents stand in for the pixels of images to generate, so that none is decoded."""
    return inputs.target is not None and inputs.target.cached_latents


def _jpeg(side_px: int) -> bytes:
    """A square picture of smooth colours with some noise, about as large a file as a photograph."""
    import cv2

    random = np.random.default_rng(0)
    smooth = cv2.resize(random.uniform(0.0, 255.0, (8, 8, 3)), (side_px, side_px), interpolation=cv2.INTER_CUBIC)
    pixels = np.clip(smooth + random.normal(0.0, 8.0, smooth.shape), 0.0, 255.0).astype(np.uint8)
    return bytes(cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])[1])


def _mean_s(call: Callable[[], object], seconds: float) -> float:
    """Mean time of a call repeated for about `seconds`, after one that warms up."""
    call()
    begin, calls = time.perf_counter(), 0
    while calls == 0 or time.perf_counter() - begin < seconds:
        call()
        calls += 1
    return (time.perf_counter() - begin) / calls

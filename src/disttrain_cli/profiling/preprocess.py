"""How fast one core turns the dataset's own files into model inputs: images and clips decoded,
sequences put together.

These rates decide how many preprocessing cores a run needs. Files are read as training reads them,
through the index; broken files are passed over, as training does. A named distribution has no
files: `decode_like` takes synthetic ones of its mean image size, and noise for clips.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import numpy as np

from disttrain_cli.data.decoding import decode_image, decode_target
from disttrain_cli.data.log_mel import HOP, decode_features, log_mel
from disttrain_cli.data.packing import Packing
from disttrain_cli.data.reading import ShardReader
from disttrain_cli.data.sequences import SequencePlan
from disttrain_cli.data.tokenizer import read_tokenizer
from disttrain_cli.spec.index import AUDIO, IMAGE, TARGET, TEXT
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.profile import PreprocessProfile
from disttrain_cli.spec.runfile import Run

SECONDS = 0.5
JPEG_QUALITY = 90


def measure_preprocessing(
    run: Run, packing: Packing, seconds: float = SECONDS
) -> PreprocessProfile:
    """Prepare the sequences of `packing`, one after the other, for about `seconds` (at least one of
    them).

    A sequence's time includes its images and clips. The rate of either is 0 where the sequences
    have none.

    Raises:
        DataError: a shard is gone or changed.
    """
    index, tokenizer = packing.index, read_tokenizer(run)
    reader = ShardReader(index, tokenizer)
    _clips_alone(packing, reader, 0.0)  # the libraries that it needs are loaded at the first clip
    images = clips = sequences = 0
    image_s, clip_s, begin = 0.0, 0.0, time.perf_counter()
    for number in range(len(packing)):
        plan = SequencePlan(packing, number)
        plan.layout()
        plan.token_ids(tokenizer, reader.texts)
        image_begin = time.perf_counter()
        for sample in plan.samples.tolist():
            images += _decode_images(packing, reader, sample)
        clip_begin = time.perf_counter()
        image_s += clip_begin - image_begin
        for sample in plan.samples.tolist():
            clips += _decode_clips(packing, reader, sample)
        clip_s += time.perf_counter() - clip_begin
        sequences += 1
        if time.perf_counter() - begin > seconds:
            break
    sequence_s = (time.perf_counter() - begin) / sequences
    if not clips:  # none among the first sequences
        clips, clip_s = _clips_alone(packing, reader, seconds / 2)
    return PreprocessProfile(
        images_per_s_per_core=images / image_s if images else 0.0,
        clips_per_s_per_core=clips / clip_s if clips else 0.0,
        sequences_per_s_per_core=1.0 / sequence_s,
    )


def _decode_images(packing: Packing, reader: ShardReader, sample: int) -> int:
    """Decode all images of a sample, read and generated; how many there were."""
    index = packing.index
    segments = range(int(index.segment_start[sample]), int(index.segment_start[sample + 1]))
    count = 0
    for segment in segments:
        if index.kinds[segment] in (TEXT, AUDIO) or (
            index.kinds[segment] == TARGET and _cached(index.inputs)
        ):
            continue
        count += 1
        data = reader.file(sample, segment)
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


def _decode_clips(packing: Packing, reader: ShardReader, sample: int) -> int:
    """Decode all clips of a sample; how many there were."""
    index, audio = packing.index, packing.index.inputs.audio
    if audio is None:
        return 0
    first, last = index.segment_start[sample : sample + 2].tolist()
    segments = [segment for segment in range(first, last) if index.kinds[segment] == AUDIO]
    features = np.empty((audio.mel_bins, audio.frames), np.float32)
    for segment in segments:
        with contextlib.suppress(ValueError):
            decode_features(reader.file(sample, segment), audio, features)
    return len(segments)


def _clips_alone(packing: Packing, reader: ShardReader, seconds: float) -> tuple[int, float]:
    """Decode the first clips of a packing for about so long: how many (0 where there are none), and
    the time."""
    samples = np.searchsorted(packing.index.segment_start, packing.clip_segment, side="right") - 1
    clips, begin = 0, time.perf_counter()
    for sample in dict.fromkeys(samples.tolist()):
        clips += _decode_clips(packing, reader, sample)
        if time.perf_counter() - begin > seconds:
            break
    return clips, time.perf_counter() - begin


def decode_like(packing: Packing, seconds: float = SECONDS) -> PreprocessProfile:
    """The rates on synthetic JPEG files: images as large as the model reads on average, targets as
    it generates.

    Clips are as long as the model hears, without the decoding of their files. Larger originals take
    longer, and putting tokens together takes nothing here: an upper bound of the rates. The rate of
    sequences is 0 where they have neither images nor clips.
    """
    inputs = packing.index.inputs
    images_s, count = 0.0, 0
    if inputs.image is not None and len(packing.image_grid):
        image = inputs.image
        blocks = max(1, round(np.sqrt(packing.image_grid.prod(axis=1).mean()) / image.merge))
        grid = (blocks * image.merge, blocks * image.merge)
        data = _jpeg(grid[0] * image.patch_px)
        images_s += len(packing.image_grid) * _mean_s(
            lambda: decode_image(data, grid, image), seconds / 2.0
        )
        count += len(packing.image_grid)
    if inputs.target is not None and len(packing.target_segment) and not _cached(inputs):
        target = inputs.target
        file = _jpeg(target.size_px)
        images_s += len(packing.target_segment) * _mean_s(
            lambda: decode_target(file, target), seconds / 2.0
        )
        count += len(packing.target_segment)
    clip_s, clips = 0.0, len(packing.clip_segment)
    if inputs.audio is not None and clips:
        audio, random = inputs.audio, np.random.default_rng(0)
        noise = random.uniform(-0.5, 0.5, audio.frames * HOP).astype(np.float32)
        features = np.empty((audio.mel_bins, audio.frames), np.float32)
        clip_s = _mean_s(lambda: log_mel(noise, audio, features), seconds / 2.0)
    all_s = images_s + clips * clip_s
    return PreprocessProfile(
        images_per_s_per_core=count / images_s if count else 0.0,
        clips_per_s_per_core=1.0 / clip_s if clip_s else 0.0,
        sequences_per_s_per_core=len(packing) / all_s if all_s else 0.0,
    )


def _cached(inputs: ModelInputs) -> bool:
    """Whether latents stand in for the pixels of images to generate, so that none is decoded."""
    return inputs.target is not None and inputs.target.cached_latents


def _jpeg(side_px: int) -> bytes:
    """A square picture of smooth colours with some noise, about as large a file as a photograph."""
    import cv2

    random = np.random.default_rng(0)
    smooth = cv2.resize(
        random.uniform(0.0, 255.0, (8, 8, 3)), (side_px, side_px), interpolation=cv2.INTER_CUBIC
    )
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

"""How fast one core turns the dataset's own files into model inputs: images decoded, sequences put together.

These rates decide how many preprocessing cores a run needs. Files are read as training reads them, through the
index; broken images are passed over, as training does.
"""

from __future__ import annotations

import time

from disttrain_cli.data.decoding import decode_image, decode_target
from disttrain_cli.data.packing import Packing
from disttrain_cli.data.reading import ShardReader
from disttrain_cli.data.sequences import SequencePlan
from disttrain_cli.data.tokenizer import read_tokenizer
from disttrain_cli.spec.index import IMAGE, TEXT
from disttrain_cli.spec.profile import PreprocessProfile
from disttrain_cli.spec.runfile import Run

SECONDS = 0.5


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
        if index.kinds[segment] == TEXT:
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

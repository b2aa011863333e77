"""Precomputed VAE latents (`disttrain data latents`, `spec.latents`), encoded shard by shard.

Every image to be generated is encoded by the VAE of its generator. A shard's file gets its name
when it is complete. Until then encoded images are appended to NAME.partial, which the next call
continues. The description is written last: until then training uses the old latents, or none.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from disttrain_cli.calls import call
from disttrain_cli.data.checking import Broken, allowed_broken, check_broken, try_decoding
from disttrain_cli.data.index.index_checks import check_sources
from disttrain_cli.data.index.index_file import read_stored
from disttrain_cli.data.index.sample_index import Index
from disttrain_cli.data.indexing.building import open_index
from disttrain_cli.data.latents import images_of, origin_of
from disttrain_cli.data.modalities.registry import MODALITIES
from disttrain_cli.data.modalities.targets import DTYPES
from disttrain_cli.data.reading import ShardReader
from disttrain_cli.data.sources import Skipped
from disttrain_cli.data.tokenizer import read_tokenizer
from disttrain_cli.errors import SpecError
from disttrain_cli.models.architectures import read_configs
from disttrain_cli.models.graph import describe
from disttrain_cli.models.host import use_cuda
from disttrain_cli.models.vae import PIXELS, VaeEncoder, encoder_maker
from disttrain_cli.models.weights import load_into
from disttrain_cli.runtime.feeding import message_dtype, normalised
from disttrain_cli.runtime.launching.starts import alone
from disttrain_cli.spec.files import fingerprint
from disttrain_cli.spec.heads import TargetInput
from disttrain_cli.spec.latents import DESCRIPTION, MARK, MARKED, LatentFile, Latents, Origin
from disttrain_cli.spec.progress import Progress
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.whole import write_whole

PARTIAL = ".partial"
#: Images that are decoded ahead of the encoder, for each core.
AHEAD = 4

Bytes = NDArray[np.uint8]


class Made(NamedTuple):
    """Latents of one generator."""

    module: str
    path: Path  # of the description
    images: int
    image_bytes: int  # size of each image's latents
    encoded: int  # images of the files that this call wrote
    broken: list[Skipped]  # undecodable images of all files


def make_latents(run: Run, progress: Progress) -> tuple[Index, list[Made]]:
    """Encode the images of all generators with `cached_latents`.

    Returns the index of their data, and the latents of each generator. Existing files of the same
    images, VAE and precision are reused.

    Raises:
        DataError: the data are missing, or more is broken than `data.max_bad_fraction` allows.
        MismatchError: the data changed.
        DisttrainError: the run is being trained.
        SpecError: no generator uses cached latents, or they cannot be written.
    """
    check_sources(run)
    inputs = describe(run)
    if not any(head.cached_latents for head in inputs.targets):
        raise SpecError(
            "No generator of this run reads latents that are prepared beforehand",
            f"generators: {', '.join(inputs.generators) or 'none'}",
            "Set model.modules.NAME.cached_latents: true for one that has a VAE.",
        )
    with alone(run.dir):
        index = open_index(run, inputs, progress)
        return index, [
            _make(run, index, number, head, progress)
            for number, head in enumerate(inputs.targets)
            if head.cached_latents
        ]


def _make(run: Run, index: Index, number: int, head: TargetInput, progress: Progress) -> Made:
    folder, origin, (images, first) = (
        run.dir.latents / head.module,
        origin_of(run, head),
        images_of(index),
    )
    files, broken = _files(run, origin, np.diff(first).tolist()), list[Skipped]()
    allowed = allowed_broken(run.file, index)
    missing = [shard for shard, file in enumerate(files) if not _is_whole(folder, file, origin)]
    total, done = sum(files[shard].images for shard in missing), 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "decode") as threads:
            pixels = partial(_decoded, run, index, head.pixels, threads)
            for shard, file in enumerate(files):
                rows = first[shard] + _marked(folder, file, origin)
                for _, found in pixels(images[rows].tolist()):
                    broken += [one.what for one in found]
            encode = _encoder(run, number, head) if missing else None
            for shard in missing:
                assert encode is not None
                own = images[first[shard] : first[shard + 1]].tolist()
                path = folder / files[shard].name
                for written, found in _append(path, own, origin.image_bytes, pixels, encode):
                    done += written
                    broken += [one.what for one in found]
                    check_broken(run.file, broken, allowed)
                    progress(f"encode images of {head.module}", done, total)
        latents = Latents(data=index.fingerprint, origin=origin, files=files)
        write_whole(folder / DESCRIPTION, latents.model_dump_json(indent=2) + "\n")
        kept = {DESCRIPTION, *(file.name for file in files)}
        for stale in folder.iterdir():
            if stale.name not in kept:
                stale.unlink()
    except OSError as error:
        raise SpecError(
            f"Cannot write the latents {folder}",
            str(error),
            f"Free space there and go on with: {call('data_latents')}",
        ) from None
    return Made(head.module, folder / DESCRIPTION, len(images), origin.image_bytes, total, broken)


def _files(run: Run, origin: Origin, images: list[int]) -> list[LatentFile]:
    """Return the file of each shard, named by the hash of the shard and of the encoder."""
    stored = read_stored(run.dir.index).files
    return [
        LatentFile(
            name=fingerprint(
                [
                    origin.model_dump(),
                    indexed.name,
                    indexed.size,
                    indexed.digest,
                    indexed.content or indexed.time,
                ]
            )
            + ".bin",
            images=count,
        )
        for indexed, count in zip(stored, images, strict=True)
    ]


def _is_whole(folder: Path, file: LatentFile, origin: Origin) -> bool:
    path = folder / file.name
    size = path.stat().st_size if path.is_file() else 0
    return size == file.images * origin.image_bytes


def _marked(folder: Path, file: LatentFile, origin: Origin) -> NDArray[np.int64]:
    """Return the rows that earlier calls marked as images that cannot be decoded."""
    path = folder / (file.name if _is_whole(folder, file, origin) else file.name + PARTIAL)
    rows = path.stat().st_size // origin.image_bytes if path.is_file() else 0
    if not rows:
        return np.zeros(0, np.int64)
    begins = np.memmap(path, np.uint8, "r", shape=(rows, origin.image_bytes))[:, :MARKED]
    return np.flatnonzero((begins == MARK).all(axis=1))


def _append(
    path: Path,
    segments: list[int],
    image_bytes: int,
    pixels: Callable[[list[int]], Iterator[tuple[Bytes, list[Broken]]]],
    encode: Callable[[Bytes], NDArray[Any]],
) -> Iterator[tuple[int, list[Broken]]]:
    """Continue a shard's file; yield (images written since the last yield, broken ones)."""
    unfinished = path.with_name(path.name + PARTIAL)
    with unfinished.open("ab") as file:
        there = file.tell() // image_bytes
        file.truncate(there * image_bytes)
        yield there, []
        for some in _batches(pixels(segments[there:])):
            rows = _encoded([one for one, _ in some], encode)
            for row, (_, broken) in zip(rows, some, strict=True):
                row = bytes([MARK]) * image_bytes if broken else row.ljust(image_bytes, b"\0")
                file.write(row)
            file.flush()
            os.fsync(file.fileno())
            yield len(some), [one for _, found in some for one in found]
    unfinished.replace(path)


def _encoded(images: list[Bytes], encode: Callable[[Bytes], NDArray[Any]]) -> list[bytes]:
    """Return the moments of each image; images of one size are encoded together."""
    of_sizes: dict[tuple[int, ...], list[int]] = {}
    for number, image in enumerate(images):
        of_sizes.setdefault(image.shape, []).append(number)
    rows = [b""] * len(images)
    for numbers in of_sizes.values():
        moments = encode(np.stack([images[number] for number in numbers]))
        for number, row in zip(numbers, moments, strict=True):
            rows[number] = row.tobytes()
    return rows


def _batches(images: Iterator[tuple[Bytes, list[Broken]]]) -> Iterator[Any]:
    """Yield batches of the number of images that the encoder takes at a time."""
    for first in images:
        more = max(1, PIXELS // first[0][0].size) - 1
        yield [first, *islice(images, more)]


def _decoded(
    run: Run, index: Index, head: TargetInput, threads: ThreadPoolExecutor, segments: list[int]
) -> Iterator[tuple[Bytes, list[Broken]]]:
    """Yield the pixels of images [3, H, W], in order; black where one cannot be decoded."""
    reader, modality = ShardReader(index, read_tokenizer(run)), MODALITIES[head.item]

    def decode(segment: int) -> tuple[Bytes, list[Broken]]:
        sample = int(np.searchsorted(index.segment_start, segment, side="right")) - 1
        rows, columns = index.grids[segment].tolist()
        out = modality.blank(head, (rows, columns))
        into = partial(modality.decode, head=head, grid=(rows, columns), out=out)
        return out, try_decoding(run, index, reader, sample, segment, into)

    waiting: deque[Future[tuple[Bytes, list[Broken]]]] = deque()
    for segment in segments:
        waiting.append(threads.submit(decode, segment))
        if len(waiting) > AHEAD * len(os.sched_getaffinity(0)):
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _encoder(run: Run, number: int, head: TargetInput) -> Callable[[Bytes], NDArray[Any]]:
    """Return a function from pixels [N, 3, H, W] to moments [N, 2 · channels, …] as stored."""
    cuda = run.file.cluster.device != "cpu" and torch.cuda.is_available()
    device, dtype = use_cuda(0) if cuda else torch.device("cpu"), message_dtype(run.file.train)
    config = read_configs(run)[head.module].vae
    assert config is not None and head.cached_latents
    maker = encoder_maker(head.module, config, head.size_px, number)
    encoder = maker.build(run.file.train.seed, device, dtype)
    assert isinstance(encoder, VaeEncoder) and head.pixels.affine is not None
    load_into([encoder], run)
    affine, stored = head.pixels.affine, DTYPES[head.cached_latents]

    def encode(pixels_NCHW: Bytes) -> NDArray[Any]:
        planes = torch.from_numpy(pixels_NCHW).to(device)
        moments = encoder.moments(normalised(planes, affine, dtype)).cpu()
        plain = moments.view(torch.uint16) if dtype == torch.bfloat16 else moments
        return plain.numpy().astype(stored, copy=False)

    return encode

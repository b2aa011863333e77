"""Latents prepared beforehand (`spec.latents`), read instead of image files, and their checks."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from disttrain_cli.calls import call
from disttrain_cli.data.sources.files import content_of
from disttrain_cli.errors import DataError, MismatchError, SpecError
from disttrain_cli.spec.files import fingerprint, parse_json, validate
from disttrain_cli.spec.heads import TargetInput
from disttrain_cli.spec.index import TARGET
from disttrain_cli.spec.latents import DESCRIPTION, MARK, MARKED, Latents, Origin
from disttrain_cli.spec.runfile import Run

if TYPE_CHECKING:
    from disttrain_cli.data.index.sample_index import Index

OPEN_FILES = 64
PREPARE = f"Prepare them: {call('data_latents')}"


class LatentReader:
    """Reader of a generator's latents files; safe to use from several threads."""

    def __init__(self, folder: Path, latents: Latents, index: Index) -> None:
        self._folder, self._latents, self._index = folder, latents, index
        self._image_bytes = latents.origin.image_bytes
        self._images, self._first = images_of(index)
        self._map = lru_cache(OPEN_FILES)(self._open)

    def file_name(self, sample: int, segment: int) -> str:
        return ""

    def file(self, sample: int, segment: int) -> Any:
        """Return the moments of a segment's image, as bytes.

        Raises:
            DataError: their file is gone or truncated.
            ValueError: the image could not be decoded.
        """
        shard = int(self._index.shard[sample])
        row = int(np.searchsorted(self._images, segment)) - int(self._first[shard])
        data = self._map(shard)[row * self._image_bytes : (row + 1) * self._image_bytes]
        if (data[:MARKED] == MARK).all():
            raise ValueError("it could not be decoded when its latents were prepared")
        return data

    def _open(self, shard: int) -> Any:
        file = self._latents.files[shard]
        path = self._folder / file.name
        try:
            return np.memmap(path, np.uint8, "r", shape=(file.images * self._image_bytes,))
        except (OSError, ValueError) as error:
            raise DataError(f"Cannot read the latents {path}", str(error), PREPARE) from None


def images_of(index: Index) -> tuple[Any, Any]:
    """Return (segments that are images to generate, their offsets by shard [shards + 1])."""
    images = np.flatnonzero(index.kinds == TARGET)
    shards = index.shard[np.searchsorted(index.segment_start, images, side="right") - 1]
    return images, np.searchsorted(shards, np.arange(len(index.shards) + 1))


def open_latents(run: Run, index: Index) -> dict[str, LatentReader]:
    """Return the prepared latents by generator; none for generators whose VAE is in the pipeline.

    Raises:
        DataError: there are none, or a file is gone or truncated.
        MismatchError: they are of other data, another VAE, size or precision.
    """
    return {
        name: LatentReader(run.dir.latents / name, latents, index)
        for name, latents in described(run, index).items()
    }


def described(run: Run, index: Index) -> dict[str, Latents]:
    """Return the checked description of the latents by generator; raises as `open_latents`."""
    return {
        head.module: _described(run, index, head)
        for head in index.inputs.targets
        if head.cached_latents
    }


def origin_of(run: Run, head: TargetInput) -> Origin:
    """Return the current inputs of a generator's latents.

    Weights are identified by the size and sampled content of their files, as shards are
    (`content_of`).

    Raises:
        SpecError: the VAE's folder has no configuration.
    """
    assert head.cached_latents
    spec = run.file.model.modules[head.module]
    folder = None if spec.vae_folder is None else run.resolve(spec.vae_folder)
    step = f"Correct model.modules.{head.module}.vae_folder."
    config = {} if folder is None else parse_json(folder / "config.json", "configuration", step)
    files = sorted(folder.glob("*.safetensors")) if folder and spec.pretrained else []
    weights = [[path.stat().st_size, content_of(str(path))] for path in files]
    return Origin(
        configuration=fingerprint([config, spec.vae]),
        weights=fingerprint(weights) if weights else f"drawn from seed {run.file.train.seed}",
        image_size=head.size_px,
        shape=head.shape,
        precision=head.cached_latents,
        buckets=head.buckets,
    )


def _described(run: Run, index: Index, head: TargetInput) -> Latents:
    path = run.dir.latents / head.module / DESCRIPTION
    if not path.is_file():
        raise DataError(
            f"There are no latents for {head.module} at {path.parent}",
            f"model.modules.{head.module}.cached_latents: true",
            PREPARE,
        )
    try:
        latents = validate(Latents, parse_json(path, "latents", PREPARE), path, "latents", PREPARE)
    except SpecError as error:
        raise DataError(error.what, error.why, PREPARE) from None
    _check_made_for(path.parent, latents, {"data": index.fingerprint, **vars(origin_of(run, head))})
    _check_files(path.parent, latents, index)
    return latents


def _check_made_for(folder: Path, latents: Latents, now: dict[str, Any]) -> None:
    then = {"data": latents.data, **vars(latents.origin)}
    changed = [
        f"{name}: latents {then[name]}, now {now[name]}" for name in now if then[name] != now[name]
    ]
    if changed:
        raise MismatchError(
            f"The latents {folder} were computed for a different run file or different data",
            "\n".join(changed),
            PREPARE,
        )


def _check_files(folder: Path, latents: Latents, index: Index) -> None:
    images = np.diff(images_of(index)[1]).tolist()
    if [file.images for file in latents.files] != images:
        raise DataError(
            f"The latents {folder} are damaged",
            f"{DESCRIPTION} has other images than the index",
            PREPARE,
        )
    for path, expected in (
        (folder / file.name, file.images * latents.origin.image_bytes)
        for file in latents.files
        if file.images
    ):
        size = path.stat().st_size if path.is_file() else None
        if size != expected:
            there = "there is no such file" if size is None else f"{size:,} bytes"
            raise DataError(
                f"The latents {folder} are damaged",
                f"{path.name}: {there}, {expected:,} bytes are expected",
                PREPARE,
            )

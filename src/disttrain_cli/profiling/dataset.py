"""The data of a profile: index → packing → numbers; the same for a measured device and for one of
the catalogue."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from disttrain_cli.data.index import open_index
from disttrain_cli.data.packing import Packing, SequenceStream, pack
from disttrain_cli.data.statistics import describe_data, mean_and_max_work, sequence_work
from disttrain_cli.errors import DataError
from disttrain_cli.profiling.preprocess import decode_like, measure_preprocessing
from disttrain_cli.profiling.sizes import SEQUENCES
from disttrain_cli.runtime.checkpoints.folder import order_of
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.profile import DataProfile, PreprocessProfile
from disttrain_cli.spec.progress import Progress, silent
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.work import Work

#: How messages name items: missing for a module, one of them, several, the distribution's field.
_WANTED = {
    "image": (
        "image for {} to read",
        "an image to read",
        "images to read",
        "images_per_sequence",
    ),
    "target": (
        "image for {} to generate",
        "an image to generate",
        "images to generate",
        "generated_per_sequence",
    ),
    "audio": ("audio clip for {}", "a clip", "clips", "clips_per_sequence"),
}
SYNTHETIC = "decoding of synthetic JPEG files of the distribution's mean image size"


@dataclass(frozen=True)
class Dataset:
    """What a profile says of the data, and the sequences it was learnt from."""

    epoch: Packing
    drawn: Packing  # the first SEQUENCES of the stream of all epochs
    mean: dict[str, Work]  # by module name: mean work per packed sequence
    most: dict[str, Work]  # the largest of each amount in one sequence
    idle: dict[str, float]  # share of the sequences that bring a module no work
    profile: DataProfile
    preprocess: PreprocessProfile
    provenance: dict[str, str]  # what a reader must know of these figures


def read_dataset(run: Run, inputs: ModelInputs, progress: Progress = silent) -> Dataset:
    """Take the sample index that is there, or build it, and describe one epoch of packed sequences.

    Preprocessing rates are measured on this machine, on the data's own files; for a named
    distribution, which has none, on synthetic JPEG files of its mean image size.

    Raises:
        DataError: the dataset is missing, empty or too damaged, or brings a module no work at all.
        SpecError: the tokenizer does not fit the model, or the distribution is not known.
    """
    index = open_index(run, inputs, progress)
    seed, order = run.file.train.seed, order_of(run.dir.checkpoints)
    epoch = pack(index, inputs, seed, 0, order, progress)
    _check_work(run, inputs, epoch)
    drawn = SequenceStream(index, seed, order).batch(0, SEQUENCES)
    progress("measure preprocessing", 0, 0)
    rates = decode_like(epoch) if run.file.data.distribution else measure_preprocessing(run, drawn)
    known = epoch if len(epoch) >= SEQUENCES else drawn
    work = mean_and_max_work(known)
    return Dataset(
        epoch=epoch,
        drawn=drawn,
        mean={name: mean for name, (mean, _) in work.items()},
        most={name: most for name, (_, most) in work.items()},
        idle={
            name: 1.0 - float(np.mean(np.any(rows > 0, axis=1)))
            for name, rows in sequence_work(known).items()
        },
        profile=describe_data(epoch, order),
        preprocess=rates,
        provenance={"preprocess": SYNTHETIC} if run.file.data.distribution else {},
    )


def _check_work(run: Run, inputs: ModelInputs, epoch: Packing) -> None:
    """Refuse data that leaves a module without any work: there would be nothing to measure and
    nothing to plan."""
    for head in inputs.heads:
        if len(epoch.items[head.item]):
            continue
        what, one, several, field = _WANTED.get(
            head.item, (f"{head.item} for {{}}", *[head.item] * 3)
        )
        source = (
            f"raise data.distribution.{field}"
            if run.file.data.distribution
            else f"add a source with {several} to data.sources"
        )
        raise DataError(
            f"The data has no {what.format(head.module)}",
            f"{len(epoch.index):,} samples in {len(epoch):,} packed sequences, none with {one}",
            f"Remove model.modules.{head.module}, or {source}.",
        )

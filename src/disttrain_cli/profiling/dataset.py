"""Data part of a profile: index, packing, statistics; for measured and catalogue devices alike."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from disttrain_cli.data.epochs.mixture import Mixture, Phase
from disttrain_cli.data.index.sample_index import Index
from disttrain_cli.data.indexing.building import open_index
from disttrain_cli.data.mixtures import Phases
from disttrain_cli.data.packing import Packing, SequenceStream, pack
from disttrain_cli.data.statistics import (
    describe_data,
    mean_and_max_work,
    sequence_work,
    size_sample,
    text_loss_to_beat,
)
from disttrain_cli.errors import DataError
from disttrain_cli.models.architectures import read_configs
from disttrain_cli.profiling.preprocess import decode_like, measure_preprocessing
from disttrain_cli.profiling.sizes import SEQUENCES
from disttrain_cli.runtime.checkpoints.folder import begun
from disttrain_cli.runtime.checkpoints.phases import phases_of
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.profile import DataProfile, LossToBeat, PhaseProfile, PreprocessProfile
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
    """Data statistics of a profile, and the sequences that they were computed from."""

    epoch: Packing
    drawn: Packing  # the first SEQUENCES of the stream of all epochs
    mean: dict[str, Work]  # by module name: mean work per packed sequence
    most: dict[str, Work]  # largest value of each amount in one sequence
    idle: dict[str, float]  # share of the sequences that bring a module no work
    profile: DataProfile
    preprocess: PreprocessProfile
    provenance: dict[str, str]  # sources of these figures, where they are not measured


def read_dataset(run: Run, inputs: ModelInputs, progress: Progress = silent) -> Dataset:
    """Open or build the sample index, and describe one epoch of packed sequences.

    Preprocessing rates are measured on this machine, on the data's own files; for a named
    distribution, which has none, on synthetic JPEG files of its mean image size.

    Raises:
        DataError: the dataset is missing, empty or too damaged, or has no work at all for a module.
        SpecError: the tokenizer does not fit the model, or the distribution is not known.
    """
    index, seed = open_index(run, inputs, progress), run.file.train.seed
    before = begun(run.dir.checkpoints)
    phases, goes_on = phases_of(index, before)
    left = _left(phases, before.step)
    mixtures = {
        step: Mixture(index, seed, (Phase(0, weights),) if phases else ()) for step, weights in left
    }
    packed = {step: pack(mixture, 0, progress) for step, mixture in mixtures.items()}
    priced = _longest(left, before.step, run.file.train.steps or 0)
    epoch = packed[priced]
    _check_work(run, inputs, epoch)
    drawn = SequenceStream(mixtures[priced]).batch(0, SEQUENCES)
    progress("measure preprocessing", 0, 0)
    rates = decode_like(epoch) if run.file.data.distribution else measure_preprocessing(run, drawn)
    known = epoch if len(epoch) >= SEQUENCES else drawn
    work = mean_and_max_work(known)
    others = [mean_and_max_work(other) for step, other in packed.items() if step != priced]
    return Dataset(
        epoch=epoch,
        drawn=drawn,
        mean={name: mean for name, (mean, _) in work.items()},
        most={
            name: Work(*np.max([each[name][1] for each in (work, *others)], axis=0).tolist())
            for name in work
        },
        idle={
            name: 1.0 - float(np.mean(np.any(rows > 0, axis=1)))
            for name, rows in sequence_work(known).items()
        },
        profile=describe_data(epoch).model_copy(
            update={
                "phases": [
                    PhaseProfile(
                        step=step,
                        weights=weights,
                        sample=size_sample(packed[step])
                        if step in packed and step != priced
                        else None,
                    )
                    for step, weights in phases
                ],
                "sources": index.of_sources if phases else [],
                "priced_step": priced,
                "goes_on_from": goes_on,
                "losses_to_beat": [] if run.file.data.distribution else _to_beat(run, index),
            }
        ),
        preprocess=rates,
        provenance={"preprocess": SYNTHETIC} if run.file.data.distribution else {},
    )


def _to_beat(run: Run, index: Index) -> list[LossToBeat]:
    """Return the losses to beat of texts, and of images whose noise or flow is predicted.

    There a prediction of zero costs 1 or more. Its cost where velocities are predicted has not been
    measured.
    """
    predicted = {one.noise.prediction for one in read_configs(run).values() if one.noise}
    image = LossToBeat(loss="image", value=1.0, basis="a prediction of zero")
    return [
        text_loss_to_beat(run, index),
        *([image] if predicted and predicted <= {"epsilon", "flow"} else []),
    ]


def _left(phases: Phases, step: int) -> Phases:
    """Return the phases that are not over at a step; one without weights where there are none."""
    over = [first for first, _ in phases if first <= step][:-1]
    return phases[len(over) :] or [(0, [])]


def _longest(phases: Phases, begin: int, end: int) -> int:
    """Return the first step of the phase with the most steps from `begin` to before `end`.

    The earliest of several equally long ones.
    """
    firsts = [first for first, _ in phases]
    lasts = [*firsts[1:], max(end, firsts[-1])]
    return max(
        zip(firsts, lasts, strict=True),
        key=lambda phase: (min(phase[1], end) - max(phase[0], begin), -phase[0]),
    )[0]


def _check_work(run: Run, inputs: ModelInputs, epoch: Packing) -> None:
    """Raise DataError if the data leave a module without any work to measure and plan."""
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
            f"{source[:1].upper()}{source[1:]}."
            if run.published is not None  # a part of its folder
            else f"Remove model.modules.{head.module}, or {source}.",
        )

"""`data`: samples, or a distribution that replaces them, and their packing into sequences."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field, model_validator

from disttrain_cli.spec.files import Strict
from disttrain_cli.spec.runfile.bounds import MOST_DRAWN

URL = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]*(::|://)")


def is_url(path: str) -> bool:
    """True if fsspec opens a path of the run file."""
    return URL.match(path) is not None


class SourceSpec(Strict):
    """One dataset."""

    path: str = Field(
        description="Folder or file of shards (tars, Parquet, Arrow, or LLaVA's JSON), relative to"
        " the run file, or a URL that fsspec opens (s3://, https://, …)."
    )
    images: str | None = Field(
        None,
        description="Folder of the images that a LLaVA JSON names; by default the folder of the"
        " JSON.",
    )
    text: str | None = Field(
        None,
        min_length=1,
        description="Column of the Parquet or Arrow files with the texts, or the turns of"
        " conversations; needed if it has no usual name.",
    )
    weight: float = Field(
        1.0,
        gt=0,
        le=1000,
        description="Sampling rate relative to the other sources (1 = every sample once per"
        " epoch).",
    )

    name: str | None = Field(
        None,
        min_length=1,
        description="Name of the source in data.curriculum; by default its path.",
    )


class CurriculumPhase(Strict):
    """Other weights of the sources, from a step on."""

    step: int = Field(ge=0, le=1_000_000_000, description="First step with these weights.")
    weights: dict[str, Annotated[float, Field(ge=0, le=1000)]] = Field(
        min_length=1,
        description="Weight by name of the source, replacing its own; 0 = not drawn. Sources that"
        " are not listed keep their previous weight.",
    )


class VideoSpec(Strict):
    """Reading of videos, and limits on their frames and pixels.

    Fields that are not given follow the model's own processor.
    """

    fps: float | None = Field(
        None, gt=0, le=1000, description="Frames sampled per second of video."
    )
    max_frames: int | None = Field(
        None, ge=2, le=100_000, description="Maximum number of frames sampled from one video."
    )
    max_pixels: int | None = Field(
        None,
        ge=64,
        le=2**40,
        description="Maximum number of pixels of all sampled frames of one video; larger frames"
        " are scaled down.",
    )


class DistributionSpec(Strict):
    """Named distribution of sizes in place of a dataset, to plan for unavailable data."""

    name: str = Field("laion-like", description="File of templates/distributions/.")
    images_per_sequence: float = Field(
        8.0, ge=0, le=1e6, description="Mean number of input images per packed sequence."
    )
    generated_per_sequence: float = Field(
        8.0, ge=0, le=1e6, description="Mean number of generated images per packed sequence."
    )
    clips_per_sequence: float = Field(
        0.0, ge=0, le=1e6, description="Mean number of audio clips per packed sequence."
    )
    min_side_px: int = Field(
        0,
        ge=0,
        le=10_000,
        description="Minimum shorter side in pixels; smaller images are not used.",
    )
    sequences: int = Field(
        4096,
        ge=1,
        le=100_000,
        description="Number of packed sequences drawn, which make up one epoch.",
    )

    @property
    def per_sequence(self) -> dict[str, float]:
        """Mean items per packed sequence, by modality."""
        return {
            "image": self.images_per_sequence,
            "target": self.generated_per_sequence,
            "audio": self.clips_per_sequence,
        }

    @model_validator(mode="after")
    def _drawn(self) -> DistributionSpec:
        each = sum(self.per_sequence.values())
        if each * self.sequences > MOST_DRAWN:
            raise ValueError(
                f"{each:g} images and clips × {self.sequences:,} sequences are more than are drawn;"
                f" allowed: {MOST_DRAWN:,}"
            )
        return self


class DataSpec(Strict):
    """Training data, and their packing into sequences."""

    sources: list[SourceSpec] = Field(default_factory=list, description="Datasets.")
    distribution: DistributionSpec | None = Field(
        None,
        description="Instead of sources: sizes drawn from a named distribution; for planning only,"
        " not for training.",
    )
    curriculum: list[CurriculumPhase] = Field(
        default_factory=list, description="Phases with different weights of the sources, in order."
    )
    temperature: float = Field(
        1.0,
        ge=1,
        le=1000,
        description="Temperature of the mixture: samples are drawn from sources in proportion to"
        " (weight × samples) to the power of 1 / temperature, so higher values even them out; the"
        " epoch is as long as at 1, where only weights count.",
    )
    deduplicate: bool = Field(
        False,
        description="Use only the first of several samples with the same texts and files; indexing"
        " then reads every file completely.",
    )
    tokenizer: str = Field(
        "bytes",
        description="'bytes', a local Hugging Face tokenizer folder, or the name of one on Hugging"
        " Face.",
    )
    sequence_length: int = Field(
        8192, ge=16, le=2**20, description="Length of a packed sequence in tokens."
    )
    max_image_pixels: int = Field(
        1048576,
        ge=64,
        le=100_000_000,
        description="Maximum number of pixels of an input image; larger images are scaled down.",
    )
    video: VideoSpec | None = Field(
        None,
        description="Reading of videos by the image encoder, as in its model family; {} = with the"
        " settings of the model's processor. Without it, videos are left out.",
    )
    held_out: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of the samples held out from training for train.evaluation, chosen by a"
        " hash of source, shard and key. With 0, evaluation uses the validation splits of the"
        " folders in sources.",
    )
    max_bad_fraction: float = Field(
        0.01, ge=0, le=1, description="Share of samples that may be unusable before the run stops."
    )

    @model_validator(mode="after")
    def _one_origin(self) -> DataSpec:
        if bool(self.sources) == (self.distribution is not None):
            raise ValueError(
                "set either sources (a dataset) or distribution (sizes that replace one)"
            )
        if self.held_out and self.distribution is not None:
            raise ValueError(
                "held_out belongs to sources: a distribution has no samples to evaluate on"
            )
        return self

    @model_validator(mode="after")
    def _stated(self) -> DataSpec:
        names = self.names
        for before, phase in zip([None, *self.curriculum], self.curriculum, strict=False):
            if before is not None and phase.step <= before.step:
                raise ValueError(
                    f"steps of curriculum must increase; given: {before.step}, then {phase.step}"
                )
            for name in phase.weights:
                if names.count(name) != 1:
                    which = "no source" if name not in names else "several sources"
                    raise ValueError(
                        f"curriculum gives {name!r} a weight, as {which} is called; sources:"
                        f" {', '.join(names) or 'none'}. Name them with sources[].name"
                    )
        for step, weights in self.phases():
            if self.sources and not any(weights):
                raise ValueError(f"from step {step} on, curriculum gives every source weight 0")
        return self

    @property
    def names(self) -> list[str]:
        """Name of each source."""
        return [source.name or source.path for source in self.sources]

    def phases(self) -> list[tuple[int, list[float]]]:
        """Return (first step, weight of each source) of all phases; the first begins at step 0."""
        weights = dict(enumerate(source.weight for source in self.sources))
        names, phases = self.names, [(0, list(weights.values()))]
        for phase in self.curriculum:
            weights |= {names.index(name): weight for name, weight in phase.weights.items()}
            if not phase.step:
                phases.clear()
            phases.append((phase.step, list(weights.values())))
        return phases

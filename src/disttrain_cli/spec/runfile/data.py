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
        description=(
            "Folder or file of shards (tars, Parquet, Arrow, or LLaVA's JSON), relative to the run"
            " file, or a URL that fsspec opens (s3://, https://, …)."
        )
    )
    images: str | None = Field(
        None,
        description=(
            "Folder of the images that a LLaVA JSON names; the JSON's own folder if not given."
        ),
    )
    text: str | None = Field(
        None,
        min_length=1,
        description=(
            "Column of its Parquet or Arrow files that holds the texts, or the turns of"
            " conversations, where it has no usual name."
        ),
    )
    weight: float = Field(
        1.0,
        gt=0,
        le=1000,
        description=(
            "How often its samples are drawn, relative to the other sources (1 = once per epoch)."
        ),
    )

    name: str | None = Field(
        None,
        min_length=1,
        description="What data.curriculum calls it; its path if not given.",
    )


class CurriculumPhase(Strict):
    """Other weights of the sources, from a step on."""

    step: int = Field(ge=0, le=1_000_000_000, description="The first step with these weights.")
    weights: dict[str, Annotated[float, Field(ge=0, le=1000)]] = Field(
        min_length=1,
        description=(
            "By name of the source, instead of its weight; 0 = not drawn. Sources that are not"
            " named keep the weight they had."
        ),
    )


class VideoSpec(Strict):
    """Reading of videos, and limits on their frames and pixels.

    Fields that are not given follow the model's own processor.
    """

    fps: float | None = Field(
        None, gt=0, le=1000, description="Frames seen of each second of a video."
    )
    max_frames: int | None = Field(
        None, ge=2, le=100_000, description="Frames seen of one video, at most."
    )
    max_pixels: int | None = Field(
        None,
        ge=64,
        le=2**40,
        description="Pixels of all seen frames of one video together; larger ones are scaled down.",
    )


class DistributionSpec(Strict):
    """Named distribution of sizes in place of a dataset, to plan for unavailable data."""

    name: str = Field("laion-like", description="File of templates/distributions/.")
    images_per_sequence: float = Field(
        8.0, ge=0, le=1e6, description="Mean images read per packed sequence."
    )
    generated_per_sequence: float = Field(
        8.0, ge=0, le=1e6, description="Mean images generated per packed sequence."
    )
    clips_per_sequence: float = Field(
        0.0, ge=0, le=1e6, description="Mean audio clips heard per packed sequence."
    )
    min_side_px: int = Field(
        0, ge=0, le=10_000, description="Smaller images are not used (shorter side in pixels)."
    )
    sequences: int = Field(
        4096, ge=1, le=100_000, description="Packed sequences drawn; together they are one epoch."
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
        description=(
            "Instead of sources: sizes drawn from a named distribution; plans only, no training."
        ),
    )
    curriculum: list[CurriculumPhase] = Field(
        default_factory=list,
        description="Phases with other weights of the sources, in order.",
    )
    temperature: float = Field(
        1.0,
        ge=1,
        le=1000,
        description=(
            "Evens the sources out: shares of the samples drawn go with (weight × samples) to the"
            " power of 1 / temperature; an epoch has as many as at 1, where weights alone count."
        ),
    )
    deduplicate: bool = Field(
        False,
        description=(
            "Of samples with the same texts and files only the first is used; indexing then reads"
            " every file as a whole."
        ),
    )
    tokenizer: str = Field(
        "bytes",
        description=(
            "'bytes', a local Hugging Face tokenizer folder, or the name of one on Hugging Face."
        ),
    )
    sequence_length: int = Field(
        8192, ge=16, le=2**20, description="Tokens of one packed sequence."
    )
    max_image_pixels: int = Field(
        1048576,
        ge=64,
        le=100_000_000,
        description="Pixels of one image read; larger ones are scaled down to it.",
    )
    video: VideoSpec | None = Field(
        None,
        description=(
            "Videos are read by the image encoder, as its family reads them; {} = as the model's"
            " processor says. Without it they are left out."
        ),
    )
    held_out: float = Field(
        0.0,
        ge=0,
        lt=1,
        description=(
            "Share of the samples that are never trained on, for train.evaluation; chosen by a"
            " hash of source, shard and key. At 0 evaluation uses the validation splits of the"
            " folders in sources."
        ),
    )
    max_bad_fraction: float = Field(
        0.01, ge=0, le=1, description="Share of samples that may be broken before the run stops."
    )

    @model_validator(mode="after")
    def _one_origin(self) -> DataSpec:
        if bool(self.sources) == (self.distribution is not None):
            raise ValueError(
                "give either sources (a dataset) or distribution (sizes that stand in for one)"
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

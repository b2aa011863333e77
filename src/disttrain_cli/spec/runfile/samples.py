"""`samples`: images and texts that a trained model generates."""

from __future__ import annotations

from pydantic import Field

from disttrain_cli.spec.files import Strict


class SampleSpec(Strict):
    """Images and texts generated after training, stored under the checkpoint's step in
    `images/`."""

    images: int = Field(8, ge=0, le=10_000, description="Images generated at the end of a run.")
    prompts: list[str] = Field(
        default_factory=list,
        max_length=10_000,
        description="Texts that they are drawn after, in turn; none: what the data ask for.",
    )
    read: int = Field(
        0,
        ge=0,
        le=10_000,
        description=(
            "Held-out images (of all data where none are held out) that it writes a text about."
        ),
    )
    answers: int = Field(
        0,
        ge=0,
        le=10_000,
        description=(
            "Held-out conversations (of all data where none are held out) whose last answer it"
            " writes beside theirs."
        ),
    )
    during: int = Field(
        0,
        ge=0,
        le=1000,
        description=(
            "Images and answers, so many of each at most, also of every checkpoint that is written"
            " while training goes on, by a process of low priority on the CPU; 0 = none."
        ),
    )
    metrics: list[str] = Field(
        default_factory=list,
        max_length=100,
        description=(
            "Scores of these answers besides exact match: names of entry points of the group"
            " disttrain.metrics, functions of a spec.samples.Answer to a number."
        ),
    )
    judge: str | None = Field(
        None,
        description=(
            "Who says what an image shows: digits, a classifier of scikit-learn's scanned digits;"
            " or the name of an entry point of the group disttrain.judges, a"
            " data.metrics.ImageJudge."
        ),
    )
    denoising_steps: int = Field(20, ge=1, le=10_000, description="Steps from noise to an image.")

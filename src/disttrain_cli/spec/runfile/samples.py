"""`samples`: images and texts that a trained model generates."""

from __future__ import annotations

from pydantic import Field

from disttrain_cli.spec.files import Strict


class SampleSpec(Strict):
    """Images and texts generated after training, stored under the checkpoint's step in
    `images/`."""

    images: int = Field(
        8, ge=0, le=10_000, description="Number of images generated at the end of a run."
    )
    prompts: list[str] = Field(
        default_factory=list,
        max_length=10_000,
        description="Prompts of the generated images, used in turn; by default prompts from the"
        " data.",
    )
    read: int = Field(
        0,
        ge=0,
        le=10_000,
        description="Number of held-out images (of all data if none are held out) that the model"
        " describes.",
    )
    answers: int = Field(
        0,
        ge=0,
        le=10_000,
        description="Number of held-out conversations (of all data if none are held out) whose"
        " last answer the model generates for comparison.",
    )
    during: int = Field(
        0,
        ge=0,
        le=1000,
        description="Maximum number of images, and of answers, generated from every checkpoint"
        " during training, by a process of low priority on the CPU; 0 = none.",
    )
    metrics: list[str] = Field(
        default_factory=list,
        max_length=100,
        description="Metrics of these answers in addition to exact match: names of entry points of"
        " the group disttrain.metrics, functions from a spec.samples.Answer to a number.",
    )
    judge: str | None = Field(
        None,
        description="Judge that recognises what an image shows: digits, a classifier of"
        " scikit-learn's scanned digits; or the name of an entry point of the group"
        " disttrain.judges, a data.metrics.ImageJudge.",
    )
    denoising_steps: int = Field(
        20, ge=1, le=10_000, description="Sampling steps from noise to an image."
    )

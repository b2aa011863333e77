"""Model inputs: data requirements of a model as plain numbers, so that CPU nodes need no torch.

Written by `models.graph.describe`, stored in the profile and next to the index; read by `data`.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, SerializeAsAny, WithJsonSchema, model_validator

from disttrain_cli.spec.files import Strict, fingerprint
from disttrain_cli.spec.heads import (
    AudioInput,
    Head,
    ImageInput,
    Item,
    Rows,
    TargetInput,
    number_of,
)
from disttrain_cli.spec.library_images import LIBRARY_HEADS, LibraryItems
from disttrain_cli.spec.plugins import with_plugins

#: Modality spec classes by item, including those of other packages.
HEADS: dict[str, type[Head]] = with_plugins(
    "disttrain.heads", {"image": ImageInput, "target": TargetInput, "audio": AudioInput}
)

#: Token positions: by index in the sample, or by time, row and column (M-RoPE).
Positions = Literal["1d", "mrope"]


def _head(value: Any) -> Head:
    """Parse a modality spec of any modality from JSON."""
    if isinstance(value, Head):
        return value
    item = value.get("item") if isinstance(value, dict) else None
    if item not in HEADS:
        raise ValueError(f"item must be one of {', '.join(HEADS)}")
    kind = (LIBRARY_HEADS if "form" in value else HEADS)[item]
    return kind.model_validate(value)


class ModelInputs(Strict):
    """Everything that the data subpackage needs to know of a model."""

    llm: str = Field(description="Name of the LLM module.")
    vocabulary: int = Field(ge=1)
    sequence_length: int = Field(ge=16)
    windows: list[int] = Field(
        default_factory=list,
        description="Attention window of each LLM block: number of previous tokens of a sample"
        " that a token attends to, itself included; empty if all blocks attend to all tokens.",
    )
    positions: Positions = Field(
        "1d",
        description="Number of position ids per LLM token: one, counted within its sample, or"
        " three (time, row and column) for multimodal rotary embeddings.",
    )
    heads: list[
        Annotated[
            SerializeAsAny[Head],
            PlainValidator(_head),
            WithJsonSchema(
                {
                    "anyOf": [
                        one.model_json_schema()
                        for one in (*HEADS.values(), *LIBRARY_HEADS.values())
                    ]
                }
            ),
        ]
    ] = Field(
        default_factory=list,
        description="Modality specs of all encoders and generators, in the model's order. Those"
        " with the same item process the same items: image encoders see every image, cut into the"
        " same patches; generators learn to generate the same images, each at its size.",
    )

    @model_validator(mode="after")
    def _same_patches(self) -> ModelInputs:
        if (
            len(
                {
                    (
                        *(head.patch_px, head.merge, head.channels, head.max_pixels),
                        *(head.processor, head.video),
                    )
                    for head in self.images
                }
            )
            > 1
        ):
            raise ValueError(
                "image encoders must have equal patch_px, merge, channels, max_pixels, processor"
                " and video: their tokens are added one by one"
            )
        return self

    def of(self, item: Item) -> list[Head]:
        """Return the modality specs for an item, in the model's order."""
        return [head for head in self.heads if head.item == item]

    def decoding(self, item: Item) -> list[Head]:
        """Return the modality specs for which an item's file is decoded.

        Generators whose latents are cached are excluded.
        """
        return [
            head
            for head in self.of(item)
            if not (isinstance(head, TargetInput) and head.cached_latents)
        ]

    def head(self, module: str) -> Head | None:
        """Return a module's modality spec; None for the LLM."""
        return next((head for head in self.heads if head.module == module), None)

    def item(self, module: str) -> Item:
        """Return the kind of item that a module processes."""
        head = self.head(module)
        return "sequence" if head is None else head.item

    @property
    def images(self) -> list[ImageInput]:
        """Specs of every image encoder, in the model's order."""
        return [head for head in self.heads if isinstance(head, ImageInput)]

    @property
    def reads_videos(self) -> bool:
        """True if an encoder reads videos."""
        return any(getattr(head, "video", None) is not None for head in self.heads)

    @property
    def image(self) -> ImageInput | None:
        """Spec of the first image encoder."""
        return next(iter(self.images), None)

    @property
    def targets(self) -> list[TargetInput]:
        """Specs of every generator, in the model's order."""
        return [head for head in self.heads if isinstance(head, TargetInput)]

    @property
    def target(self) -> TargetInput | None:
        """Spec of the first generator."""
        return next(iter(self.targets), None)

    @property
    def encoders(self) -> list[str]:
        """Names of the encoders: parallel branches that send their outputs to the LLM."""
        return [head.module for head in self.heads if not isinstance(head, TargetInput)]

    @property
    def generators(self) -> list[str]:
        """Names of the generators: parallel branches that receive the LLM's output."""
        return [head.module for head in self.targets]

    def rows(self, item: Item, column: str) -> Rows:
        """Return the rows of an item in a state tensor; "COLUMN.N" are those of its spec N.

        For a sequence all of its rows.
        """
        if item == "sequence":
            return Rows(self.sequence_length)
        name, number = column.partition(".")[0], number_of(column)
        return self.of(item)[number].rows(name)

    def length_sq(self, lengths: Any) -> Any:
        """Return the pairs of tokens within an LLM block's window, in samples of these lengths.

        An int64 array: length² without windows; the mean over blocks if their windows differ.
        Causal attention computes half.
        """
        import numpy as np

        lengths, windows = np.asarray(lengths, dtype=np.int64), Counter(self.windows)
        hidden = np.zeros_like(lengths)
        for window, blocks in windows.items():
            beyond = np.maximum(0, lengths - window)
            hidden += blocks * beyond * (beyond + 1)
        return lengths**2 - hidden // max(1, windows.total())

    def target_of(self, generator: str) -> TargetInput:
        """Return a generator's modality spec."""
        return next(head for head in self.targets if head.module == generator)

    def fingerprint(self) -> str:
        return fingerprint(self)

    def moved(self, folder: Path) -> ModelInputs:
        """Return the inputs with processors of the published model in `folder`."""
        heads = [
            head.model_validate(head.model_dump() | {"folder": str(folder)})
            if isinstance(head, LibraryItems)
            else head
            for head in self.heads
        ]
        return self.model_copy(update={"heads": heads})

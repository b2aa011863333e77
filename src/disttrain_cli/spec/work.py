"""Work: the three amounts that every cost of a layer depends on (time, memory, FLOPs)."""

from __future__ import annotations

from typing import NamedTuple


class Work(NamedTuple):
    """Amounts that one forward of a module processes.

    encoder    items = images read, tokens = their patches, sum_length_sq = Σ patches² per
               image; or audio clips and their positions
    llm        items = packed sequences, tokens = their unpadded tokens, sum_length_sq =
               Σ length² per sample, or its rest with windows (`ModelInputs.length_sq`)
    generator  items = images generated, tokens = their latent pixels, sum_length_sq =
               Σ pixels² per image
    """

    items: float = 0.0
    tokens: float = 0.0
    sum_length_sq: float = 0.0

    def __add__(self, other: object) -> Work:
        assert isinstance(other, tuple)
        return Work(self[0] + other[0], self[1] + other[1], self[2] + other[2])

    def scaled(self, factor: float) -> Work:
        """Return the same mix of sizes, multiplied by `factor`."""
        return Work(self.items * factor, self.tokens * factor, self.sum_length_sq * factor)

"""Common parts of image encoders that are plain transformers over square patches.

These are ViT, and the vision towers of CLIP, SigLIP and Idefics3; `projectors` connects them to the
LLM. Images keep their own grid: position embeddings are interpolated to it, and images of equal
grid (which are adjacent) are embedded as one batch. Rows of an image: the class token if the class
has one, then its patches in raster order. Attention covers the entire image, of all images in one
call (`attention`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from disttrain_cli.models.attention import Segments, not_empty, segments_of
from disttrain_cli.models.division import colwise, rowwise
from disttrain_cli.models.group import Group
from disttrain_cli.models.host import to_device
from disttrain_cli.models.layer import Batch, PipelineLayer, TensorSpec, embeds_name
from disttrain_cli.models.parallel import across, split

Ints = NDArray[np.int64]

#: Output for the LLM of the first image encoder.
EMBEDS = embeds_name("image")


def runs(grids: list[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Yield runs of equal grids as (images, patch rows, patch columns)."""
    for (rows, columns), group in groupby(grids):
        yield sum(1 for _ in group), rows, columns


def by_grid(rows_RD: Tensor, grids: list[tuple[int, int]], extra: int) -> Iterator[Tensor]:
    """Yield views [N, P + extra, D] of rows [R, D], one per run of equal grids."""
    start = 0
    for images, rows, columns in runs(grids):
        length = rows * columns + extra
        yield rows_RD[start : start + images * length].unflatten(0, (images, length))
        start += images * length
    assert start == len(rows_RD), "rows do not match the grids"


def rows_of(grids: list[tuple[int, int]], extra: int) -> list[int]:
    """Return the rows of each image."""
    return [rows * columns + extra for rows, columns in grids]


def count(grids: list[tuple[int, int]], extra: int) -> int:
    """Return the rows of all images together."""
    return sum(rows_of(grids, extra))


def own_runs(
    grids: list[tuple[int, int]], extra: int, own: slice
) -> Iterator[tuple[int, int, int, slice, slice]]:
    """Yield each run of equal grids that overlaps a rank's `own` rows of all images.

    As (index of the run, patch rows, patch columns, images with own rows, own rows among these
    images' rows). A rank without rows gets the first run with empty slices.
    """
    start = 0
    for number, (images, rows, columns) in enumerate(runs(grids)):
        length = rows * columns + extra
        first, stop = max(own.start, start) - start, min(own.stop - start, images * length)
        if first < stop or (number == 0 and own.start == own.stop):
            some = slice(first // length, -(-stop // length)) if first < stop else slice(0, 0)
            before = some.start * length
            rows_of_them = slice(first - before, stop - before) if first < stop else slice(0, 0)
            yield number, rows, columns, some, rows_of_them
        start += images * length


def images_of(batch: Batch, extra: int, like: Tensor, cp: Group | None) -> Segments:
    """Return the rows of each image, which attend to each other."""
    return segments_of(
        batch.cache, f"images + {extra}", lambda: rows_of(batch.of("image").grids, extra), like, cp
    )


def positions(
    table_PD: Tensor, rows: int, columns: int, mode: Literal["bicubic", "bilinear"] = "bicubic"
) -> Tensor:
    """Return a square grid's position embeddings, interpolated if needed: [rows · columns, D].

    As in transformers' classes: most bicubic (`interpolate_pos_encoding`), others bilinear between
    the grids' corners; one axis after the other by its taps, whose backward is deterministic on any
    device, unlike that of `interpolate`.
    """
    side = round(len(table_PD) ** 0.5)
    if (rows, columns) == (side, side):
        return table_PD
    made = table_PD.float().unflatten(0, (side, side))
    for axis, length in enumerate((rows, columns)):
        positions, weights = taps(side, length, made.device, mode)
        each = made.index_select(axis, positions.flatten()).unflatten(axis, tuple(positions.shape))
        made = (each * weights.view(*weights.shape, *(1,) * (2 - axis))).sum(axis + 1)
    return made.flatten(0, 1).to(table_PD.dtype)


@lru_cache(maxsize=1024)
def taps(side: int, length: int, device: torch.device, mode: str) -> tuple[Tensor, Tensor]:
    """Return input positions and weights for interpolating `side` values to `length`.

    Each is [length, 4], or [length, 2] for bilinear, or fewer.
    """
    corners = mode == "bilinear"
    with torch.device("cpu"):
        each = functional.interpolate(
            torch.eye(side)[None, :, :, None], size=(length, 1), mode=mode, align_corners=corners
        )
    weights = each[0, :, :, 0].T  # [length, side]
    positions = weights.abs().topk(min(2 if corners else 4, side)).indices
    return to_device(positions, device), to_device(weights.gather(1, positions), device)


class ImageLayer(PipelineLayer):
    """Layer whose items are the images read."""

    by_rows = True
    extra: int = 0  # rows of an image before its patches
    index: int = 0  # index of the encoder among the model's image encoders

    def with_index(self, index: int) -> PipelineLayer:
        """Assign the layer to a further image encoder, with batch fields and tensors of its own.

        Only those names change of which both encoders have one.
        """
        self.index = index
        self.needs = tuple(f"image.{index}" if name == "image" else name for name in self.needs)
        self.writes = tuple(
            replace(
                spec,
                name=embeds_name("image", index) if spec.name == EMBEDS else spec.name,
                rows=f"patches.{index}" if spec.rows == "patches" else spec.rows,
            )
            for spec in self.writes
        )
        return self

    def forward(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        written = super().forward(state, batch)
        if not self.index:
            return written
        return {
            embeds_name("image", self.index) if name == EMBEDS else name: tensor
            for name, tensor in written.items()
        }

    def seeded_rows(self, batch: Batch) -> tuple[Tensor | None, list[int]]:
        items = batch.of("image")
        return items.seeds, rows_of(items.grids, self.extra)

    def is_empty(self, state: dict[str, Tensor], batch: Batch) -> bool:
        return not batch.of("image").grids

    def rows(self, batch: Batch) -> int:
        """Return the image rows, including extra ones, that this rank's TP group processes."""
        own = self.of_group(count(batch.of("image").grids, self.extra))
        return own.stop - own.start

    def own_embedded(
        self,
        batch: Batch,
        conv: tuple[Tensor, Tensor | None],
        placed: Callable[[int, int], Tensor] | None,
        order: Callable[[int, int], Ints] | None = None,
    ) -> Tensor:
        """Return [R, D] local rows of a rank in a CP group: a convolution of their patches only.

        Args:
            conv: its kernel [D, C, p, p] and bias.
            placed: returns for a grid the values added to an image's rows, [P + extra, D]: extra
                rows consist of these alone.
            order: returns for a grid the patches' raster indices in the rows' order; None: raster
                order.
        """
        kernel, bias = conv
        side, hidden = kernel.shape[-1], []
        runs_NCHW = self.pixels(batch)
        grids = batch.of("image").grids
        for number, rows, columns, images, own in own_runs(
            grids, self.extra, self.of_group(count(grids, self.extra))
        ):
            image, place = np.divmod(np.arange(own.start, own.stop), rows * columns + self.extra)
            seen = np.flatnonzero(place >= self.extra)
            patch = place[seen] - self.extra
            patch = patch if order is None else order(rows, columns)[patch]
            grid = runs_NCHW[number][images].unflatten(3, (columns, side))
            grid = grid.unflatten(2, (rows, side)).permute(0, 2, 4, 1, 3, 5)  # [n, h, w, C, p, p]
            at, *places = (
                to_device(torch.from_numpy(numbers), kernel.device)
                for numbers in (seen, image[seen], patch // columns, patch % columns)
            )
            pixels = grid[tuple(places)].flatten(1).to(kernel.dtype)
            made = functional.linear(pixels, kernel.flatten(1), bias)
            if placed is not None:
                table = placed(rows, columns).expand(images.stop - images.start, -1, -1)
                made = table.flatten(0, 1)[own].index_add(0, at, made)
            hidden.append(made)
        return torch.cat(hidden)

    def pixels(self, batch: Batch) -> list[Tensor]:
        """Return [n, C, H, W] of each run of equal grids."""
        return batch.of("image").values[self.index]


class PatchEmbed(ImageLayer):
    """Pixels [N, C, H, W] → a convolution of each patch, plus its position: CLIP and SigLIP.

    A class with a class token starts each image with it and normalises the sum (`pre_norm`).
    """

    kind = "embed"
    needs = ("image",)

    def __init__(self, module: str, config: Any, class_token: bool) -> None:
        super().__init__()
        width, side = config.hidden_size, config.image_size // config.patch_size
        self.name, self.module, self.extra = f"{module}.embed", module, int(class_token)
        self.writes = (TensorSpec("image_hidden", "image", "patches", (width,), split=True),)
        self.patch_embedding = nn.Conv2d(
            config.num_channels, width, config.patch_size, config.patch_size, bias=not class_token
        )
        self.position_embedding = nn.Embedding(side * side + class_token, width)
        self.class_embedding = nn.Parameter(torch.empty(width)) if class_token else None
        self.pre_norm = (
            nn.LayerNorm(width, eps=config.layer_norm_eps) if class_token else nn.Identity()
        )
        names = (
            "patch_embedding",
            "position_embedding",
            *(("class_embedding",) if class_token else ()),
        )
        self.published = {
            **{name: f"embeddings.{name}" for name in names},
            "pre_norm": "pre_layrnorm",
        }

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        if self.cp is None:
            hidden = torch.cat([self._embed(pixels).flatten(0, 1) for pixels in self.pixels(batch)])
        else:
            conv = self.patch_embedding
            hidden = self.own_embedded(batch, (conv.weight, conv.bias), self._table)
        return {"image_hidden": self.pre_norm(split(hidden, self.group))}

    def _table(self, rows: int, columns: int) -> Tensor:
        """Return the values added to an image's rows, including the class token's row."""
        table = self.position_embedding.weight
        if self.class_embedding is None:
            return self.placed(table, rows, columns)
        first = (self.class_embedding + table[0])[None]
        return torch.cat([first, self.placed(table[1:], rows, columns)])

    def _embed(self, pixels: Tensor) -> Tensor:
        """Return [N, P + 1, D], or [N, P, D] without a class token."""
        table = self.position_embedding.weight
        grid = self.patch_embedding(pixels.to(table.dtype))  # [N, D, rows, columns]
        hidden_NPD = grid.flatten(2).transpose(1, 2)
        if self.class_embedding is None:
            return hidden_NPD + self.placed(table, *grid.shape[2:])
        first = (self.class_embedding + table[0]).expand(len(pixels), 1, -1)
        return torch.cat([first, hidden_NPD + self.placed(table[1:], *grid.shape[2:])], dim=1)

    def placed(self, table_PD: Tensor, rows: int, columns: int) -> Tensor:
        """Return the position embeddings of a grid's patches, [rows · columns, D]."""
        return positions(table_PD, rows, columns)


class Block(ImageLayer):
    """Encoder layer of CLIP or SigLIP."""

    kind = "block"
    row_by_row = True
    reads = ("image_hidden",)
    division = colwise("q_proj", "k_proj", "v_proj", "fc1") | rowwise("out_proj", "fc2")

    def __init__(self, module: str, number: int, config: Any, layer: nn.Module, extra: int) -> None:
        super().__init__()
        self.name, self.module, self.extra = f"{module}.block.{number}", module, extra
        self.writes = (
            TensorSpec("image_hidden", "image", "patches", (config.hidden_size,), split=True),
        )
        self.layer = layer
        heads = config.num_attention_heads
        self.exchanged = (heads, heads, config.hidden_size // heads)
        self.published = {"layer": f"encoder.layers.{number}"}

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        layer, hidden, rows = self.layer, state["image_hidden"], self.rows(batch)
        images = images_of(batch, self.extra, hidden, self.cp)

        def attend(normed_RD: Tensor) -> Tensor:
            return layer.self_attn(normed_RD[None], attention_mask=images)[0].flatten(0, 1)

        def attended(normed_RD: Tensor) -> Tensor:
            return not_empty(attend, normed_RD)

        hidden = hidden + across(attended, layer.layer_norm1(hidden), rows, self.group)
        hidden = hidden + across(layer.mlp, layer.layer_norm2(hidden), rows, self.group)
        return {"image_hidden": hidden}

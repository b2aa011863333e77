"""Projector of an image tower into the LLM's width, in the forms that published models have.

It consists of the tower's final norm, m × m neighbouring patches merged to one row (pixel shuffle),
and linears to the LLM's width:

- `mlp`: linear, GELU, linear, as in LLaVA.
- `norm_mlp`: the same after a norm of the merged rows, as in InternVL.
- `linear`: one linear without bias, as in Idefics3 and SmolVLM.

If the rows of tiles are those of a joined picture (`spec.joined_tiles`), each tile is followed by
as many rows of a learned `image_newline` as it has rows.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from disttrain_cli.models.building import LayerMaker
from disttrain_cli.models.context_parallel import bounds_of, regrouped
from disttrain_cli.models.division import REPLICATED, colwise, rowwise
from disttrain_cli.models.group import Group
from disttrain_cli.models.host import to_device
from disttrain_cli.models.layer import Batch, TensorSpec
from disttrain_cli.models.parallel import across, gather, split
from disttrain_cli.models.towers import EMBEDS, ImageLayer, Ints, by_grid, runs
from disttrain_cli.spec.runfile.model import Projector as Form


class Joint(NamedTuple):
    """Projector settings of a tower."""

    form: Form
    merge: int  # patches per side merged to one row
    hidden: int  # width between the linears, if there are two
    width: int  # the LLM's width
    newlines: int = 0  # rows of `image_newline` after those of an image


def merged(rows_RD: Tensor, grids: list[tuple[int, int]], merge: int, extra: int) -> Tensor:
    """Return m × m neighbouring patches concatenated, row by row: [Σ P / m², m·m·D].

    The `extra` first rows of an image are dropped.
    """
    blocks = []
    for view, (_, rows, columns) in zip(by_grid(rows_RD, grids, extra), runs(grids), strict=True):
        # [N, h, m, w, m, D]
        grid = view[:, extra:].unflatten(1, (rows // merge, merge, columns // merge, merge))
        blocks.append(grid.transpose(2, 3).flatten(3, 5).flatten(0, 2))
    return torch.cat(blocks)


@lru_cache(maxsize=1024)
def neighbours(rows: int, columns: int, merge: int) -> Ints:
    """Return [rows · columns] raster indices of a grid's patches, in the order of `merged`."""
    numbers = np.arange(rows * columns).reshape(rows // merge, merge, columns // merge, merge)
    return numbers.swapaxes(1, 2).ravel()


def own_merged(
    own_RD: Tensor, grids: list[tuple[int, int]], merge: int, extra: int, newlines: int, cp: Group
) -> tuple[Tensor, Ints]:
    """Return the merged blocks among a CP rank's local rows, and the position of each row.

    As `merged`, from local rows: the blocks [B, m·m·D] among the local part of the rows that the
    LLM reads, and for each of these rows [R'] the index of its block, or B for a newline.
    """
    patches, is_block, start = [], [], 0
    for images, rows, columns in runs(grids):
        length = rows * columns + extra
        starts = start + extra + length * np.arange(images)
        patches.append((starts[:, None] + neighbours(rows, columns, merge)).ravel())
        one = np.arange(rows * columns // merge**2 + newlines) < rows * columns // merge**2
        is_block.append(np.tile(one, images))
        start += images * length
    seen = np.concatenate(is_block)
    bounds = bounds_of(len(seen), cp)
    blocks = np.concatenate([[0], np.cumsum(seen)])[bounds]  # before each rank's rows
    taken = regrouped(own_RD, np.concatenate(patches), bounds_of(start, cp), blocks * merge**2, cp)
    mine = seen[bounds[cp.rank] : bounds[cp.rank + 1]]
    places = np.where(mine, np.cumsum(mine) - 1, mine.sum())
    return taken.unflatten(0, (-1, merge**2)).flatten(1), places


class Projector(ImageLayer):
    """Final norm, class token dropped, m × m patches merged, two-layer MLP to the LLM's width.

    `norm` is the name of the final norm in the published weights; None if an inner block's output
    is read, or the tower has none.
    """

    kind = "projector"
    reads = ("image_hidden",)
    division = colwise("mlp.0") | rowwise("mlp.2")

    def __init__(
        self, module: str, config: Any, norm: str | None, extra: int, joint: Joint
    ) -> None:
        super().__init__()
        self.name, self.module, self.merge = f"{module}.projector", module, joint.merge
        self.extra, self.newlines = extra, joint.newlines
        self.writes = (TensorSpec(EMBEDS, "image", "tokens", (joint.width,), split=True),)
        self.norm = (
            nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if norm else nn.Identity()
        )
        self.published = {"norm": norm} if norm else {}
        self.join(joint.merge**2 * config.hidden_size, joint)
        self.image_newline = nn.Parameter(torch.empty(joint.width)) if joint.newlines else None

    def join(self, given: int, joint: Joint) -> None:
        """Create the linears from merged rows, `given` wide, to the LLM's width."""
        self.mlp = nn.Sequential(
            nn.Linear(given, joint.hidden), nn.GELU(), nn.Linear(joint.hidden, joint.width)
        )

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        def project(normed_RD: Tensor) -> Tensor:
            if self.cp is not None:
                blocks, places = own_merged(
                    normed_RD, grids, self.merge, self.extra, self.newlines, self.cp
                )
                made = self.project(blocks)
                return made if self.image_newline is None else self._own_newlines(made, places)
            made = self.project(merged(normed_RD, grids, self.merge, self.extra))
            return made if self.image_newline is None else self._with_newlines(made, grids)

        grids = batch.of("image").grids
        normed = self.norm(state["image_hidden"])
        return {EMBEDS: across(project, normed, self.rows(batch), self.group)}

    def project(self, merged_TD: Tensor) -> Tensor:
        """Project merged rows to the LLM's width."""
        made: Tensor = self.mlp(merged_TD)
        return made

    def _with_newlines(self, made_TD: Tensor, grids: list[tuple[int, int]]) -> Tensor:
        """Return the rows with `image_newline` rows appended to those of each image."""
        newline_D = self._newline()
        merged_grids = [(rows // self.merge, columns // self.merge) for rows, columns in grids]
        blocks = [
            torch.cat([view, newline_D.expand(len(view), self.newlines, -1)], dim=1).flatten(0, 1)
            for view in by_grid(made_TD, merged_grids, extra=0)
        ]
        return torch.cat(blocks)

    def _own_newlines(self, made_BD: Tensor, places: Ints) -> Tensor:
        """Return a CP rank's local blocks and newlines, in order."""
        rows = torch.cat([made_BD, self._newline()[None]])
        return rows.index_select(0, to_device(torch.from_numpy(places), rows.device))

    def _newline(self) -> Tensor:
        """Return an `image_newline` row; zeros on all ranks of a TP group but the first."""
        assert self.image_newline is not None
        first = self.group is None or not self.group.rank
        return self.image_newline if first else torch.zeros_like(self.image_newline)


class NormedProjector(Projector):
    """`Projector` with a norm of the merged rows before its MLP."""

    def join(self, given: int, joint: Joint) -> None:
        super().join(given, joint)
        self.merged_norm = nn.LayerNorm(given)

    def project(self, merged_TD: Tensor) -> Tensor:
        # every rank normalises all rows: local patches may end inside one
        return super().project(self.merged_norm(merged_TD))


class LinearProjector(Projector):
    """One linear without bias, replicated over a TP group; each rank computes its local rows."""

    division = REPLICATED

    def join(self, given: int, joint: Joint) -> None:
        self.linear = nn.Linear(given, joint.width, bias=False)

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        grids = batch.of("image").grids
        normed = gather(self.norm(state["image_hidden"]), self.rows(batch), self.group)
        if self.cp is None:
            blocks = merged(normed, grids, self.merge, self.extra)
        else:
            blocks, _ = own_merged(normed, grids, self.merge, self.extra, 0, self.cp)
        return {EMBEDS: self.linear(split(blocks, self.group))}


#: Projectors by the values of `ModuleSpec.projector`.
FORMS: dict[Form, type[Projector]] = {
    "mlp": Projector,
    "norm_mlp": NormedProjector,
    "linear": LinearProjector,
}


def projector(
    module: str, config: Any, norm: str | None, extra: int, joint: Joint, std: float
) -> LayerMaker:
    """Return the factory of a tower's last layer."""
    return LayerMaker(partial(FORMS[joint.form], module, config, norm, extra, joint), std)

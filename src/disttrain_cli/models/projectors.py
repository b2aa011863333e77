"""What joins an image tower to the LLM: its final norm, m × m neighbouring patches merged to one
row (pixel shuffle), and linears to the LLM's width, in the forms that published models have.

- `mlp`: linear, GELU, linear, as LLaVA's.
- `norm_mlp`: the same behind a norm of the merged rows, as InternVL's.
- `linear`: one linear without bias, as Idefics3's and SmolVLM's.

Where rows of tiles are those of a joined picture (`spec.joined_tiles`), as many rows of a learned
`image_newline` as a tile has rows stand behind those of each tile.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from disttrain_cli.models.building import LayerMaker
from disttrain_cli.models.context_parallel import bounds_of, regrouped
from disttrain_cli.models.division import Division
from disttrain_cli.models.group import Group
from disttrain_cli.models.host import to_device
from disttrain_cli.models.layer import Batch, TensorSpec
from disttrain_cli.models.parallel import across, gather, split
from disttrain_cli.models.towers import EMBEDS, ImageLayer, Ints, by_grid, runs
from disttrain_cli.spec.runfile.model import Projector as Form


class Joint(NamedTuple):
    """How a tower is joined to the LLM."""

    form: Form
    merge: int  # patches per side of what becomes one row
    hidden: int  # width between the linears, where there are two
    width: int  # of the LLM
    newlines: int = 0  # rows of `image_newline` behind those of an image


def merged(rows_RD: Tensor, grids: list[tuple[int, int]], merge: int, extra: int) -> Tensor:
    """m × m neighbouring patches side by side, row by row, [Σ P / m², m·m·D]; the `extra` first
    rows of an image are dropped."""
    blocks = []
    for view, (_, rows, columns) in zip(by_grid(rows_RD, grids, extra), runs(grids), strict=True):
        # [N, h, m, w, m, D]
        grid = view[:, extra:].unflatten(1, (rows // merge, merge, columns // merge, merge))
        blocks.append(grid.transpose(2, 3).flatten(3, 5).flatten(0, 2))
    return torch.cat(blocks)


@lru_cache(maxsize=1024)
def neighbours(rows: int, columns: int, merge: int) -> Ints:
    """[rows · columns] patches of a grid, by their number in raster order, in the order of
    `merged`."""
    numbers = np.arange(rows * columns).reshape(rows // merge, merge, columns // merge, merge)
    return numbers.swapaxes(1, 2).ravel()


def own_merged(
    own_RD: Tensor, grids: list[tuple[int, int]], merge: int, extra: int, newlines: int, cp: Group
) -> tuple[Tensor, Ints]:
    """As `merged`, of a rank of a CP group with own rows: the blocks among the rows that it has of
    what the LLM will see, [B, m·m·D], and where these rows are, [R']: a block's number, or B of a
    newline."""
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
    """Final norm, class token dropped, m × m neighbouring patches merged, two-layer MLP to the
    LLM's width.

    `norm` is the name of the final norm in the published weights; None where an inner block's
    output is read, or the tower has none.
    """

    kind = "projector"
    reads = ("image_hidden",)
    division = Division(column=("mlp.0",), row=("mlp.2",))

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
        """Make what maps merged rows, `given` wide, to the LLM's width."""
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
        """What merged rows become."""
        made: Tensor = self.mlp(merged_TD)
        return made

    def _with_newlines(self, made_TD: Tensor, grids: list[tuple[int, int]]) -> Tensor:
        """Rows of `image_newline` behind those of each image."""
        newline_D = self._newline()
        merged_grids = [(rows // self.merge, columns // self.merge) for rows, columns in grids]
        blocks = [
            torch.cat([view, newline_D.expand(len(view), self.newlines, -1)], dim=1).flatten(0, 1)
            for view in by_grid(made_TD, merged_grids, extra=0)
        ]
        return torch.cat(blocks)

    def _own_newlines(self, made_BD: Tensor, places: Ints) -> Tensor:
        """The same where a CP group has the rows: own blocks and newlines at their places."""
        rows = torch.cat([made_BD, self._newline()[None]])
        return rows.index_select(0, to_device(torch.from_numpy(places), rows.device))

    def _newline(self) -> Tensor:
        """A row of `image_newline`; of a TP group's partial sums the first rank has it."""
        assert self.image_newline is not None
        first = self.group is None or not self.group.rank
        return self.image_newline if first else torch.zeros_like(self.image_newline)


class NormedProjector(Projector):
    """The same behind a norm of the merged rows."""

    def join(self, given: int, joint: Joint) -> None:
        super().join(given, joint)
        self.merged_norm = nn.LayerNorm(given)

    def project(self, merged_TD: Tensor) -> Tensor:
        # every rank norms all rows: own patches may end inside one
        return super().project(self.merged_norm(merged_TD))


class LinearProjector(Projector):
    """One linear without bias: over a TP group every rank has it whole, and makes its own rows."""

    division = Division()

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


#: By the values of `ModuleSpec.projector`.
FORMS: dict[Form, type[Projector]] = {
    "mlp": Projector,
    "norm_mlp": NormedProjector,
    "linear": LinearProjector,
}


def projector(
    module: str, config: Any, norm: str | None, extra: int, joint: Joint, std: float
) -> LayerMaker:
    """The last layer of a tower."""
    return LayerMaker(partial(FORMS[joint.form], module, config, norm, extra, joint), std)

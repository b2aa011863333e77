"""What a pipeline layer is: a module that maps a dict of named tensors to a dict, and says which it
reads and writes.

State tensors are rows: the first dimension counts rows, and every item (a packed sequence, an image
read, an audio clip, an image to be generated) owns a known number of them, so that any set of items
can be cut out, sent to another rank and put back in order without looking at the values
(`data.slots` has the row counts).

Shape letters used in this room:
    N items · R rows · M sequences of a microbatch · L sequence length · D hidden width
    P patches of an image, positions of a clip · K context tokens of a generated image
    C channels · H, W height, width
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from disttrain_cli.models.attention import Segments
from disttrain_cli.models.division import Division
from disttrain_cli.spec.heads import Item
from disttrain_cli.spec.runfile.model import PROJECTORS

if TYPE_CHECKING:
    from disttrain_cli.models.group import Group


@dataclass(frozen=True)
class TensorSpec:
    """A named state tensor [R, *shape]: whose rows it holds, how many per item, and the shape of a
    row.

    `rows` names what an item's head counts (`spec.heads.Head.rows`): "tokens" in the LLM; of an
    image "patches" (with extra tokens; "patches.N" of encoder N), of a clip "positions", of an
    image to be generated "one".

    Over a TP or CP group every rank has the whole tensor, or with `split` its own rows
    (`division.Place`).
    """

    name: str
    item: Item
    rows: str
    shape: tuple[int, ...]
    split: bool = False


@dataclass(frozen=True)
class Shared:
    """Of which of the items' rows each place in `Items.rows` is, where not of each in its order."""

    numbers: NDArray[np.int64]  # ascending, in the order of all
    tokens: int  # of all


@dataclass(frozen=True)
class Items:
    """The items of one modality that a replica works on in a slot, in its own order; fields that a
    stage did not ask for are None."""

    grids: list[tuple[int, int]]  # (rows, columns) of each; equal grids are adjacent; always come
    #: of the encoders or generators whose layers are on the stage, by their number among those of
    #: the modality: per run of equal grids [n, …]
    values: Mapping[int, list[Tensor]] = field(default_factory=dict)
    # [R] int64, positions in M·L of their tokens, in their order; of a CP group, places among the
    # rank's own tokens of those that are there
    rows: Tensor | None = None
    shared: Shared | None = None  # where a CP group has the tokens, or not every row is one token
    shares: Tensor | None = None  # [R] float32, of the rows in these tokens; None = whole ones
    seeds: Tensor | None = None  # [N] int64, from (seed, step, sample), the same on any rank
    weights: Tensor | None = None  # [N] float32, 0 = could not be decoded; of targets
    noise_seeds: Tensor | None = None  # [N] int64, as `seeds`; of targets

    def __len__(self) -> int:
        return len(self.grids)


@dataclass(frozen=True)
class Batch:
    """What one replica works on in one slot, as tensors on its device; fields a stage did not ask
    for are None.

    Items and sequences are in the replica's own order, which every state tensor follows.
    """

    items: Mapping[Item, Items] = field(default_factory=dict)  # by modality
    # [M, L] int64; of a CP group this and the next two have the rank's own tokens only, as [1, R]
    token_ids: Tensor | None = None
    # [M, L] int64, restarting with every sample; [3, M, L] with M-RoPE
    positions: Tensor | None = None
    # of all M·L rows: tokens of each sample, and a sequence's padding as one
    sample_lengths: list[int] | None = None
    sample_seeds: Tensor | None = None  # int64, one for each of them, as those of items
    labels: Tensor | None = None  # [M, L] int64, the next token, -100 = not trained
    label_tokens: float = 1.0  # label tokens of the whole global batch
    targets: float = 1.0  # images to generate of the whole global batch
    #: by module whose items are dealt out over a TP group (`replicated`), this rank's share; what
    #: the module reads is there alone
    shares: Mapping[str, Share] = field(default_factory=dict)
    # what the layers of a stage made of the batch, once for all
    cache: dict[str, Any] = field(default_factory=dict)

    def of(self, item: Item) -> Items:
        """The items of a modality."""
        return self.items.get(item, NOTHING)

    def tensors(self) -> list[Tensor]:
        """All tensors of the batch, with what was made of them so far."""
        made = [
            value.tensors() for value in self.cache.values() if isinstance(value, (Segments, Batch))
        ]
        made += [share.batch.tensors() for share in self.shares.values()]
        items = [vars(fields) for fields in self.items.values()]
        return [
            value for value in tree_leaves([vars(self), made, items]) if isinstance(value, Tensor)
        ]


@dataclass(frozen=True)
class Share:
    """A TP rank's share of the items that its replica brings to a module in a slot
    (`replicated`)."""

    batch: Batch  # of the rank's own items
    owner: NDArray[np.int64]  # [N] TP rank of each of the replica's items, in the replica's order
    counts: Callable[[TensorSpec], NDArray[np.int64]]  # [N] rows of each item in a state tensor


NOTHING = Items([])

#: What an encoder leaves for the LLM is named ITEM_embeds, of a further one ITEM_embeds.N.
EMBEDS = "_embeds"


def embeds_name(item: Item, number: int = 0) -> str:
    """Name of what encoder `number` of a modality leaves for the LLM, which reads the sum."""
    return f"{item}{EMBEDS}.{number}" if number else f"{item}{EMBEDS}"


def features_name(level: int) -> str:
    """Name of what an image encoder's inner block leaves for block `level` of the LLM."""
    return f"image_features.{level}"


#: State names with this prefix are summed losses (scalars), already weighted and normalised by
#: global counts.
LOSS_PREFIX = "loss/"


#: An adapter's two matrices, as peft names them: B (A x) beside a linear layer.
ADAPTER = ("lora_A", "lora_B")


def is_adapter(path: str) -> bool:
    """Whether a parameter is of an adapter."""
    return any(part in ADAPTER for part in path.split("."))


class PipelineLayer(nn.Module):
    """The smallest piece that can be placed on a stage.

    Subclasses set the attributes below and implement `compute`; `forward` skips the computation
    when the layer's items are none (deepspeed trap 29) and emits empty tensors instead.
    """

    name: str  # "llm.block.3": unique in the model, stable over layouts
    module: str  # "llm"
    kind: str  # cost kind: layers of equal kind have equal costs ("block")
    reads: tuple[str, ...] = ()  # state tensors it needs
    writes: tuple[TensorSpec, ...] = ()  # state tensors it leaves (also those it replaces)
    #: groups of batch fields: "ITEM" (what encoder or generator 0 of a modality reads), "ITEM.N"
    #: (the same of number N), "tokens" (ids, and rows of what encoders made), "rows" (the latter
    #: alone), "layout" (positions, sample_lengths), "context" (rows of targets), "labels",
    #: "weights" (of targets, with noise_seeds), "dropout" (seeds, of
    #: samples with the layout)
    needs: tuple[str, ...] = ()
    loss: str | None = None  # name of the loss it adds ("text"), if any
    frozen: bool = False  # never trained and never differentiated (a generator's VAE)
    # of its module's weights only adapters, and `saved`, are ever trained (`lora`)
    adapted: bool = False
    saved: frozenset[str] = frozenset()  # paths of parameters that are trained beside adapters
    # whether it is a projector that the published model has as a part of the module (Qwen-VL's
    # merger): its weights are trained as projectors, unless the module has adapters
    joint: bool = False
    # whether this run trains any of its weights; set when a stage is put together, as is the next
    trained: bool = True
    passes: bool = True  # whether gradients of its inputs are asked for
    division: Division = Division()  # over a tensor-parallel group
    # over a TP group it works on own rows of its tensors, else on whole tensors (`parallel`)
    by_rows: bool = False
    # by rows, and its divided linears take all rows of the group as they are and leave as many:
    # chunks of them can travel behind the products (`overlapped`)
    row_by_row: bool = False
    # heads of its attention that a CP group may share: of queries, of keys and values, their width
    exchanged: tuple[int, int, int] | None = None
    # whether these are views of one tensor, which stays whole for the values where nobody shares it
    fused_heads: bool = False
    group: Group | None = None  # its TP group, if it shares its computation with others
    cp: Group | None = None  # its CP group, if it shares its tokens with others
    first_id: int | None = None  # first token id of a vocabulary shard; None = the whole vocabulary
    # names of vectors that start as another number than ones ("weight") and zeros (all others)
    starts: Mapping[str, float] = {}
    # prefixes of its parameters' paths → prefixes in the published model's weights
    published: Mapping[str, str] = {}
    # paths of its parameters that are another layer's → (that layer, the path there) (`tying`)
    tied: Mapping[str, tuple[str, str]] = {}
    dropouts: Sequence[nn.Module] = ()  # parts that drop numbers by its items' seeds (`dropout`)
    # the published model that `published` speaks of
    weights_of: Literal["module", "vae"] = "module"

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        """Map the tensors named in `reads` to those in `writes` (plus `loss/NAME`)."""
        raise NotImplementedError

    def is_empty(self, state: dict[str, Tensor], batch: Batch) -> bool:
        """Whether the replica has nothing for this layer in this slot."""
        raise NotImplementedError

    def of_group(self, rows: int) -> slice:
        """Of so many rows of its items those that this rank's TP group works on."""
        return slice(0, rows) if self.cp is None else self.cp.local_rows(rows)

    def own(self, all_R: Tensor, batch: Batch) -> Tensor:
        """Of what all rows of its items have, in their order, that of these rows."""
        return all_R[self.of_group(len(all_R))]

    def seeded_rows(self, batch: Batch) -> tuple[Tensor | None, list[int]]:
        """Seeds of its items, if the batch has them, and how many rows each has, on all ranks of a
        group together; what is dropped is drawn by them (`dropout`)."""
        raise NotImplementedError

    def forward(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        """`compute`, or empty tensors where there is nothing to compute."""
        if not self.is_empty(state, batch):
            return self.compute(state, batch)
        reference = next(self.parameters(), None)
        dtype = torch.float32 if reference is None else reference.dtype
        device = None if reference is None else reference.device
        return {
            spec.name: torch.zeros((0, *spec.shape), dtype=dtype, device=device)
            for spec in self.writes
        }

    def published_name(self, path: str) -> str | None:
        """What the published model calls a parameter; None where the parameter is ours alone
        (projectors) or an adapter's."""
        return None if is_adapter(path) else self.published_path(path)

    def published_path(self, path: str) -> str | None:
        """Where a part or a parameter of it is in the published model."""
        for name, theirs in self.published.items():
            if path == name or path.startswith(f"{name}."):
                return theirs + path[len(name) :]
        return None

    def trains(self, path: str) -> bool:
        """Whether a parameter is trained where its owner is."""
        own = self.adapted and self.owner_of(path) == self.module
        return not self.frozen and (not own or is_adapter(path) or path in self.saved)

    def ask_for_gradients(self, wanted: bool = True) -> None:
        """Have all parameters that can be trained ask for gradients, and no others; or none."""
        for path, parameter in self.named_parameters():
            parameter.requires_grad_(wanted and self.trains(path))

    def owner_of(self, path: str) -> str:
        """Name under which a parameter is trained and its learning rate is given: its module's, or
        "projectors".

        A projector's layer may begin with the module's own final norm, which the published model
        has: the module's.
        """
        added = self.kind == "projector" and self.published_path(path) is None
        return PROJECTORS if added or (self.joint and not self.adapted) else self.module

    def to_published(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors by the paths of this layer's parameters → tensors by the published model's
        names.

        Parameters that are ours alone are left out. A class that splits or fuses tensors says so
        here and in `from_published`.
        """
        named = ((self.published_name(path), tensor) for path, tensor in tensors.items())
        return {name: tensor for name, tensor in named if name is not None}

    def from_published(self, read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The inverse: (path, whole tensor) of every published parameter, read one at a time by the
        published name."""
        for path, _ in self.named_parameters():
            if (name := self.published_name(path)) is not None:
                yield path, read(name)

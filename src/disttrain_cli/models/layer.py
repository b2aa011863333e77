"""Pipeline layer: a module from a dict of named tensors to a dict, with declared reads and writes.

State tensors are rows: the first dimension counts rows, and every item (a packed sequence, an image
read, an audio clip, an image to be generated) owns a known number of them, so that any set of items
can be cut out, sent to another rank and put back in order without reading the values (`data.slots`
has the row counts).

Shape letters used in this folder:
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

from disttrain_cli.models.attention import tensors_in
from disttrain_cli.models.division import REPLICATED, Division
from disttrain_cli.spec.heads import Item
from disttrain_cli.spec.runfile.model import PROJECTORS

if TYPE_CHECKING:
    from disttrain_cli.models.group import Group


@dataclass(frozen=True)
class TensorSpec:
    """Named state tensor [R, *shape]: the item that owns its rows, rows per item, shape of a row.

    `rows` names a count of the item's modality spec (`spec.heads.Head.rows`): "tokens" in the LLM;
    for an image "patches" (with extra tokens; "patches.N" of encoder N), for a clip "positions",
    for an image to be generated "one".
    Over a TP or CP group every rank has the full tensor, or with `split` its local rows
    (`division.Place`).
    """

    name: str
    item: Item
    rows: str
    shape: tuple[int, ...]
    split: bool = False


@dataclass(frozen=True)
class Shared:
    """Item row of each entry of `Items.rows`, if they are not all item rows in order."""

    numbers: NDArray[np.int64]  # row indices, ascending, in the order of all items
    tokens: int  # rows of all items


@dataclass(frozen=True)
class Items:
    """Items of one modality that a replica processes in a slot, in its own order.

    Fields that a stage does not need are None.
    """

    grids: list[tuple[int, int]]  # (rows, columns) of each; equal ones adjacent; always present
    #: inputs of the encoders or generators on the stage, by index in the modality: per run of equal
    #: grids [n, …]
    values: Mapping[int, list[Tensor]] = field(default_factory=dict)
    # [R] int64, positions in M·L of their tokens, in order; in a CP group, indices among the rank's
    # local tokens, for the tokens there
    rows: Tensor | None = None
    at: NDArray[np.int64] | None = None  # on the host: positions of all rows among all tokens
    shared: Shared | None = None  # set if a CP group shares the tokens, or rows and tokens differ
    shares: Tensor | None = None  # [R] float32, weight of each row in its token; None = 1
    seeds: Tensor | None = None  # [N] int64, from (seed, step, sample), equal on all ranks
    weights: Tensor | None = None  # [N] float32, 0 = could not be decoded; targets only
    noise_seeds: Tensor | None = None  # [N] int64, as `seeds`; targets only
    #: of packed items, which are all runs of their own: their table, on the host
    #: (`spec.library_images.Packed`)
    tables: Mapping[int, list[NDArray[np.int64]]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.grids)


@dataclass(frozen=True)
class Batch:
    """Inputs of one replica in one slot, as tensors on its device; unneeded fields are None.

    Items and sequences are in the replica's own order, which every state tensor follows.
    """

    items: Mapping[Item, Items] = field(default_factory=dict)  # by modality
    # [M, L] int64; in a CP group this and the next two have the local tokens only, as [1, R]
    token_ids: Tensor | None = None
    # [M, L] int64, restarting with every sample; [3, M, L] with M-RoPE
    positions: Tensor | None = None
    # of all M·L rows: tokens of each sample; a sequence's padding counts as one
    sample_lengths: list[int] | None = None
    sample_seeds: Tensor | None = None  # int64, one per entry of `sample_lengths`, as for items
    labels: Tensor | None = None  # [M, L] int64, the next token, -100 = not trained
    label_tokens: float = 1.0  # label tokens of the entire global batch
    targets: float = 1.0  # images to generate in the entire global batch
    #: this rank's share by module whose items are distributed over a TP group (`replicated`); only
    #: the share has the module's inputs
    shares: Mapping[str, Share] = field(default_factory=dict)
    # tensors that layers of a stage compute once per batch and share
    cache: dict[str, Any] = field(default_factory=dict)

    def of(self, item: Item) -> Items:
        """Return the items of a modality."""
        return self.items.get(item, NOTHING)

    def tensors(self) -> list[Tensor]:
        """Return all tensors of the batch, including those cached so far."""
        fields = [vars(one) for one in (self, *self.items.values())]
        inner = [value for value in self.cache.values() if isinstance(value, Batch)]
        inner += [share.batch for share in self.shares.values()]
        return [*tensors_in(fields), *(tensor for one in inner for tensor in one.tensors())]


@dataclass(frozen=True)
class Share:
    """TP rank's share of the items of its replica for a module in a slot (`replicated`)."""

    batch: Batch  # the rank's own items
    owner: NDArray[np.int64]  # [N] TP rank of each of the replica's items, in the replica's order
    counts: Callable[[TensorSpec], NDArray[np.int64]]  # [N] rows of each item in a state tensor


NOTHING = Items([])

#: An encoder's outputs for the LLM are named ITEM_embeds, those of further encoders ITEM_embeds.N.
EMBEDS = "_embeds"


def embeds_name(item: Item, number: int = 0) -> str:
    """Return the name of encoder `number`'s output; the LLM reads the sum over encoders."""
    return f"{item}{EMBEDS}.{number}" if number else f"{item}{EMBEDS}"


def features_name(level: int) -> str:
    """Return the name of an inner encoder block's features for block `level` of the LLM."""
    return f"image_features.{level}"


#: State names with this prefix are summed losses (scalars), already weighted and normalised by
#: global counts.
LOSS_PREFIX = "loss/"


#: An adapter's two matrices, as peft names them: B (A x), added to a linear layer's output.
ADAPTER = ("lora_A", "lora_B")


def is_adapter(path: str) -> bool:
    """Return True if a parameter belongs to an adapter."""
    return any(part in ADAPTER for part in path.split("."))


class PipelineLayer(nn.Module):
    """Smallest unit that can be assigned to a stage.

    Subclasses set the attributes below and implement `compute`; `forward` skips the computation
    when the layer has no items (deepspeed trap 29) and emits empty tensors instead.
    """

    name: str  # "llm.block.3": unique in the model, the same in every layout
    module: str  # "llm"
    kind: str  # cost kind: layers of equal kind have equal costs ("block")
    reads: tuple[str, ...] = ()  # state tensors it reads
    writes: tuple[TensorSpec, ...] = ()  # state tensors it writes (also those it replaces)
    #: groups of batch fields: "ITEM" (inputs of encoder or generator 0 of a modality), "ITEM.N"
    #: (the same of number N), "tokens" (ids, and rows of encoder outputs), "rows" (the latter
    #: alone), "layout" (positions, sample_lengths), "context" (rows of targets), "labels",
    #: "weights" (of targets, with noise_seeds), "dropout" (seeds, of samples with the layout)
    needs: tuple[str, ...] = ()
    loss: str | None = None  # name of the loss it adds ("text"), if any
    frozen: bool = False  # never trained and never differentiated (a generator's VAE)
    # of its module's weights only adapters, and `saved`, are ever trained (`lora`)
    adapted: bool = False
    saved: frozenset[str] = frozenset()  # paths of parameters trained in addition to adapters
    # paths of parameters that no gradient changes: buffers that the published model stores
    untrained: frozenset[str] = frozenset()
    # True: a projector that the published model has inside the module (Qwen-VL's merger); its
    # weights are trained as projectors, unless the module has adapters
    joint: bool = False
    # True if this run trains any of its weights; set when a stage is assembled, like the next
    trained: bool = True
    passes: bool = True  # True if gradients of its inputs are needed
    division: Division = REPLICATED  # sharding over a tensor-parallel group
    unsharded: bool = False  # True: its TP size is 1
    # True: over a TP group it operates on local rows of its tensors, else on full tensors
    # (`parallel`)
    by_rows: bool = False
    # by rows, but every rank of a TP group computes all of them and returns its own
    redundant: bool = False
    # by rows, and its sharded linears take all rows of the group unchanged and return as many:
    # chunks of them can be sent while GEMMs run (`overlapped`)
    row_by_row: bool = False
    # attention heads that a CP group may share: of queries, of keys and values, their width
    exchanged: tuple[int, int, int] | None = None
    # experts that an EP group may divide: their number, those that a token chooses, width of a row
    experts: tuple[int, int, int] | None = None
    # True if these are views of one tensor, which values keep alive when no CP group shares the
    # heads
    fused_heads: bool = False
    group: Group | None = None  # its TP group, if any
    cp: Group | None = None  # its CP group, if any
    first_id: int | None = None  # first token id of a vocabulary shard; None = the whole vocabulary
    # initial values of vectors that differ from ones ("weight") and zeros (all others), by name
    starts: Mapping[str, float] = {}
    # prefixes of its parameters' paths → prefixes in the published model's weights
    published: Mapping[str, str] = {}
    # paths of its parameters owned by another layer → (that layer, the path there) (`tying`)
    tied: Mapping[str, tuple[str, str]] = {}
    dropouts: Sequence[nn.Module] = ()  # submodules with dropout seeded by its items (`dropout`)
    # published model that `published` refers to
    weights_of: Literal["module", "vae"] = "module"

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        """Map the tensors named in `reads` to those in `writes` (plus `loss/NAME`)."""
        raise NotImplementedError

    def is_empty(self, state: dict[str, Tensor], batch: Batch) -> bool:
        """Return True if the replica has no items for this layer in this slot."""
        raise NotImplementedError

    def of_group(self, rows: int) -> slice:
        """Return the slice of the items' `rows` rows that this rank's TP group processes."""
        return slice(0, rows) if self.cp is None else self.cp.local_rows(rows)

    def own(self, all_R: Tensor, batch: Batch) -> Tensor:
        """Return the local entries of a tensor over all rows of its items."""
        return all_R[self.of_group(len(all_R))]

    def seeded_rows(self, batch: Batch) -> tuple[Tensor | None, list[int]]:
        """Return the seeds of its items, if the batch has them, and rows per item over all ranks.

        Dropout masks are derived from them (`dropout`).
        """
        raise NotImplementedError

    def forward(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        """Run `compute`, or return empty tensors if there are no items."""
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
        """Return a parameter's published name; None for projectors of ours and for adapters."""
        return None if is_adapter(path) else self.published_path(path)

    def published_path(self, path: str) -> str | None:
        """Return the published path of a submodule or parameter; None if there is none."""
        for name, theirs in self.published.items():
            if path == name or path.startswith(f"{name}."):
                return theirs + path[len(name) :]
        return None

    def trains(self, path: str) -> bool:
        """Return True if a parameter is trained whenever its owner is."""
        if self.frozen or path in self.untrained:
            return False
        own = self.adapted and self.owner_of(path) == self.module
        return not own or is_adapter(path) or path in self.saved

    def ask_for_gradients(self, wanted: bool = True) -> None:
        """Set `requires_grad` for all trainable parameters, and for no others; or for none."""
        for path, parameter in self.named_parameters():
            parameter.requires_grad_(wanted and self.trains(path))

    def owner_of(self, path: str) -> str:
        """Return the name for training and learning rate: the parameter's module, or "projectors".

        A projector's layer may begin with the module's own final norm, which the published model
        has: the module's.
        """
        added = self.kind == "projector" and self.published_path(path) is None
        return PROJECTORS if added or (self.joint and not self.adapted) else self.module

    def to_published(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rename unsharded tensors from parameter paths to published names.

        Parameters that are ours alone are omitted. A class that splits or fuses tensors overrides
        this and `from_published`.
        """
        named = ((self.published_name(path), tensor) for path, tensor in tensors.items())
        return {name: tensor for name, tensor in named if name is not None}

    def from_published(self, read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield (path, unsharded tensor) of every published parameter, read one at a time.

        The inverse of `to_published`; `read` takes published names.
        """
        for path, _ in self.named_parameters():
            if (name := self.published_name(path)) is not None:
                yield path, read(name)

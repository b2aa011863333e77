"""transformers' decoders as pipeline layers: embed, block × n, head with the text loss.

A block is the library's own layer of any family (`library_decoder`), with arguments that the
library's own model computes for it from the batch, once per stage (`Batch.cache`).

Hidden rows are the M·L tokens of the microbatch, or a CP rank's local part of them. Attention is
block-causal: a token sees the earlier tokens of its own sample only, the nearest ones if the block
has a sliding window; padding sees padding, and its outputs are not used. With M-RoPE there are
three positions per token.

With `tie_word_embeddings` the head's weight is the embedding's: one tensor if both are on one
stage, else two copies whose gradients are summed (`tying`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from disttrain_cli.models.attention import Segments, segments_of
from disttrain_cli.models.building import LayerMaker
from disttrain_cli.models.configs.decoders import sees_vision
from disttrain_cli.models.context_parallel import assembled, own_part
from disttrain_cli.models.cross_entropy import cross_entropy
from disttrain_cli.models.division import vocabulary
from disttrain_cli.models.fused import with_rows_added
from disttrain_cli.models.layer import EMBEDS, LOSS_PREFIX, Batch, PipelineLayer, TensorSpec
from disttrain_cli.models.levelling import runs_of
from disttrain_cli.models.library_decoder import Offsets, Store, library_decoder
from disttrain_cli.models.library_frame import Arguments, Frame, Place, Spans, Tail
from disttrain_cli.models.library_whole import whole_of
from disttrain_cli.models.own_kernels import adds_feed_forward
from disttrain_cli.models.parallel import across, embed, gather, once, scatter, share, split
from disttrain_cli.models.recurrent import documents, restart


def ties(config: Any) -> bool:
    """Return True if the head is tied to the embedding; some configurations lack the field."""
    return bool(getattr(config, "tie_word_embeddings", False))


class DecoderLayer(PipelineLayer):
    """Layer whose items are packed sequences; a replica of the LLM always has some."""

    by_rows = True

    def seeded_rows(self, batch: Batch) -> tuple[Tensor | None, list[int]]:
        return batch.sample_seeds, batch.sample_lengths or []

    def own(self, all_R: Tensor, batch: Batch) -> Tensor:
        if self.cp is None or not self.cp.gathers:
            return super().own(all_R, batch)
        runs = runs_of(batch.sample_lengths or [], self.cp.size, causal=True)[self.cp.rank]
        return torch.cat([all_R[slice(*run)] for run in runs])

    def is_empty(self, state: dict[str, Tensor], batch: Batch) -> bool:
        return False


class Embed(DecoderLayer):
    """Token embeddings, with the rows of image and audio tokens replaced by the encoders' outputs.

    Outputs of several encoders of the same items are summed. The tokens that condition an image to
    be generated have an id of their own, whose embedding is learned.
    """

    kind = "embed"
    needs: tuple[str, ...] = ("tokens",)
    division = vocabulary("embedding")

    def __init__(self, module: str, config: Any, reads: tuple[str, ...]) -> None:
        super().__init__()
        self.name, self.module = f"{module}.embed", module
        self.reads = reads
        self.writes = (
            TensorSpec("hidden", "sequence", "tokens", (config.hidden_size,), split=True),
        )
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self._library = library_decoder(config)
        self.norms = self._library.embedding_norms()
        name = self._library.names["embedding"]
        self.published = {"embedding": name}
        self.published |= {f"norms.{norm}": f"{name}.{norm}" for norm in self.norms}
        self.writes += tuple(
            TensorSpec(_input_name(number, place), "sequence", "tokens", shape, split=True)
            for number, inputs in enumerate(self._library.inputs)
            for place, shape in inputs.items()
        )
        self.more: nn.Module | None = None
        if self._library.reads_tokens:
            self.more = self._library.beside_layers()
            self.published["more"] = self._library.prefix.rstrip(".")
        self._around = self.more is not None or self._library.changes_input
        if self._around:
            self.needs = ("tokens", "layout")
        self._frame = cache(
            partial(Frame, self._library, weights=self.more, first_only=self.more is None)
        )

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        assert batch.token_ids is not None
        ids = batch.token_ids.flatten()
        table = self.embedding.weight
        hidden = self.embedding(ids) if self.first_id is None else embed(ids, table, self.first_id)
        for norm in self.norms.values():  # rows of other ranks are zero, and stay so
            hidden = norm(hidden)
        if self._library.embedding_scale != 1.0:
            hidden = hidden * hidden.new_tensor(self._library.embedding_scale)
        for item in dict.fromkeys(name.partition(EMBEDS)[0] for name in self.reads):
            made = [
                state[name]
                for name in self.reads
                if name.startswith(f"{item}{EMBEDS}") and name in state
            ]
            given, items = sum(made[1:], made[0]) if made else None, batch.of(item)
            rows = items.rows
            if given is None or (rows is None and not len(given)):
                continue
            assert rows is not None
            # each rank inserts its own part of the rows, and the sum over the group below completes
            # them
            if self.group is not None or items.shares is not None:
                hidden = hidden.index_fill(0, rows, 0.0)
            rows, given, shares = own_part(items, given, self.group, self.cp)
            if shares is None:
                hidden = hidden.index_copy(0, rows, given.to(hidden.dtype))
            else:
                of_rows = given.float() * shares[:, None]
                hidden = hidden.float().index_add(0, rows, of_rows).to(hidden.dtype)
        hidden = scatter(hidden, self.group)
        return self._before_layers(hidden, ids, batch) if self._around else {"hidden": hidden}

    def _before_layers(self, hidden_RD: Tensor, ids_R: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return what the library's model does between its embedding and its layers."""
        assert batch.positions is not None
        local = slice(None) if self.group is None else self.group.local_rows(len(ids_R))
        positions = batch.positions.flatten(-2)[..., None, local]
        for items in batch.items.values():
            if items.rows is not None:  # tokens of other modalities have no embedding per layer
                ids_R = ids_R.index_fill(0, items.rows, self._library.config.pad_token_id or 0)
        frame = self._frame(hidden_RD.device)
        rows = Segments([len(hidden_RD)], hidden_RD.device)  # their masks are not used
        calls, entry = frame.run(hidden_RD[None], positions, rows, ids_R[None, local])
        made = {"hidden": entry.squeeze(0)}
        for number, inputs in enumerate(self._library.inputs):
            for place in inputs:
                made[_input_name(number, place)] = calls[number].at(place).squeeze(0)
        return made


def _input_name(number: int, place: Place) -> str:
    """Return the name of a state tensor that only one layer reads, as an argument."""
    return f"layer_input.{number}.{place}"


#: Name of the feed-forward in layers whose residual stream DeepStack's features are added to.
FEED_FORWARD = "mlp"


class Block(DecoderLayer):
    """Decoder layer of a family of transformers.

    Over a TP group its rows are divided; modules with sharded linears, and token mixers without,
    receive all rows of the group (sequence parallelism).
    """

    row_by_row = True
    reads: tuple[str, ...] = ("hidden",)
    needs: tuple[str, ...] = ("layout",)

    def __init__(self, module: str, number: int, config: Any) -> None:
        super().__init__()
        self.name, self.module = f"{module}.block.{number}", module
        self.writes = (
            TensorSpec("hidden", "sequence", "tokens", (config.hidden_size,), split=True),
        )
        self._library, self._number = library_decoder(config), number
        self._inputs = {place: _input_name(number, place) for place in self._library.inputs[number]}
        self._stored, self._stores = self._library.reads[number], self._library.writes[number]
        self.reads += (*self._inputs.values(), *(one.name for one in self._stored))
        self.writes += tuple(
            TensorSpec(one.name, "sequence", "tokens", one.shape, split=True)
            for one in self._stores
        )
        self.unsharded = bool(self._stored or self._stores)
        sees = sees_vision(config)
        self._sees_vision = sees if any(sees) else []
        if self._sees_vision:
            self.needs = ("layout", "rows")
        self.kind = self._library.kinds[number]
        self.layer = self._library.layer(number)
        self._restarts = restart(self.layer)
        # a recurrent mixer calls its linears once per length of documents
        self.row_by_row = self.row_by_row and not self._restarts
        self.published = {"layer": self._library.layer_name(number)}
        self.untrained = frozenset(
            path for path, parameter in self.named_parameters() if not parameter.requires_grad
        )
        self.experts = self._library.mixture(number)
        heads = self._library.heads
        self.exchanged = None if heads is None else heads[number]
        self.division, sharded = self._library.division(number)
        for path in sharded:
            self._wrap(path, self._sharded)
        for path in {*self._library.mixers(number)} - {*sharded}:
            self._wrap(path, self._replicated)
        self._rows = 0
        # never registered: a cast to bf16 would degrade its rotary frequencies
        self._frame = cache(partial(Frame, self._library))

    def _wrap(self, path: str, by: Callable[..., Any]) -> None:
        part = self.layer.get_submodule(path)
        part.forward = partial(self._run, by, path)

    def _run(self, by: Callable[..., Any], path: str, *given: Any, **named: Any) -> Any:
        """Run a submodule's own forward on rows of the group; `by` distributes them."""
        rows, *more = given or (named.pop("hidden_states"),)
        part = self.layer.get_submodule(path)
        return by(path, partial(type(part).forward, part, **named), rows, *more)

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        assert batch.positions is not None
        hidden, self._rows = state["hidden"], batch.positions.shape[-2:].numel()
        store = Store()
        for key in dict.fromkeys(one.key for one in self._stored):
            store[key] = tuple(
                state[one.name].transpose(0, 1)[None] for one in self._stored if one.key == key
            )
        inputs = {place: state[name][None] for place, name in self._inputs.items()}
        samples = segments_of(
            batch.cache, "samples", lambda: batch.sample_lengths or [], hidden, self.cp
        )
        call = self._calls(batch, hidden, samples)[self._number]
        call = self._library.filled(self._number, call, samples, inputs, store)
        if self._library.counts_rows:
            call.keywords["past_key_values"] = Offsets(batch.positions.flatten())
        with documents(samples) if self._restarts else nullcontext():
            made = self.layer(hidden[None], *call.positional, **call.keywords)
        return {"hidden": (made[0] if isinstance(made, tuple) else made).squeeze(0)} | {
            one.name: store[one.key][one.number].squeeze(0).transpose(0, 1) for one in self._stores
        }

    def _calls(self, batch: Batch, hidden_RD: Tensor, samples: Segments) -> list[Arguments]:
        """Return the arguments of all layers, computed once per stage."""
        assert batch.positions is not None
        if self.module not in batch.cache:
            positions = batch.positions.flatten(-2)[..., None, :]
            like = hidden_RD.new_zeros(()).expand(1, self._rows, hidden_RD.shape[-1])
            with torch.no_grad():
                frame = self._frame(hidden_RD.device)
                calls = frame.run(like, positions, samples)[0]
            if self._sees_vision and (spans := _vision_spans(batch)):
                calls = [
                    call.within(spans) if sees else call
                    for call, sees in zip(calls, self._sees_vision, strict=True)
                ]
            batch.cache[self.module] = calls
        made: list[Arguments] = batch.cache[self.module]
        return made

    def _sharded(self, path: str, forward: Callable[..., Any], rows: Tensor, *more: Any) -> Any:
        """Run a module whose linears are sharded over the TP group: local rows in and out."""
        others: list[Any] | None = None

        def partial_sums(rows_RD: Tensor) -> Tensor:
            nonlocal others
            made = forward(rows_RD.view(*(1,) * (rows.ndim - 2), *rows_RD.shape), *more)
            if isinstance(made, tuple):
                made, *others = made
            return self.completed(path, made)

        made = across(partial_sums, rows.flatten(0, -2), self._rows, self.group)
        made = made.view(*rows.shape[:-1], made.shape[-1])
        if "." in path and self.group is not None:
            made = made.clone()  # shared experts, to which the library adds in place
        return made if others is None else (made, *others)

    def _replicated(self, path: str, forward: Callable[..., Any], rows: Tensor, *more: Any) -> Any:
        """Run a token mixer that is replicated: each rank keeps its local rows of the result."""
        if self.group is None:
            return forward(rows, *more)
        made = forward(gather(rows.flatten(0, -2), self._rows, self.group)[None], *more)
        if isinstance(made, tuple):
            return split(made[0].squeeze(0), self.group)[None], *made[1:]
        return split(made.squeeze(0), self.group)[None]

    def completed(self, path: str, made: Tensor) -> Tensor:
        """Return a sharded module's partial sums, with other tensors added to them."""
        return made


def _vision_spans(batch: Batch) -> Spans:
    """Return the runs of consecutive vision tokens of one sample."""
    rows = batch.of("image").at
    if rows is None or not len(rows):
        return ()
    rows = np.sort(rows)  # images may be in another order than their tokens
    ends = np.cumsum(np.array(batch.sample_lengths or [], np.int64))
    sample = np.searchsorted(ends, rows, "right")
    cuts = np.flatnonzero((np.diff(rows) != 1) | (np.diff(sample) != 0)) + 1
    return tuple((int(run[0]), int(run[-1]) + 1) for run in np.split(rows, cuts))


class DeepBlock(Block):
    """Decoder layer that adds features of an encoder's inner block to its images' rows.

    This is DeepStack (Meng et al. 2024, arXiv 2406.04334). Each rank of a TP group adds its own
    part of the features to its partial sums of the feed-forward, whose sum over the group is then
    complete: no additional message, but none overlapped with GEMMs. Layers that scale their
    feed-forward add the features after it.
    """

    row_by_row = False
    needs = ("layout", "rows")

    def __init__(self, module: str, number: int, config: Any, features: str) -> None:
        super().__init__(module, number, config)
        self.kind = f"{self.kind}.deepstack"
        self.features, self.reads = features, ("hidden", features)
        self._more: tuple[Tensor, Tensor] | None = None
        sharded = any(path.startswith(f"{FEED_FORWARD}.") for path in self.division)
        self._completes = sharded and adds_feed_forward(self.layer)

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        images, given = batch.of("image"), state.get(self.features)
        if given is not None and images.rows is not None:
            self._more = own_part(images, given, self.group, self.cp)[:2]
        try:
            hidden = super().compute(state, batch)["hidden"]
            if self._more is not None and not self._completes:
                more = hidden.new_zeros(self._rows, hidden.shape[-1])
                hidden = hidden + scatter(with_rows_added(more, *self._more), self.group)
            return {"hidden": hidden}
        finally:
            self._more = None

    def completed(self, path: str, made: Tensor) -> Tensor:
        """Return the feed-forward's partial sums, with the features added to its images' rows."""
        if path != FEED_FORWARD or self._more is None or not self._completes:
            return made
        return with_rows_added(made.flatten(0, -2), *self._more)


class Head(DecoderLayer):
    """Final norm, logits and text loss; passes the rows that condition an image to the generator.

    loss/text = weight · Σ cross-entropy over trained tokens / label tokens of the global batch. A
    slot without trained tokens adds zero, still connected to the graph; without labels (generating)
    there is no loss.
    """

    kind = "head"
    reads = ("hidden",)
    loss = "text"
    division = vocabulary("lm_head")

    def __init__(self, module: str, config: Any, weight: float, feeds_generator: bool) -> None:
        super().__init__()
        self.name, self.module, self.weight = f"{module}.head", module, weight
        self.needs = ("labels", "context") if feeds_generator else ("labels",)
        if feeds_generator:
            self.writes = (TensorSpec("context", "target", "tokens", (config.hidden_size,)),)
        library = library_decoder(config)
        self.norm, self.lm_head = library.norm(), library.head()
        self.published = {"norm": library.names["norm"], "lm_head": library.names["head"]}
        whole = whole_of(config)
        self._tail = Tail(whole or library.model, "model" if whole else library.base_name)
        if ties(config):
            self.tied = {"lm_head.weight": (f"{module}.embed", "embedding.weight")}

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        count = batch.labels.numel() if batch.labels is not None else len(state["hidden"])
        hidden = gather(self.norm(state["hidden"]), count, self.group)
        result: dict[str, Tensor] = {}
        if self.writes:
            targets = batch.of("target")
            assert targets.rows is not None
            own = share(hidden.index_select(0, targets.rows), self.group)
            result["context"] = assembled(own, targets, self.cp)
        if batch.labels is not None:
            total = cross_entropy(
                self._logits(hidden), batch.labels.flatten(), self.first_id or 0, self.group
            )
            result[f"{LOSS_PREFIX}{self.loss}"] = once(
                self.weight * total / batch.label_tokens, self.group
            )
        return result

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Return the next-token logits [R, V] float32 for each row of the last block's output.

        Requires an unsharded vocabulary.
        """
        return self._logits(self.norm(hidden_RD)).float()

    def _logits(self, normed_RD: Tensor) -> Tensor:
        """Return logits, scaled and capped as the library's class does."""
        return self._tail(normed_RD, self.lm_head)


def makers(
    module: str,
    config: Any,
    reads: tuple[str, ...],
    features: tuple[str, ...],
    feeds_generator: bool,
    loss_weight: float,
) -> list[LayerMaker]:
    """Return the layer factories of an LLM in pipeline order.

    Args:
        reads: encoder outputs, read by its embedding.
        features: DeepStack features, read by its first blocks, one after each.
    """
    initialise = library_decoder(config).initialise
    return [
        LayerMaker(partial(Embed, module, config, reads), initialise),
        *(
            LayerMaker(partial(DeepBlock, module, i, config, name), initialise)
            for i, name in enumerate(features)
        ),
        *(
            LayerMaker(partial(Block, module, i, config), initialise)
            for i in range(len(features), config.num_hidden_layers)
        ),
        LayerMaker(
            partial(Head, module, config, loss_weight, feeds_generator),
            initialise,
            drawn_as=f"{module}.embed" if ties(config) else None,
        ),
    ]

"""transformers' decoders as pipeline layers: embed, block × n, head with the text loss.

Supported: Llama, Mistral, Qwen2, Qwen3, and the LLMs of Qwen2.5-VL and Qwen3-VL.

Hidden rows are the M·L tokens of the microbatch, or a CP rank's local part of them. Attention is
block-causal: a token sees the earlier tokens of its own sample only, the nearest ones if the block
has a sliding window; padding sees padding, and its outputs are not used. Rotary factors are
computed once per stage and batch, in `Batch.cache`; with M-RoPE from three positions per token.

With `tie_word_embeddings` the head's weight is the embedding's: one tensor if both are on one
stage, else two copies whose gradients are summed (`tying`).
"""

from __future__ import annotations

from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from disttrain_cli.models.attention import segments_of
from disttrain_cli.models.building import LayerMaker
from disttrain_cli.models.configs.decoders import DYNAMIC, FAMILIES
from disttrain_cli.models.context_parallel import assembled, own_part
from disttrain_cli.models.cross_entropy import cross_entropy
from disttrain_cli.models.division import colwise, rowwise, vocabulary
from disttrain_cli.models.fused import (
    RmsNorm,
    gated_mlp,
    rotated,
    with_own_norms,
    with_rows_added,
)
from disttrain_cli.models.host import to_device
from disttrain_cli.models.layer import EMBEDS, LOSS_PREFIX, Batch, PipelineLayer, TensorSpec
from disttrain_cli.models.levelling import runs_of
from disttrain_cli.models.parallel import across, embed, gather, once, scatter, share


def library(config: Any, part: str) -> Any:
    """Return a class of the family's file in transformers: "DecoderLayer" or "RotaryEmbedding".

    The file's `apply_rotary_pos_emb` is replaced by a fused one that the file's attention then
    calls.
    """
    family = FAMILIES[config.model_type]
    file: Any = import_module(f"transformers.models.{family.file}.modeling_{family.file}")
    if not isinstance(file.apply_rotary_pos_emb, partial):
        file.apply_rotary_pos_emb = partial(rotated, file.apply_rotary_pos_emb)
    return getattr(file, family.prefix + part)


def _rotary(config: Any, device: torch.device) -> Any:
    with torch.device("cpu"):
        made = library(config, "RotaryEmbedding")(config)
    if config.rope_parameters["rope_type"] == DYNAMIC:
        made.rope_type = "default"  # no longer samples (`check_length`)
    return made._apply(partial(to_device, device=device))


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
    needs = ("tokens",)
    division = vocabulary("embedding")

    def __init__(self, module: str, config: Any, reads: tuple[str, ...]) -> None:
        super().__init__()
        self.name, self.module = f"{module}.embed", module
        self.reads = reads
        self.writes = (
            TensorSpec("hidden", "sequence", "tokens", (config.hidden_size,), split=True),
        )
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.published = {"embedding": "model.embed_tokens"}

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        assert batch.token_ids is not None
        ids = batch.token_ids.flatten()
        table = self.embedding.weight
        hidden = self.embedding(ids) if self.first_id is None else embed(ids, table, self.first_id)
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
        return {"hidden": scatter(hidden, self.group)}


class Block(DecoderLayer):
    """Decoder layer of the family."""

    kind = "block"
    row_by_row = True
    reads: tuple[str, ...] = ("hidden",)
    needs: tuple[str, ...] = ("layout",)
    division = colwise("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj") | rowwise(
        "o_proj", "down_proj"
    )

    def __init__(self, module: str, number: int, config: Any) -> None:
        super().__init__()
        self.name, self.module = f"{module}.block.{number}", module
        self.writes = (
            TensorSpec("hidden", "sequence", "tokens", (config.hidden_size,), split=True),
        )
        self.layer = with_own_norms(library(config, "DecoderLayer")(config, number))
        attention = self.layer.self_attn
        self.exchanged = (
            config.num_attention_heads,
            config.num_key_value_heads,
            int(attention.head_dim),
        )
        self.published = {"layer": f"model.layers.{number}"}
        # Constructed when first used and never registered: a cast to bf16 would degrade its
        # frequencies.
        self._rotary = cache(partial(_rotary, config))

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        assert batch.positions is not None
        layer, shape, hidden = self.layer, batch.positions.shape[-2:], state["hidden"]
        samples = segments_of(
            batch.cache, "samples", lambda: batch.sample_lengths or [], hidden, self.cp
        )
        rotary = self._rotary_factors(batch, hidden)

        def attend(normed_RD: Tensor) -> Tensor:
            return layer.self_attn(
                normed_RD.unflatten(0, shape), attention_mask=samples, position_embeddings=rotary
            )[0]

        rows, feed = shape.numel(), partial(self.feed, state, batch)
        hidden = hidden + across(attend, layer.input_layernorm(hidden), rows, self.group)
        hidden = hidden + across(feed, layer.post_attention_layernorm(hidden), rows, self.group)
        return {"hidden": hidden}

    def feed(self, state: dict[str, Tensor], batch: Batch, normed_RD: Tensor) -> Tensor:
        """Return the feed-forward's output."""
        return gated_mlp(self.layer.mlp, normed_RD)

    def _rotary_factors(self, batch: Batch, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [M, L, head width]."""
        if "cos" not in batch.cache:
            batch.cache["cos"], batch.cache["sin"] = self._rotary(like.device)(
                like, batch.positions
            )
        return batch.cache["cos"], batch.cache["sin"]


class DeepBlock(Block):
    """Decoder layer that adds features of an encoder's inner block to its images' rows.

    This is DeepStack (Meng et al. 2024, arXiv 2406.04334). Each rank of a TP group adds its own
    part of the features to its partial sums of the feed-forward, whose sum over the group is then
    complete: no additional message, but none overlapped with GEMMs.
    """

    kind = "block.deepstack"
    row_by_row = False
    needs = ("layout", "rows")

    def __init__(self, module: str, number: int, config: Any, features: str) -> None:
        super().__init__(module, number, config)
        self.features, self.reads = features, ("hidden", features)

    def feed(self, state: dict[str, Tensor], batch: Batch, normed_RD: Tensor) -> Tensor:
        """Return the feed-forward's output, with the features added to its images' rows."""
        made, images, given = (
            super().feed(state, batch, normed_RD),
            batch.of("image"),
            state.get(self.features),
        )
        if given is None or images.rows is None:
            return made
        rows, given, _ = own_part(images, given, self.group, self.cp)
        return with_rows_added(made.flatten(0, -2), rows, given)


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
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.published = {"norm": "model.norm", "lm_head": "lm_head"}
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
                self.lm_head(hidden), batch.labels.flatten(), self.first_id or 0, self.group
            )
            result[f"{LOSS_PREFIX}{self.loss}"] = once(
                self.weight * total / batch.label_tokens, self.group
            )
        return result

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Return the next-token logits [R, V] float32 for each row of the last block's output.

        Requires an unsharded vocabulary.
        """
        return self.lm_head(self.norm(hidden_RD)).float()


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
    std = config.initializer_range
    return [
        LayerMaker(partial(Embed, module, config, reads), std),
        *(
            LayerMaker(partial(DeepBlock, module, i, config, name), std)
            for i, name in enumerate(features)
        ),
        *(
            LayerMaker(partial(Block, module, i, config), std)
            for i in range(len(features), config.num_hidden_layers)
        ),
        LayerMaker(
            partial(Head, module, config, loss_weight, feeds_generator),
            std,
            drawn_as=f"{module}.embed" if ties(config) else None,
        ),
    ]

"""transformers' Llama decoder as pipeline layers: embed, block × n, head with the text loss.

Hidden rows are the M·L tokens of the microbatch. Attention is block-causal: a token sees the earlier tokens of
its own sample only. Mask and rotary factors are made once per stage and batch, in `Batch.cache`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from disttrain_cli.models.building import LayerMaker
from disttrain_cli.models.division import Division
from disttrain_cli.models.layer import LOSS_PREFIX, Batch, PipelineLayer, TensorSpec


def block_causal_mask(documents_ML: Tensor) -> Tensor:
    """Boolean mask [M, 1, L, L], true where attention is allowed.

    Every token sees itself, so that padding (-1) has no empty row and no NaN; nothing else sees padding.
    """
    length = documents_ML.shape[1]
    places = torch.arange(length, device=documents_ML.device)
    same = documents_ML[:, :, None] == documents_ML[:, None, :]
    earlier = places[:, None] > places[None, :]
    oneself = places[:, None] == places[None, :]
    real = (documents_ML >= 0)[:, :, None]
    return ((same & earlier & real) | oneself).unsqueeze(1)


class LlamaLayer(PipelineLayer):
    """A layer whose items are packed sequences; a replica of the LLM always has some."""

    def is_empty(self, state: dict[str, Tensor], batch: Batch) -> bool:
        return False


class Embed(LlamaLayer):
    """Token embeddings, with the rows of image and audio tokens replaced by the encoders'.

    The tokens that condition an image to be generated have an id of their own, whose embedding is learned.
    """

    kind = "embed"
    needs = ("tokens",)
    division = Division(vocabulary=("embedding",))

    def __init__(self, module: str, config: Any, reads: tuple[str, ...]) -> None:
        super().__init__()
        self.name, self.module = f"{module}.embed", module
        self.reads = reads
        self.writes = (TensorSpec("hidden", "sequence", "tokens", (config.hidden_size,)),)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        assert batch.token_ids is not None
        hidden = self._embed(batch.token_ids.flatten())  # [M·L, D]
        for name, rows in (("image_embeds", batch.image_rows), ("audio_embeds", batch.audio_rows)):
            given = state.get(name)
            if name in self.reads and given is not None and len(given):
                assert rows is not None
                hidden = hidden.index_copy(0, rows, given.to(hidden.dtype))
        return {"hidden": hidden}

    def _embed(self, ids: Tensor) -> Tensor:
        if self.first_id is None:
            return self.embedding(ids)
        local = ids - self.first_id
        foreign = (local < 0) | (local >= len(self.embedding.weight))
        return self.embedding(local.masked_fill(foreign, 0)).masked_fill(foreign.unsqueeze(1), 0.0)


class Block(LlamaLayer):
    """One transformers LlamaDecoderLayer."""

    kind = "block"
    reads = ("hidden",)
    needs = ("layout",)
    division = Division(
        column=("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), row=("o_proj", "down_proj")
    )

    def __init__(self, module: str, number: int, config: Any) -> None:
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

        super().__init__()
        self.name, self.module = f"{module}.block.{number}", module
        self.writes = (TensorSpec("hidden", "sequence", "tokens", (config.hidden_size,)),)
        self.layer = LlamaDecoderLayer(config, number)
        # Constructed when used and never registered: a cast to bf16 would spoil its frequencies.
        self._rotary = partial(LlamaRotaryEmbedding, config)

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        assert batch.documents is not None
        hidden_MLD = state["hidden"].unflatten(0, tuple(batch.documents.shape))
        mask, cos, sin = self._prepared(batch, hidden_MLD)
        return {"hidden": self.layer(hidden_MLD, attention_mask=mask, position_embeddings=(cos, sin)).flatten(0, 1)}

    def _prepared(self, batch: Batch, hidden_MLD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        cache = batch.cache
        if "mask" not in cache:
            assert batch.documents is not None and batch.positions is not None
            cache["mask"] = block_causal_mask(batch.documents)
            with torch.device("cpu"):
                rotary = self._rotary()
            cache["cos"], cache["sin"] = rotary(hidden_MLD, batch.positions)
        return cache["mask"], cache["cos"], cache["sin"]


class Head(LlamaLayer):
    """Final norm, logits and text loss; hands the rows that condition an image on to the generator.

    loss/text = weight · Σ cross-entropy over trained tokens / label tokens of the global batch. A slot without
    trained tokens adds zero, still connected to the graph; without labels (generating) there is no loss.
    """

    kind = "head"
    reads = ("hidden",)
    loss = "text"
    division = Division(vocabulary=("lm_head",))

    def __init__(self, module: str, config: Any, weight: float, feeds_generator: bool) -> None:
        from transformers.models.llama.modeling_llama import LlamaRMSNorm

        super().__init__()
        self.name, self.module, self.weight = f"{module}.head", module, weight
        self.needs = ("labels", "context") if feeds_generator else ("labels",)
        if feeds_generator:
            self.writes = (TensorSpec("context", "target", "context", (config.hidden_size,)),)
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        hidden = self.norm(state["hidden"])
        result: dict[str, Tensor] = {}
        if self.writes:
            assert batch.context_rows is not None
            result["context"] = hidden.index_select(0, batch.context_rows)
        if batch.labels is not None:
            logits = self.lm_head(hidden).float()
            labels = self._labels(batch.labels.flatten())
            total = functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
            result[f"{LOSS_PREFIX}{self.loss}"] = self.weight * total / batch.label_tokens
        return result

    def _labels(self, labels: Tensor) -> Tensor:
        if self.first_id is None:
            return labels
        local = (labels - self.first_id).clamp(0, len(self.lm_head.weight) - 1)
        return torch.where(labels < 0, labels, local)


def makers(
    module: str, config: Any, reads: tuple[str, ...], feeds_generator: bool, loss_weight: float
) -> list[LayerMaker]:
    """The layers of an LLM in pipeline order; `reads` are the tensors that the encoders before it leave."""
    std = config.initializer_range
    return [
        LayerMaker(partial(Embed, module, config, reads), std),
        *(LayerMaker(partial(Block, module, i, config), std) for i in range(config.num_hidden_layers)),
        LayerMaker(partial(Head, module, config, loss_weight, feeds_generator), std),
    ]

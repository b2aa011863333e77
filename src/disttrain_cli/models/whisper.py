"""transformers' Whisper encoder as pipeline layers: embed, block × n, projector.

Every clip is padded to the same length, so all have the same rows: positions of 20 ms each. A
clip's positions are sinusoids (Radford et al. 2023, arXiv 2212.04356, section 2.2), which are not
weights: computed once per stage and batch.

A rank of a CP group computes the positions of its local rows, whose convolutions reach over two
more frames on the left and one on the right: these are computed on both sides of a border, and
nothing is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from disttrain_cli.models.attention import not_empty, segments_of
from disttrain_cli.models.building import LayerMaker
from disttrain_cli.models.context_parallel import bounds_of, regrouped
from disttrain_cli.models.division import colwise, rowwise
from disttrain_cli.models.dropout import seeded
from disttrain_cli.models.host import constant
from disttrain_cli.models.layer import Batch, PipelineLayer, TensorSpec
from disttrain_cli.models.parallel import across, split

#: Log-mel frames per position: the stride of the second convolution.
FRAMES_PER_POSITION = 2


class WhisperLayer(PipelineLayer):
    """Layer whose items are audio clips."""

    by_rows = True
    positions: int  # positions of a clip

    def rows_of(self, batch: Batch) -> list[int]:
        """Return the rows of each clip."""
        return [self.positions] * len(batch.of("audio"))

    def all_rows(self, batch: Batch) -> int:
        """Return the rows of all clips."""
        return len(batch.of("audio")) * self.positions

    def rows(self, batch: Batch) -> int:
        """Return the rows that this rank's TP group processes."""
        own = self.of_group(self.all_rows(batch))
        return own.stop - own.start

    def seeded_rows(self, batch: Batch) -> tuple[Tensor | None, list[int]]:
        return batch.of("audio").seeds, self.rows_of(batch)

    def is_empty(self, state: dict[str, Tensor], batch: Batch) -> bool:
        return not batch.of("audio").grids


class Embed(WhisperLayer):
    """Log-mel features [N, mel bins, frames] → positions: two convolutions, sinusoids.

    Both convolutions are followed by GELU.
    """

    kind = "embed"
    needs = ("audio",)

    def __init__(self, module: str, config: Any) -> None:
        super().__init__()
        self.name, self.module = f"{module}.embed", module
        self.writes = (
            TensorSpec("audio_hidden", "audio", "positions", (config.d_model,), split=True),
        )
        self.published, self.positions = (
            {"conv1": "conv1", "conv2": "conv2"},
            config.max_source_positions,
        )
        self.conv1 = nn.Conv1d(config.num_mel_bins, config.d_model, kernel_size=3, padding=1)
        self.conv2 = nn.Conv1d(
            config.d_model, config.d_model, kernel_size=3, stride=FRAMES_PER_POSITION, padding=1
        )
        self.dropout = nn.Dropout(config.dropout)
        seeded(self)

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        (features,) = batch.of("audio").values[0]
        features = features.to(self.conv1.weight.dtype)
        if self.cp is None:
            hidden = functional.gelu(self.conv1(features))
            hidden_NPD = functional.gelu(self.conv2(hidden)).transpose(1, 2)
            hidden_RD = (hidden_NPD + self._sinusoids(hidden_NPD)).flatten(0, 1)
        else:
            own = self.of_group(self.all_rows(batch))
            parts = [self._some(features, *run).flatten(0, 1) for run in self._runs(own)]
            hidden_RD = torch.cat(parts)[: own.stop - own.start]
        return {"audio_hidden": split(self.dropout(hidden_RD), self.group)}

    def to_published(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Add the sinusoids, which the published model stores with its weights."""
        from transformers.models.whisper.modeling_whisper import sinusoids

        with torch.device("cpu"):
            positions = sinusoids(self.positions, self.conv1.out_channels)
        return super().to_published(tensors) | {"embed_positions.weight": positions}

    def _runs(self, own: slice) -> list[tuple[slice, int, int]]:
        """Return runs (clips, first position, end position) that cover these rows.

        Complete clips form one run, parts of the others one each. Without rows the first position
        of the first clip, through which zero gradients flow.
        """
        if own.start == own.stop:
            return [(slice(0, 1), 0, 1)]
        (first, begin), (last, end) = (divmod(row, self.positions) for row in (own.start, own.stop))
        if first == last:
            return [(slice(first, first + 1), begin, end)]
        whole = first + (begin > 0)
        runs = [
            (slice(first, whole), begin, self.positions),
            (slice(whole, last), 0, self.positions),
            (slice(last, last + 1), 0, end),
        ]
        return [run for run in runs if run[0].start < run[0].stop and run[1] < run[2]]

    def _some(self, features: Tensor, clips: slice, first: int, stop: int) -> Tensor:
        """Return [n, stop - first, D]: some positions of some clips."""
        frames = features.shape[2]
        begin, end = FRAMES_PER_POSITION * first - 2, FRAMES_PER_POSITION * stop + 1
        given = features[clips, :, max(0, begin) : min(frames, end)]
        given = functional.pad(given, (max(0, -begin), max(0, end - frames)))
        hidden = functional.gelu(functional.conv1d(given, self.conv1.weight, self.conv1.bias))
        if first == 0:  # the second convolution pads with zeros, not with a convolution of zeros
            hidden = functional.pad(hidden[:, :, 1:], (1, 0))
        conv = functional.conv1d(hidden, self.conv2.weight, self.conv2.bias, FRAMES_PER_POSITION)
        hidden_NPD = functional.gelu(conv).transpose(1, 2)
        return hidden_NPD + self._sinusoids(hidden_NPD)[first:stop]

    def _sinusoids(self, hidden_NPD: Tensor) -> Tensor:
        """Return [P, D], of all positions of a clip."""
        from transformers.models.whisper.modeling_whisper import sinusoids

        known = {"device": hidden_NPD.device, "dtype": hidden_NPD.dtype}
        return constant(sinusoids, self.positions, hidden_NPD.shape[2], **known)


class Block(WhisperLayer):
    """transformers' WhisperEncoderLayer; every position attends to its entire clip."""

    kind = "block"
    row_by_row = True
    reads = ("audio_hidden",)
    division = colwise("q_proj", "k_proj", "v_proj", "fc1") | rowwise("out_proj", "fc2")

    def __init__(self, module: str, number: int, config: Any) -> None:
        from transformers.models.whisper.modeling_whisper import WhisperEncoderLayer

        super().__init__()
        self.name, self.module, self.positions = (
            f"{module}.block.{number}",
            module,
            config.max_source_positions,
        )
        self.writes = (
            TensorSpec("audio_hidden", "audio", "positions", (config.d_model,), split=True),
        )
        self.layer = WhisperEncoderLayer(config)
        self.published = {"layer": f"layers.{number}"}
        self.dropout, self.inner_dropout = (
            nn.Dropout(config.dropout),
            nn.Dropout(config.activation_dropout),
        )
        heads = config.encoder_attention_heads
        self.exchanged = (heads, heads, config.d_model // heads)
        seeded(self)

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        layer, hidden, rows = self.layer, state["audio_hidden"], self.rows(batch)
        clips = segments_of(
            batch.cache,
            f"clips of {self.positions}",
            lambda: self.rows_of(batch),
            hidden,
            self.cp,
        )

        def attention(normed_RD: Tensor) -> Tensor:
            return layer.self_attn(normed_RD[None], attention_mask=clips)[0].flatten(0, 1)

        def attend(normed_RD: Tensor) -> Tensor:
            return self.dropout(not_empty(attention, normed_RD))

        def feed(normed_RD: Tensor) -> Tensor:
            return self.dropout(
                layer.fc2(self.inner_dropout(layer.activation_fn(layer.fc1(normed_RD))))
            )

        hidden = hidden + across(attend, layer.self_attn_layer_norm(hidden), rows, self.group)
        hidden = hidden + across(feed, layer.final_layer_norm(hidden), rows, self.group)
        return {"audio_hidden": hidden}


class Projector(WhisperLayer):
    """Final norm, m neighbouring positions merged, two-layer MLP to the LLM's width."""

    kind = "projector"
    reads = ("audio_hidden",)
    division = colwise("mlp.0") | rowwise("mlp.2")

    def __init__(self, module: str, config: Any, merge: int, hidden: int, width: int) -> None:
        super().__init__()
        self.name, self.module, self.merge = f"{module}.projector", module, merge
        self.positions = config.max_source_positions
        self.writes = (TensorSpec("audio_embeds", "audio", "tokens", (width,), split=True),)
        self.norm = nn.LayerNorm(config.d_model)
        self.published = {"norm": "layer_norm"}
        self.mlp = nn.Sequential(
            nn.Linear(merge * config.d_model, hidden), nn.GELU(), nn.Linear(hidden, width)
        )

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        count = self.all_rows(batch)

        def project(normed_RD: Tensor) -> Tensor:
            if self.cp is not None:
                whole = bounds_of(count // self.merge, self.cp) * self.merge
                given = bounds_of(count, self.cp)
                normed_RD = regrouped(normed_RD, np.arange(count), given, whole, self.cp)
            # A clip has a multiple of m positions, so that no merged row covers two clips.
            return self.mlp(normed_RD.unflatten(0, (-1, self.merge)).flatten(1))

        normed = self.norm(state["audio_hidden"])
        return {"audio_embeds": across(project, normed, self.rows(batch), self.group)}


def makers(
    module: str, config: Any, merge: int, projector_hidden: int, llm_width: int
) -> list[LayerMaker]:
    """Return the layer factories of an audio encoder in pipeline order."""
    std = config.init_std
    return [
        LayerMaker(partial(Embed, module, config), std),
        *(LayerMaker(partial(Block, module, i, config), std) for i in range(config.encoder_layers)),
        LayerMaker(partial(Projector, module, config, merge, projector_hidden, llm_width), std),
    ]

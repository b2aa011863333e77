"""transformers' Whisper encoder as pipeline layers: embed, block × n, projector into the LLM's
width.

Every clip is padded to the same length, so all have the same rows: positions of 20 ms each. A
clip's positions are sinusoids (Radford et al. 2023, arXiv 2212.04356, section 2.2), which are no
weights: made once per stage and batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from disttrain_cli.models.attention import segments_of
from disttrain_cli.models.building import LayerMaker
from disttrain_cli.models.division import Division
from disttrain_cli.models.dropout import seeded
from disttrain_cli.models.host import constant
from disttrain_cli.models.layer import Batch, PipelineLayer, TensorSpec
from disttrain_cli.models.parallel import across, split

#: Log-mel frames that one position stands for: the stride of the second convolution.
FRAMES_PER_POSITION = 2


class WhisperLayer(PipelineLayer):
    """A layer whose items are audio clips."""

    by_rows = True
    positions: int  # of a clip

    def rows_of(self, batch: Batch) -> list[int]:
        """Rows of each clip."""
        return [self.positions] * len(batch.of("audio"))

    def seeded_rows(self, batch: Batch) -> tuple[Tensor | None, list[int]]:
        return batch.of("audio").seeds, self.rows_of(batch)

    def is_empty(self, state: dict[str, Tensor], batch: Batch) -> bool:
        return not batch.of("audio").grids


class Embed(WhisperLayer):
    """Log-mel features [N, mel bins, frames] → positions: two convolutions with GELU, then
    sinusoids."""

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
        hidden = functional.gelu(self.conv1(features.to(self.conv1.weight.dtype)))
        hidden_NPD = functional.gelu(self.conv2(hidden)).transpose(1, 2)
        hidden_RD = (hidden_NPD + self._positions(hidden_NPD)).flatten(0, 1)
        return {"audio_hidden": split(self.dropout(hidden_RD), self.group)}

    def to_published(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Also the sinusoids, which the published model keeps with its weights."""
        from transformers.models.whisper.modeling_whisper import sinusoids

        with torch.device("cpu"):
            positions = sinusoids(self.positions, self.conv1.out_channels)
        return super().to_published(tensors) | {"embed_positions.weight": positions}

    def _positions(self, hidden_NPD: Tensor) -> Tensor:
        """Sinusoids [P, D]."""
        from transformers.models.whisper.modeling_whisper import sinusoids

        return constant(
            sinusoids, *hidden_NPD.shape[1:], device=hidden_NPD.device, dtype=hidden_NPD.dtype
        )


class Block(WhisperLayer):
    """One transformers WhisperEncoderLayer; every position attends all of its own clip."""

    kind = "block"
    row_by_row = True
    reads = ("audio_hidden",)
    division = Division(column=("q_proj", "k_proj", "v_proj", "fc1"), row=("out_proj", "fc2"))

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
        seeded(self)

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        layer, hidden, rows = (
            self.layer,
            state["audio_hidden"],
            len(batch.of("audio")) * self.positions,
        )
        clips = segments_of(
            batch.cache,
            f"clips of {self.positions}",
            lambda: self.rows_of(batch),
            hidden,
        )

        def attend(normed_RD: Tensor) -> Tensor:
            attended_1RD = layer.self_attn(normed_RD[None], attention_mask=clips)[0]
            return self.dropout(attended_1RD.flatten(0, 1))

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
    division = Division(column=("mlp.0",), row=("mlp.2",))

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
        def project(normed_RD: Tensor) -> Tensor:
            # A clip's positions are whole groups of m, so that no group has rows of two clips.
            return self.mlp(normed_RD.unflatten(0, (-1, self.merge)).flatten(1))

        rows = len(batch.of("audio")) * self.positions
        return {"audio_embeds": across(project, self.norm(state["audio_hidden"]), rows, self.group)}


def makers(
    module: str, config: Any, merge: int, projector_hidden: int, llm_width: int
) -> list[LayerMaker]:
    """The layers of an audio encoder in pipeline order."""
    std = config.init_std
    return [
        LayerMaker(partial(Embed, module, config), std),
        *(LayerMaker(partial(Block, module, i, config), std) for i in range(config.encoder_layers)),
        LayerMaker(partial(Projector, module, config, merge, projector_hidden, llm_width), std),
    ]

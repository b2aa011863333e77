"""Model of a checkpoint in one process, whatever the layout that wrote it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from disttrain_cli.models.architectures import read_configs
from disttrain_cli.models.graph import build_layers, describe, layer_table
from disttrain_cli.models.layer import PipelineLayer
from disttrain_cli.models.tying import tie, untie
from disttrain_cli.models.vae import VaeDecoder, decoder_maker
from disttrain_cli.models.weights import load_into
from disttrain_cli.runtime.checkpoints import checkpoint
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.runfile import Run


@dataclass(frozen=True)
class Trained:
    """Model for drawing and writing."""

    run: Run
    inputs: ModelInputs
    device: torch.device
    layers: list[PipelineLayer]  # all except those of VAEs
    decoders: dict[str, VaeDecoder | None]  # by generator: its VAE's decoder, if it has one


def load_trained(run: Run, folder: Path, device: torch.device) -> Trained:
    """Return the model with a checkpoint's weights, or their moving averages where it has them.

    Raises:
        SpecError: the checkpoint is damaged, or a VAE's weights are.
    """
    inputs, table = describe(run), layer_table(run)
    layers = [
        layer
        for index, info in enumerate(table)
        if not info.frozen
        for layer in build_layers(run, index, index + 1, device=device)
    ]
    with checkpoint.opened(folder, [layer.name for layer in layers]) as opened:
        untie(layers, opened.names())
        tie(layers, table)
        averaged = opened.layers("ema")
        with torch.no_grad():
            for layer in layers:
                group = "ema" if layer.name in averaged else "weight"
                tensors = opened.read([layer.name], (group,))
                for path in (
                    path for path, _ in layer.named_parameters() if path not in layer.tied
                ):
                    layer.get_parameter(path).copy_(tensors[f"{group}/{layer.name}/{path}"])
    return Trained(
        run,
        inputs,
        device,
        layers,
        {name: _decoder(run, name, device) for name in inputs.generators},
    )


def _decoder(run: Run, generator: str, device: torch.device) -> VaeDecoder | None:
    """Return the decoder of a generator's VAE, if any: from the VAE's folder, or from the seed."""
    vae = read_configs(run)[generator].vae
    if vae is None:
        return None
    decoder = decoder_maker(generator, vae).build(run.file.train.seed, device)
    assert isinstance(decoder, VaeDecoder)
    load_into([decoder], run)
    return decoder

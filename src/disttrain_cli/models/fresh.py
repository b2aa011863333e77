"""Random weights for the folder of a whole model, initialised by its class."""

from __future__ import annotations

from pathlib import Path

import torch

from disttrain_cli.models.configs.wholes import whole_config
from disttrain_cli.models.conversion import Conversions
from disttrain_cli.models.published import SINGLE, published_class
from disttrain_cli.spec.families.folder import read_folder


def random_weights(folder: Path, seed: int) -> tuple[str, bytes]:
    """Return name and content of the weight file that a folder with a `config.json` lacks.

    Equal seeds give equal weights. A tied head is not written twice.

    Raises:
        SpecError: the folder holds no whole model of a known family, or one that its class does not
            accept.
    """
    from safetensors.torch import save

    published = read_folder(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = published_class(published.model_type)(whole_config(published))
    state = model.state_dict()
    tensors: dict[str, torch.Tensor] = {}
    for conversion in Conversions(model).to_files(state.keys() - model.all_tied_weights_keys):
        tensors |= conversion(state.__getitem__)
    return SINGLE[0], save(tensors, metadata={"format": "pt"})

"""Adapters of SD3 and Flux against peft's own on diffusers' models: what they compute, and the
folders that hold them."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from disttrain_cli.models.adapter_folder import Adapted, write_adapter
from disttrain_cli.models.adapters import stored_name
from disttrain_cli.models.architectures import read_configs
from disttrain_cli.models.graph import build_layers, describe, layer_table
from disttrain_cli.models.layer import is_adapter
from disttrain_cli.models.probe import entry_state, probe_batch
from disttrain_cli.models.published import on_meta
from disttrain_cli.spec.runfile import Run
from tests.cases import first_fast
from tests.models.test_generators import GENERATORS, NAME, of_flux
from tests.models.test_lora import assert_same_gradients, randomised

#: Adapters on all that can have one, and on what diffusers' training scripts adapt.
LORA: dict[str, dict[str, Any]] = {
    "sd3.5": {"r": 3, "lora_alpha": 6, "target_modules": "all-linear"},
    "sd3": {"r": 2, "target_modules": ["to_q", "to_k", "to_v", "to_out.0", "add_k_proj"]},
    "flux": {"r": 3, "lora_alpha": 6, "target_modules": "all-linear"},
    "flux, pixels": {"r": 2, "use_rslora": True, "target_modules": ["to_q", "proj_out"]},
}


def made(make_run: Any, kind: str) -> tuple[Run, list[Any], Any, dict[str, Tensor]]:
    """Run, the generator's layers with random weights, a batch and the generator's entry."""
    run = make_run()
    plain = run.file.model_dump(mode="json", exclude_none=True)
    plain["model"]["modules"][NAME] = {
        "kind": "generator",
        "image_size": 16,
        "context_tokens": 4,
        "lora": LORA[kind],
        **GENERATORS[kind],
    }
    run = Run(path=run.path, file=type(run.file).model_validate(plain))
    table, inputs = layer_table(run), describe(run)
    first = next(i for i, info in enumerate(table) if info.module == NAME)
    batch = probe_batch(inputs, target=3)
    layers = randomised(build_layers(run, first, len(table)))
    return run, list(layers), batch, entry_state(table, NAME, inputs, batch)


@pytest.mark.parametrize("kind", first_fast(LORA, 2))
def test_a_flow_with_adapters_equals_pefts_from_their_folder(
    make_run: Any, tmp_path: Path, kind: str
) -> None:
    from peft import PeftModel

    run, layers, batch, state = made(make_run, kind)
    config = read_configs(run)[NAME]
    own = [layer for layer in layers if layer.weights_of == "module"]
    whole = on_meta(config.architecture, config.config).to_empty(device="cpu").eval()
    base = {
        name: tensor.detach().clone()
        for layer in own
        for name, tensor in layer.to_published(dict(layer.named_parameters())).items()
    }
    whole.load_state_dict(base)
    write_adapter(
        tmp_path / "adapter",
        [Adapted(config, layers)],
        whole,
        lambda layer: {path: p.detach() for path, p in layer.named_parameters()},
        torch.float32,
        tmp_path,
    )
    plain = copy.deepcopy(whole)
    model = PeftModel.from_pretrained(whole, tmp_path / "adapter", is_trainable=True).eval()
    theirs = {
        name.replace(".default.", "."): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    ours = {
        stored_name(layer, path): parameter
        for layer in own
        for path, parameter in layer.named_parameters()
        if is_adapter(path)
    }
    assert ours.keys() == theirs.keys()

    for layer in layers:
        state.update(layer(state, batch))
    canvas = layers[-1].canvas
    timesteps, noise = canvas.draw(batch)
    noisy = config.noise.mix(canvas.clean(state, batch), noise, timesteps)
    projector = next(layer for layer in layers if layer.kind == "projector")
    conditioning = projector(state, batch)["conditioning"].detach()
    arguments = {
        "encoder_hidden_states": conditioning.unflatten(0, (3, 4)),
        "pooled_projections": state["pooled"].detach(),
    }
    times = config.noise.times(timesteps)

    def predicted(one: Any) -> Tensor:
        if config.architecture == "flux":
            return of_flux(one, config, noisy, times, arguments)
        return one(noisy, timestep=times, **arguments).sample

    found, expected = layers[-1].predict(state, batch), predicted(model)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)
    assert (expected - predicted(plain)).abs().max() > 1e-2
    weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)) / len(found)
    (found * weight).sum().backward()
    (expected * weight).sum().backward()
    # the last block's queries of the conditioning lead nowhere
    unread = [name for name in ours if "transformer_blocks.2.attn.add_q_proj" in name]
    assert len(unread) == (2 if kind == "sd3.5" else 0)
    for name in unread:
        assert not ours.pop(name).grad.any()
    assert_same_gradients(ours, theirs)


@pytest.mark.parametrize("kind", ["sd3.5", "flux"])
def test_diffusers_loads_the_folder_by_itself(make_run: Any, tmp_path: Path, kind: str) -> None:
    """Into a transformer, as a pipeline does, told the folder's configuration."""
    from safetensors.torch import load_file

    run, layers, _, _ = made(make_run, kind)
    config = read_configs(run)[NAME]
    whole = on_meta(config.architecture, config.config).to_empty(device="cpu")
    write_adapter(
        tmp_path / "adapter",
        [Adapted(config, layers)],
        whole,
        lambda layer: {path: p.detach() for path, p in layer.named_parameters()},
        torch.float32,
        tmp_path,
    )
    said = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    prefix = "base_model.model"
    whole.load_lora_adapter(
        load_file(tmp_path / "adapter" / "adapter_model.safetensors"),
        prefix=prefix,
        metadata={f"{prefix}.{name}": value for name, value in said.items()},
    )
    ours = {
        stored_name(layer, path).removeprefix(f"{prefix}."): parameter
        for layer in layers
        if layer.weights_of == "module"
        for path, parameter in layer.named_parameters()
        if is_adapter(path)
    }
    theirs = {
        name.replace(".default_0.", "."): parameter
        for name, parameter in whole.named_parameters()
        if "lora_" in name
    }
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    adapted = [part for part in whole.modules() if hasattr(part, "lora_A") and part.scaling]
    assert {scale for part in adapted for scale in part.scaling.values()} == {2.0}

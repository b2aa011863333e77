"""Names under which the parameters of every architecture are trained: what a published model has is
its module's, except DeepStack's mergers, which end in rows of the LLM."""

from pathlib import Path

import pytest

from disttrain_cli.models.architectures import architectures, read_configs
from disttrain_cli.models.graph import build_layers, layer_table
from disttrain_cli.models.published import on_meta
from disttrain_cli.spec.runfile import Run, RunFile
from tests.cases import mostly_slow
from tests.models.conftest import AUDIO, LLAMA, MODULES, MROPE, UNET
from tests.models.test_library_generators import PIXELS
from tests.models.test_towers import TOWERS
from tests.models.test_weights import FLUX, LUMINA2, SD3

PIXART = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 3,
    "out_channels": 6,
    "num_layers": 1,
    "cross_attention_dim": 24,
    "caption_channels": 20,
}
CONFIGS = (
    {
        "whisper": AUDIO["config"],
        "unet2d_condition": UNET,
        "pixart": PIXART,
        "sd3": SD3,
        "flux": FLUX,
        "lumina2": LUMINA2,
    }
    | PIXELS
    | {name: tower["config"] for name, tower in TOWERS.items()}
    | {"smolvlm_vision": TOWERS["idefics3_vision"]["config"]}
    | dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "qwen3_vl_text"), LLAMA)
    | {"qwen2_5_vl_text": LLAMA | MROPE}
)
PLACES = {"encoder": "image_encoder", "llm": "llm", "generator": "image_generator"}
#: Parts of the published classes that no layer has: heads that pool, or that nothing here reads.
UNUSED = ("pooler.", "head.", "embed_positions.")
#: Parts of published towers that join them to the LLM.
JOINTS = ("deepstack_merger_list.",)


@pytest.mark.parametrize("architecture", mostly_slow(CONFIGS, *[*CONFIGS][::4]))
def test_a_modules_are_its_published_models_and_only_the_rest_are_projectors(
    make_run, architecture
) -> None:
    place = PLACES[architectures()[architecture].kind]
    spec = TOWERS.get(architecture, AUDIO if architecture == "whisper" else MODULES[place])
    plain = make_run().file.model_dump(mode="json", exclude_none=True)
    plain["model"]["modules"][place] = {
        **spec,
        "kind": architectures()[architecture].kind,
        "architecture": architecture,
        "config": CONFIGS[architecture],
    }
    run = Run(path=Path("disttrain.yaml"), file=RunFile.model_validate(plain))
    layers = [
        layer
        for layer in build_layers(run, 0, len(layer_table(run)), device="meta")
        if layer.module == place
    ]
    module = read_configs(run)[place]
    shapes = {
        name: tensor.shape
        for name, tensor in on_meta(architecture, module.config).state_dict().items()
    }
    owners = {
        path_of: layer.owner_of(path)
        for layer in layers
        for path, parameter in layer.named_parameters()
        for path_of in [layer.published_name(path) or f"{layer.name}.{path}"]
    }
    assert {name for name, owner in owners.items() if owner == place} == {
        name
        for name in shapes
        if not name.startswith((*UNUSED, *JOINTS)) and not name.startswith("model.rotary")
    }
    joined = {name for name, owner in owners.items() if owner == "projectors"}
    assert bool(joined) == (place != "llm") and all(
        name.startswith((f"{place}.projector.", *JOINTS)) for name in joined
    )

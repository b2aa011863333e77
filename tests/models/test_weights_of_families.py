"""Weights of every family of the installed transformers: read as its loader reads them, written as
`save_pretrained` writes them, layer by layer."""

import copy
import json
import re
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from disttrain_cli.errors import SpecError
from disttrain_cli.models.architecture import Architecture
from disttrain_cli.models.architectures import architectures
from disttrain_cli.models.building import LayerMaker
from disttrain_cli.models.conversion import Conversions
from disttrain_cli.models.export import write_model
from disttrain_cli.models.graph import build_layers, layer_table
from disttrain_cli.models.layer import PipelineLayer
from disttrain_cli.models.published import Weights, locate, published_class, weight_files
from disttrain_cli.models.weights import load_into
from disttrain_cli.spec.runfile import Run, RunFile
from tests.cases import mostly_slow
from tests.models.tiny_configs import tiny

#: Image-text families that cannot be built tiny here, with the reason.
UNBUILT = {
    "fast_vlm": "its tower needs timm",
    "gemma3n": "its tower needs timm",
    "perception_lm": "its tower needs timm",
    "shieldgemma2": "a classifier, which its own from_pretrained does not read back",
}
CAUSAL = [
    name
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if getattr(CONFIG_MAPPING[name], "base_model_pp_plan", None)
]
#: Families tried in the fast suite: every eighth decoder, the first ones with images, and one for
#: each kind of rule.
FAST = (
    *CAUSAL[::8],
    "ernie4_5_vl_moe",
    "gemma4",
    "glm46v",
    "internvl",
    "llava",
    "mistral3",
    "qwen2_5_omni_thinker",
    "qwen2_5_vl",
    "qwen3_5",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen4_exp",
)
WHOLE = [name for name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES if name not in UNBUILT]


class Part(PipelineLayer):
    """Tensors of a class up to and including its n-th layer, by their names in the class."""

    kind = "block"

    def __init__(self, module, name, tensors):
        super().__init__()
        self.module, self.name = module, name
        for key, tensor in tensors.items():
            parameter = nn.Parameter(tensor, requires_grad=False)
            self.register_parameter(key.replace(".", ":"), parameter)
        self.published = {key.replace(".", ":"): key for key in tensors}


def parts_of(model, module="llm"):
    """Factories of layers that hold a class's tensors block by block, the others in front.

    Without those that are tied to others.
    """
    groups = {}
    for key, tensor in model.state_dict().items():
        block = re.match(r".*?\.\d+\.", key)
        if key not in model.all_tied_weights_keys:
            groups.setdefault(block[0] if block else "", {})[key] = tensor
    return [
        partial(Part, module, f"{module}.{number}", group)
        for number, group in enumerate(groups.values())
    ]


def random_model(model_type, seed=0, **fields):
    """The library's model with random weights, buffers that are saved too."""
    config = tiny(model_type)
    for name, value in fields.items():
        setattr(config, name, value)
    model = published_class(model_type)(copy.deepcopy(config)).eval()
    drawn = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.normal_(0, 0.1, generator=drawn)
    return model, config


def stored_in(folder):
    tensors = {}
    for path in weight_files(folder):
        tensors |= load_file(path)
    return tensors


def read_all(folder, model):
    """All tensors of a class, each read by itself from the files."""
    conversions = Conversions(model)
    with Weights(weight_files(folder)) as weights:
        located = locate(weights, conversions.tensors, conversions)
        for name, stored in located.items():
            assert stored.shape == conversions.tensors[name].shape, name
        return {name: stored.read() for name, stored in located.items()}


def assert_equal(given, expected):
    assert given.keys() == expected.keys(), given.keys() ^ expected.keys()
    for name, tensor in expected.items():
        assert given[name].shape == tensor.shape and torch.equal(given[name], tensor), name


@pytest.mark.parametrize("model_type", mostly_slow([*CAUSAL, *WHOLE], *FAST))
def test_every_family_is_read_and_written_as_by_its_class(tmp_path, model_type):
    model, config = random_model(model_type)
    model.save_pretrained(tmp_path / "given", max_shard_size="200kB")
    state, tied = model.state_dict(), model.all_tied_weights_keys
    read = read_all(tmp_path / "given", model)
    assert_equal(read | {name: state[name] for name in tied}, state)

    layers = [construct() for construct in parts_of(model)]
    written = write_model(
        tmp_path / "out",
        model_type,
        config,
        layers,
        lambda layer: dict(layer.named_parameters()),
        torch.float32,
        most_bytes=200_000,
    )
    assert_equal(stored_in(tmp_path / "out"), stored_in(tmp_path / "given"))
    assert written.parameters == sum(t.numel() for t in stored_in(tmp_path / "given").values())


def renamed(*pairs):
    """A checkpoint whose names begin otherwise than those of the class."""

    def old(state):
        tensors = {}
        for name, tensor in state.items():
            ours, theirs = next(pair for pair in pairs if name.startswith(pair[0]))
            tensors[theirs + name.removeprefix(ours)] = tensor
        return tensors

    return old


def experts(gate, up, down):
    """A checkpoint with a tensor per expert and projection, by these names."""

    def old(state):
        tensors = {}
        for name, tensor in state.items():
            at = name.rpartition("experts.")[0]
            for index, expert in enumerate(tensor if "experts." in name else ()):
                if name.endswith("gate_up_proj"):
                    one, other = expert.chunk(2)
                    tensors[f"{at}{gate % index}"], tensors[f"{at}{up % index}"] = one, other
                else:
                    tensors[f"{at}{down % index}"] = expert
            if "experts." not in name:
                tensors[name] = tensor
        return {
            name.replace(".mlp.block_sparse_moe", ".block_sparse_moe").replace(
                ".mlp.gate.weight", ".block_sparse_moe.gate.weight"
            )
            if "block_sparse_moe" in gate
            else name: tensor
            for name, tensor in tensors.items()
        }

    return old


def transposed(state):
    """Experts by inputs, then outputs, as the hub's Qwen3-VL has them."""
    return {
        name: tensor.transpose(1, 2) if "experts." in name else tensor
        for name, tensor in state.items()
    }


#: Forms of files on the hub that `save_pretrained` does not write, or writes otherwise.
OLD = {
    "llama": renamed(("model.", ""), ("lm_head.", "lm_head.")),  # of the class without a head
    "mixtral": experts(
        *(f"block_sparse_moe.experts.%d.{name}.weight" for name in ("w1", "w3", "w2"))
    ),
    "qwen3_moe": experts(*(f"experts.%d.{name}_proj.weight" for name in ("gate", "up", "down"))),
    "gpt_oss": dict,  # as in the class
    "qwen2_moe": dict,
    "qwen3_vl_moe": transposed,
    "qwen3_5_text": renamed(("model.", "model.language_model."), ("lm_head.", "lm_head.")),
    "qwen2_5_vl": renamed(
        ("model.language_model.", "model."), ("model.visual.", "visual."), ("lm_head.", "lm_head.")
    ),
    "llava": renamed(
        ("model.language_model.", "language_model.model."),
        ("lm_head.", "language_model.lm_head."),
        ("model.vision_tower.", "vision_tower.vision_model."),
        ("model.multi_modal_projector.", "multi_modal_projector."),
    ),
}


@pytest.mark.parametrize("model_type", OLD)
def test_files_of_older_forms_are_read_as_by_the_class(tmp_path, model_type):
    model, config = random_model(model_type)
    tensors = OLD[model_type](
        {k: v for k, v in model.state_dict().items() if k not in model.all_tied_weights_keys}
    )
    config.save_pretrained(tmp_path)
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in tensors.items()},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    theirs, said = published_class(model_type).from_pretrained(tmp_path, output_loading_info=True)
    assert not said["missing_keys"] and not said["unexpected_keys"]
    ours = read_all(tmp_path, model)
    assert_equal(
        ours | {name: theirs.state_dict()[name] for name in model.all_tied_weights_keys},
        theirs.state_dict(),
    )
    assert_equal(theirs.state_dict(), model.state_dict())


@pytest.mark.parametrize("model_type", ["glm4_moe", "ernie4_5_moe"])
def test_what_the_class_keeps_in_fp32_is_written_in_fp32(tmp_path, model_type):
    model, config = random_model(model_type)
    model.save_pretrained(tmp_path / "given")
    made = published_class(model_type)
    made.from_pretrained(tmp_path / "given", dtype=torch.bfloat16).save_pretrained(
        tmp_path / "theirs"
    )
    write_model(
        tmp_path / "ours",
        model_type,
        config,
        [construct() for construct in parts_of(model)],
        lambda layer: dict(layer.named_parameters()),
        torch.bfloat16,
    )
    ours, theirs = stored_in(tmp_path / "ours"), stored_in(tmp_path / "theirs")
    assert {t.dtype for t in theirs.values()} == {torch.bfloat16, torch.float32}
    assert {k: t.dtype for k, t in ours.items()} == {k: t.dtype for k, t in theirs.items()}
    assert_equal(ours, theirs)


@pytest.fixture
def mixtral(tmp_path, monkeypatch):
    """A run of an LLM from a folder of random weights, and the model that is in it."""
    model, config = random_model("mixtral", vocab_size=264)
    model.save_pretrained(tmp_path / "given")

    def make(joined):
        with torch.device("meta"):
            blank = published_class("mixtral")(joined.module.config)
        return [LayerMaker(construct, None) for construct in parts_of(blank)]

    def read(name, architecture, spec, fields):
        return type(config).from_dict(fields | spec.config), None

    entry = Architecture("llm", "sequence", None, read, make)
    monkeypatch.setitem(architectures(), "mixtral", entry)
    file = RunFile.model_validate(
        {
            "name": "tiny",
            "model": {"modules": {"llm": {"kind": "llm", "folder": "given"}}},
            "data": {"sources": [{"path": "data"}], "sequence_length": 48},
            "train": {"global_batch_size": 4, "steps": 1, "precision": "fp32"},
        }
    )
    return model, Run(path=tmp_path / "disttrain.yaml", file=file)


def all_layers(run):
    return build_layers(run, 0, len(layer_table(run)))


def test_a_layer_with_experts_is_loaded_alone_from_the_files_of_its_experts(mixtral, tmp_path):
    model, run = mixtral
    layers = all_layers(run)
    assert load_into(layers[2:3], run) == [f"llm: weights from {tmp_path / 'given'}."]
    expected = model.state_dict()
    (block,) = layers[2:3]
    loaded = block.to_published(dict(block.named_parameters()))
    assert any("gate_up_proj" in name for name in loaded)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.items())


EXPERT = "model.layers.2.block_sparse_moe.experts.1.w3.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda files: files.pop(EXPERT), ("lack tensors", EXPERT)),
        (
            lambda files: files.update({EXPERT: files[EXPERT][:-1].clone()}),
            ("another shape", "experts.0.w1.weight …", "do not fit each other"),
        ),
        (
            lambda files: files.update(
                {
                    name: t[:-1].clone()
                    for name, t in files.items()
                    if "layers.2." in name and "w2" in name
                }
            ),
            ("another shape", "experts.0.w2.weight …", "given [4, 63, 96], expected [4, 64, 96]"),
        ),
        (
            lambda files: files.update({EXPERT: files[EXPERT].to(torch.float8_e4m3fn)}),
            ("not stored as plain numbers", EXPERT, "F8_E4M3"),
        ),
    ],
)
def test_faults_in_one_expert_are_named(mixtral, tmp_path, change, words):
    _, run = mixtral
    files = load_file(tmp_path / "given" / "model.safetensors")
    change(files)
    save_file(files, tmp_path / "given" / "model.safetensors")
    with pytest.raises(SpecError) as error:
        load_into(all_layers(run), run)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_quantised_form_with_other_names_is_named(mixtral, tmp_path):
    _, run = mixtral
    config, weights = (tmp_path / "given" / name for name in ("config.json", "model.safetensors"))
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"quantization_config": {"quant_method": "x"}})
    )
    files = load_file(weights)
    save_file(
        {
            name.replace(".w2.weight", ".w2.qweight"): t.to(torch.int32) if ".w2." in name else t
            for name, t in files.items()
        },
        weights,
    )
    with pytest.raises(SpecError, match=r"not stored as plain numbers[\s\S]*w2\.qweight: I32"):
        load_into(all_layers(run), run)


def test_a_family_that_is_not_installed_is_named():
    with pytest.raises(SpecError, match="has no model 'of_next_year'"):
        published_class("of_next_year")


def test_a_tensor_that_the_class_lacks_keeps_its_name(mixtral):
    conversions = Conversions(mixtral[0])
    ours, theirs = "model.layers.0.mlp.gate.weight", "mtp.layers.0.mlp.gate.weight"
    assert [one.name for one in conversions.to_files([ours, theirs])] == [
        "model.layers.0.block_sparse_moe.gate.weight",
        theirs,
    ]

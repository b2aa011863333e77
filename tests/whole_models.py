"""Tiny whole vision-language models with random weights, as transformers saves them, and runs from
their folders."""

import json
from pathlib import Path
from typing import Any

import torch
import yaml

from disttrain_cli.spec.runfile import Run, read_run
from tests.data import tiled

TEXT: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}
SPECIAL = ("<pad>", "<s>", "</s>", "<image>")
IMAGE = SPECIAL.index("<image>")
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>\n{% elif message['role'] == 'assistant' %}"
    "{% generation %}{{ part['text'] }}</s>{% endgeneration %}{% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def tokenizer() -> Any:
    """A byte-level tokenizer of 256 + 4 ids, with a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: place for place, name in enumerate((*SPECIAL, *letters))}
    rules = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    rules.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rules.decoder = decoders.ByteLevel()
    rules.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    made = PreTrainedTokenizerFast(
        tokenizer_object=rules, pad_token=SPECIAL[0], bos_token=SPECIAL[1], eos_token=SPECIAL[2]
    )
    made.chat_template = TEMPLATE
    return made


def spread(model: Any, seed: int = 3) -> Any:
    """The model with weights that are all apart, norms and biases too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.copy_(1 + noise if "norm" in name and name.endswith("weight") else noise)
    return model.eval()


def image_processor(tower: str = "clip") -> Any:
    """The image processor of a tower, of its class without torchvision."""
    from transformers import CLIPImageProcessorPil, SiglipImageProcessorPil

    side = TOWER["image_size"]
    if tower == "clip":
        return CLIPImageProcessorPil(
            size={"shortest_edge": side}, crop_size={"height": side, "width": side}
        )
    return SiglipImageProcessorPil(size={"height": side, "width": side})


def write_llava(
    folder: Path, tower: str = "clip", llm: str = "llama", text: Any = None, **fields: Any
) -> Any:
    """A LLaVA folder; returns its model. `fields` are of its configuration, `text` of its LLM's."""
    import transformers

    vision = getattr(transformers, {"clip": "CLIP", "siglip": "Siglip"}[tower] + "VisionConfig")
    decoder = getattr(transformers, f"{llm.capitalize()}Config")
    config = transformers.LlavaConfig(
        vision_config=vision(**TOWER),
        text_config=decoder(**{**TEXT, **(text or {})}),
        image_token_index=IMAGE,
        image_seq_length=16,
        vision_feature_select_strategy="default" if tower == "clip" else "full",
        **fields,
    )
    model = spread(transformers.LlavaForConditionalGeneration(config))
    model.save_pretrained(folder)
    words = tokenizer()
    transformers.LlavaProcessor(
        image_processor(tower),
        words,
        patch_size=TOWER["patch_size"],
        vision_feature_select_strategy=config.vision_feature_select_strategy,
        num_additional_image_tokens=1 if tower == "clip" else 0,
        image_token="<image>",
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    return model


#: A tower of tiles, and an LLM of their processors' ids.
TILE_TOWER: dict[str, Any] = TOWER | {"image_size": tiled.TILE, "patch_size": tiled.PATCH}
TILE_TEXT: dict[str, Any] = TEXT | {"vocab_size": 400}


def write_tiled(
    folder: Path, family: str, text: Any = None, tower: Any = None, cut: Any = None, **fields: Any
) -> Any:
    """A folder of a family that cuts images into tiles; returns its model. `fields` are of its
    configuration, `text`, `tower` and `cut` of its LLM's, its tower's and its image processor's."""
    import transformers

    prefix, tower_type, llm = TILED[family]
    processor = tiled_processor(family, **(cut or {}))
    words = processor.tokenizer
    image = words.convert_tokens_to_ids(processor.image_token)
    if tower_type is not None:  # rows of joined pictures, which nothing merges
        resolutions = processor.image_processor.image_grid_pinpoints
        of_type = {"model_type": tower_type, "patch_size": tiled.PATCH * tiled.MERGE}
        tower = of_type | {"vision_use_head": False} | (tower or {})
        fields = {"image_grid_pinpoints": resolutions} | fields
    config = getattr(transformers, f"{prefix}Config")(
        vision_config=TILE_TOWER | (tower or {}),
        text_config={"model_type": llm, "pad_token_id": 0} | TILE_TEXT | (text or {}),
        image_token_id=image,
        **{"tie_word_embeddings": False} | fields,
    )
    model = spread(getattr(transformers, f"{prefix}ForConditionalGeneration")(config))
    model.save_pretrained(folder)
    tiled.written(folder, processor)
    return model


def tiled_processor(family: str, **fields: Any) -> Any:
    """The processor of a family that cuts images into tiles; SmolVLM's is Idefics3's."""
    return tiled.FAMILIES[family.replace("smolvlm", "idefics3")][0](**fields)


#: By family that cuts images into tiles: prefix of its classes, its tower if there are several, and
#: its LLM.
TILED: dict[str, tuple[str, str | None, str]] = {
    "internvl": ("InternVL", None, "qwen2"),
    "idefics3": ("Idefics3", None, "llama"),
    "smolvlm": ("SmolVLM", None, "llama"),
    "llava_next": ("LlavaNext", "clip_vision_model", "mistral"),
    "llava_onevision": ("LlavaOnevision", "siglip_vision_model", "qwen2"),
}


#: By family: the tower's and the LLM's configuration.
QWEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": (
        {"window_size": 16, "fullatt_block_indexes": [1, 3]},
        {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 2, 2]}},
    ),
    "qwen3_vl": (
        {"num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2]},
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "default",
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
        },
    ),
}
QWEN_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "depth": 4,
    "num_heads": 4,
    "intermediate_size": 64,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "out_hidden_size": 48,
}


def qwen_processor(least: int = 256, most: int = 4096) -> Any:
    """The image processor of tiny Qwen-VL models."""
    from transformers import Qwen2VLImageProcessorPil

    size = {"shortest_edge": least, "longest_edge": most}
    return Qwen2VLImageProcessorPil(size=size, patch_size=4, merge_size=2)


def write_qwen(
    folder: Path, family: str, flat: bool = False, text: Any = None, **fields: Any
) -> Any:
    """A Qwen-VL folder; returns its model. `flat`: with the LLM's fields at the top of config.json,
    as published folders of Qwen2.5-VL have them; `text`: fields of its LLM's configuration."""
    import transformers

    prefix = {"qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[family]
    tower, own = QWEN[family]
    config = getattr(transformers, f"{prefix}Config")(
        vision_config=QWEN_TOWER | tower,
        text_config=TEXT | {"num_hidden_layers": 3} | own | (text or {}),
        image_token_id=IMAGE,
        video_token_id=270,
        vision_start_token_id=271,
        vision_end_token_id=272,
        **fields,
    )
    model = spread(getattr(transformers, f"{prefix}ForConditionalGeneration")(config))
    model.save_pretrained(folder)
    qwen_processor().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    if flat:
        path = folder / "config.json"
        whole = json.loads(path.read_text())
        inner = whole.pop("text_config")
        whole["vision_config"]["model_type"] = family
        path.write_text(json.dumps(inner | whole))
    return model


def run_of(folder: Path, model: dict[str, Any] | None = None, **fields: Any) -> Run:
    """A run file beside `folder` that names it, read."""
    content = {
        "name": "whole",
        "model": {"folder": folder.name, **(model or {})},
        "data": {"sources": [{"path": "data"}], "sequence_length": 64, **fields.pop("data", {})},
        "cluster": fields.pop("cluster", {}),
        "train": {"global_batch_size": 4, "steps": 1, "precision": "fp32", **fields},
    }
    path = folder.parent / "disttrain.yaml"
    path.write_text(yaml.safe_dump(content))
    return read_run(path)


def rewritten(folder: Path, name: str = "config.json", **fields: Any) -> None:
    """Change fields of a JSON file."""
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))

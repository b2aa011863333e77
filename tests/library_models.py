"""Tiny folders of whole models of families that are known by the library alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.data.tiled import _rules as words_of
from tests.whole_models import TEXT, TOWER, spread

LLM: dict[str, Any] = TEXT | {"vocab_size": 400, "pad_token_id": 0}


class Tiny(NamedTuple):
    """A family's classes, without Config and ForConditionalGeneration, and a folder's contents."""

    prefix: str
    processor: Callable[[], Any]
    vision: dict[str, Any]
    text: dict[str, Any]
    fields: dict[str, Any] = {}


def vipllava() -> Any:
    from transformers import CLIPImageProcessorPil, LlavaProcessor

    words = words_of((), "<image>", image_token="<image>")
    side = TOWER["image_size"]
    return LlavaProcessor(
        CLIPImageProcessorPil(
            size={"shortest_edge": side}, crop_size={"height": side, "width": side}
        ),
        words,
        patch_size=TOWER["patch_size"],
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=words.chat_template,
    )


def pixtral() -> Any:
    from transformers import PixtralImageProcessorPil, PixtralProcessor

    words = words_of(("[IMG_BREAK]", "[IMG_END]"), "[IMG]")
    return PixtralProcessor(
        PixtralImageProcessorPil(
            size={"longest_edge": 64}, patch_size={"height": 8, "width": 8}
        ),
        words,
        patch_size=8,
        spatial_merge_size=2,
        chat_template=words.chat_template,
    )


def aya_vision() -> Any:
    from transformers import AyaVisionProcessor, GotOcr2ImageProcessorPil

    marks = ("<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>", "TILE_GLOBAL")
    words = words_of((*marks, *(f"TILE_{n}" for n in range(1, 7)), "<image>"), "<|IMG_PATCH|>")
    words.chat_template = words.chat_template.replace("<|IMG_PATCH|>", "<image>")
    return AyaVisionProcessor(
        GotOcr2ImageProcessorPil(
            size={"height": 32, "width": 32}, max_patches=4, crop_to_patches=True
        ),
        words,
        patch_size=8,
        img_size=32,
        downsample_factor=2,
        chat_template=words.chat_template,
    )


PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 64,
    "patch_size": 8,
}
LLAMA, MISTRAL, QWEN2 = ({"model_type": name} | LLM for name in ("llama", "mistral", "qwen2"))
FAMILIES: dict[str, Tiny] = {
    "vipllava": Tiny(
        "VipLlava",
        vipllava,
        TOWER,
        LLAMA,
        {"vision_feature_layers": [-1, -2, 1]},
    ),
    "mistral3": Tiny("Mistral3", pixtral, PIXTRAL, MISTRAL | {"head_dim": 16}),
    "aya_vision": Tiny(
        "AyaVision",
        aya_vision,
        TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False},
        QWEN2,
    ),
}


def write(folder: Path, family: str) -> tuple[Any, Any]:
    """Write a folder of a family; return its model and its processor."""
    import transformers

    tiny = FAMILIES[family]
    processor = tiny.processor()
    words = processor.tokenizer
    row = getattr(processor, "img_patch_token", processor.image_token)
    fields = {"tie_word_embeddings": False} | tiny.fields
    config = getattr(transformers, f"{tiny.prefix}Config")(
        vision_config=tiny.vision,
        text_config=tiny.text,
        image_token_index=words.convert_tokens_to_ids(row),
        **fields,
    )
    model = spread(getattr(transformers, f"{tiny.prefix}ForConditionalGeneration")(config))
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return model, transformers.AutoProcessor.from_pretrained(folder)

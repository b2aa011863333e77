"""Tiny folders of whole models of families that are known by the library alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.data.tiled import _rules as words_of
from tests.whole_models import TEXT, TOWER, spread

LLM: dict[str, Any] = TEXT | {"vocab_size": 400, "pad_token_id": 0}


class Tiny(NamedTuple):
    """A family's classes, without Config and ForConditionalGeneration, and a folder's contents."""

    prefix: str
    processor: Callable[[], Any]
    vision: dict[str, Any]
    text: dict[str, Any]
    fields: dict[str, Any] | None = None


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
        PixtralImageProcessorPil(size={"longest_edge": 64}, patch_size={"height": 8, "width": 8}),
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


def deepseek_vl() -> Any:
    from transformers import DeepseekVLImageProcessorPil, DeepseekVLProcessor

    words = words_of((), "<image>", image_token="<image>")
    return DeepseekVLProcessor(
        DeepseekVLImageProcessorPil(size={"height": 32, "width": 32}),
        words,
        chat_template=words.chat_template,
        num_image_tokens=16,
    )


def deepseek_vl_hybrid() -> Any:
    from transformers import DeepseekVLHybridImageProcessorPil, DeepseekVLHybridProcessor

    words = words_of((), "<image>", image_token="<image>")
    return DeepseekVLHybridProcessor(
        DeepseekVLHybridImageProcessorPil(
            size={"height": 32, "width": 32}, high_res_size={"height": 64, "width": 64}
        ),
        words,
        chat_template=words.chat_template,
        num_image_tokens=16,
    )


def lighton_ocr() -> Any:
    from transformers import LightOnOcrProcessor, PixtralImageProcessorPil

    named = {"image_break_token": "[BREAK]", "image_end_token": "[END]", "image_token": "[IMG]"}
    words = words_of(("[BREAK]", "[END]"), "[IMG]", **named)
    return LightOnOcrProcessor(
        PixtralImageProcessorPil(size={"longest_edge": 64}, patch_size={"height": 16, "width": 16}),
        words,
        patch_size=8,
        spatial_merge_size=2,
        chat_template=words.chat_template,
    )


def qianfan_ocr() -> Any:
    from transformers import GotOcr2ImageProcessorPil, QianfanOCRProcessor

    words = words_of(
        ("<img>", "</img>", "<image>"),
        "<IMG_CONTEXT>",
        start_image_token="<img>",
        end_image_token="</img>",
        context_image_token="<IMG_CONTEXT>",
    )
    words.chat_template = words.chat_template.replace("<IMG_CONTEXT>", "<image>")
    return QianfanOCRProcessor(
        GotOcr2ImageProcessorPil(size={"height": 32, "width": 32}, max_patches=4),
        words,
        image_seq_length=4,
        chat_template=words.chat_template,
    )


def janus() -> Any:
    from transformers import JanusImageProcessorPil, JanusProcessor

    named = {"image_token": "<image>", "boi_token": "<boi>", "eoi_token": "<eoi>"}
    words = words_of(("<boi>", "<eoi>"), "<image>", **named)
    return JanusProcessor(
        JanusImageProcessorPil(size={"height": 32, "width": 32}),
        words,
        chat_template=words.chat_template,
        num_image_tokens=16,
    )


def cohere2_vision() -> Any:
    from transformers import Cohere2VisionImageProcessor, Cohere2VisionProcessor

    named = {
        "image_token": "<image>",
        "boi_token": "<boi>",
        "eoi_token": "<eoi>",
        "img_line_break_token": "<br>",
    }
    words = words_of(("<boi>", "<eoi>", "<br>"), "<image>", **named)
    return Cohere2VisionProcessor(
        Cohere2VisionImageProcessor(size={"height": 16, "width": 16}, max_patches=4, patch_size=2),
        words,
        chat_template=words.chat_template,
    )


def ovis2() -> Any:
    import transformers

    marks = ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>", "<image>")
    words = words_of(marks, "<IMG_ATOM>")
    words.chat_template = words.chat_template.replace("<IMG_ATOM>", "<image>")
    return transformers.Ovis2Processor(
        transformers.Ovis2ImageProcessorPil(size={"height": 32, "width": 32}),
        words,
        image_seq_length=16,
        chat_template=words.chat_template,
    )


def qwen2_vl() -> Any:
    import transformers

    named = {"image_token": "<image>", "video_token": "<video>"}
    words = words_of(("<video>", "<start>", "<end>"), "<image>", **named)
    # the library takes images without anything between them for one
    words.chat_template = words.chat_template.replace("<image>", "<start><image><end>")
    fields = {"size": {"shortest_edge": 256, "longest_edge": 4096}, "patch_size": 4}
    return transformers.Qwen2VLProcessor(
        transformers.Qwen2VLImageProcessor(**fields, merge_size=2),
        words,
        transformers.Qwen2VLVideoProcessor(),
        chat_template=words.chat_template,
    )


def glm46v() -> Any:
    import transformers

    named = {"image_token": "<image>", "video_token": "<video>"}
    words = words_of(("<video>", "<start>", "<end>"), "<image>", **named)
    # the library takes images without anything between them for one
    words.chat_template = words.chat_template.replace("<image>", "<start><image><end>")
    fields = {"size": {"shortest_edge": 512, "longest_edge": 8192}, "patch_size": 4}
    return transformers.Glm46VProcessor(
        transformers.Glm46VImageProcessor(**fields, merge_size=2),
        words,
        transformers.Glm46VVideoProcessor(),
        chat_template=words.chat_template,
    )


def gemma3() -> Any:
    import transformers

    named = {"image_token": "<soft>", "boi_token": "<boi>", "eoi_token": "<eoi>"}
    words = words_of(("<boi>", "<eoi>"), "<soft>", **named)
    words.chat_template = words.chat_template.replace("<soft>", "<boi>")
    return transformers.Gemma3Processor(
        transformers.Gemma3ImageProcessorPil(size={"height": 32, "width": 32}),
        words,
        chat_template=words.chat_template,
        image_seq_length=4,
    )


def lfm2_vl() -> Any:
    import transformers

    words = words_of(("<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"), "<image>")
    return transformers.Lfm2VlProcessor(
        transformers.Lfm2VlImageProcessor(
            tile_size=32,
            encoder_patch_size=8,
            min_image_tokens=1,
            max_image_tokens=16,
            max_num_patches=64,
            do_image_splitting=False,
        ),
        words,
        chat_template=words.chat_template,
    )


def idefics2() -> Any:
    import transformers

    named = {"image_token": "<image>", "image_boundary_token": "<fake>"}
    words = words_of(("<fake>", "<end_of_utterance>"), "<image>", **named)
    return transformers.Idefics2Processor(
        transformers.Idefics2ImageProcessorPil(
            size={"shortest_edge": 24, "longest_edge": 64}, do_image_splitting=False
        ),
        words,
        image_seq_len=3,
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
LLAMA, MISTRAL, QWEN2, QWEN3 = (
    {"model_type": name} | LLM for name in ("llama", "mistral", "qwen2", "qwen3")
)
SIGLIP = TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False}
INTERNVIT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": [32, 32],
    "patch_size": [8, 8],
    "drop_path_rate": 0.0,
}
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
        SIGLIP,
        QWEN2,
    ),
    "deepseek_vl": Tiny("DeepseekVL", deepseek_vl, SIGLIP, LLAMA),
    "deepseek_vl_hybrid": Tiny(
        "DeepseekVLHybrid",
        deepseek_vl_hybrid,
        SIGLIP,
        LLAMA,
        {
            "high_res_vision_config": {
                "hidden_size": 32,
                "output_channels": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "image_size": 64,
                "patch_size": 4,
                "window_size": 4,
                "global_attn_indexes": [1],
                "mlp_dim": 64,
                "num_pos_feats": 8,
            }
        },
    ),
    "lighton_ocr": Tiny("LightOnOcr", lighton_ocr, PIXTRAL, QWEN3 | {"head_dim": 12}),
    "qianfan_ocr": Tiny("QianfanOCR", qianfan_ocr, INTERNVIT, QWEN3 | {"head_dim": 12}),
    "janus": Tiny(
        "Janus",
        janus,
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "mlp_ratio": 2.0,
            "image_size": 32,
            "patch_size": 8,
            "projection_dim": 48,
            "num_image_tokens": 16,
        },
        LLAMA,
        {
            "vq_config": {
                "base_channels": 32,
                "embed_dim": 8,
                "num_embeddings": 16,
                "latent_channels": 32,
                "channel_multiplier": [1, 1],
                "projection_dim": 48,
                "image_token_embed_dim": 48,
            }
        },
    ),
    "cohere2_vision": Tiny(
        "Cohere2Vision",
        cohere2_vision,
        SIGLIP | {"image_size": 16, "patch_size": 4},
        LLAMA,
        {"alignment_intermediate_size": 64},
    ),
    "qwen2_vl": Tiny(
        "Qwen2VL",
        qwen2_vl,
        {
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": 48,
            "num_heads": 4,
            "mlp_ratio": 2,
            "patch_size": 4,
            "spatial_merge_size": 2,
        },
        LLM | {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 2, 2]}},
        {"video_token_id": 399, "vision_start_token_id": 397, "vision_end_token_id": 398},
    ),
    "glm46v": Tiny(
        "Glm46V",
        glm46v,
        {
            "model_type": "glm4v_vision",
            "depth": 2,
            "hidden_size": 32,
            "out_hidden_size": 48,
            "num_heads": 4,
            "intermediate_size": 64,
            "image_size": 32,
            "patch_size": 4,
            "spatial_merge_size": 2,
        },
        {"model_type": "glm4v_text"}
        | LLM
        | {
            "rope_parameters": {
                "rope_type": "default",
                "mrope_section": [2, 2, 2],
                "partial_rotary_factor": 1.0,
            }
        },
        {"video_token_id": 399},
    ),
    "gemma3": Tiny(
        "Gemma3",
        gemma3,
        SIGLIP,
        LLM
        | {
            "model_type": "gemma3_text",
            "head_dim": 12,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        {"mm_tokens_per_image": 4},
    ),
    "lfm2_vl": Tiny(
        "Lfm2Vl",
        lfm2_vl,
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "patch_size": 8,
            "num_patches": 16,
            "vision_use_head": False,
        },
        {"model_type": "lfm2"} | LLM | {"layer_types": ["conv", "full_attention"]},
        {"projector_hidden_size": 64},
    ),
    "idefics2": Tiny(
        "Idefics2",
        idefics2,
        TOWER | {"image_size": 64},
        MISTRAL,
        {
            "perceiver_config": {
                "hidden_size": 48,
                "resampler_n_latents": 3,
                "resampler_depth": 2,
                "resampler_n_heads": 4,
                "num_key_value_heads": 2,
                "resampler_head_dim": 12,
            }
        },
    ),
    "ovis2": Tiny(
        "Ovis2",
        ovis2,
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "image_size": 32,
            "patch_size": 8,
            "vocab_size": 40,
        },
        QWEN2,
        {"hidden_size": 48, "vocab_size": 400},
    ),
}


#: Families that are refused, and why.
REFUSED = {
    "idefics2": "the text that it writes for an image depends on the others",
    "ovis2": "visual_indicator_features",
}


def write(folder: Path, family: str) -> tuple[Any, Any]:
    """Write a folder of a family; return its model and its processor."""
    import transformers

    tiny = FAMILIES[family]
    try:
        processor = tiny.processor()
    except ImportError as error:
        pytest.skip(" ".join(str(error).split()))
    words = processor.tokenizer
    rows = ("<|IMG_PATCH|>", "<IMG_ATOM>", "<soft>", "<imgpad>", getattr(processor, "image_token", "<image>"))
    row = next(one for one in rows if one in words.get_vocab())
    fields = {"tie_word_embeddings": False} | (tiny.fields or {})
    config = getattr(transformers, f"{tiny.prefix}Config")(
        vision_config=tiny.vision,
        text_config=tiny.text,
        image_token_id=words.convert_tokens_to_ids(row),
        **fields,
    )
    model = spread(getattr(transformers, f"{tiny.prefix}ForConditionalGeneration")(config))
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return model, transformers.AutoProcessor.from_pretrained(folder)

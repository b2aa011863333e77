"""Tiny folders of whole models of families that are known by the library alone."""

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.cases import mostly_slow
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
    length: int = 1024  # tokens of the sequence that holds all conversations


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


def gridded(
    name: str,
    images: str,
    videos: str,
    edges: tuple[int, int] = (256, 4096),
    image: str = "<image>",
    **fields: Any,
) -> Callable[[], Any]:
    """Factory of a processor whose images are grids of patches."""

    def made() -> Any:
        import transformers

        ends = {"start": "<start>", "end": "<end>"}
        named = {f"{item}_{end}_token": text for end, text in ends.items() for item in ITEMS}
        named |= {"image_token": image, "video_token": "<video>"}
        words = words_of(MARKS, image, **named)
        # the library takes images without anything between them for one
        words.chat_template = words.chat_template.replace(image, f"<start>{image}<end>")
        sizes = {"size": {"shortest_edge": edges[0], "longest_edge": edges[1]}, "patch_size": 4}
        return getattr(transformers, name)(
            image_processor=getattr(transformers, images)(**sizes | {"merge_size": 2} | fields),
            tokenizer=words,
            video_processor=getattr(transformers, videos)(),
            chat_template=words.chat_template,
        )

    return made


def llava_next_video() -> Any:
    import transformers

    words = words_of(("<video>",), "<image>", image_token="<image>", video_token="<video>")
    return transformers.LlavaNextVideoProcessor(
        transformers.LlavaNextVideoVideoProcessor(),
        transformers.LlavaNextImageProcessorPil(
            size={"shortest_edge": 32},
            crop_size={"height": 32, "width": 32},
            image_grid_pinpoints=PINPOINTS,
        ),
        words,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=words.chat_template,
    )


def video_llava() -> Any:
    import transformers

    words = words_of(("<video>",), "<image>", image_token="<image>", video_token="<video>")
    return transformers.VideoLlavaProcessor(
        transformers.VideoLlavaImageProcessor(
            size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
        ),
        transformers.VideoLlavaVideoProcessor(),
        words,
        patch_size=8,
        vision_feature_select_strategy="default",
        chat_template=words.chat_template,
    )


def aria() -> Any:
    import transformers

    words = words_of((), "<image>", image_token="<image>")
    return transformers.AriaProcessor(
        transformers.AriaImageProcessorPil(max_image_size=980, min_image_size=336),
        words,
        chat_template=words.chat_template,
        size_conversion={980: 4},
    )


def minicpm(name: str, of: str) -> Any:
    import transformers

    named = {f"{part}_token": f"<{part}>" for part in ("image", "video", *SLICES)}
    words = words_of(tuple(named.values())[1:], "<image>", **named)
    return getattr(transformers, f"{name}Processor")(
        getattr(transformers, f"{of}ImageProcessor")(
            scale_resolution=32, patch_size=4, max_slice_nums=4, use_image_id=False
        ),
        getattr(transformers, f"{of}VideoProcessor")(),
        words,
        chat_template=words.chat_template,
    )


def omni(name: str = "Qwen2_5Omni") -> Any:
    import transformers

    named = {f"{part}_token": f"<{part}>" for part in ("image", "video", "audio", *OMNI)}
    words = words_of(tuple(named.values())[1:], "<image>", **named)
    around = "<vision_bos><image><vision_eos>"
    words.chat_template = words.chat_template.replace(
        "<image>",
        around
        + "".join(
            f"{{% elif part['type'] == '{media}' %}}<{start}_bos><{media}><{start}_eos>"
            for media, start in (("video", "vision"), ("audio", "audio"))
        ),
    )
    # its class sets the least pixels of a video's frame: 128 tokens of this patch
    sizes = {"size": {"shortest_edge": 28**2, "longest_edge": 64**2}, "patch_size": 14}
    return getattr(transformers, f"{name}Processor")(
        transformers.Qwen2VLImageProcessor(**sizes, merge_size=2),
        transformers.Qwen2VLVideoProcessor(**sizes, merge_size=2, cap_pixels_per_frame=False),
        transformers.WhisperFeatureExtractor(feature_size=16),
        words,
        chat_template=words.chat_template,
    )


def compass() -> Any:
    import transformers

    named = {"image_token": "<|IMAGE_PAD|>", "video_token": "<|VIDEO_PAD|>"}
    ends = ("<|VISION_START|>", "<|VISION_END|>")
    words = words_of(("<|VIDEO_PAD|>", *ends), "<|IMAGE_PAD|>", **named)
    around = "<|IMAGE_PAD|>".join(ends)
    words.chat_template = words.chat_template.replace("<|IMAGE_PAD|>", around)
    sizes = {"size": {"shortest_edge": 256, "longest_edge": 4096}, "patch_size": 4}
    return transformers.CohereCompassProcessor(
        transformers.Qwen2VLImageProcessor(**sizes, merge_size=2),
        words,
        transformers.Qwen3VLVideoProcessor(),
        chat_template=words.chat_template,
    )


def gemma4(name: str = "Gemma4") -> Any:
    import transformers

    parts = ("boi", "eoi", "audio", "boa", "eoa")
    named = {f"{part}_token": f"<{part}>" for part in parts} | {"image_token": "<soft>"}
    words = words_of(tuple(f"<{part}>" for part in parts), "<soft>", **named)
    words.chat_template = words.chat_template.replace(
        "<soft>", "<soft>{% elif part['type'] == 'audio' %}<audio>"
    )
    clips = {} if name == "Gemma4Unified" else {"feature_size": 16}
    return getattr(transformers, f"{name}Processor")(
        getattr(transformers, f"{name}AudioFeatureExtractor")(**clips),
        getattr(transformers, f"{name}ImageProcessor")(
            patch_size=4, max_soft_tokens=70, pooling_kernel_size=3
        ),
        words,
        getattr(transformers, f"{name}VideoProcessor")(),
        chat_template=words.chat_template,
        image_seq_length=70,
    )


def step3p7() -> Any:
    import transformers

    marks = ("<patch_start>", "<patch_end>", "<patch_newline>", "<im_start>", "<im_end>")
    words = words_of(marks, "<im_patch>")
    return transformers.Step3p7Processor(
        transformers.Step3p7ImageProcessor(
            size={"height": 64, "width": 64},
            patch_size=32,
            vision_patch_size=4,
            downsampler_stride=4,
        ),
        words,
        chat_template=words.chat_template,
    )


def granite_docling() -> Any:
    import transformers

    tiles = (f"<row_{row}_col_{column}>" for row in range(1, 9) for column in range(1, 9))
    marks = ("<fake_token_around_image>", "<global-img>", *tiles)
    words = words_of(marks, "<image>", image_token="<image>")
    return transformers.GraniteDoclingProcessor(
        transformers.GraniteDoclingImageProcessorPil(
            size={"height": 32, "width": 32}, max_patches=2, dense_max_patches=2
        ),
        words,
        image_seq_len=4,
        chat_template=words.chat_template,
    )


def got_ocr2(name: str = "GotOcr2", rows: int = 1) -> Any:
    import transformers

    words = words_of(("<img>", "</img>"), "<imgpad>")
    words.chat_template = words.chat_template.replace("<imgpad>", f"<img>{'<imgpad>' * rows}</img>")
    return getattr(transformers, f"{name}Processor")(
        getattr(transformers, f"{name}ImageProcessorPil")(size={"height": 256, "width": 256}),
        words,
        chat_template=words.chat_template,
    )


def deepseek_ocr2() -> Any:
    import transformers

    words = words_of((), "<image>", image_token="<image>")
    return transformers.DeepseekOcr2Processor(
        # 256 and 144 queries, as its tower has them
        transformers.DeepseekOcr2ImageProcessorPil(
            size={"height": 128, "width": 128}, tile_size=96, max_patches=2
        ),
        words,
        patch_size=2,
        chat_template=words.chat_template,
    )


def llama4() -> Any:
    import transformers

    marks = ("image", "image_start", "image_end", "tile_x_separator", "tile_y_separator")
    words = words_of(tuple(f"<|{mark}|>" for mark in marks), "<|patch|>")
    words.chat_template = words.chat_template.replace("<|patch|>", "<|image|>")
    return transformers.Llama4Processor(
        transformers.Llama4ImageProcessor(size={"height": 32, "width": 32}, max_patches=4),
        words,
        patch_size=8,
        chat_template=words.chat_template,
    )


def muse() -> Any:
    import transformers

    marks = ("image_start", "image_end", "video", "vid_frame_separator", "vid_start", "vid_end")
    words = words_of(tuple(f"<|{mark}|>" for mark in marks), "<|patch|>")
    return transformers.MuseGlimmerProcessor(
        transformers.MuseGlimmerImageProcessor(patch_size=4, max_image_tokens=16),
        transformers.MuseGlimmerVideoProcessor(),
        words,
        chat_template=words.chat_template,
    )


ITEMS = ("image", "video", "vision")
MARKS = ("<video>", "<start>", "<end>", "<|begin_of_video|>", "<|end_of_video|>")


def nemotron_h_omni() -> Any:
    import transformers

    marks = ("<img>", "</img>", "<video>", "<so_embedding>", "<so_start>", "<so_end>")
    words = words_of(marks, "<image>", image_token="<image>")
    named = transformers.models.nemotron_h_omni
    return named.NemotronH_Omni_Reasoning_V3Processor(
        named.NemotronH_Omni_Reasoning_V3ImageProcessor(
            patch_size=4, min_num_patches=16, max_num_patches=64
        ),
        named.NemotronH_Omni_Reasoning_V3VideoProcessor(),
        words,
        transformers.ParakeetFeatureExtractor(),
        chat_template=words.chat_template,
    )


def perception_lm() -> Any:
    import transformers

    words = words_of(("<video>",), "<image>", image_token="<image>", video_token="<video>")
    return transformers.PerceptionLMProcessor(
        transformers.PerceptionLMVideoProcessor(),
        transformers.PerceptionLMImageProcessor(tile_size=32, max_num_tiles=4),
        words,
        patch_size=8,
        pooling_ratio=2,
        chat_template=words.chat_template,
    )


SLICES = (
    *("image_start", "image_end", "slice_start", "slice_end", "image_id_start", "image_id_end"),
)
OMNI = ("vision_bos", "vision_eos", "audio_bos", "audio_eos")
PINPOINTS = [[32, 64], [64, 32]]
#: Ids in the configurations that no processor writes for an image.
VIDEO = {"video_token_id": 391}
IDS = VIDEO | {"vision_start_token_id": 392, "vision_end_token_id": 393}
AUDIO_IDS = {f"audio_{one}token_id": 394 for one in ("", "start_", "end_")}
GLM_IDS = VIDEO | {
    f"{item}_{end}_token_id": 392 for item in ("image", "video") for end in ("start", "end")
}
VIT = {
    "depth": 2,
    "hidden_size": 32,
    "out_hidden_size": 48,
    "num_heads": 4,
    "intermediate_size": 64,
    "patch_size": 4,
    "spatial_merge_size": 2,
}
QWEN3_VIT = VIT | {"num_position_embeddings": 64}
DEEP_VIT = QWEN3_VIT | {"deepstack_visual_indexes": [0]}
GLM_VIT = VIT | {"image_size": 32}
WINDOWED_VIT = VIT | {"window_size": 16, "fullatt_block_indexes": [1]}
VIT_LAYERS = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "patch_size": 4,
}
HEADS = LLM | {"head_dim": 12}
MROPE = {"rope_type": "default", "mrope_section": [2, 2, 2]}
SECTIONS = {"rope_parameters": MROPE}
GLM_SECTIONS = {"rope_parameters": MROPE | {"partial_rotary_factor": 1.0}}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LINEAR = HEADS | {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": MROPE | {"partial_rotary_factor": 1.0, "mrope_interleaved": True},
}
LATENT = LLM | {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
AUDIO = {
    "d_model": 32,
    "encoder_layers": 1,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "output_dim": 48,
    "num_mel_bins": 16,
}
QWEN3_VL = gridded("Qwen3VLProcessor", "Qwen2VLImageProcessor", "Qwen3VLVideoProcessor")
GLM4V = gridded("Glm4vProcessor", "Glm4vImageProcessor", "Glm4vVideoProcessor", edges=(512, 8192))

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
SAM = {
    "hidden_size": 32,
    "output_channels": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 64,
    "patch_size": 4,
    "window_size": 4,
    "global_attn_indexes": [],
    "mlp_dim": 64,
}
FAMILIES: dict[str, Tiny] = {
    "llama4": Tiny(
        "Llama4",
        llama4,
        VIT_LAYERS
        | {
            "image_size": 32,
            "patch_size": 8,
            "intermediate_size": 128,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
            "vision_output_dim": 32,
        },
        HEADS
        | {
            "intermediate_size_mlp": 64,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 0],
        },
    ),
    "nemotron_h_omni": Tiny(
        "NemotronH_Omni_Reasoning_V3_",
        nemotron_h_omni,
        VIT_LAYERS | {"max_img_size": 64, "video_temporal_patch_size": 2},
        HEADS
        | {
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"],
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 32,
            "ssm_state_size": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "chunk_size": 16,
        },
        {"vision_hidden_size": 32, "projector_hidden_size": 64},
    ),
    "perception_lm": Tiny(
        "PerceptionLM",
        perception_lm,
        {
            "architecture": "vit_pe_core_tiny_patch16_384",
            "model_args": {
                "embed_dim": 32,
                "img_size": [32, 32],
                "patch_size": 8,
                "depth": 2,
                "num_heads": 4,
                "global_pool": "",
                "use_post_transformer_norm": False,
                "init_values": 0.1,
                "ref_feat_shape": [4, 4],
            },
        },
        LLAMA,
        VIDEO | {"projector_pooling_ratio": 2},
    ),
    "muse_glimmer": Tiny(
        "MuseGlimmer",
        muse,
        VIT_LAYERS | {"pos_emb_height": 8, "pos_emb_width": 8},
        HEADS | {"sliding_window": 16},
        VIDEO | {"out_hidden_size": 128, "projector_hidden_size": 32},
    ),
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
        gridded("Qwen2VLProcessor", "Qwen2VLImageProcessor", "Qwen2VLVideoProcessor"),
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
        gridded(
            "Glm46VProcessor", "Glm46VImageProcessor", "Glm46VVideoProcessor", edges=(512, 8192)
        ),
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
        {
            "hidden_size": 48,
            "vocab_size": 400,
            "visual_indicator_token_ids": list(range(305, 310)),
        },
    ),
    "qwen3_5": Tiny("Qwen3_5", QWEN3_VL, QWEN3_VIT, LINEAR, IDS),
    "qwen3_5_moe": Tiny(
        "Qwen3_5Moe",
        QWEN3_VL,
        QWEN3_VIT,
        LINEAR | EXPERTS | {"shared_expert_intermediate_size": 24},
        IDS,
    ),
    "qwen3_vl_moe": Tiny("Qwen3VLMoe", QWEN3_VL, DEEP_VIT, HEADS | SECTIONS | EXPERTS, IDS),
    "cosmos3_omni": Tiny(
        "Cosmos3Omni",
        QWEN3_VL,
        {"model_type": "qwen3_vl_vision"} | DEEP_VIT,
        {"model_type": "qwen3_vl_text"} | HEADS | SECTIONS,
        IDS,
    ),
    "glm4v": Tiny("Glm4v", GLM4V, GLM_VIT, LLM | GLM_SECTIONS, GLM_IDS),
    "glm4v_moe": Tiny("Glm4vMoe", GLM4V, GLM_VIT, HEADS | GLM_SECTIONS | ROUTED, GLM_IDS),
    "glmga": Tiny(
        "Glmga",
        GLM4V,
        {"model_type": "glm4v_vision"} | GLM_VIT,
        {"model_type": "glm4v_text"} | LLM | GLM_SECTIONS,
        GLM_IDS,
    ),
    "glm_ocr": Tiny(
        "GlmOcr",
        gridded(
            "Glm46VProcessor", "Glm46VImageProcessor", "Glm46VVideoProcessor", edges=(512, 8192)
        ),
        GLM_VIT,
        HEADS | GLM_SECTIONS,
        GLM_IDS,
    ),
    "exaone4_5": Tiny(
        "Exaone4_5_",
        gridded("Exaone4_5_Processor", "Qwen2VLImageProcessor", "Qwen2VLVideoProcessor"),
        WINDOWED_VIT | {"num_key_value_heads": 2},
        {"model_type": "exaone4"} | HEADS | {"sliding_window": 16},
        VIDEO,
    ),
    "hyperclovax_vision_v2": Tiny(
        "HyperCLOVAXVisionV2",
        gridded("HyperCLOVAXVisionV2Processor", "Qwen2VLImageProcessor", "Qwen2VLVideoProcessor"),
        {"model_type": "qwen2_5_vl_vision"} | WINDOWED_VIT,
        {"model_type": "hyperclovax"} | LLM,
        VIDEO,
    ),
    "video_llama_3": Tiny(
        "VideoLlama3",
        gridded(
            "VideoLlama3Processor",
            "VideoLlama3ImageProcessor",
            "VideoLlama3VideoProcessor",
            merge_size=1,
        ),
        VIT_LAYERS,
        QWEN2,
        VIDEO,
    ),
    "paddleocr_vl": Tiny(
        "PaddleOCRVL",
        gridded(
            "PaddleOCRVLProcessor",
            "PaddleOCRVLImageProcessor",
            "Qwen2VLVideoProcessor",
            edges=(512, 4096),
        ),
        VIT_LAYERS | {"image_size": 32},
        HEADS | SECTIONS,
        IDS,
    ),
    "kimi_k25": Tiny(
        "Kimi_K25",
        gridded(
            "Kimi_K25Processor",
            "Kimi_K25ImageProcessor",
            "Kimi_K25VideoProcessor",
            size={"max_height": 16, "max_width": 16},
        ),
        VIT_LAYERS | {"pos_emb_height": 4, "pos_emb_width": 4},
        {"model_type": "deepseek_v3"} | LATENT | ROUTED,
        IDS | {"projection_hidden_size": 32},
    ),
    "llava_next_video": Tiny(
        "LlavaNextVideo",
        llava_next_video,
        TOWER,
        LLAMA,
        {"video_token_index": 399, "image_grid_pinpoints": PINPOINTS},
    ),
    "video_llava": Tiny(
        "VideoLlava",
        video_llava,
        {"model_type": "clip_vision_model"} | TOWER,
        LLAMA,
        {"video_token_index": 399},
    ),
    "aria": Tiny(
        "Aria",
        aria,
        VIT_LAYERS | {"model_type": "idefics3_vision", "image_size": 980, "patch_size": 70},
        LLM | {"moe_num_experts": 4, "moe_num_shared_experts": 1},
        {"projector_patch_to_query_dict": {"196": 4}},
    ),
    **{
        name: Tiny(
            prefix,
            partial(minicpm, prefix, of),
            VIT_LAYERS | {"image_size": 64, "insert_layer_id": 0},
            {"model_type": "qwen3_5_text"} | LINEAR,
            VIDEO | {"insert_layer_id": 0},
        )
        for name, prefix, of in (
            ("minicpmv4_6", "MiniCPMV4_6", "MiniCPMV4_6"),
            ("minicpmv4_7", "MiniCPMV4_7", "MiniCPMV4_6"),
            ("minicpm_ocr", "MiniCPMOcr", "MiniCPMOcr"),
        )
    },
    "step3p7": Tiny(
        "Step3p7",
        step3p7,
        VIT_LAYERS | {"image_size": 64},
        HEADS
        | EXPERTS
        | {
            "model_type": "step3p5",
            "sliding_window": 16,
            "n_routed_experts": 4,
            "share_expert_dim": 24,
            "layer_types": ["full_attention", "full_attention"],
        },
    ),
    "lfm3_vl": Tiny(
        "Lfm3Vl",
        gridded("Lfm3VlProcessor", "Qwen2VLImageProcessor", "Qwen3VLVideoProcessor"),
        VIT_LAYERS | {"spatial_merge_size": 2, "num_key_value_heads": 2},
        HEADS
        | {
            "model_type": "lfm3",
            "num_hidden_layers": 3,
            "sliding_window": 16,
            "layer_types": ["conv", "full_attention", "sliding_attention"],
        },
        IDS | {"projector_hidden_size": 64},
    ),
    "cosmos3_edge": Tiny(
        "Cosmos3Edge",
        gridded("Cosmos3EdgeProcessor", "Cosmos3EdgeImageProcessor", "Cosmos3EdgeVideoProcessor"),
        VIT_LAYERS | {"num_patches": 64},
        HEADS | SECTIONS,
        IDS | {"projector_hidden_size": 64},
    ),
    "qwen2_5_omni_thinker": Tiny(
        "Qwen2_5OmniThinker",
        omni,
        WINDOWED_VIT | {"patch_size": 14, "window_size": 56},
        LLM | SECTIONS,
        IDS | {"audio_config": AUDIO} | AUDIO_IDS,
    ),
    "qwen3_omni_moe_thinker": Tiny(
        "Qwen3OmniMoeThinker",
        partial(omni, "Qwen3OmniMoe"),
        DEEP_VIT | {"patch_size": 14},
        HEADS | SECTIONS | EXPERTS,
        IDS | {"audio_config": AUDIO | {"downsample_hidden_size": 16}} | AUDIO_IDS,
    ),
    "cohere_compass": Tiny(
        "CohereCompass",
        compass,
        DEEP_VIT,
        LLM
        | {
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                kind: MROPE | {"rope_theta": 10000.0}
                for kind in ("sliding_attention", "full_attention")
            },
            "logit_scale": 0.5,
        },
        IDS,
    ),
    "granite_docling": Tiny(
        "GraniteDocling",
        granite_docling,
        VIT_LAYERS
        | {
            "image_size": 32,
            "out_hidden_size": 48,
            "deepstack_visual_indexes": [0],
            "scale_factor": 4,
        },
        LLM,
    ),
    "got_ocr2": Tiny("GotOcr2", got_ocr2, SAM | {"image_size": 256}, QWEN2, length=4096),
    "pp_chart2table": Tiny(
        "PPChart2Table",
        partial(got_ocr2, "PPChart2Table", 256),
        SAM | {"image_size": 256},
        QWEN2,
        length=4096,
    ),
    "deepseek_ocr2": Tiny(
        "DeepseekOcr2",
        deepseek_ocr2,
        {
            "sam_config": SAM
            | {"image_size": 128, "patch_size": 2, "downsample_channels": [32, 32]},
            "encoder_config": LLM | {"hidden_size": 32, "num_key_value_heads": 4},
        },
        LLM | ROUTED | {"num_key_value_heads": 4, "mlp_layer_types": ["dense", "sparse"]},
        length=4096,
    ),
    "cohere2_vision, scaled": Tiny(
        "Cohere2Vision",
        cohere2_vision,
        SIGLIP | {"image_size": 16, "patch_size": 4},
        {"model_type": "cohere2"} | HEADS | {"sliding_window": 16, "logit_scale": 0.25},
        {"alignment_intermediate_size": 64},
    ),
    "gemma4": Tiny(
        "Gemma4",
        gemma4,
        VIT_LAYERS
        | {
            "num_key_value_heads": 4,
            "head_dim": 8,
            "position_embedding_size": 1024,
            "use_clipped_linears": True,
        },
        HEADS
        | {
            "global_head_dim": 12,
            "sliding_window": 80,
            "layer_types": ["sliding_attention", "full_attention"],
            "vocab_size_per_layer_input": 400,
            "hidden_size_per_layer_input": 8,
            "use_bidirectional_attention": "vision",
        },
        {"audio_config": None},
    ),
    "gemma4_unified": Tiny(
        "Gemma4Unified",
        partial(gemma4, "Gemma4Unified"),
        {"patch_size": 4},
        HEADS
        | {
            "global_head_dim": 12,
            "sliding_window": 80,
            "layer_types": ["sliding_attention", "full_attention"],
            "use_bidirectional_attention": "vision",
        },
        {"audio_config": None},
    ),
}

FAMILIES["gemma4, heard"] = FAMILIES["gemma4"]._replace(
    fields={
        "audio_config": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "subsampling_conv_channels": [16, 8],
            "output_proj_dims": 32,
        },
        "audio_token_id": 394,
    }
)


#: Families of the fast suite: one of each rule.
FAST = (
    *("vipllava", "mistral3", "deepseek_vl_hybrid", "janus", "lighton_ocr", "idefics2", "ovis2"),
    *("gemma3", "lfm2_vl", "aya_vision", "qwen3_vl_moe", "paddleocr_vl", "gemma4", "aria"),
)
#: Families that are refused, and why.
REFUSED = {
    "minicpmv4_7": "its positions are of a form that is not known",
    "idefics2": "the text that it writes for a file depends on the others",
    "ovis2": "visual_indicator_features",
}

#: The others; those outside the fast suite are slow.
TRAINED = mostly_slow(
    [one for one in FAMILIES if one not in (*REFUSED, "gemma4, heard")], "vipllava", "gemma3"
)


#: Fields of a configuration with ids of tokens that some processors name.
TOKENS = {
    "video_token_id": "video_token",
    "audio_token_id": "audio_token",
    "vision_start_token_id": "vision_bos_token",
    "vision_end_token_id": "vision_eos_token",
    "audio_start_token_id": "audio_bos_token",
    "audio_end_token_id": "audio_eos_token",
}


def write(folder: Path, family: str) -> tuple[Any, Any]:
    """Write a folder of a family; return its model and its processor."""
    import transformers

    tiny = FAMILIES[family]
    if family == "perception_lm":
        pytest.importorskip("timm")
    try:
        processor = tiny.processor()
    except ImportError as error:
        pytest.skip(" ".join(str(error).split()))
    words = processor.tokenizer
    rows = (
        "<|IMG_PATCH|>",
        "<|patch|>",
        "<IMG_ATOM>",
        "<soft>",
        "<imgpad>",
        getattr(processor, "image_token", "<image>"),
    )
    row = next(one for one in rows if one in words.get_vocab())
    fields = {"tie_word_embeddings": False} | (tiny.fields or {})
    fields |= {
        field: words.convert_tokens_to_ids(token)
        for field, name in TOKENS.items()
        if field in fields and (token := getattr(processor, name, None)) in words.get_vocab()
    }
    config = getattr(transformers, f"{tiny.prefix}Config")(
        vision_config=tiny.vision,
        text_config=tiny.text,
        image_token_id=words.convert_tokens_to_ids(row),
        **fields,
    )
    made = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    model = spread(made(config))
    for name, bound in model.named_buffers():
        if name.endswith(("_min", "_max")):  # of clipped linears
            bound.copy_(bound.sign() * 0.5)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    processor = transformers.AutoProcessor.from_pretrained(folder)
    kinds = "mm_token_type_ids" in inspect.signature(model.forward).parameters
    processor.return_mm_token_type_ids |= kinds  # some classes ask for them, then
    if (
        family == "perception_lm"
    ):  # of images with other numbers of tiles the processor makes a list
        features = model.model.get_image_features
        model.model.get_image_features = lambda pixel_values, **given: features(
            pixel_values[None] if pixel_values.ndim == 4 else pixel_values, **given
        )
    if family == "nemotron_h_omni":  # its class drops what moves the spans that are trained
        replaced, masked = (
            processor.get_text_with_replacements,
            processor._adjust_assistant_masks_indices,
        )
        offsets: list[Any] = []

        def replacing(*given: Any, **named: Any) -> Any:
            text, offsets[:] = replaced(*given, **named)
            return text, offsets

        processor.get_text_with_replacements = replacing
        processor._adjust_assistant_masks_indices = lambda made, spans: masked(
            made.update({"text_replacement_offsets": offsets}) or made, spans
        )
    if family in ("got_ocr2", "pp_chart2table"):  # their classes take lists without samples
        layout = processor.prepare_inputs_layout
        processor.prepare_inputs_layout = lambda images=None, text=None, **given: layout(
            images=images and [image for sample in images for image in sample],
            text=[text] if isinstance(text, str) else text,
            **given,
        )
    return model, processor

"""All families, by the `model_type` of a whole model's config.json."""

from __future__ import annotations

from disttrain_cli.spec.families import idefics3, internvl, llava, qwen_vl
from disttrain_cli.spec.families.family import Family

FAMILIES: dict[str, Family] = {
    "idefics3": idefics3.IDEFICS3,
    "internvl": internvl.FAMILY,
    "llava": llava.FAMILY,
    "llava_next": llava.LLAVA_NEXT,
    "llava_onevision": llava.LLAVA_ONEVISION,
    "qwen2_5_vl": qwen_vl.QWEN2_5_VL,
    "qwen3_vl": qwen_vl.QWEN3_VL,
    "smolvlm": idefics3.SMOLVLM,
}

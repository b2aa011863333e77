"""Model families of the installed transformers: those that run, and why others do not.

By trying: the class of each is built from its default configuration, without memory for weights,
and one layer of each kind runs on the meta device. What the processor and the forward of an
image-text family do is checked with a folder only (`library_whole.tower_call`): families whose tiny
folders were trained are stated (`COMPARED`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from disttrain_cli.errors import SpecError
from disttrain_cli.models import recurrent
from disttrain_cli.models.architectures import architectures, decoder_of, read_decoder
from disttrain_cli.models.library_attention import packed
from disttrain_cli.models.library_tower import unfit
from disttrain_cli.models.library_whole import FEATURES, refused, whole_model
from disttrain_cli.spec.families.library import TABLES, library_classes, library_family
from disttrain_cli.spec.families.table import FAMILIES

THINKER = "_thinker"  # suffix of the model_type of an Omni's part
#: Families that are known by the library alone and of which a tiny folder has the library's own
#: loss, by its own processor (`tests/runtime/test_library_models.py`).
COMPARED = frozenset(
    (
        *("aria", "aya_vision", "cohere2_vision", "cohere_compass", "cosmos3_edge"),
        *("cosmos3_omni", "deepseek_ocr2", "deepseek_vl", "deepseek_vl_hybrid", "exaone4_5"),
        *("gemma3", "gemma4", "gemma4_unified", "glm46v", "glm4v", "glm4v_moe", "glm_ocr"),
        *("glmga", "got_ocr2", "granite_docling", "hyperclovax_vision_v2", "janus", "kimi_k25"),
        *("lfm2_vl", "lfm3_vl", "lighton_ocr", "llama4", "llava_next_video", "minicpm_ocr"),
        *("minicpmv4_6", "mistral3", "muse_glimmer", "nemotron_h_omni", "paddleocr_vl"),
        *("perception_lm", "pp_chart2table", "qianfan_ocr", "qwen2_5_omni_thinker", "qwen2_vl"),
        *("qwen3_5", "qwen3_5_moe", "qwen3_omni_moe_thinker", "qwen3_vl_moe", "step3p7"),
        *("video_llama_3", "video_llava", "vipllava"),
    )
)
#: Beginning of the reason why a default configuration, unlike a folder's, proves nothing.
OF_DEFAULT = "known from a folder only"


class Decoder(NamedTuple):
    """Support of a decoder family."""

    model_type: str
    refused: str | None = None  # the reason, if it does not run
    tp: bool = False  # its layers are sharded over TP groups; else replicated
    cp: bool = False
    experts: bool = False
    recurrent: bool = False  # some layers pass a state from token to token


class ImageText(NamedTuple):
    """Support of a family of whole models that read images, videos or clips."""

    model_type: str
    tower: str  # "in layers", or "whole": as one layer
    llm: str  # model_type of its LLM, "" if unknown
    refused: str | None = None
    reads: tuple[str, ...] = ()  # of "image", "video" and "audio"
    compared: bool = False  # a tiny folder has the library's loss; else only its classes ran


def decoders(names: tuple[str, ...] = ()) -> list[Decoder]:
    """Return the decoder families of the installed library whose name contains one of `names`."""
    known = {name for name, one in architectures().items() if one.read is read_decoder}
    known -= library_classes().keys()  # whole models, of which a decoder is a part
    with _quiet():
        return [_decoder(name) for name in sorted(known) if _asked(name, names)]


def image_text_families(names: tuple[str, ...] = ()) -> list[ImageText]:
    """Return the image-text and audio-text families of the installed library, likewise."""
    known = library_classes().keys() | library_classes(TABLES[1]).keys()
    # published folders of these hold the part that reads and writes texts in a section
    known -= {name.removesuffix(THINKER) for name in known if name.endswith(THINKER)}
    with _quiet():
        return [_image_text(name) for name in sorted(known) if _asked(name, names)]


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the library's notes about default configurations."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _asked(name: str, names: tuple[str, ...]) -> bool:
    return not names or any(part in name for part in names)


def _decoder(model_type: str) -> Decoder:
    from transformers import CONFIG_MAPPING

    try:
        library = decoder_of(model_type, packed(CONFIG_MAPPING[model_type]()))
    except SpecError as error:
        return Decoder(model_type, _of_default(error))
    except Exception as error:  # whatever a class of the library raises
        return Decoder(model_type, f"its default configuration fails: {_first_line(error)}")
    layers: list[Any] = list(library.layers)
    return Decoder(
        model_type,
        tp=any(library.division(number)[0] for number in range(len(layers))),
        cp=library.heads is not None,
        experts=any("experts." in path for layer in layers for path, _ in layer.named_parameters()),
        recurrent=any(recurrent.mixers(layer) for layer in layers),
    )


def _of_default(error: SpecError) -> str:
    """Return the reason of a refusal; sizes of a default configuration prove nothing."""
    return str(error.why).replace("its classes fail", f"{OF_DEFAULT}: its default sizes fail")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _image_text(model_type: str) -> ImageText:
    from transformers import CONFIG_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING, MODEL_MAPPING

    if model_type in FAMILIES:
        family = FAMILIES[model_type]
        module = family.modules["llm"]
        reads = ("image", *(() if family.video is None else ("video",)))
        llm = module.architecture or module.default
        return ImageText(model_type, "in layers", llm, reads=reads, compared=True)
    compared, llm, reads = model_type in COMPARED, "", tuple[str, ...]()
    why: str | None = None
    try:
        if library_family(model_type) is None:
            raise refused(model_type, "its class is a text model")
        config = CONFIG_MAPPING[model_type]()
        text = config.get_text_config()
        llm, kind = str(text.model_type), type(config)
        mappings = MODEL_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING
        made = [mapping[kind] for mapping in mappings if kind in mapping]
        reads = tuple(
            media
            for media, function in FEATURES.items()
            if any(hasattr(one, function) for one in made)
        )
        whole = whole_model(config)
        delattr(whole.base, whole.llm)
        if why := unfit(whole.base):
            raise refused(model_type, why)
        decoder_of(llm, packed(text))
    except SpecError as error:
        why = _of_default(error)
    except Exception as error:  # whatever a class of the library raises
        why = f"{OF_DEFAULT}: {_first_line(error)}"
    if compared and why is not None and why.startswith(OF_DEFAULT):
        why = None  # a folder of other sizes ran
    return ImageText(model_type, "whole", llm, why, reads, compared)

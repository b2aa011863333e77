"""Model families of the installed transformers: those that run, and why others do not.

By trying: the class of each is built from its default configuration, without memory for weights,
and one layer of each kind runs on the meta device. What the processor and the forward of an
image-text family do is checked with a folder only (`library_whole.tower_call`).
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
    return str(error.why).replace(
        "its classes fail", "known from a folder only: its default sizes fail"
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _image_text(model_type: str) -> ImageText:
    if model_type in FAMILIES:
        family = FAMILIES[model_type]
        module = family.modules["llm"]
        reads = ("image", *(() if family.video is None else ("video",)))
        llm = module.architecture or module.default
        return ImageText(model_type, "in layers", llm, reads=reads)
    try:
        config, reads = _tried(model_type)
        llm = config.get_text_config()
        decoder_of(str(llm.model_type), packed(llm))
    except SpecError as error:
        return ImageText(model_type, "whole", "", _of_default(error))
    except Exception as error:  # whatever a class of the library raises
        return ImageText(model_type, "whole", "", f"its classes fail: {_first_line(error)}")
    return ImageText(model_type, "whole", str(llm.model_type), reads=reads)


def _tried(model_type: str) -> tuple[Any, tuple[str, ...]]:
    """Return a family's default configuration, and what it reads.

    Raises:
        SpecError: its class cannot be trained.
    """
    from transformers import CONFIG_MAPPING

    if library_family(model_type) is None:
        raise refused(model_type, "its class is a text model")
    config = CONFIG_MAPPING[model_type]()
    whole = whole_model(config)
    delattr(whole.base, whole.llm)
    if why := unfit(whole.base):
        raise refused(model_type, why)
    reads = (media for media, function in FEATURES.items() if hasattr(whole.base, function))
    return config, tuple(reads)

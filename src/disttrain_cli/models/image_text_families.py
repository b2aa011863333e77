"""Image-text families of the installed transformers: those that run, and why others do not.

By trying: the class of each is built from its default configuration, without memory for weights.
What its processor and its forward do is checked with a folder only (`library_tower.glue_of`).
"""

from __future__ import annotations

from typing import NamedTuple

from disttrain_cli.errors import SpecError
from disttrain_cli.models.architectures import architectures
from disttrain_cli.models.library_tower import refused, unfit, whole_model
from disttrain_cli.spec.families.library import library_classes, library_family
from disttrain_cli.spec.families.table import FAMILIES


class Support(NamedTuple):
    """Support of a family; `refused` has the reason if it is not trained."""

    model_type: str
    tower: str  # "in layers", or "whole": as one layer
    llm: str  # model_type of its LLM, "" if unknown
    refused: str | None = None


def image_text_families() -> list[Support]:
    """Return every image-text family of the installed library."""
    return [_support(model_type) for model_type in library_classes()]


def _support(model_type: str) -> Support:
    if model_type in FAMILIES:
        module = FAMILIES[model_type].modules["llm"]
        return Support(model_type, "in layers", module.architecture or module.default)
    try:
        llm = _tried(model_type)
    except SpecError as error:
        return Support(model_type, "whole", "", error.why)
    known = llm in architectures()
    return Support(model_type, "whole", llm, None if known else f"its LLM, {llm}, is not known")


def _tried(model_type: str) -> str:
    """Return the model_type of a family's LLM; SpecError if its class cannot be trained."""
    from transformers import CONFIG_MAPPING

    if library_family(model_type) is None:
        raise refused(model_type, "its class is a text model")
    config = CONFIG_MAPPING[model_type]()
    whole = whole_model(config)
    delattr(whole.base, whole.llm)
    if why := unfit(whole.base):
        raise refused(model_type, why)
    return str(config.get_text_config().model_type)

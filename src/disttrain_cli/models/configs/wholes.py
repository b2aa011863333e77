"""Configurations of whole published models, as their classes read them."""

from __future__ import annotations

import copy
from typing import Any

from disttrain_cli.errors import SpecError
from disttrain_cli.models.configs.checks import MISTAKES
from disttrain_cli.spec.families.family import Module
from disttrain_cli.spec.families.folder import PublishedFolder


def whole_config(published: PublishedFolder) -> Any:
    """The configuration of a whole model, of its class.

    Raises:
        SpecError: the class does not accept it.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    made = CONFIG_MAPPING[published.model_type]
    try:
        return made.from_dict(copy.deepcopy(dict(published.config)))
    except (StrictDataclassError, *MISTAKES) as error:
        raise SpecError(
            f"{published.file} does not fit {published.model_type}",
            " ".join(str(error).split()),
            "Download the folder again.",
        ) from None


def section_fields(published: PublishedFolder, module: Module) -> dict[str, Any]:
    """Fields of a module's own configuration; whether an LLM's head is its embedding the whole
    model's class says, by defaults and precedence of its own.

    Raises:
        SpecError: the whole model has no such part, or its class does not accept it.
    """
    fields = published.section(module)
    if module.kind == "llm":
        fields["tie_word_embeddings"] = whole_config(published).tie_word_embeddings
    return fields

"""Configurations of whole published models, as their own classes read them."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import Any

from disttrain_cli.errors import SpecError
from disttrain_cli.models.configs.checks import MISTAKES, decoded
from disttrain_cli.spec.families.family import Module
from disttrain_cli.spec.families.folder import PublishedFolder

HEAD_AND_EMBEDDING = ("lm_head.weight", "embed_tokens.weight")
#: Attribute of an LLM's configuration: fields of the whole model's, of which it is a part.
WHOLE = "whole_model"
ROWS = 4096  # rows compared at once


def whole_config(published: PublishedFolder) -> Any:
    """Return the configuration of a whole model in its own class.

    Raises:
        SpecError: the class does not accept it.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    made = CONFIG_MAPPING[published.model_type]
    try:
        return made.from_dict(decoded(published.config))
    except (StrictDataclassError, *MISTAKES) as error:
        raise SpecError(
            f"{published.file} does not fit {published.model_type}",
            " ".join(str(error).split()),
            "Download the folder again.",
        ) from None


def section_fields(published: PublishedFolder, module: Module) -> dict[str, Any]:
    """Return the fields of a module's own configuration.

    An LLM's head is tied to its embedding if the whole model's class does so, by its own defaults
    and precedence, and, as in transformers' `tie_weights`, the weights do not hold another head.

    Raises:
        SpecError: the whole model has no such part, or its class does not accept it.
    """
    fields = published.section(module)
    if published.family.library and module.kind == "llm":  # with the whole class's own defaults
        fields = whole_config(published).get_text_config().to_dict()
    if module.kind == "llm":
        whole = whole_config(published).to_dict()
        fields[WHOLE] = {name: one for name, one in whole.items() if name != module.section}
        tied = whole_config(published).tie_word_embeddings
        fields["tie_word_embeddings"] = tied and not _has_another_head(published.path)
    return fields


@cache
def _has_another_head(folder: Path) -> bool:
    """Return True if a folder's weights hold an `lm_head` that differs from the embedding.

    Also True if their index names one and the weights are not downloaded yet: tied heads are not
    saved.
    """
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    if index.is_file() and not any(folder.glob("*.safetensors")):
        return '"lm_head.weight"' in index.read_text(encoding="utf-8")
    found: dict[str, Any] = {}
    with ExitStack() as stack, suppress(OSError, SafetensorError):
        for path in folder.glob("*.safetensors"):
            opened = stack.enter_context(safe_open(path, framework="pt"))
            for name in opened.keys():  # noqa: SIM118
                if name.endswith(HEAD_AND_EMBEDDING):
                    found[name.rpartition(".")[0].rpartition(".")[2]] = opened.get_slice(name)
        if len(found) < len(HEAD_AND_EMBEDDING):
            return False
        head, embedding = found.values()
        rows = range(0, head.get_shape()[0], ROWS)
        return head.get_shape() != embedding.get_shape() or any(
            not head[row : row + ROWS].equal(embedding[row : row + ROWS]) for row in rows
        )
    return False  # damaged files are reported by `models.weights`

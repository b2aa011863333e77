"""Any image-text family of the installed transformers that is not in the table.

Its tower runs whole, as the library has it (`models.library_tower`), and its images are prepared by
the library's own processor (`spec.library_processor`). Everything outside the LLM is the tower's
module. Whether a family can be trained exactly is decided where the library is imported: this file
only reads the text of the library's table of families.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from disttrain_cli.spec.families.family import Family, Fields, Module

TABLE = "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"
#: Names of the LLM in a whole model's class, where it is not `language_model`.
LLM_NAMES = {"emu3": "text_model", "granite_docling": "text_model", "idefics2": "text_model"}


@cache
def library_classes() -> Mapping[str, str]:
    """Return the classes of image-text models of the installed transformers, by model_type.

    Read from its source, as an import takes seconds; empty without the library.
    """
    found = find_spec("transformers")
    if found is None or found.origin is None:
        return {}
    path = Path(found.origin).parent / "models" / "auto" / "modeling_auto.py"
    table = re.search(rf"^{TABLE} = OrderedDict\((.*?)^\)", path.read_text(), re.S | re.M)
    pairs = re.findall(r'\("([\w.-]+)", "(\w+)"\)', table[1]) if table else []
    return dict(pairs)


@cache
def library_family(model_type: str) -> Family | None:
    """Return the family of a model_type of the installed transformers; None if it has none."""
    name = library_classes().get(model_type)
    if name is None:
        return None
    llm = f"model.{LLM_NAMES.get(model_type, 'language_model')}"
    return Family(
        modules={
            "vision": Module(
                "encoder",
                "vision_config",
                architecture="library_tower",
                names={"": "model."},
                whole=True,
                without=(f"{llm}.",),
            ),
            "llm": Module("llm", "text_config", names={"model": llm, "lm_head": "lm_head"}),
        },
        joins=lambda path, config: {"vision": {"projector": "none"}},  # the tower's own
        processor=_no_rule,
        image_processors=(),
        defaults={},
        image_token=("image_token_id", "image_token_index"),
        library=True,
    )


@cache
def default_image_token(model_type: str) -> int | None:
    """Return the id of an image's placeholder in the configuration class of a family."""
    made = import_module("transformers").CONFIG_MAPPING[model_type]
    given = getattr(made, "image_token_id", getattr(made, "image_token_index", None))
    return given if isinstance(given, int) else None


def _no_rule(path: Path, fields: Fields) -> NoReturn:
    raise AssertionError("the library's own processor runs")

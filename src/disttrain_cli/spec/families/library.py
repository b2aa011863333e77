"""Any image-text or audio-text family of the installed transformers that is not in the table.

Its towers run whole, as the library has them (`models.library_tower`), and its files are prepared
by the library's own processor (`spec.library_processor`). Everything outside the LLM is a tower's
module; if it sees and hears, `AUDIO_PARTS` are the module that hears. Whether a family can be
trained exactly is decided where the library is imported: this file only reads the text of the
library's tables of families.
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

#: Families that see (and may hear), and those that may only hear.
TABLES = ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES")
#: Names of audio towers and their projectors in base classes that have vision towers, too.
AUDIO_PARTS = ("audio_tower", "embed_audio", "audio_projector", "sound_tower", "sound_projection")
#: Names of the LLM in a whole model's class, where it is not `language_model`.
LLM_NAMES = {"emu3": "text_model", "granite_docling": "text_model", "idefics2": "text_model"}
#: Families whose class holds its towers, and an LLM with its head, itself.
WITHOUT_BASE = ("llama4", "nemotron_h_omni")


@cache
def library_classes(table: str = TABLES[0]) -> Mapping[str, str]:
    """Return the classes of a table of models of the installed transformers, by model_type.

    Read from its source, as an import takes seconds; empty without the library.
    """
    found = find_spec("transformers")
    if found is None or found.origin is None:
        return {}
    path = Path(found.origin).parent / "models" / "auto" / "modeling_auto.py"
    text = re.search(rf"^{table} = OrderedDict\((.*?)^\)", path.read_text(), re.S | re.M)
    pairs = re.findall(r'\("([\w.-]+)", "(\w+)"\)', text[1]) if text else []
    return dict(pairs)


@cache
def library_family(model_type: str, hears: bool = False) -> Family | None:
    """Return the family of a model_type of the installed transformers; None if it has none.

    Args:
        hears: its configuration describes an audio tower.
    """
    sees = model_type in library_classes()
    if not sees and model_type not in library_classes(TABLES[1]):
        return None
    base = "" if model_type in WITHOUT_BASE else "model."
    llm = f"{base}{LLM_NAMES.get(model_type, 'language_model')}"
    heard = {name: f"{base}{name}" for name in AUDIO_PARTS}
    names = {"model": llm, "lm_head": "lm_head"}
    if not base:
        names = {name: f"{llm}.{name}" for name in names}
    modules = {}
    if sees:
        others = tuple(f"{name}." for name in heard.values()) if hears else ()
        modules["vision"] = _tower("vision", {"": base}, (f"{llm}.", *others))
    if hears or not sees:
        modules["audio"] = (
            _tower("audio", heard) if sees else _tower("audio", {"": base}, (f"{llm}.",))
        )
    return Family(
        modules={**modules, "llm": Module("llm", "text_config", names=names)},
        joins=lambda path, config: {name: {"projector": "none"} for name in modules},  # their own
        processor=_no_rule,
        image_processors=(),
        defaults={},
        image_token=("image_token_id", "image_token_index"),
        library=True,
    )


def _tower(item: str, names: Mapping[str, str], without: tuple[str, ...] = ()) -> Module:
    architecture = "library_tower" if item == "vision" else "library_audio_tower"
    return Module(
        "encoder",
        f"{item}_config",
        architecture=architecture,
        names=names,
        whole=True,
        without=without,
    )


@cache
def default_token(model_type: str, media: str) -> int | None:
    """Return the id of a file's placeholder in the configuration class of a family."""
    made = import_module("transformers").CONFIG_MAPPING[model_type]
    given = getattr(made, f"{media}_token_id", getattr(made, f"{media}_token_index", None))
    return given if isinstance(given, int) else None


def _no_rule(path: Path, fields: Fields) -> NoReturn:
    raise AssertionError("the library's own processor runs")

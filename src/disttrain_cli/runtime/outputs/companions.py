"""Files of an exported folder other than config and weights.

The run's tokenizer and chat template, the processors of the folder that the run started from, and
the tokens that stop `generate`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from disttrain_cli.data.tokenizer import read_tokenizer, tokenizer_folder
from disttrain_cli.spec.runfile import Run

TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "additional_chat_templates/*.jinja",
)
GENERATION, PROCESSOR = "generation_config.json", "processor_config.json"
OTHERS = (
    GENERATION,
    "preprocessor_config.json",
    PROCESSOR,
    "video_preprocessor_config.json",
    "LICENSE*",
)


def write_companions(run: Run, source: Path | None, folder: Path, llm: bool) -> None:
    """Write the files of an exported folder other than config and weights.

    Args:
        source: the folder that the model started from; None = none.
        llm: True if the folder holds the LLM, which the tokenizer belongs to.

    Raises:
        SpecError: the run's tokenizer cannot be read.
    """
    if source is not None:
        _copy(source, folder, OTHERS)
    if not llm:
        return
    tokenizer = tokenizer_folder(run)
    if tokenizer is not None:
        _copy(tokenizer, folder, TOKENIZER)
    if tokenizer is None or source is None or tokenizer.resolve() != source.resolve():
        _without_template(folder / PROCESSOR)
    _write_ends(run, folder)


def _copy(source: Path, folder: Path, patterns: Sequence[str]) -> None:
    for pattern in patterns:
        for path in sorted(source.glob(pattern)):
            if path.is_file():
                target = folder / path.relative_to(source)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target)


def _without_template(processor: Path) -> None:
    """Remove another tokenizer's chat template from a processor's configuration.

    It would take precedence over the tokenizer's.
    """
    if processor.is_file():
        fields = json.loads(processor.read_text(encoding="utf-8"))
        if fields.pop("chat_template", None) is not None:
            processor.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def _write_ends(run: Run, folder: Path) -> None:
    """Add the tokens that ended samples and answers in training to those that stop `generate`."""
    tokenizer = read_tokenizer(run)
    ends = [tokenizer.eos, *([] if tokenizer.chat is None else [tokenizer.chat.end])]
    path = folder / GENERATION
    there = path if path.is_file() else folder / "config.json"
    fields = json.loads(there.read_text(encoding="utf-8")) if there.is_file() else {}
    own = fields.get("eos_token_id", fields.get("text_config", {}).get("eos_token_id"))
    own = own if isinstance(own, list) else [] if own is None else [own]
    added = [end for end in dict.fromkeys(ends) if end is not None and end not in own]
    if added:
        kept = fields if there == path else {}
        path.write_text(json.dumps(kept | {"eos_token_id": [*own, *added]}, indent=2) + "\n")

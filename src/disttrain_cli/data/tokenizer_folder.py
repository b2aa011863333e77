"""A tokenizer's folder as transformers loads it.

Which files declare tokens, which of them take precedence, which class rebuilds the tokenizer from
its vocabulary, and where the chat template is, depends on the version of transformers. So
transformers itself loads the folder, in a separate process without torch, and the result is cached
by the content of the files: one such process per tokenizer and host.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from contextlib import redirect_stdout, suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from disttrain_cli.errors import SpecError
from disttrain_cli.spec.user_cache import cache_folder
from disttrain_cli.spec.whole import write_whole

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Rules

FILE = "tokenizer.json"
#: Files from which a tokenizer and its chat template are loaded.
READ = (
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "config.json",
    "processor_config.json",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)
VERSION = 1  # of the cached JSON
KEYS = {"rules", "split_special_tokens", "tokens", "template"}
LONGEST_S = 300


class TokenizerFolder(NamedTuple):
    """A tokenizer with its special tokens and chat template."""

    rules: Rules
    tokens: dict[str, str]  # text of each special token by its name: bos_token, image_token, …
    template: str | None
    fingerprint: str  # of everything but the template


def read_tokenizer_folder(folder: Path, processor: bool = False) -> TokenizerFolder:
    """Load a tokenizer and its chat template.

    Args:
        processor: the folder is of a whole model: the processor's template takes precedence over
            the tokenizer's, else the tokenizer's over the processor's.

    Raises:
        ValueError: transformers cannot load it; the message is its reason.
    """
    from tokenizers import Tokenizer as Rules

    if not (folder / FILE).is_file():
        raise ValueError(f"there is no {FILE}")
    loaded = _cached(folder, processor)
    template = loaded.pop("template")
    fingerprint = hashlib.sha256(json.dumps(loaded).encode()).hexdigest()
    rules = Rules.from_str(loaded["rules"])
    rules.encode_special_tokens = loaded["split_special_tokens"]
    rules.no_truncation()
    rules.no_padding()
    return TokenizerFolder(rules, loaded["tokens"], template, fingerprint)


def _cached(folder: Path, processor: bool) -> dict[str, Any]:
    """Return the result of `load`, from the cache if it is there and complete."""
    about = [VERSION, version("transformers"), version("tokenizers"), processor]
    key = hashlib.sha256(json.dumps(about).encode())
    for path in sorted(path for pattern in READ for path in folder.glob(pattern)):
        if path.is_file():
            key.update(hashlib.sha256(str(path.relative_to(folder)).encode()).digest())
            key.update(hashlib.sha256(path.read_bytes()).digest())
    name = f"tokenizers/{key.hexdigest()[:32]}.json"
    # without a home folder, or with a read-only one, every reader starts the process
    with suppress(OSError, RuntimeError, ValueError):
        cached = json.loads((cache_folder() / name).read_text(encoding="utf-8"))
        if isinstance(cached, dict) and cached.keys() == KEYS:
            return cached
    content = _loaded(folder, processor)
    with suppress(SpecError, RuntimeError):
        write_whole(cache_folder() / name, content)
    return dict(json.loads(content))


def _loaded(folder: Path, processor: bool) -> str:
    """Return the JSON of `load`, run in a separate process."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", __name__, str(folder.resolve()), str(int(processor))],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=LONGEST_S,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONIOENCODING": "utf-8"},
        )
    except subprocess.TimeoutExpired:
        load = f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
        raise ValueError(
            f"transformers did not end within {LONGEST_S} s; load of this machine: {load}"
        ) from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise ValueError(lines[-1] if lines else f"transformers ended with {done.returncode}")
    return done.stdout


def load(folder: Path, processor: bool) -> str:
    """Load a folder with transformers, and return the tokenizer and its chat template as JSON.

    No code of the folder is executed, and nothing is downloaded.
    """
    from transformers import AutoTokenizer
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    tokenizer = AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )
    if not isinstance(tokenizer, TokenizersBackend):
        raise ValueError(f"{type(tokenizer).__name__} is not a tokenizer of the library tokenizers")
    templates = [partial(_tokenizer_template, tokenizer), partial(_processor_template, folder)]
    texts = (read() for read in templates[:: -1 if processor else 1])
    return json.dumps(
        {
            "rules": tokenizer.backend_tokenizer.to_str(),
            "split_special_tokens": tokenizer.split_special_tokens,
            "tokens": tokenizer.special_tokens_map,
            "template": next(filter(None, texts), None),
        }
    )


def _tokenizer_template(tokenizer: Any) -> str | None:
    """Return the chat template of a tokenizer of transformers."""
    return None if tokenizer.chat_template is None else str(tokenizer.get_chat_template())


def _processor_template(folder: Path) -> str | None:
    """Return the chat template of the folder's processor."""
    from transformers import ProcessorMixin

    values: Any = ProcessorMixin.get_processor_dict(folder, local_files_only=True)[0].get(
        "chat_template"
    )
    if isinstance(values, dict):
        if "default" not in values:
            raise ValueError(f"of its chat templates ({', '.join(values)}) none is `default`")
        values = values["default"]
    if values is not None and not isinstance(values, str):
        raise ValueError("the `chat_template` of processor_config.json must be a text")
    return values


if __name__ == "__main__":
    sys.modules["torch"] = None  # type: ignore[assignment]  # transformers would import it
    try:
        with redirect_stdout(sys.stderr):
            loaded = load(Path(sys.argv[1]), sys.argv[2] == "1")
    except Exception as error:  # errors of transformers have no common base
        sys.exit(" ".join(str(error).split()) or type(error).__name__)
    print(loaded)

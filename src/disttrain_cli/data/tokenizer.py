"""Text to token ids: a byte-level tokenizer that needs no file, or a local Hugging Face tokenizer folder."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Protocol

from disttrain_cli.errors import SpecError
from disttrain_cli.spec.runfile import Run


class Tokenizer(Protocol):
    """What the data room asks of a tokenizer; safe to use from several threads."""

    vocabulary: int  # ids are below it, special ones included
    fingerprint: str  # changes when the same text may give other ids
    pad: int
    bos: int
    eos: int
    image: int  # placeholder for one row of an image that is read
    context: int  # placeholder for one row that conditions an image to be generated

    def encode(self, text: str) -> list[int]:
        """Ids of `text` alone, without special ones."""


class ByteTokenizer:
    """One id per UTF-8 byte, then the five special ids."""

    fingerprint = "bytes"
    pad, bos, eos, image, context = range(256, 261)
    vocabulary = 261

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "replace"))


class FolderTokenizer:
    """A local Hugging Face tokenizer (tokenizer.json); special ids that it lacks are appended to its vocabulary.

    Which of its tokens begin, end and pad a text is said by tokenizer_config.json or special_tokens_map.json.
    """

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer as Rules

        try:
            rules = Rules.from_file(str(folder / "tokenizer.json"))
            named = {
                name: token
                for file in ("special_tokens_map.json", "tokenizer_config.json")
                if (folder / file).is_file()
                for name, token in json.loads((folder / file).read_text(encoding="utf-8")).items()
            }
        except Exception as error:  # the library raises plain Exceptions for a bad file
            raise SpecError(
                f"Cannot read the tokenizer {folder} (data.tokenizer)",
                str(error),
                "Give 'bytes' or a folder with tokenizer.json.",
            ) from None
        rules.no_truncation()
        rules.no_padding()
        self._rules = rules
        self.vocabulary = max(rules.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.pad, self.bos, self.eos = (self._special(named.get(f"{name}_token")) for name in ("pad", "bos", "eos"))
        self.image, self.context = self._special(None), self._special(None)
        content = hashlib.sha256()
        for path in sorted(p for p in folder.iterdir() if p.suffix in (".json", ".model", ".txt")):
            content.update(path.name.encode() + path.read_bytes())
        self.fingerprint = content.hexdigest()[:16]

    def _special(self, token: Any) -> int:
        """Id of a special token, given as its text or as a mapping with `content`."""
        text = token.get("content") if isinstance(token, dict) else token
        own = self._rules.token_to_id(text) if isinstance(text, str) else None
        if own is not None:
            return own
        self.vocabulary += 1
        return self.vocabulary - 1

    def encode(self, text: str) -> list[int]:
        return list(self._rules.encode(text, add_special_tokens=False).ids)


def read_tokenizer(run: Run) -> Tokenizer:
    """The tokenizer that the run file names.

    Raises:
        SpecError: it is neither 'bytes' nor a readable folder.
    """
    name = run.file.data.tokenizer
    if name == "bytes":
        return ByteTokenizer()
    folder = run.resolve(name)
    if not folder.is_dir():
        raise SpecError(
            f"There is no tokenizer folder at {folder} (data.tokenizer)",
            f"given: {name!r}",
            "Give 'bytes' or a local folder with tokenizer.json.",
        )
    return FolderTokenizer(folder)

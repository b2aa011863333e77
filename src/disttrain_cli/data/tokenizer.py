"""Text to token ids: a byte-level tokenizer that needs no file, or a local Hugging Face tokenizer folder."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Protocol

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
    """A local Hugging Face tokenizer; special ids that it lacks are appended to its vocabulary."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # the library raises many kinds for a bad folder
            raise SpecError(
                f"Cannot read the tokenizer {folder} (data.tokenizer)",
                str(error),
                "Give 'bytes' or a folder with tokenizer.json.",
            ) from None
        own = self._tokenizer
        self.vocabulary = len(own)
        self.pad = self._special(own.pad_token_id)
        self.bos = self._special(own.bos_token_id)
        self.eos = self._special(own.eos_token_id)
        self.image, self.context = self._special(None), self._special(None)
        content = hashlib.sha256()
        for path in sorted(p for p in folder.iterdir() if p.suffix in (".json", ".model", ".txt")):
            content.update(path.name.encode() + path.read_bytes())
        self.fingerprint = content.hexdigest()[:16]

    def _special(self, own: int | None) -> int:
        if own is not None:
            return own
        self.vocabulary += 1
        return self.vocabulary - 1

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


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

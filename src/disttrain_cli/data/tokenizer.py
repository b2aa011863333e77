"""Text to token ids: a byte-level tokenizer that needs no file, or one of Hugging Face, from a
folder or by name."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.data.chat import Chat
from disttrain_cli.data.chat_templates import FILES as TEMPLATES
from disttrain_cli.data.chat_templates import image_token, read_chat_template, video_token
from disttrain_cli.errors import SpecError
from disttrain_cli.spec.runfile import Run

#: All that is read of a tokenizer, but its chat template; the later of the last two says which
#: tokens begin, end and pad a text.
FILES = ("tokenizer.json", "special_tokens_map.json", "tokenizer_config.json")
CHOICES = (
    "Give 'bytes', a local folder with tokenizer.json, or a name on Hugging Face (data.tokenizer)."
)


class Tokenizer(Protocol):
    """What the data room asks of a tokenizer; safe to use from several threads."""

    vocabulary: int  # ids are below it, special ones included
    fingerprint: str  # changes when the same text may give other ids
    pad: int
    bos: int
    eos: int
    image: int  # placeholder for one row of an image that is read
    video: int  # the same of a video
    context: int  # placeholder for one row that conditions an image to be generated
    chat: Chat | None  # writes conversations, where the tokenizer says how

    def encode(self, text: str) -> list[int]:
        """Ids of `text` alone, without special ones."""

    def count(self, texts: list[str]) -> list[int]:
        """How many ids each text has: the length of what `encode` gives, found faster."""

    def starts(self, text: str) -> NDArray[np.int64]:
        """The character of `text` at which each of its tokens begins."""

    def decode(self, ids: list[int]) -> str:
        """The text of ids; special ones and those of no text are left out."""


class ByteTokenizer:
    """One id per UTF-8 byte, then the five special ids."""

    fingerprint = "bytes"
    pad, bos, eos, image, context = range(256, 261)
    video = image
    vocabulary = 261
    chat: Chat | None = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "replace"))

    def count(self, texts: list[str]) -> list[int]:
        return [
            len(text) if text.isascii() else len(text.encode("utf-8", "replace")) for text in texts
        ]

    def starts(self, text: str) -> NDArray[np.int64]:
        first_bytes = np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8) & 0xC0 != 0x80
        return np.cumsum(first_bytes, dtype=np.int64) - 1

    def decode(self, ids: list[int]) -> str:
        return bytes(one for one in ids if one < self.pad).decode("utf-8", "replace")


class FolderTokenizer:
    """A local Hugging Face tokenizer (tokenizer.json); special ids that it lacks are appended to
    its vocabulary.

    Which of its tokens begin, end and pad a text is said by tokenizer_config.json or
    special_tokens_map.json. `image` is the id of an image's placeholder, where the model has one of
    its own; else, with a chat template, it is the tokenizer's, where that has one. `processor`:
    the folder is of a whole model, whose processor writes conversations. `video` is the id of a
    video's placeholder.
    """

    def __init__(
        self,
        folder: Path,
        image: int | None = None,
        processor: bool = False,
        video: int | None = None,
    ) -> None:
        from tokenizers import Tokenizer as Rules

        try:
            rules = Rules.from_file(str(folder / "tokenizer.json"))
            named = {
                name: token
                for file in FILES[1:]
                if (folder / file).is_file()
                for name, token in json.loads((folder / file).read_text(encoding="utf-8")).items()
            }
            template = read_chat_template(folder, named)
            placeholder = image_token(folder, named, rules, image) if template else None
            of_videos = video_token(folder, rules, video) if template else None
        except Exception as error:  # the library raises plain Exceptions for a bad file
            raise SpecError(
                f"Cannot read the tokenizer {folder} (data.tokenizer)", str(error), CHOICES
            ) from None
        rules.no_truncation()
        rules.no_padding()
        self._rules = rules
        self.vocabulary = max(rules.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.pad, self.bos, self.eos = (
            self._special(named.get(f"{name}_token")) for name in ("pad", "bos", "eos")
        )
        self.vocabulary = max(self.vocabulary, (image or 0) + 1)
        self.image = self._special(placeholder) if image is None else image
        self.context = self._special(None)
        self.video = self._special(of_videos) if of_videos else self.image
        self.chat = Chat(template, rules, placeholder, processor, of_videos) if template else None
        content = hashlib.sha256()
        for path in (folder / name for name in FILES):
            if path.is_file():
                content.update(path.name.encode() + path.read_bytes())
        if image is not None:
            content.update(f"image {image}".encode())
        if processor:
            content.update(b"processor")
        self.fingerprint = content.hexdigest()[:16]

    def _special(self, token: Any) -> int:
        """Id of a special token, given as its text or as a mapping with `content`."""
        text = token.get("content") if isinstance(token, dict) else token
        number = self._rules.token_to_id(text) if isinstance(text, str) else None
        if number is not None:
            return number
        self.vocabulary += 1
        return self.vocabulary - 1

    def encode(self, text: str) -> list[int]:
        return list(self._rules.encode(text, add_special_tokens=False).ids)

    def count(self, texts: list[str]) -> list[int]:
        return [
            len(encoding)
            for encoding in self._rules.encode_batch_fast(texts, add_special_tokens=False)
        ]

    def starts(self, text: str) -> NDArray[np.int64]:
        offsets = self._rules.encode(text, add_special_tokens=False).offsets
        return np.array([start for start, _ in offsets], dtype=np.int64)

    def decode(self, ids: list[int]) -> str:
        return str(self._rules.decode(ids, skip_special_tokens=True))


def read_tokenizer(run: Run) -> Tokenizer:
    """The tokenizer that the run file names: 'bytes', a local folder, or a name on Hugging Face.

    Raises:
        SpecError: it is none of them, cannot be fetched, or cannot be read.
    """
    name = run.file.data.tokenizer
    if name == "bytes":
        return ByteTokenizer()
    folder = run.resolve(name)
    if folder.is_dir():
        own = run.published if name == run.file.model.folder else None
        if own is None:
            return FolderTokenizer(folder)
        return FolderTokenizer(folder, own.image_token, True, own.video_token)
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", name):
        raise SpecError(
            f"There is no tokenizer folder at {folder} (data.tokenizer)",
            f"given: {name!r}",
            CHOICES,
        )
    return FolderTokenizer(_fetched(name, folder))


def doubtful_template(run: Run) -> list[str]:
    """A sentence where a whole model's folder has no chat template, or where that ends answers with
    no special token (LLaVA 1.5's): nothing then teaches a model to stop.

    Raises:
        SpecError: the tokenizer cannot be read.
    """
    chat = read_tokenizer(run).chat if run.file.data.sources else None
    if chat is None and run.file.data.sources and run.published is not None:
        return [
            f"{run.file.data.tokenizer} has no chat template (chat_template.jinja): conversations"
            " are written as USER: … ASSISTANT: …"
        ]
    if chat is None or chat.end is not None:
        return []
    return [
        f"The chat template of {run.file.data.tokenizer} ends answers with no special token: a"
        " model trained on conversations does not learn where to stop."
    ]


def _fetched(name: str, folder: Path) -> Path:
    """Folder of Hugging Face's cache with a tokenizer's files; they are fetched where they are not
    there yet.

    Only `FILES` and its chat template are fetched, and nothing in them is executed.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    path: Path | None = None
    try:
        for local in (
            True,
            False,
        ):  # what is there is taken: all ranks tokenize alike, without a network
            try:
                path = Path(
                    snapshot_download(
                        name, allow_patterns=[*FILES, *TEMPLATES], local_files_only=local
                    )
                )
            except Exception:  # its errors have no common base
                if not local:
                    raise
            if path is not None and (path / FILES[0]).is_file():
                return path
    except Exception as error:
        why = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise SpecError(
            f"There is no tokenizer {name!r} here, and it cannot be fetched from Hugging Face"
            " (data.tokenizer)",
            f"no folder {folder}; {why}",
            f"{CHOICES} To fetch one where there is a network: hf download {name}"
            f" {' '.join(FILES)}",
        ) from None
    raise SpecError(
        f"The tokenizer {name!r} of Hugging Face has no tokenizer.json (data.tokenizer)",
        "only fast tokenizers are read",
        CHOICES,
    )

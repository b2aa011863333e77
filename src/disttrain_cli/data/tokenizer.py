"""Tokenizers: a byte-level one that needs no file, or one of Hugging Face (folder or name)."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.data.chat import Chat
from disttrain_cli.data.chat_templates import ChatTemplate, audio_token, image_token, video_token
from disttrain_cli.data.tokenizer_folder import FILE, READ, read_tokenizer_folder
from disttrain_cli.errors import SpecError
from disttrain_cli.spec.runfile import Run

#: In place of an id that the model does not use.
NONE = -1
CHOICES = (
    "Use 'bytes', a local folder with tokenizer.json, or a name on Hugging Face (data.tokenizer)."
)


class Tokenizer(Protocol):
    """Interface of tokenizers; implementations are safe to use from several threads."""

    vocabulary: int  # ids are below it, special tokens included
    fingerprint: str  # changes if the same text may have other ids
    pad: int
    bos: int
    eos: int
    image: int  # placeholder for one row of an image to read
    video: int  # placeholder for one row of a video
    context: int  # placeholder for one row that conditions an image to generate
    chat: Chat | None  # tokenizer of conversations, if it has a chat template

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text` alone, without special tokens."""

    def count(self, texts: list[str]) -> list[int]:
        """Return the number of ids of each text, as from `encode` but faster."""

    def starts(self, text: str) -> NDArray[np.int64]:
        """Return the index of the character of `text` at which each of its tokens begins."""

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids, without special tokens and ids of no text."""

    def token(self, number: int) -> str | None:
        """Return the name of an id; None if it represents no text."""


class ByteTokenizer:
    """A tokenizer with one id per UTF-8 byte, followed by the five special ids."""

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

    def token(self, number: int) -> str | None:
        return f"<0x{number:02X}>" if number < self.pad else None


class FolderTokenizer:
    """A local Hugging Face tokenizer, as transformers loads its folder.

    Ids that a model needs and the tokenizer lacks follow its vocabulary: the placeholder of items
    that the model reads, and the one that conditions images to generate. Without a BOS token,
    samples begin with EOS, as GPT-2's `<|endoftext|>` serves as both; without an EOS token, they
    end with the token that ends an answer of the chat template; padding, which nothing attends to,
    is EOS if there is no token for it.
    """

    def __init__(
        self,
        folder: Path,
        image: int | None = None,
        processor: bool = False,
        video: int | None = None,
        *,
        reads: bool = True,
        draws: bool = True,
    ) -> None:
        """
        Args:
            image, video: ids of the model's placeholders, if it has any; else, with a chat
                template, they are the tokenizer's, if it has any.
            processor: the folder is of a whole model, whose processor renders conversations.
            reads, draws: the model has encoders, generators.

        Raises:
            SpecError: the tokenizer cannot be read.
        """
        try:
            found = read_tokenizer_folder(folder, processor)
            rules, tokens = found.rules, found.tokens
            template = ChatTemplate(found.template, tokens) if found.template else None
            placeholder = image_token(folder, tokens, rules, image) if template else None
            of_videos = video_token(folder, rules, video) if template else None
            of_clips = audio_token(folder, rules) if template else None
        except Exception as error:  # the libraries raise plain Exceptions for a bad file
            raise SpecError(
                f"Cannot read the tokenizer {folder} (data.tokenizer)", str(error), CHOICES
            ) from None
        self._rules = rules
        self.chat = (
            Chat(template, rules, placeholder, processor, of_videos, of_clips) if template else None
        )
        self.vocabulary = (
            max(max(rules.get_vocab(with_added_tokens=True).values(), default=-1), image or 0) + 1
        )

        def named(name: str) -> int | None:
            return rules.token_to_id(tokens[name]) if name in tokens else None

        end = named("eos_token")
        if end is None and self.chat is not None:
            end = self.chat.end
        self.eos = self._reserved() if end is None else end
        self.bos = self.eos if (begin := named("bos_token")) is None else begin
        self.pad = self.eos if (padding := named("pad_token")) is None else padding
        own = image if image is not None or not placeholder else rules.token_to_id(placeholder)
        self.image = own if own is not None else self._reserved() if reads else NONE
        self.context = self._reserved() if draws else NONE
        film = rules.token_to_id(of_videos) if of_videos else None
        self.video = self.image if film is None else film
        ids = (self.pad, self.bos, self.eos, self.image, self.video, self.context, processor)
        self.fingerprint = hashlib.sha256(f"{found.fingerprint} {ids}".encode()).hexdigest()[:16]

    def _reserved(self) -> int:
        """Reserve an id after the vocabulary."""
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

    def token(self, number: int) -> str | None:
        return self._rules.id_to_token(number)


def read_tokenizer(run: Run) -> Tokenizer:
    """Return the run's tokenizer: 'bytes', a local folder, or a name on Hugging Face.

    Raises:
        SpecError: it is none of them, cannot be downloaded, or cannot be read.
    """
    folder, model = tokenizer_folder(run), run.file.model
    if folder is None:
        return ByteTokenizer()
    reads, draws = bool(model.named("encoder")), bool(model.named("generator"))
    own = run.published if run.file.data.tokenizer == model.folder else None
    if own is None:
        return FolderTokenizer(folder, reads=reads, draws=draws)
    return FolderTokenizer(folder, own.image_token, True, own.video_token, reads=reads, draws=draws)


def tokenizer_folder(run: Run) -> Path | None:
    """Return the folder of the run's tokenizer, in Hugging Face's cache for a name there.

    None for 'bytes'.

    Raises:
        SpecError: there is none of that name, or it cannot be downloaded.
    """
    name = run.file.data.tokenizer
    if name == "bytes":
        return None
    folder = run.resolve(name)
    if folder.is_dir():
        return folder
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", name):
        raise SpecError(
            f"There is no tokenizer folder at {folder} (data.tokenizer)",
            f"given: {name!r}",
            CHOICES,
        )
    return _fetched(name, folder)


def doubtful_template(run: Run) -> list[str]:
    """Return a warning if a model's chat template is missing or ends answers with no special token.

    Without such a token (LLaVA 1.5's template), nothing teaches a model to stop.

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
        f"The chat template of {run.file.data.tokenizer} does not end answers with a special token:"
        " a model trained on conversations does not learn where to stop."
    ]


def _fetched(name: str, folder: Path) -> Path:
    """Return the folder of Hugging Face's cache with a tokenizer's files; download them if needed.

    Only the files that are read are downloaded, and nothing in them is executed.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    path: Path | None = None
    try:
        for local in (
            True,
            False,
        ):  # cached files first: all ranks tokenize alike, without a network
            try:
                path = Path(
                    snapshot_download(name, allow_patterns=list(READ), local_files_only=local)
                )
            except Exception:  # its errors have no common base
                if not local:
                    raise
            if path is not None and (path / FILE).is_file():
                return path
    except Exception as error:
        why = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise SpecError(
            f"There is no tokenizer {name!r} here, and it cannot be fetched from Hugging Face"
            " (data.tokenizer)",
            f"no folder {folder}; {why}",
            f"{CHOICES} To download one on a machine with network access: hf download {name}",
        ) from None
    raise SpecError(
        f"The tokenizer {name!r} of Hugging Face has no tokenizer.json (data.tokenizer)",
        "only fast tokenizers are supported",
        CHOICES,
    )

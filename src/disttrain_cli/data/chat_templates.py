"""A tokenizer's chat template, rendered as transformers renders it.

As in `transformers.utils.chat_template_utils` (5.x): jinja2 in an immutable sandbox, trimmed
blocks, `raise_exception`, `strftime_now`, `tojson` without HTML escapes, and `{% generation %}`
around an assistant's text. One thing differs: `strftime_now` returns a fixed time, as a sample must
have the same tokens on every day and rank.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from disttrain_cli.data.sources.chats import MARK
from disttrain_cli.data.sources.samples import printable
from disttrain_cli.errors import SpecError

if TYPE_CHECKING:
    import jinja2
    from tokenizers import Tokenizer as Rules

    from disttrain_cli.data.template_limits import LimitedEnvironment

#: Placeholders of Qwen-VL, InternVL, Gemma 3, Llama 3.2 and Pixtral, LLaVA and SmolVLM.
VIDEO_TOKEN = "<|video_pad|>"
IMAGE_TOKENS = ("<|image_pad|>", "<IMG_CONTEXT>", "<image_soft_token>", "<|image|>", "[IMG]", MARK)
NOW = datetime(2024, 7, 26)  # the date that Llama's templates write where no clock is available
MOST_ENDLESS = 3  # renderings that may run into `template_limits.MOST_WORK`
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")

Message = Mapping[str, Any]  # `role` and `content`, with all other keys of the record


class ChatTemplate:
    """A chat template and the special tokens that it may name; thread-safe."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        self._source, self._tokens = source, dict(tokens)
        self.marks = MARKS.search(source) is not None  # it marks the assistant's text
        self.words = frozenset(re.findall(r"\w+", source))
        content = json.dumps([source, sorted(self._tokens.items())])
        self.fingerprint = hashlib.sha256(content.encode()).hexdigest()[:16]
        # of the current rendering: its blocks, and the spans of its marked parts
        self._blocks: list[str] = []
        self._spans: list[tuple[int, int]] = []
        self._lock = threading.Lock()
        self._endless = 0  # renderings that ran into the limit

    def render(self, messages: list[Message], prompt: bool = False) -> str:
        """Render a conversation as one text; with `prompt`, an assistant's answer may follow.

        Raises:
            ValueError: the template refuses the conversation; the message is the template's.
        """
        return self.render_marked(messages, prompt)[0]

    @property
    def bos(self) -> str | None:
        """Text of the BOS token, if there is one."""
        return self._tokens.get("bos_token")

    def render_marked(
        self, messages: list[Message], prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return (text, (first, last + 1) character of each marked part)."""
        values = {"tools": None, "documents": None, "add_generation_prompt": prompt}
        with self._lock:
            self._blocks.clear()
            self._spans.clear()
            template, limits = self._template
            limits.begin()
            try:
                for block in template.generate(messages=messages, **self._tokens, **values):
                    self._blocks.append(limits.charge(block))
            except SpecError:
                raise
            except Exception as error:  # a template is anyone's program
                self._check_ends(error)
                reason = printable(str(error) or type(error).__name__)
                raise ValueError(f"the chat template rejects it: {reason}") from None
            return "".join(self._blocks), list(self._spans)

    def _check_ends(self, error: Exception) -> None:
        """Raise SpecError once the template has exceeded its work limit several times."""
        if type(error).__name__ != "TooMuchWorkError":
            return
        self._endless += 1
        if self._endless == MOST_ENDLESS:
            raise SpecError(
                "The chat template of the tokenizer (data.tokenizer) does not terminate",
                f"for {MOST_ENDLESS} conversations: {error}",
                "Correct chat_template.jinja in the tokenizer's folder.",
            )

    @cached_property
    def _template(self) -> tuple[jinja2.Template, LimitedEnvironment]:
        import jinja2

        try:
            limits = _environment(self._note)
            return limits.from_string(self._source), limits
        except jinja2.TemplateError as error:
            raise SpecError(
                "Cannot read the chat template of the tokenizer (data.tokenizer)",
                printable(str(error)),
                "Correct chat_template.jinja, or the `chat_template` of its JSON files, in the"
                " tokenizer's folder.",
            ) from None

    def _note(self, text: str) -> None:
        """Record the span of a marked part, which is the next text of the output."""
        first = sum(map(len, self._blocks))
        self._spans.append((first, first + len(text)))


def image_token(
    folder: Path, tokens: Mapping[str, str], rules: Rules, token_id: int | None = None
) -> str | None:
    """Return the placeholder of an image.

    It is the token of the id `token_id`, else the one that the tokenizer's folder names, else a
    common one that the tokenizer has.
    """
    if token_id is not None:
        return rules.id_to_token(token_id)
    path = folder / "config.json"
    model = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    number = model.get("image_token_id", model.get("image_token_index"))
    by_number = rules.id_to_token(number) if isinstance(number, int) else None
    candidates = (by_number, tokens.get("image_token"), *IMAGE_TOKENS)
    return next((one for one in candidates if one and rules.token_to_id(one) is not None), None)


def video_token(folder: Path, rules: Rules, token_id: int | None = None) -> str | None:
    """Return the placeholder of a video.

    It is the token of the id `token_id`, else the one that the model's config.json in the folder
    names, else the common one if the tokenizer has it.
    """
    path = folder / "config.json"
    model = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    number = token_id if token_id is not None else model.get("video_token_id")
    if isinstance(number, int) and (named := rules.id_to_token(number)) is not None:
        return named
    return VIDEO_TOKEN if rules.token_to_id(VIDEO_TOKEN) is not None else None


def audio_token(folder: Path, rules: Rules) -> str | None:
    """Return the placeholder of a clip: the token that the model's config.json names, if any."""
    path = folder / "config.json"
    model = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    inside = model.get("thinker_config", model)
    number = inside.get("audio_token_id", inside.get("audio_token_index"))
    return rules.id_to_token(number) if isinstance(number, int) else None


def _environment(note: Callable[[str], None]) -> LimitedEnvironment:
    """Return the jinja2 environment of transformers; `note` is called with every marked part."""
    import jinja2
    from jinja2 import ext, nodes, parser, runtime

    from disttrain_cli.data.template_limits import LimitedEnvironment

    class Generation(ext.Extension):
        """`{% generation %}…{% endgeneration %}`: written unchanged, its text passed to `note`."""

        def __init__(self, environment: jinja2.Environment) -> None:
            super().__init__(environment)
            self.tags = {"generation"}

        def parse(self, parser: parser.Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

        def _note(self, caller: runtime.Macro) -> str:
            text = str(caller())
            note(text)
            return text

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = LimitedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = environment.charged("tojson", to_json)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = NOW.strftime
    return environment

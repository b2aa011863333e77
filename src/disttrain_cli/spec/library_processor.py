"""Processor of a published folder as the library runs it: inputs of a file, and the text for it.

The text depends on the file's size alone, so that it is taken from a blank one while indexing.
Classes of the installed library only: code in the folder is never run. The library, which needs
torch for it, is imported when a processor is first used: folders of families that are known here by
their rules do without.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, cached_property, lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from disttrain_cli.errors import SpecError
from disttrain_cli.spec.extras import install_command
from disttrain_cli.spec.heads import Numbers
from disttrain_cli.spec.library_calls import RATE_HZ, AudioCall, Call, VideoCall
from disttrain_cli.spec.video_processor import Film

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Inputs = Mapping[str, NDArray[Any]]

ROW = -1  # among the ids of a file: one row of the encoder's output
#: Outputs of a tokenizer, all others are the file's.
KINDS = "mm_token_type_ids"
OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", KINDS)
FILES = (
    *("processor_config.json", "preprocessor_config.json", "tokenizer.json"),
    *("tokenizer_config.json", "special_tokens_map.json", "video_preprocessor_config.json"),
    *("chat_template.jinja", "chat_template.json"),
)
MINUTE_MS = 60_000
MERGE = "spatial_merge_size"
VIDEOS = "video_processor"
#: Field of an Omni's configuration with that of its part that reads and writes texts.
THINKER = "thinker_config"
#: Outputs of a clip with as many columns as its features: a model reads those that are set.
MASK, FEATURES = "feature_attention_mask", "input_features"
#: Arguments of positions under another name than the processor's output.
OF_POSITIONS = {"second_per_grids": "video_second_per_grid"}
#: Sizes whose texts, and whose counts of rows are cached.
MOST, MOST_COUNTS = 4096, 1 << 17


class Spelled(NamedTuple):
    """Tokens that replace the placeholder of a file."""

    before: str  # text before the first row
    ids: tuple[int, ...]  # from the first row to the last, `ROW` for each
    after: str  # text after the last row

    @property
    def rows(self) -> int:
        """Rows of the encoder's output."""
        return self.ids.count(ROW)


class _Recorder:
    """The processor's tokenizer; records the text instead of tokenizing it. Safe to share."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.said = tokenizer, threading.local()

    def __call__(self, text: Any, **_: Any) -> Any:
        texts = [text] if isinstance(text, str) else list(text)
        self.said.texts = texts
        ids = [[0] for _ in texts]
        return self._tokenizer.__class__.pad(self._tokenizer, {"input_ids": ids})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return len(self._tokenizer)


class LibraryProcessor:
    """Processor of a folder, for files of one type whose rows have the token `row`."""

    def __init__(self, folder: Path, row: int, call: Call) -> None:
        """
        Raises:
            SpecError: the library cannot load it, or it writes files in a form that cannot be
                mapped to rows.
        """
        self.folder, self.row, self.call = folder, row, call
        self._processor = self._loaded()
        tokenizer = getattr(self._processor, "tokenizer", None)
        if tokenizer is None:
            raise self._refused(
                f"transformers finds a {type(self._processor).__name__} in its files, which is no"
                f" processor of texts with {call.media}s"
            )
        self._check_call()
        self._tokenizer, self._recorder = tokenizer, _Recorder(tokenizer)
        self._processor.tokenizer = self._recorder
        self._processor._check_special_mm_tokens = lambda *_, **__: None  # the recorder's ids
        self._row = tokenizer.convert_ids_to_tokens(row)
        if not isinstance(self._row, str):
            raise self._refused(f"the tokenizer has no token {row}, the model's {call.media} token")
        self._row_counts: dict[Numbers, int] = {}
        self.spelled = lru_cache(MOST)(self._quickly_spelled)
        self.turned = lru_cache(MOST)(self.positions)
        self._check_several()

    def inputs(self, content: Any) -> Inputs:
        """Return the model's inputs for a file's content (`library_calls`).

        Raises:
            ValueError: the processor refuses it; the message has the reason.
        """
        return self._said(self.placeholder, [content])[1]

    def blank(self, numbers: Numbers) -> Inputs:
        """Return the model's inputs for a blank file of this size."""
        return self.inputs(self._blank(numbers))

    def frames(self, film: Film) -> list[int]:
        """Return the numbers of a video's frames that are sampled."""
        assert isinstance(self.call, VideoCall)
        return self.call.frames(self._processor, film)

    def misfit(self, numbers: Numbers) -> str | None:
        """Return why a file of this size is not read; None if it is."""
        if isinstance(self.call, AudioCall):
            longest_ms = self.call.longest_ms(self._processor)
            if numbers[0] > longest_ms:
                return (
                    f"a clip of {numbers[0] / 1e3:.1f} s, longer than the processor's limit of"
                    f" {longest_ms / 1e3:g} s"
                )
        try:
            rows = self.spelled(numbers).rows
            if isinstance(self.call, AudioCall) and longest_ms == math.inf:
                longer = numbers[0] + MINUTE_MS, *numbers[1:]
                if self.spelled(longer).rows == rows:
                    return f"a clip of {numbers[0] / 1e3:.1f} s: the processor reads its beginning"
        except ValueError as error:
            return str(error)
        return None

    def _blank(self, numbers: Numbers) -> Any:
        return self.call.blank(self._processor, numbers)

    def _check_call(self) -> None:
        """Raise SpecError if the processor takes no such files, or not as they are read here."""
        own, media = self._processor, self.call.media
        if media == "video" and getattr(own, "video_processor", None) is None:
            if import_module("transformers").utils.is_torchvision_available():
                raise self._refused("it has no video processor")
            raise self._needs_torchvision("video")
        if media == "video" and getattr(own, "load_audio_from_video", False):
            raise self._refused("load_audio_from_video: sound of videos is not read")
        if media == "audio":
            extractor = getattr(own, "feature_extractor", None)
            rate = getattr(extractor, "sampling_rate", RATE_HZ)
            if rate != RATE_HZ:
                raise self._refused(f"sampling_rate {rate}: clips are read at {RATE_HZ} per second")

    def _quickly_spelled(self, numbers: Numbers) -> Spelled:
        """Return the tokens for a file of this size; ValueError if the processor refuses it.

        By the processor's own count of rows where it agrees with what it writes: a distribution
        has thousands of sizes, and each text costs a blank file.
        """
        if self._same is None:
            return self._spelled(numbers)
        return self._same._replace(ids=(ROW,) * self.rows([numbers])[0])

    def rows(self, sizes: Sequence[Numbers]) -> list[int]:
        """Return the rows of files of these sizes; ValueError if the processor refuses one."""
        if self._same is None:
            return [self.spelled(numbers).rows for numbers in sizes]
        if len(self._row_counts) > MOST_COUNTS:
            self._row_counts.clear()
        if new := [size for size in dict.fromkeys(sizes) if size not in self._row_counts]:
            try:
                counts = self.call.counts(self._processor, new)
            except Exception as error:
                raise ValueError(f"the processor refuses it: {_line(error)}") from None
            self._row_counts.update(zip(new, counts, strict=True))
        return [self._row_counts[size] for size in sizes]

    @property
    def counts_rows(self) -> bool:
        """True if the processor counts rows of a size; else a blank file of it is prepared."""
        return self._same is not None

    @cached_property
    def _same(self) -> Spelled | None:
        """Text around any file, if the processor counts rows and writes nothing between them."""
        try:
            texts = [self._spelled(numbers) for numbers in self.call.counted]
            counts = self.call.counts(self._processor, self.call.counted)
        except Exception:  # it counts none, or in another form
            return None
        first = texts[0]
        same = all(
            one == first._replace(ids=(ROW,) * count)
            for one, count in zip(texts, counts, strict=True)
        )
        return first if same else None

    def positions(self, numbers: Numbers) -> tuple[NDArray[np.int64], int]:
        """Return [3, tokens] M-RoPE positions of a file's tokens, from those of its first.

        Also returns the position of the next token.

        Raises:
            SpecError: the class computes them in another form.
        """
        import numpy as np

        torch, one = import_module("torch"), self.spelled(numbers)
        before, after = (
            self._tokenizer(text, add_special_tokens=False)["input_ids"]
            for text in (self.around[0] + one.before, f"{one.after}{self.around[1]} a")
        )
        row = self.row
        ids = [*before, *(row if id_ == ROW else id_ for id_ in one.ids), *after]
        given = {
            **{name: torch.from_numpy(value) for name, value in self.blank(numbers).items()},
            "input_ids": torch.tensor([ids]),
            KINDS: torch.tensor([[self.call.number * (id_ == row) for id_ in ids]]),
            "attention_mask": torch.ones(1, len(ids), dtype=torch.int64),
        }
        given |= {name: given[own] for name, own in OF_POSITIONS.items() if own in given}
        base = self._base
        names = inspect.signature(base.get_rope_index).parameters
        try:
            positions, _ = base.get_rope_index(
                **{name: value for name, value in given.items() if name in names}
            )
        except Exception as error:
            raise self._refused(f"get_rope_index: {_line(error)}") from None
        found = positions.numpy()[-3:, 0]
        inside = found[:, len(before) :][:, : len(one.ids)]
        first, following = inside[0, 0], found[:, len(before) + len(one.ids)]
        if (inside[:, 0] != first).any() or (following != following[0]).any():
            raise self._refused(f"positions after {self.call.media}s do not follow the largest one")
        return np.asarray(inside - first, dtype=np.int64), int(following[0] - first)

    @cached_property
    def _base(self) -> Any:
        """The base model's class with a configuration alone."""
        transformers = import_module("transformers")
        config = transformers.AutoConfig.from_pretrained(str(self.folder), local_files_only=True)
        config = getattr(config, THINKER, config)
        made = next(
            mapping[type(config)]
            for mapping in (
                transformers.MODEL_MAPPING,
                transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING,
            )
            if type(config) in mapping
        )
        base = made.__new__(made)
        import_module("torch.nn").Module.__init__(base)
        base.config = config
        if hasattr(config.vision_config, MERGE):  # an attribute of some classes
            setattr(base, MERGE, getattr(config.vision_config, MERGE))
        return base

    def complete(self, numbers: Numbers) -> dict[str, Any]:
        """Return all outputs, as the library passes them to its model, for a text of one file.

        Some classes ask for the kinds of the tokens though their processors leave them out.
        """
        self._processor.tokenizer = self._tokenizer
        kinds = KINDS in inspect.signature(self._base.forward).parameters
        try:
            with _on_host():
                arguments = self.call.arguments(self._processor, [self._blank(numbers)])
                return dict(
                    self._processor(
                        **arguments,
                        text=self.placeholder.join(self.around),
                        return_tensors="pt",
                        **({f"return_{KINDS}": True} if kinds else {}),
                    )
                )
        except Exception as error:
            raise self._refused(_line(error)) from None
        finally:
            self._processor.tokenizer = self._recorder

    @cached_property
    def around(self) -> tuple[str, str]:
        """Texts that the chat template writes around a placeholder; some positions need them."""
        before, found, after = self._turn.partition(self.placeholder)
        return (before, after) if found and self.placeholder not in after else ("", "")

    @cached_property
    def _turn(self) -> str:
        """A user's turn with one file, as the chat template writes it; "" if it refuses one."""
        turn = {"role": "user", "content": [{"type": self.call.media}]}
        try:
            return str(self._processor.apply_chat_template([turn], tokenize=False))
        except Exception:  # a template is anyone's program
            return ""

    @cached_property
    def placeholder(self) -> str:
        """Text that a chat template writes for a file, and that the processor replaces.

        Some templates write all rows themselves.
        """
        template = self._processor.chat_template or self._tokenizer.chat_template or ""
        named = [
            value
            for name, value in vars(self._processor).items()
            if name.endswith("token") and isinstance(value, str)
        ]
        # those that the template writes first
        texts = sorted(dict.fromkeys([*named, self._row]), key=lambda one: one not in str(template))
        texts = [*re.findall(f"(?:{re.escape(self._row)}){{2,}}", self._turn)[:1], *texts]
        why = ""
        for text in texts:
            try:
                said, _ = self._said(text, [self._blank(self.call.sizes[0])])
            except ValueError as error:
                why = why or str(error)
                continue
            if self._row in said:
                return text
        media = f"{self.call.media}s"
        raise self._refused(f"no text is replaced by rows of {media}: {why or 'it names none'}")

    def _spelled(self, numbers: Numbers) -> Spelled:
        """Return the tokens for a file of this size; ValueError if the processor refuses it."""
        said, _ = self._said(self.placeholder, [self._blank(numbers)])
        before, *inside, after = said.split(self._row)
        if not inside and said == before:
            raise ValueError("the processor writes no rows for one of this size")
        ids = [ROW]
        for text in inside:
            if text:
                ids += self._tokenizer(text, add_special_tokens=False)["input_ids"]
            ids.append(ROW)
        return Spelled(before, tuple(ids), after)

    def _said(self, text: str, contents: Sequence[Any]) -> tuple[str, Inputs]:
        """Return the text as the processor completes it, and the inputs of the files."""
        import numpy as np

        arguments = self.call.arguments(self._processor, contents)
        bf16 = import_module("torch").bfloat16  # which numpy lacks
        with _on_host():  # a mode that fakes a device would make arrays of tensors without values
            try:
                outputs = self._processor(**arguments, text=text, return_tensors="pt")
            except Exception as error:  # classes of many authors raise anything
                raise ValueError(f"the processor refuses it: {_line(error)}") from None
            arrays = {
                name: np.asarray(value.float() if getattr(value, "dtype", None) is bf16 else value)
                for name, value in outputs.items()
                if name not in OF_TEXT
            }
        said, *others = self._recorder.said.texts
        if others:
            raise ValueError(f"the processor makes {1 + len(others)} texts of one")
        return said, _trimmed(arrays) if len(contents) == 1 else arrays

    def _check_several(self) -> None:
        """Raise SpecError unless files of a sample are prepared one by one."""
        import numpy as np

        text, image = self.placeholder, self._blank(self.call.sizes[0])
        for between in ("", "\n"):
            try:
                one, alone = self._said(text, [image])
                two, both = self._said(between.join([text, text]), [image, image])
            except ValueError as error:
                raise self._refused(f"two {self.call.media}s in a text: {error}") from None
            if two != between.join([one, one]):
                raise self._refused("the text that it writes for a file depends on the others")
        for name, value in alone.items():
            if name in (MASK, FEATURES) and MASK in alone:  # cut to a clip's own columns
                continue
            flat = both[name].reshape(-1)
            if not np.array_equal(flat, np.concatenate([value.reshape(-1)] * 2)):
                raise self._refused(f"{name} of a file depends on the others of a sample")

    @cached_property
    def joins(self) -> bool:
        """True if the inputs of files of different sizes are those of each, one after the other."""
        import numpy as np

        contents = [self._blank(numbers) for numbers in self.call.sizes]
        try:
            each = [self._said(self.placeholder, [content])[1] for content in contents]
            _, both = self._said("\n".join([self.placeholder] * len(contents)), contents)
            return both.keys() == each[0].keys() and all(
                np.array_equal(together, np.concatenate([one[name] for one in each]))
                for name, together in both.items()
            )
        except (KeyError, ValueError):  # each has another form, or the processor takes fewer
            return False

    def _loaded(self) -> Any:
        try:
            transformers = import_module("transformers")
            processor_class = transformers.AutoProcessor
            if not transformers.utils.is_torchvision_available():
                processor_class = _without_videos(self._class_name()) or processor_class
            return processor_class.from_pretrained(
                str(self.folder), local_files_only=True, trust_remote_code=False
            )
        except ModuleNotFoundError as error:
            if error.name != "torchvision":
                raise self._refused(_line(error)) from None
            raise self._needs_torchvision("image") from None
        except Exception as error:
            files = self._files()
            if not files.keys() & set(FILES[:2]):
                raise self._refused(f"it holds neither {FILES[0]} nor {FILES[1]}") from None
            if any("auto_map" in fields for fields in files.values()):
                why = "its processor asks for code of its own (auto_map), which is never run"
                raise self._refused(why) from None
            raise self._refused(_line(error)) from None

    def _files(self) -> dict[str, dict[str, Any]]:
        """Return the configurations of the processor and its parts, by the names of their files."""
        there = (self.folder / name for name in FILES if name.endswith("_config.json"))
        return {path.name: json.loads(path.read_text()) for path in there if path.is_file()}

    def _class_name(self) -> str | None:
        """Return the name of the processor's class that a file of the folder states."""
        named = (fields.get("processor_class") for fields in self._files().values())
        return next((one for one in named if isinstance(one, str)), None)

    def _needs_torchvision(self, media: str) -> SpecError:
        return SpecError(
            f"{self.folder}: the processor needs torchvision (model.folder)",
            f"its class in transformers imports it for any {media}",
            install_command("generate"),
        )

    def _refused(self, why: str) -> SpecError:
        return SpecError(
            f"{self.folder}: the processor cannot be used (model.folder)",
            why,
            "Download the folder again, with its processor's files, and install what is named; or"
            " train the modules by their own folders (model.modules).",
        )


def _without_videos(name: str | None) -> Any:
    """Return a processor's class without its video processor, which needs torchvision.

    None if the library has no class of this name that reads images without torchvision.
    """
    auto = import_module("transformers.models.auto.processing_auto")
    types = [kind for kind, one in auto.PROCESSOR_MAPPING_NAMES.items() if one == name]
    found = (find_spec(f"transformers.models.{kind}.processing_{kind}") for kind in types)
    module = next((one for one in found if one is not None), None)
    if module is None:
        return None
    base: Any = getattr(import_module(module.name), str(name))

    class OfImages(base):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument is None:
                return None
            return super().check_argument_for_proper_class(argument_name, argument)

        @classmethod
        def _get_arguments_from_pretrained(cls, *args: Any, **kwargs: Any) -> list[Any]:
            names = [one for one in base.get_attributes() if one != VIDEOS]
            fewer: Any = type(
                base.__name__, (base,), {"get_attributes": classmethod(lambda _: names)}
            )
            values = dict(
                zip(names, fewer._get_arguments_from_pretrained(*args, **kwargs), strict=True)
            )
            return [values.get(one) for one in base.get_attributes()]

    OfImages.__name__ = base.__name__  # the library compares it with the folder's
    return OfImages


@cache
def library_processor(folder: Path, row: int, call: Call) -> LibraryProcessor:
    """Return a folder's processor for files of one type, loaded once per process."""
    return LibraryProcessor(folder, row, call)


def _trimmed(inputs: Inputs) -> Inputs:
    """Return a clip's inputs without the columns that its mask excludes, up to minutes of them."""
    if MASK not in inputs:
        return inputs
    columns = int(inputs[MASK].sum())
    return {**inputs, **{name: inputs[name][..., :columns] for name in (MASK, FEATURES)}}


def digest_of(folder: Path) -> str:
    """Return a hash of the files that determine what a processor does."""
    content = hashlib.sha256()
    for name in FILES:
        if (folder / name).is_file():
            content.update(name.encode() + (folder / name).read_bytes())
    return content.hexdigest()[:16]


@contextmanager
def _on_host() -> Iterator[None]:
    """Run a processor on the CPU, whatever models are built on, counted with or faked by."""
    modes = import_module("torch.utils._python_dispatch")
    with modes._disable_current_modes(), import_module("torch").device("cpu"):
        yield


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__

"""Processor of a published folder as the library runs it: inputs of an image, and the text for it.

The text depends on the image's size alone, so that it is taken from a blank image while indexing.
Classes of the installed library only: code in the folder is never run. The library, which needs
torch for it, is imported when a processor is first used: folders of families that are known here by
their rules do without.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, cached_property, lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from disttrain_cli.errors import SpecError
from disttrain_cli.spec.cutting import Size
from disttrain_cli.spec.extras import install_command

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Inputs = Mapping[str, NDArray[Any]]

ROW = -1  # among the ids of an image: one row of the encoder's output
SIZE: Size = (96, 64)  # of the image with which a processor is tried
LARGER: Size = (1920, 1280)
#: Outputs of a tokenizer, all others are the image's.
KINDS = "mm_token_type_ids"
OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", KINDS)
FILES = (
    *("processor_config.json", "preprocessor_config.json", "tokenizer.json"),
    *("tokenizer_config.json", "special_tokens_map.json"),
)
MERGE = "spatial_merge_size"
VIDEOS = "video_processor"
#: Sizes for which a processor's own count is compared with its texts.
COUNTED = ((64, 64), (640, 480), (480, 640), (211, 37), (97, 1024), (1600, 900), (2048, 2048))
#: Sizes whose texts, and whose counts of rows are cached.
MOST, MOST_COUNTS = 4096, 1 << 17
#: Heights that the library takes for the channels of an image with channels first
#: (`transformers.image_utils.infer_channel_dimension_format`).
CHANNELS = (1, 3)


class Spelled(NamedTuple):
    """Tokens that replace the placeholder of an image."""

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
    """Processor of a folder whose images' rows have the token `image_token`."""

    def __init__(self, folder: Path, image_token: int) -> None:
        """
        Raises:
            SpecError: the library cannot load it, or it writes images in a form that cannot be
                mapped to rows.
        """
        self.folder, self.row = folder, image_token
        self._processor = self._loaded()
        tokenizer = getattr(self._processor, "tokenizer", None)
        if tokenizer is None:
            raise self._refused(
                f"transformers finds a {type(self._processor).__name__} in its files, which is no"
                " processor of texts with images"
            )
        self._tokenizer, self._recorder = tokenizer, _Recorder(tokenizer)
        self._processor.tokenizer = self._recorder
        self._processor._check_special_mm_tokens = lambda *_, **__: None  # the recorder's ids
        self._row = tokenizer.convert_ids_to_tokens(image_token)
        if not isinstance(self._row, str):
            raise self._refused(
                f"the tokenizer has no token {image_token}, the model's image token"
            )
        self._row_counts: dict[Size, int] = {}
        self.spelled = lru_cache(MOST)(self._quickly_spelled)
        self.turned = lru_cache(MOST)(self.positions)
        self._check_several()

    def inputs(self, pixels: NDArray[np.uint8]) -> Inputs:
        """Return the model's inputs for an image [H, W, RGB].

        Raises:
            ValueError: the processor refuses the image; the message has the reason.
        """
        return self._said(self.placeholder, [import_module("PIL.Image").fromarray(pixels)])[1]

    def blank(self, size: Size) -> Inputs:
        """Return the model's inputs for a black image."""
        return self._said(self.placeholder, [_blank(size)])[1]

    def _quickly_spelled(self, size: Size) -> Spelled:
        """Return the tokens for an image of this size; ValueError if the processor refuses it.

        By the processor's own count of rows where it agrees with what it writes: a distribution
        has thousands of sizes, and each text costs a blank image.
        """
        if self._same is None:
            return self._spelled(size)
        return self._same._replace(ids=(ROW,) * self.rows([size])[0])

    def rows(self, sizes: Sequence[Size]) -> list[int]:
        """Return the rows of images of these sizes; ValueError if the processor refuses one."""
        if self._same is None:
            return [self.spelled(size).rows for size in sizes]
        if len(self._row_counts) > MOST_COUNTS:
            self._row_counts.clear()
        if new := [size for size in dict.fromkeys(sizes) if size not in self._row_counts]:
            _check_heights(new)
            try:
                counts = self._counted(new)
            except Exception as error:
                raise ValueError(f"the processor refuses it: {_line(error)}") from None
            self._row_counts.update(zip(new, counts, strict=True))
        return [self._row_counts[size] for size in sizes]

    @cached_property
    def _same(self) -> Spelled | None:
        """Text around any image, if the processor counts rows and writes nothing between them."""
        try:
            texts, counts = [self._spelled(size) for size in COUNTED], self._counted(COUNTED)
        except Exception:  # it counts none, or in another form
            return None
        first = texts[0]
        same = all(
            one == first._replace(ids=(ROW,) * count)
            for one, count in zip(texts, counts, strict=True)
        )
        return first if same else None

    def _counted(self, sizes: Sequence[Size]) -> list[int]:
        """Return the processor's own counts: a call, which checks its options, takes a ms."""
        made = self._processor._get_num_multimodal_tokens(image_sizes=[one[::-1] for one in sizes])
        return [int(count) for count in made.num_image_tokens]

    def positions(self, size: Size) -> NDArray[np.int64]:
        """Return [3, tokens] M-RoPE positions of an image's tokens, from those of its first.

        Raises:
            SpecError: the class computes them in another form, or the next token's do not follow.
        """
        import numpy as np

        torch, one = import_module("torch"), self.spelled(size)
        before, after = (
            self._tokenizer(text, add_special_tokens=False)["input_ids"]
            for text in (one.before, f"{one.after} a")
        )
        row = self.row
        ids = [*before, *(row if id_ == ROW else id_ for id_ in one.ids), *after]
        given = {
            **{name: torch.from_numpy(value) for name, value in self.blank(size).items()},
            "input_ids": torch.tensor([ids]),
            KINDS: torch.tensor([[int(id_ == row) for id_ in ids]]),
            "attention_mask": torch.ones(1, len(ids), dtype=torch.int64),
        }
        base = self._base
        names = inspect.signature(base.get_rope_index).parameters
        try:
            made, _ = base.get_rope_index(
                **{name: value for name, value in given.items() if name in names}
            )
        except Exception as error:
            raise self._refused(f"get_rope_index: {_line(error)}") from None
        found = made.numpy()[-3:, 0]
        inside = found[:, len(before) :][:, : len(one.ids)]
        first, following = inside[0, 0], found[:, len(before) + len(one.ids)]
        if (inside[:, 0] != first).any() or (following != inside.max() + 1).any():
            raise self._refused("positions after an image do not follow its largest one")
        return np.asarray(inside - first, dtype=np.int64)

    @cached_property
    def _base(self) -> Any:
        """The base model's class with a configuration alone."""
        transformers = import_module("transformers")
        config = transformers.AutoConfig.from_pretrained(str(self.folder), local_files_only=True)
        made = transformers.MODEL_MAPPING[type(config)]
        base = made.__new__(made)
        import_module("torch.nn").Module.__init__(base)
        base.config = config
        if hasattr(config.vision_config, MERGE):  # an attribute of some classes
            setattr(base, MERGE, getattr(config.vision_config, MERGE))
        return base

    def complete(self, size: Size) -> dict[str, Any]:
        """Return all outputs, as the library passes them to its model, for a text of one image.

        Some classes ask for the kinds of the tokens though their processors leave them out.
        """
        self._processor.tokenizer = self._tokenizer
        kinds = KINDS in inspect.signature(self._base.forward).parameters
        try:
            with _on_host():
                return dict(
                    self._processor(
                        images=[_blank(size)],
                        text=self.placeholder,
                        return_tensors="pt",
                        **({f"return_{KINDS}": True} if kinds else {}),
                    )
                )
        except Exception as error:
            raise self._refused(_line(error)) from None
        finally:
            self._processor.tokenizer = self._recorder

    @cached_property
    def placeholder(self) -> str:
        """Text that a chat template writes for an image, and that the processor replaces."""
        template = self._processor.chat_template or self._tokenizer.chat_template or ""
        named = [
            value
            for name, value in vars(self._processor).items()
            if name.endswith("token") and isinstance(value, str)
        ]
        # those that the template writes first
        texts = sorted(dict.fromkeys([*named, self._row]), key=lambda one: one not in str(template))
        why = ""
        for text in texts:
            try:
                said, _ = self._said(text, [_blank(SIZE)])
            except ValueError as error:
                why = why or str(error)
                continue
            if self._row in said:
                return text
        raise self._refused(f"no text is replaced by an image's rows: {why or 'it names none'}")

    def _spelled(self, size: Size) -> Spelled:
        """Return the tokens for an image of this size; ValueError if the processor refuses it."""
        _check_heights([size])
        said, _ = self._said(self.placeholder, [_blank(size)])
        before, *inside, after = said.split(self._row)
        if not inside and said == before:
            raise ValueError("the processor writes no rows for an image of this size")
        ids = [ROW]
        for text in inside:
            if text:
                ids += self._tokenizer(text, add_special_tokens=False)["input_ids"]
            ids.append(ROW)
        return Spelled(before, tuple(ids), after)

    def _said(self, text: str, images: Sequence[Any]) -> tuple[str, Inputs]:
        """Return the text as the processor completes it, and the inputs of the images."""
        import numpy as np

        try:
            with _on_host():
                made = self._processor(images=list(images), text=text, return_tensors="pt")
        except Exception as error:  # classes of many authors raise anything
            raise ValueError(f"the processor refuses it: {_line(error)}") from None
        arrays = {name: np.asarray(value) for name, value in made.items() if name not in OF_TEXT}
        said, *others = self._recorder.said.texts
        if others:
            raise ValueError(f"the processor makes {1 + len(others)} texts of one")
        return said, arrays

    def _check_several(self) -> None:
        """Raise SpecError unless images of a sample are prepared one by one."""
        import numpy as np

        text, image = self.placeholder, _blank(SIZE)
        for between in ("", "\n"):
            try:
                one, alone = self._said(text, [image])
                two, both = self._said(between.join([text, text]), [image, image])
            except ValueError as error:
                raise self._refused(f"two images in a text: {error}") from None
            if two != between.join([one, one]):
                raise self._refused("the text that it writes for an image depends on the others")
        for name, value in alone.items():
            flat = both[name].reshape(-1)
            if not np.array_equal(flat, np.concatenate([value.reshape(-1)] * 2)):
                raise self._refused(f"{name} of an image depends on the others of a sample")

    def _loaded(self) -> Any:
        try:
            transformers = import_module("transformers")
            made = transformers.AutoProcessor
            if not transformers.utils.is_torchvision_available():
                made = _without_videos(self._class_name()) or made
            return made.from_pretrained(
                str(self.folder), local_files_only=True, trust_remote_code=False
            )
        except ModuleNotFoundError as error:
            if error.name != "torchvision":
                raise self._refused(_line(error)) from None
            raise SpecError(
                f"{self.folder}: the processor needs torchvision (model.folder)",
                "its class in transformers imports it for any image",
                install_command("generate"),
            ) from None
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
            made = dict(
                zip(names, fewer._get_arguments_from_pretrained(*args, **kwargs), strict=True)
            )
            return [made.get(one) for one in base.get_attributes()]

    OfImages.__name__ = base.__name__  # the library compares it with the folder's
    return OfImages


@cache
def library_processor(folder: Path, image_token: int) -> LibraryProcessor:
    """Return a folder's processor, loaded once per process."""
    return LibraryProcessor(folder, image_token)


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


def _check_heights(sizes: Iterable[Size]) -> None:
    """Raise ValueError for a size whose axis of channels the library would guess wrongly."""
    if any(height in CHANNELS for _, height in sizes):
        raise ValueError("its height would be taken for a number of channels")


def _blank(size: Size) -> Any:
    return import_module("PIL.Image").new("RGB", size)


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__

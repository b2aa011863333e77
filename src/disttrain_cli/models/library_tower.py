"""Tower and projector of any image-text or audio-text family as one layer, as the library has them.

Their rows come from the library's `get_image_features`, `get_video_features` and
`get_audio_features`. What the whole model does with these rows is recorded once, from its own
forward with stand-ins for LLM and tower (`Glue`): a family whose rows are anything but the input of
the LLM at the places of its tokens is refused by name.

The layer holds all of the model's base class but the LLM, and but the other tower. Its buffers are
computed for real though its weights are built on the meta device, and are no state: a cast to bf16
would degrade them.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from disttrain_cli.errors import SpecError
from disttrain_cli.models.architecture import Joined
from disttrain_cli.models.building import LayerMaker
from disttrain_cli.models.configs.checks import (
    MISTAKES,
    ModuleConfig,
    check_numbers,
    decoded,
    wrong_field,
)
from disttrain_cli.models.configs.decoders import sees_vision
from disttrain_cli.models.empty_weights import empty_weights
from disttrain_cli.models.host import to_device
from disttrain_cli.models.layer import (
    Batch,
    Items,
    PipelineLayer,
    TensorSpec,
    embeds_name,
    features_name,
)
from disttrain_cli.models.library_attention import for_images
from disttrain_cli.models.library_frame import TOKEN_INPUTS
from disttrain_cli.models.parallel import split
from disttrain_cli.spec.families.folder import PublishedFolder
from disttrain_cli.spec.families.library import AUDIO_PARTS
from disttrain_cli.spec.heads import Item
from disttrain_cli.spec.library_calls import Media
from disttrain_cli.spec.library_images import (
    ABSENT,
    FLAGS,
    VALUES,
    LibraryClips,
    LibraryImages,
    LibraryItems,
    LibraryVideos,
)
from disttrain_cli.spec.library_processor import LibraryProcessor, digest_of
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.runfile.model import PROJECTORS, ModuleSpec

#: Functions of base classes that return a tower's rows, by what it reads; the first one is called
#: for most items.
FEATURES: dict[Media, str] = {
    "image": "get_image_features",
    "video": "get_video_features",
    "audio": "get_audio_features",
}
#: Names of the LLM and of vision models in base classes.
LLMS = ("language_model", "text_model")
#: Fields of the output of a function of `FEATURES` that may be a whole model's rows.
OUTPUTS = ("pooler_output", "last_hidden_state")
#: Outputs of inner blocks of a vision tower (DeepStack), and the LLM's arguments of their rows,
#: which it adds to those of its first layers.
DEEP, DEEP_ROWS, DEEP_MASK = "deepstack_features", "deepstack_visual_embeds", "visual_pos_masks"
DROPOUT = re.compile(r"drop(out|_path|_prob)")
#: Arguments of an LLM that mean nothing without a cache, or only select outputs.
IGNORED = (
    *("past_key_values", "use_cache", "cache_position", "return_dict", "input_ids"),
    *("output_attentions", "output_hidden_states", "logits_to_keep"),
)
STEP = (
    "Train another model, or its modules by their own folders (model.modules) if their"
    " architectures are known."
)


class _NumbersOnHost(TorchFunctionMode):
    """On a device without values integers are kept on the host: classes compute shapes of them.

    Together with tensors of the device (meta or fake), they have no values.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = args, kwargs or {}
        tensors = [one for one in tree_leaves(given) if isinstance(one, Tensor)]
        if any(map(_has_no_values, tensors)):
            if function is Tensor.__getitem__ and _selects(args[1]):
                with _disable_current_modes():
                    given = (args[0], args[1].nonzero(as_tuple=True)), {}
            (args, kwargs) = tree_map_only(Tensor, self._moved, given)
            return function(*args, **kwargs)
        if not tensors or self._device.type == "meta":
            made = function(*given[0], **given[1])
            if not isinstance(made, Tensor) or made.is_floating_point() or not _has_no_values(made):
                return made
        on_host = tree_map_only(
            torch.device | str,
            lambda one: "cpu" if str(one).partition(":")[0] == self._device.type else one,
            given,
        )
        with _disable_current_modes(), torch.device("cpu"):
            return function(*on_host[0], **on_host[1])

    def _moved(self, tensor: Tensor) -> Tensor:
        if _has_no_values(tensor) or not tensor.ndim:  # numbers stay: they may be sizes
            return tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)


def _has_no_values(tensor: Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def _selects(index: Any) -> bool:
    """Return True if an index is a mask whose values are known."""
    return isinstance(index, Tensor) and index.dtype == torch.bool and not _has_no_values(index)


class Whole(NamedTuple):
    """Class instance of a whole model without memory for weights, and its base model."""

    model: Any
    base: Any
    llm: str  # name of the LLM in the base model


def whole_model(config: Any) -> Whole:
    """Return a whole model with buffers but without weights.

    Raises:
        SpecError: its class does not have the form of a tower before an LLM.
    """
    key = repr(config.to_dict())
    with _disable_current_modes():  # those that count operators or fake a device
        if key not in _wholes:
            while len(_wholes) >= MOST:
                del _wholes[next(iter(_wholes))]
            _wholes[key] = _made(config)
        return copy.deepcopy(_wholes[key])


_wholes: dict[str, Whole] = {}
MOST = 4  # models whose structure is cached


def _made(config: Any) -> Whole:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import MODEL_FOR_MULTIMODAL_LM_MAPPING

    kind, made = config.model_type, MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)]
    if config.is_encoder_decoder:
        raise refused(kind, f"{made.__name__} is an encoder-decoder")
    try:
        with empty_weights():
            model = made(copy.deepcopy(config))
    except (ImportError, StrictDataclassError, *MISTAKES) as error:
        why = " ".join(str(error).split())
        raise refused(
            kind, why if isinstance(error, ImportError) else f"its classes fail: {why}"
        ) from None
    base = getattr(model, "model", None)
    llm = next((name for name in LLMS if isinstance(getattr(base, name, None), nn.Module)), None)
    functions = FEATURES["image"], FEATURES["audio"]
    if base is None or llm is None or not any(hasattr(base, one) for one in functions):
        why = f"a model with {' or '.join(functions)} and an LLM ({' or '.join(LLMS)})"
        raise refused(kind, f"{made.__name__} has no `model` of the usual form: {why}")
    return Whole(model, base, llm)


def refused(model_type: str, why: str) -> SpecError:
    """Return the error about a family that is not trained as a whole."""
    return SpecError(f"model.folder: the family {model_type} cannot be trained exactly", why, STEP)


class Glue(NamedTuple):
    """Call of a function of `FEATURES` in the library's own forward."""

    function: str
    output: str  # field of its output with the rows
    inputs: tuple[tuple[str, str], ...]  # its argument, output of the processor
    constants: Mapping[str, Any]
    positions: Tensor | None  # [3, L] of the tokens (M-RoPE); None: counted from 0
    levels: int = 0  # inner blocks whose rows the LLM's first layers add (DeepStack)

    @property
    def names(self) -> tuple[str, ...]:
        """Outputs of the processor that it reads."""
        return tuple(dict.fromkeys(name for _, name in self.inputs))


class _ReachedError(Exception):
    """The LLM of a whole model was called, with these arguments."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


class _Table(nn.Module):
    """Embeddings that tell ids apart, of any vocabulary."""

    def __init__(self, ids: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, width).expand(ids, width), requires_grad=False)
        self.embedding_dim = width

    def forward(self, ids: Tensor) -> Tensor:
        return -1.0 - ids[..., None].float().expand(*ids.shape, self.embedding_dim)


class _Outputs:
    """Outputs of a stand-in for a tower; any other than these is NaN, which no LLM may read."""

    def __init__(self, others: set[str], **outputs: Any) -> None:
        """
        Args:
            others: gets the names of other outputs that are read.
        """
        self.__dict__ |= {"_others": others} | outputs

    def __getattr__(self, name: str) -> Tensor:
        if name.startswith("__"):
            raise AttributeError(name)
        self._others.add(name)
        return torch.tensor(torch.nan)


class _Llm(nn.Module):
    """Stand-in for an LLM."""

    def __init__(self, llm: Any, width: int) -> None:
        super().__init__()
        self.__dict__["_of"] = llm
        self.config, self.embed_tokens = llm.config, _Table(llm.config.vocab_size, width)
        self.names = tuple(inspect.signature(llm.forward).parameters)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_of"], name)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def get_per_layer_inputs(self, ids: Tensor, *_: Any) -> Tensor:
        return ids

    def forward(self, *args: Any, **kwargs: Any) -> None:
        raise _ReachedError(dict(zip(self.names, args, strict=False)) | kwargs)


def glue_of(config: Any, given: Mapping[str, Tensor], token: int, media: Media) -> Glue:
    """Return how a whole model's forward calls the function of `FEATURES` for a type of file.

    Args:
        given: all outputs of its processor for a text with one file.
        token: id of its rows.

    Raises:
        SpecError: it does anything else with the rows than to make them the LLM's input.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    whole, kind, text = whole_model(config), config.model_type, config.get_text_config()
    scale = getattr(text, "logits_scaling", 1.0)
    if scale != 1.0 and type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise refused(kind, f"its own class divides logits by {scale}, its LLM's has no head")
    base, ids, width = whole.base, given["input_ids"][0], text.hidden_size
    stand_in = _Llm(getattr(base, whole.llm), width)
    # first, as a model takes the device of its first weight for its own
    base._modules = {whole.llm: stand_in} | {**base._modules, whole.llm: stand_in}
    function = FEATURES[media]
    if not hasattr(base, function):
        raise refused(kind, f"{type(base).__name__} has no {function}")
    rows = int((ids == token).sum())
    features = 1.0 + torch.arange(rows * width, dtype=torch.float32).view(rows, width)
    calls = list[dict[str, Any]]()
    names = tuple(inspect.signature(getattr(base, function)).parameters)
    levels = _levels(config) if media != "audio" else 0

    def forms() -> Iterator[Any]:
        yield (features,)
        yield features[None]
        yield features

    why, others = "", set[str]()
    for output, form in product(OUTPUTS, forms()):
        calls.clear()
        base.__dict__[function] = partial(_features, calls, others, {output: form}, levels, names)
        try:
            with torch.no_grad():
                whole.model(**given)
        except _ReachedError as reached:
            positions = _checked(
                kind, reached.arguments, stand_in, ids, ids == token, features, media
            )
            deep = reached.arguments.get(DEEP_ROWS) or ()
            glue = _glue(kind, calls, given, function, output)
            return glue._replace(positions=positions, levels=len(deep))
        except Exception as error:  # other forms of the features fail in any way
            why = why or f"{type(error).__name__}: {' '.join(str(error).split())}"
    if others := others - set(OUTPUTS):
        why = f"it reads {', '.join(sorted(others))} of the tower"
    raise refused(kind, f"its forward does not reach the LLM: {why}")


def _levels(config: Any) -> int:
    """Return the inner blocks of a vision tower whose rows are read (DeepStack)."""
    vision = getattr(config, "vision_config", None)
    return len(getattr(vision, "deepstack_visual_indexes", None) or ())


def _features(
    calls: list[dict[str, Any]],
    others: set[str],
    made: Mapping[str, Any],
    levels: int,
    names: tuple[str, ...],
    *args: Any,
    **kwargs: Any,
) -> Any:
    calls.append(dict(zip(names, args, strict=False)) | kwargs)
    (form,) = made.values()
    deep = [tree_map_only(Tensor, partial(torch.add, other=-n), form) for n in range(levels)]
    return _Outputs(others, **made, **{DEEP: deep or None})


def _glue(
    kind: str,
    calls: list[dict[str, Any]],
    given: Mapping[str, Tensor],
    function: str,
    output: str,
) -> Glue:
    if len(calls) != 1:
        raise refused(kind, f"its forward calls {function} {len(calls)} times")
    inputs, constants = [], {}
    for name, value in calls[0].items():
        if not isinstance(value, Tensor):
            constants[name] = value
            continue
        same = [other for other, own in given.items() if own is value or _equal(own, value)]
        if not same:
            raise refused(kind, f"its forward changes {name} before {function}")
        inputs.append((name, name if name in same else same[0]))
    constants.pop("return_dict", None)
    return Glue(function, output, tuple(inputs), constants, None)


def _equal(one: Any, other: Tensor) -> bool:
    return isinstance(one, Tensor) and one.shape == other.shape and bool((one == other).all())


def _checked(
    kind: str,
    arguments: Mapping[str, Any],
    llm: _Llm,
    ids: Tensor,
    rows: Tensor,
    features: Tensor,
    media: Media,
) -> Tensor | None:
    """Return the three positions of an LLM's tokens, or None if they are counted.

    Raises:
        SpecError: it gets anything else but rows and a causal mask.
    """
    embeds, length = arguments.get("inputs_embeds"), len(rows)
    if embeds is None or embeds.shape[:2] != (1, length):
        raise refused(kind, "its LLM does not read the rows as embeddings of a text's tokens")
    if not torch.equal(embeds[0, rows].float(), features):
        raise refused(kind, "its forward changes the tower's rows before the LLM reads them")
    if not torch.equal(embeds[0, ~rows].float(), llm.embed_tokens(ids)[~rows]):
        raise refused(kind, "its forward changes the embeddings of other tokens")
    counted, positions = torch.arange(length), None
    for name, value in arguments.items():
        if name == "inputs_embeds" or name in IGNORED or value is None:
            continue
        if name == "attention_mask":
            each_other = rows if media != "audio" else torch.zeros_like(rows)
            if not _is_causal(value) and not _sees_images(value, llm.config, each_other):
                raise refused(kind, "its image tokens attend to later ones")
        elif name == "position_ids":
            if value.ndim == 3:
                positions = value[-3:, 0]
            elif not torch.equal(value.reshape(-1), counted):
                raise refused(kind, "the positions of its tokens are not counted from 0")
        elif name == "per_layer_inputs":
            if not torch.equal(value[0], ids.masked_fill(rows, llm.config.pad_token_id or 0)):
                raise refused(kind, f"{TOKEN_INPUTS} reads other tokens than those of the text")
        elif name == DEEP_MASK:
            if not torch.equal(value.reshape(-1), rows):
                raise refused(kind, f"its LLM adds rows to other tokens than those of {media}s")
        elif name == DEEP_ROWS:
            if any(not torch.equal(one, features - level) for level, one in enumerate(value)):
                raise refused(kind, "its forward changes the rows of the tower's inner blocks")
        elif name in llm.names:
            raise refused(kind, f"its LLM also reads {name}")
    return positions


def _is_causal(mask: Any) -> bool:
    """Return True if a forward's mask hides no token: then the LLM's own mask is causal."""
    return isinstance(mask, Tensor) and mask.ndim == 2 and bool(mask.bool().all())


def _sees_images(masks: Any, config: Any, rows: Tensor) -> bool:
    """Return True if masks by type of layer are those with which the decoder's layers run.

    These are causal, in some layers within a window, and in some the tokens of an image see each
    other (`configs.decoders.sees_vision`).
    """
    sees = dict(zip(config.layer_types or (), sees_vision(config), strict=False))
    if not isinstance(masks, dict) or not masks.keys() >= sees.keys():
        return False
    at = torch.arange(len(rows))
    back = at[:, None] - at
    image = torch.cumsum((~rows).long(), 0)  # equal within a run of image tokens
    together = rows[:, None] & rows & (image[:, None] == image)
    for kind, spans in sees.items():
        mask = masks[kind]
        seen = (back >= 0) | together if spans else back >= 0
        if "sliding" in kind:
            seen &= back < config.sliding_window
        if mask is None:
            given = back >= 0
        elif isinstance(mask, Tensor) and mask.shape[-2:] == seen.shape:
            given = mask[0, 0] if mask.dtype == torch.bool else mask[0, 0] == 0
        else:
            return False
        if not torch.equal(given, seen):
            return False
    return True


def unfit(tower: nn.Module) -> str | None:
    """Return why a tower's function depends on more than its images; None if it does not."""
    for path, part in tower.named_modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            return f"{path} normalises over a batch, which would depend on the layout"
        for name, value in vars(part).items():
            drops = isinstance(part, nn.Dropout) or DROPOUT.search(name)
            if drops and isinstance(value, float) and value:
                return f"{path}.{name} is {value}: this dropout would depend on the layout"
        for name, tensor in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set and tensor.is_floating_point():
                return f"the buffer {path}.{name} is a weight of the folder"
    return None


#: Names of towers in base classes; all else is a projector.
TOWERS = re.compile(r"vision|visual|image_tower|audio_tower|encoder")

_unused: dict[str, frozenset[str]] = {}


def parts_of(config: Any, base: nn.Module, llm: str, item: Item) -> list[str]:
    """Return the names of a base class's children that belong to the tower of an item."""
    names = [name for name, _ in base.named_children() if name != llm]
    heard = [name for name in names if name in AUDIO_PARTS]
    if getattr(config, "vision_config", None) is None:
        return names
    return heard if item == "audio" else [name for name in names if name not in heard]


class Tower(PipelineLayer):
    """Files → rows of embeddings for the LLM."""

    kind = "tower"
    by_rows = True
    redundant = True

    def __init__(
        self, module: str, config: Any, head: LibraryItems, glues: Mapping[str, Glue]
    ) -> None:
        """
        Args:
            glues: of all types of files that it reads.
        """
        from transformers import PreTrainedModel

        super().__init__()
        self.name, self.module, self.head, self.glues = f"{module}.tower", module, head, glues
        self.item: Item = head.item
        self.needs = (self.item,)
        width = config.get_text_config().hidden_size
        names = (
            embeds_name(self.item),
            *(features_name(level) for level in range(next(iter(glues.values())).levels)),
        )
        self.writes = tuple(
            TensorSpec(name, self.item, "tokens", (width,), split=True) for name in names
        )
        whole = whole_model(config)
        self.tower = whole.base
        own = parts_of(config, whole.base, whole.llm, self.item)
        for name in [name for name, _ in self.tower.named_children() if name not in own]:
            delattr(self.tower, name)
        for_images(self.tower)
        self.constants = _taken_buffers(self.tower)
        for part in self.tower.modules():
            for name, parameter in part.named_parameters(recurse=False):
                part.register_parameter(name, nn.Parameter(parameter.detach().to("meta")))
        published = {path.partition(".")[0] for path, _ in self.tower.named_parameters()}
        self.published = {f"tower.{name}": name for name in sorted(published)}
        self.towers = tuple(
            f"tower.{name}."
            for name, part in self.tower.named_children()
            if TOWERS.search(name) and isinstance(part, PreTrainedModel)
        )
        self._placed: torch.device | None = None
        key = f"{self.item} {config.to_dict()!r}"
        if key not in _unused:
            _unused[key] = self._without_gradients()
        self.unused = _unused[key]

    def is_empty(self, state: dict[str, Tensor], batch: Batch) -> bool:
        return not batch.of(self.item).grids

    def owner_of(self, path: str) -> str:
        own = not self.towers or path.startswith(self.towers)
        return self.module if own or self.adapted else PROJECTORS

    def trains(self, path: str) -> bool:
        return path not in self.unused and super().trains(path)

    def _without_gradients(self) -> frozenset[str]:
        """Return the parameters that items do not reach: norms after the block that is read, …"""
        example = self.head.example(1)
        items = Items(
            [(int(example.table[0]), 1)],
            {0: [torch.from_numpy(example.values)[None].to("meta")]},
            tables={0: [example.table[None]]},
        )
        with torch.enable_grad():
            made = self.compute({}, Batch({self.item: items}))
            sum(one.sum() for one in made.values()).backward()
        unused = {path for path, one in self.named_parameters() if one.grad is None}
        self.zero_grad(set_to_none=True)
        return frozenset(unused)

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        like = next(self.parameters())
        self._place(like)
        items = batch.of(self.item)
        each = zip(items.values[0], items.tables[0], items.grids, strict=True)
        made = [self._rows(values, table, count, like) for values, table, (count, _) in each]
        together = map(torch.cat, zip(*made, strict=True))
        return {
            spec.name: split(rows[self.of_group(len(rows))], self.group)
            for spec, rows in zip(self.writes, together, strict=True)
        }

    def _rows(self, values: Tensor, table: Any, count: int, like: Tensor) -> list[Tensor]:
        """Return the `count` rows of a file, and those of the tower's inner blocks.

        Of an example (`LibraryImages.example`) there are about as many.
        """
        inputs = unpacked(self.head.inputs, values, table[0])
        glue = next(one for one in self.glues.values() if one.inputs[0][1] in inputs)
        given = {
            argument: inputs[name].to(like.dtype)
            if inputs[name].is_floating_point()
            else inputs[name]
            if _has_no_values(like)
            else to_device(inputs[name], like.device)
            for argument, name in glue.inputs
            if name in inputs
        }
        rows = int(table[0, 0])
        if rows == 1:  # classes squeeze the rows of a batch with one row away
            given = {name: torch.cat([value, value]) for name, value in given.items()}
        with _NumbersOnHost(like.device) if _has_no_values(like) else nullcontext():
            made = getattr(self.tower, glue.function)(**given, **glue.constants, return_dict=True)
            deep = getattr(made, DEEP) if glue.levels else ()
            found = [flat_rows(one) for one in (getattr(made, glue.output), *deep)]
        if any(len(one) != (2 if rows == 1 else rows) for one in found):
            raise SpecError(
                f"The tower of {self.head.folder} and its processor do not fit",
                f"{len(found[0])} rows of a file for which the processor writes {rows} tokens",
                "Download the folder again, with its processor's files.",
            )
        if rows == count == len(found[0]):
            return found
        at = torch.arange(count, device=like.device) % rows
        return [one.index_select(0, at) for one in found]

    def _place(self, like: Tensor) -> None:
        """Move the buffers, which are no state of the layer, to a device; a fake one has blanks."""
        if self._placed == like.device:
            return
        for path, name, tensor in self.constants:
            self.tower.get_submodule(path).__dict__[name] = (
                torch.empty(tensor.shape, dtype=tensor.dtype, device=like.device)
                if _has_no_values(like)
                else tensor.to(like.device)
            )
        self._placed = like.device


def flat_rows(pooled: Any) -> Tensor:
    """Return the rows of all files, in order, from any of the forms that classes return."""
    rows = (
        torch.cat([flat_rows(one) for one in pooled])
        if isinstance(pooled, (list, tuple))
        else pooled
    )
    return rows.reshape(-1, rows.shape[-1])


def unpacked(names: tuple[str, ...], values: Tensor, table: Any) -> dict[str, Tensor]:
    """Return the inputs of a file from their packed form (`library_images.Packed`).

    Integers stay on the host.
    """
    numbers, at, first = np.asarray(table).tolist(), 1, 0
    flat, inputs = values.flatten(), dict[str, Tensor]()
    for name in names:
        kind, dimensions = numbers[at : at + 2]
        if kind == ABSENT:
            at += 2
            continue
        shape = numbers[at + 2 : at + 2 + dimensions]
        at, size = at + 2 + dimensions, int(np.prod(shape))
        if kind == VALUES:
            inputs[name] = flat[first : first + size].view(shape)
            first += size
        else:
            with _disable_current_modes(), torch.device("cpu"):
                given = torch.tensor(numbers[at : at + size]).view(shape)
            inputs[name] = given.bool() if kind == FLAGS else given
            at += size
    return inputs


def _taken_buffers(model: nn.Module) -> list[tuple[str, str, Tensor]]:
    """Take the buffers out of a model: (path of their module, name, value)."""
    taken = []
    for path, part in model.named_modules():
        for name, tensor in list(part.named_buffers(recurse=False)):
            del part._buffers[name]
            taken.append((path, name, tensor))
    return taken


def read(
    name: str, architecture: str, spec: ModuleSpec, fields: dict[str, Any]
) -> tuple[Any, None]:
    """Return the configuration of a whole model, whose tower is a module.

    Raises:
        SpecError: its class does not accept it, or it cannot be trained exactly.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    if spec.config:
        raise wrong_field(name, "config", spec.config, "nothing: the folder's config.json is used")
    check_numbers(name, decoded(fields))
    kind = str(fields.get("model_type"))
    try:
        config = CONFIG_MAPPING[kind].from_dict(decoded(fields))
    except (StrictDataclassError, *MISTAKES) as error:
        raise refused(kind, " ".join(str(error).split())) from None
    if why := _unfit_whole(config):
        raise refused(kind, why)
    return config, None


def _unfit_whole(config: Any) -> str | None:
    key = repr(config.to_dict())
    if key not in _unfits:
        whole = whole_model(config)
        delattr(whole.base, whole.llm)
        _unfits[key] = unfit(whole.base)
    return _unfits[key]


_unfits: dict[str, str | None] = {}


def images_of(run: Run, module: ModuleConfig) -> LibraryImages:
    """Return the tower's requirements: images as the folder's own processor prepares them.

    Raises:
        SpecError: the family's images, or the videos that the run reads, are not trained exactly.
    """
    published = _published(run, module)
    if "max_image_pixels" in run.file.data.model_fields_set:
        raise SpecError(
            "data.max_image_pixels is not read by this model's image processor",
            "its images have the sizes that the processor's own files say",
            "Leave data.max_image_pixels out; lower the processor's own budget, if it has one.",
        )
    head = LibraryImages(
        module=module.name,
        image_token=_token(published, module, "image"),
        video=_videos(run, published, module),
        **_of_folder(published),
    )
    return _completed(head, module)


def clips_of(run: Run, module: ModuleConfig) -> LibraryClips:
    """Return an audio tower's requirements: clips as the folder's own processor prepares them.

    Raises:
        SpecError: the family's clips are not trained exactly.
    """
    published = _published(run, module)
    token = _token(published, module, "audio")
    head = LibraryClips(module=module.name, audio_token=token, **_of_folder(published))
    return _completed(head, module)


def _published(run: Run, module: ModuleConfig) -> PublishedFolder:
    published = run.published
    if published is None or published.file.parent != run.resolve(
        run.file.model.modules[module.name].folder or ""
    ):
        raise refused(module.config.model_type, "its tower is used only with model.folder")
    return published


def _token(published: PublishedFolder, module: ModuleConfig, media: Media) -> int:
    token = published.token(media)
    if token is None:
        raise refused(module.config.model_type, f"its config.json names no {media}_token_id")
    return token


def _of_folder(published: PublishedFolder) -> dict[str, Any]:
    folder = published.path
    return {"folder": str(folder), "digest": digest_of(folder)}


def _videos(run: Run, published: PublishedFolder, module: ModuleConfig) -> LibraryVideos | None:
    asked = run.file.data.video
    if asked is None:
        return None
    if asked.max_pixels is not None:
        raise SpecError(
            "data.video.max_pixels is not read by this model's video processor",
            "its frames have the sizes that the processor's own files say",
            "Leave data.video.max_pixels out; lower the processor's own budget, if it has one.",
        )
    token = _token(published, module, "video")
    return LibraryVideos(token=token, fps=asked.fps, max_frames=asked.max_frames)


def _completed(head: Any, module: ModuleConfig) -> Any:
    """Return a head with the inputs that the functions of its tower read."""
    glues = glues_of(head, module.config).values()
    names = dict.fromkeys(name for glue in glues for name in glue.names)
    mrope = any(glue.positions is not None for glue in glues)
    return head.model_copy(update={"inputs": tuple(names), "mrope": mrope})


def _check_positions(
    kind: str, found: Tensor, ids: Tensor, row: int, inside: Tensor, following: int
) -> None:
    """Raise SpecError if positions are not those of a file inside counted ones.

    They are computed for each file alone (`data.positions.sample_positions`).
    """
    first = int((ids == row).nonzero()[0])
    made = torch.arange(len(ids)).repeat(3, 1)
    stop = first + inside.shape[1]
    made[:, first:stop] = first + inside
    made[:, stop:] = first + following + torch.arange(len(ids) - stop)
    if not torch.equal(made, found):
        raise refused(kind, "its positions are of a form that is not known")


_glues: dict[tuple[Any, ...], Glue] = {}


def glues_of(head: LibraryItems, config: Any) -> dict[str, Glue]:
    """Return the glue of a folder's model for each type of file that is read.

    Recorded once per process.
    """
    if isinstance(head, LibraryImages):
        processors = [head.processor, *([] if head.video is None else [head.of_videos])]
    else:
        processors = [head.processor_of(head.large)]
    return {one.call.media: _glue_from(one, head.digest, config) for one in processors}


def _glue_from(processor: LibraryProcessor, digest: str, config: Any) -> Glue:
    media = processor.call.media
    key = str(processor.folder), processor.row, processor.call, digest, repr(config.to_dict())
    if key not in _glues:
        # large files may have inputs that small ones lack
        size = max(processor.call.sizes, key=lambda one: len(processor.complete(one)))
        given = processor.complete(size)
        glue = glue_of(config, given, processor.row, media)
        ids = given["input_ids"][0]
        if glue.positions is not None and media == "audio":
            if not torch.equal(glue.positions, torch.arange(len(ids)).expand(3, -1)):
                raise refused(config.model_type, "the positions of its clips are not counted")
            glue = glue._replace(positions=None)
        elif glue.positions is not None:
            inside, following = processor.positions(size)
            own = processor.row, torch.from_numpy(inside), following
            _check_positions(config.model_type, glue.positions, ids, *own)
        _glues[key] = glue
    return _glues[key]


def makers(joined: Joined) -> list[LayerMaker]:
    """Return the factory of the one layer."""
    module, head = joined.module, joined.head
    assert isinstance(head, LibraryItems)
    section = "vision_config" if head.item == "image" else "audio_config"
    std = getattr(getattr(module.config, section, None), "initializer_range", 0.02)
    make = partial(Tower, module.name, module.config, head, glues_of(head, module.config))
    return [LayerMaker(make, std)]

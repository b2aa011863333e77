"""Vision tower and projector of any image-text family as one layer, as the library has them.

Their rows come from the library's `get_image_features`. What the whole model does with these rows
is recorded once, from its own forward with stand-ins for LLM and tower (`Glue`): a family whose
rows are anything but the input of the LLM at the places of its image tokens is refused by name.

The layer holds all of the model's base class but the LLM. Its buffers are computed for real though
its weights are built on the meta device, and are no state: a cast to bf16 would degrade them.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
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
from disttrain_cli.models.layer import Batch, Items, TensorSpec, features_name
from disttrain_cli.models.library_attention import for_images
from disttrain_cli.models.library_frame import TOKEN_INPUTS
from disttrain_cli.models.parallel import split
from disttrain_cli.models.towers import EMBEDS, ImageLayer
from disttrain_cli.spec.library_images import ABSENT, FLAGS, VALUES, LibraryImages
from disttrain_cli.spec.library_processor import (
    LARGER,
    SIZE,
    digest_of,
    library_processor,
)
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.runfile.model import PROJECTORS, ModuleSpec

FEATURES = "get_image_features"
#: Names of the LLM and of vision models in base classes.
LLMS = ("language_model", "text_model")
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
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    kind, made = config.model_type, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
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
    if base is None or llm is None or not hasattr(base, FEATURES):
        why = f"a model with {FEATURES} and an LLM ({' or '.join(LLMS)})"
        raise refused(kind, f"{made.__name__} has no `model` of the usual form: {why}")
    return Whole(model, base, llm)


def refused(model_type: str, why: str) -> SpecError:
    """Return the error about a family that is not trained as a whole."""
    return SpecError(f"model.folder: the family {model_type} cannot be trained exactly", why, STEP)


class Glue(NamedTuple):
    """Arguments of `get_image_features` in the library's own forward."""

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


def glue_of(config: Any, given: Mapping[str, Tensor], image_token: int) -> Glue:
    """Return how a whole model's forward calls `get_image_features`.

    Args:
        given: all outputs of its processor for a text with one image.

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
    rows = int((ids == image_token).sum())
    features = 1.0 + torch.arange(rows * width, dtype=torch.float32).view(rows, width)
    calls, names = list[dict[str, Any]](), _arguments(base)
    levels = len(getattr(config.vision_config, "deepstack_visual_indexes", None) or ())

    def forms() -> Iterator[Any]:
        yield (features,)
        yield features[None]
        yield features

    why, others = "", set[str]()
    for form in forms():
        calls.clear()
        base.__dict__[FEATURES] = partial(_features, calls, others, form, levels, names)
        try:
            with torch.no_grad():
                whole.model(**given)
        except _ReachedError as reached:
            positions = _checked(
                kind, reached.arguments, stand_in, ids, ids == image_token, features
            )
            deep = reached.arguments.get(DEEP_ROWS) or ()
            return _glue(kind, calls, given)._replace(positions=positions, levels=len(deep))
        except Exception as error:  # other forms of the features fail in any way
            why = why or f"{type(error).__name__}: {' '.join(str(error).split())}"
    if others:
        why = f"it reads {', '.join(sorted(others))} of the tower"
    raise refused(kind, f"its forward does not reach the LLM: {why}")


def _arguments(base: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(getattr(base, FEATURES)).parameters)


def _features(
    calls: list[dict[str, Any]],
    others: set[str],
    form: Any,
    levels: int,
    names: tuple[str, ...],
    *args: Any,
    **kwargs: Any,
) -> Any:
    calls.append(dict(zip(names, args, strict=False)) | kwargs)
    deep = [tree_map_only(Tensor, partial(torch.add, other=-n), form) for n in range(levels)]
    return _Outputs(others, pooler_output=form, **{DEEP: deep or None})


def _glue(kind: str, calls: list[dict[str, Any]], given: Mapping[str, Tensor]) -> Glue:
    if len(calls) != 1:
        raise refused(kind, f"its forward calls {FEATURES} {len(calls)} times")
    inputs, constants = [], {}
    for name, value in calls[0].items():
        if not isinstance(value, Tensor):
            constants[name] = value
            continue
        same = [other for other, own in given.items() if own is value or _equal(own, value)]
        if not same:
            raise refused(kind, f"its forward changes {name} before {FEATURES}")
        inputs.append((name, name if name in same else same[0]))
    constants.pop("return_dict", None)
    return Glue(tuple(inputs), constants, None)


def _equal(one: Any, other: Tensor) -> bool:
    return isinstance(one, Tensor) and one.shape == other.shape and bool((one == other).all())


def _checked(
    kind: str,
    arguments: Mapping[str, Any],
    llm: _Llm,
    ids: Tensor,
    rows: Tensor,
    features: Tensor,
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
        raise refused(kind, "its forward changes the embeddings of tokens around an image")
    counted, positions = torch.arange(length), None
    for name, value in arguments.items():
        if name == "inputs_embeds" or name in IGNORED or value is None:
            continue
        if name == "attention_mask":
            if not _is_causal(value) and not _sees_images(value, llm.config, rows):
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
                raise refused(kind, "its LLM adds rows to other tokens than those of an image")
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


#: Names of vision models in base classes; all else is a projector.
TOWERS = re.compile(r"vision|visual|image_tower")

_unused: dict[str, frozenset[str]] = {}


class Tower(ImageLayer):
    """Images → rows of embeddings for the LLM."""

    kind = "tower"
    needs = ("image",)
    redundant = True

    def __init__(self, module: str, config: Any, head: LibraryImages, glue: Glue) -> None:
        from transformers import PreTrainedModel

        super().__init__()
        self.name, self.module, self.head, self.glue = f"{module}.tower", module, head, glue
        width = config.get_text_config().hidden_size
        self.writes = tuple(
            TensorSpec(name, "image", "tokens", (width,), split=True)
            for name in (EMBEDS, *map(features_name, range(glue.levels)))
        )
        whole = whole_model(config)
        self.tower = whole.base
        delattr(self.tower, whole.llm)
        for_images(self.tower)
        self.constants = _taken_buffers(self.tower)
        for part in self.tower.modules():
            for name, parameter in part.named_parameters(recurse=False):
                part.register_parameter(name, nn.Parameter(parameter.detach().to("meta")))
        names = {path.partition(".")[0] for path, _ in self.tower.named_parameters()}
        self.published = {f"tower.{name}": name for name in sorted(names)}
        self.towers = tuple(
            f"tower.{name}."
            for name, part in self.tower.named_children()
            if TOWERS.search(name) and isinstance(part, PreTrainedModel)
        )
        self._placed: torch.device | None = None
        key = repr(config.to_dict())
        if key not in _unused:
            _unused[key] = self._without_gradients()
        self.unused = _unused[key]

    def owner_of(self, path: str) -> str:
        own = not self.towers or path.startswith(self.towers)
        return self.module if own or self.adapted else PROJECTORS

    def trains(self, path: str) -> bool:
        return path not in self.unused and super().trains(path)

    def _without_gradients(self) -> frozenset[str]:
        """Return the parameters that images do not reach: norms after the block that is read, …"""
        example = self.head.example(1)
        items = Items(
            [(int(example.table[0]), 1)],
            {0: [torch.from_numpy(example.values)[None].to("meta")]},
            tables={0: [example.table[None]]},
        )
        with torch.enable_grad():
            made = self.compute({}, Batch({"image": items}))
            sum(one.sum() for one in made.values()).backward()
        unused = {path for path, one in self.named_parameters() if one.grad is None}
        self.zero_grad(set_to_none=True)
        return frozenset(unused)

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        like = next(self.parameters())
        self._place(like)
        items = batch.of("image")
        each = zip(items.values[0], items.tables[0], items.grids, strict=True)
        made = [self._rows(values, table, count, like) for values, table, (count, _) in each]
        together = map(torch.cat, zip(*made, strict=True))
        return {
            spec.name: split(rows[self.of_group(len(rows))], self.group)
            for spec, rows in zip(self.writes, together, strict=True)
        }

    def _rows(self, values: Tensor, table: Any, count: int, like: Tensor) -> list[Tensor]:
        """Return the `count` rows of an image, and those of the tower's inner blocks.

        Of an example (`LibraryImages.example`) there are about as many.
        """
        inputs = unpacked(self.head.inputs, values, table[0])
        given = {
            argument: inputs[name].to(like.dtype)
            if inputs[name].is_floating_point()
            else inputs[name]
            if _has_no_values(like)
            else to_device(inputs[name], like.device)
            for argument, name in self.glue.inputs
            if name in inputs
        }
        rows = int(table[0, 0])
        if rows == 1:  # classes squeeze the rows of a batch with one row away
            given = {name: torch.cat([value, value]) for name, value in given.items()}
        with _NumbersOnHost(like.device) if _has_no_values(like) else nullcontext():
            made = getattr(self.tower, FEATURES)(**given, **self.glue.constants, return_dict=True)
            deep = getattr(made, DEEP) if self.glue.levels else ()
            found = [flat_rows(one) for one in (made.pooler_output, *deep)]
        if any(len(one) != (2 if rows == 1 else rows) for one in found):
            raise SpecError(
                f"The tower of {self.head.folder} and its processor do not fit",
                f"{len(found[0])} rows of an image for which the processor writes {rows} tokens",
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
    """Return the rows of all images, in order, from any of the forms that classes return."""
    rows = (
        torch.cat([flat_rows(one) for one in pooled])
        if isinstance(pooled, (list, tuple))
        else pooled
    )
    return rows.reshape(-1, rows.shape[-1])


def unpacked(names: tuple[str, ...], values: Tensor, table: Any) -> dict[str, Tensor]:
    """Return the inputs of an image from their packed form (`library_images.Packed`).

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
    """Return the tower's requirements: images as the folder's own processor prepares them."""
    published = run.published
    if published is None or published.file.parent != run.resolve(
        run.file.model.modules[module.name].folder or ""
    ):
        raise refused(module.config.model_type, "its tower is used only with model.folder")
    if run.file.samples.answers:
        raise SpecError(
            "samples.answers: this model's images are not read when sampling",
            "its tower runs as one layer, with the library's own processor",
            "Leave samples.answers out.",
        )
    if "max_image_pixels" in run.file.data.model_fields_set:
        raise SpecError(
            "data.max_image_pixels is not read by this model's image processor",
            "its images have the sizes that the processor's own files say",
            "Leave data.max_image_pixels out; lower the processor's own budget, if it has one.",
        )
    folder = published.path
    token = published.image_token
    if token is None:
        token = getattr(module.config, "image_token_id", None)
    if not isinstance(token, int):
        raise refused(module.config.model_type, "its config.json names no image_token_id")
    glue = glue_from(str(folder), token, digest_of(folder), module.config)
    return LibraryImages(
        module=module.name,
        folder=str(folder),
        image_token=token,
        inputs=glue.names,
        digest=digest_of(folder),
        mrope=glue.positions is not None,
    )


def _check_positions(kind: str, found: Tensor, ids: Tensor, row: int, inside: Tensor) -> None:
    """Raise SpecError if positions are not those of an image inside counted ones.

    They are computed for each image alone (`data.positions.sample_positions`).
    """
    first = int((ids == row).nonzero()[0])
    made = torch.arange(len(ids)).repeat(3, 1)
    stop = first + inside.shape[1]
    made[:, first:stop] = first + inside
    made[:, stop:] = first + 1 + inside[1:].max() + torch.arange(len(ids) - stop)
    if not torch.equal(made, found):
        raise refused(kind, "its positions are of a form that is not known")


_glues: dict[tuple[str, int, str, str], Glue] = {}


def glue_from(folder: str, token: int, digest: str, config: Any) -> Glue:
    """Return the glue of a folder's model, recorded once per process."""
    key = folder, token, digest, repr(config.to_dict())
    if key not in _glues:
        processor = library_processor(Path(folder), token)
        # large images may have inputs that small ones lack
        size = max((SIZE, LARGER), key=lambda one: len(processor.complete(one)))
        given = processor.complete(size)
        glue = glue_of(config, given, token)
        if glue.positions is not None:
            inside = torch.from_numpy(processor.positions(size))
            ids = given["input_ids"][0]
            _check_positions(config.model_type, glue.positions, ids, processor.row, inside)
        _glues[key] = glue
    return _glues[key]


def makers(joined: Joined) -> list[LayerMaker]:
    """Return the factory of the one layer."""
    module, head = joined.module, joined.head
    assert isinstance(head, LibraryImages)
    glue = glue_from(head.folder, head.image_token, head.digest, module.config)
    std = getattr(module.config.vision_config, "initializer_range", 0.02)
    return [LayerMaker(partial(Tower, module.name, module.config, head, glue), std)]

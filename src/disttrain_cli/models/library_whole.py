"""The library's whole models, and how their forward calls a tower and uses its rows.

Recorded once per folder from the library's own forward, with stand-ins for LLM and tower: a family
whose rows are anything but the input of the LLM at the places of its tokens is refused by name.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from disttrain_cli.errors import SpecError
from disttrain_cli.models.configs.checks import MISTAKES
from disttrain_cli.models.configs.decoders import sees_vision
from disttrain_cli.models.configs.wholes import WHOLE
from disttrain_cli.models.empty_weights import empty_weights
from disttrain_cli.models.library_frame import TOKEN_INPUTS, StandIn, Tail
from disttrain_cli.spec.library_calls import Media
from disttrain_cli.spec.library_images import LibraryImages, LibraryItems
from disttrain_cli.spec.library_processor import LibraryProcessor

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
#: Field of a clip's output that is true for the whole model's rows, false for padding after them.
PADDED = "attention_mask"
#: Outputs of inner blocks of a vision tower (DeepStack), and the LLM's arguments of their rows,
#: which it adds to those of its first layers.
DEEP, DEEP_ROWS, DEEP_MASK = "deepstack_features", "deepstack_visual_embeds", "visual_pos_masks"
#: Arguments of an LLM that mean nothing without a cache, or only select outputs.
IGNORED = (
    *("past_key_values", "use_cache", "cache_position", "return_dict", "input_ids"),
    *("output_attentions", "output_hidden_states", "logits_to_keep"),
)
STEP = (
    "Train another model, or its modules by their own folders (model.modules) if their"
    " architectures are known."
)


class Whole(NamedTuple):
    """Class instance of a whole model without memory for weights, and its base model.

    Some have no base model: they hold their towers, and an LLM with its head, themselves.
    """

    model: Any
    base: Any
    llm: str  # name of the LLM in the base model

    @property
    def with_head(self) -> Any:
        """The class that outputs logits of its `model`'s hidden states."""
        return getattr(self.base, self.llm) if self.base is self.model else self.model


def whole_model(config: Any) -> Whole:
    """Return a whole model with buffers but without weights.

    Raises:
        SpecError: its class does not have the form of a tower before an LLM, or its logits are no
            function of the LLM's output (`Tail`).
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
    functions = FEATURES["image"], FEATURES["audio"]
    base = getattr(model, "model", model)
    llm = next((name for name in LLMS if isinstance(getattr(base, name, None), nn.Module)), None)
    if llm is None or not any(hasattr(base, one) for one in functions):
        why = f"a model with {' or '.join(functions)} and an LLM ({' or '.join(LLMS)})"
        raise refused(kind, f"{made.__name__} is not, and has no `model`, of the usual form: {why}")
    whole = Whole(model, base, llm)
    hidden = torch.empty(2, config.get_text_config().hidden_size, device="meta")
    try:
        Tail(whole.with_head, "model")(hidden, whole.with_head.get_output_embeddings())
    except MISTAKES as error:
        why = " ".join(str(error).split())
        raise refused(kind, f"its logits are computed of more than hidden states: {why}") from None
    return whole


def whole_of(config: Any) -> Any:
    """Return the class of the whole model that outputs an LLM's logits; None if it is no part."""
    from transformers import CONFIG_MAPPING

    fields = config.to_dict()
    whole = fields.pop(WHOLE, None)
    if whole is None:
        return None
    made = CONFIG_MAPPING[whole["model_type"]]
    return whole_model(made.from_dict(whole | {"text_config": fields})).with_head


def refused(model_type: str, why: str) -> SpecError:
    """Return the error about a family that is not trained as a whole."""
    return SpecError(f"model.folder: the family {model_type} cannot be trained exactly", why, STEP)


class TowerCall(NamedTuple):
    """Call of a function of `FEATURES` in the library's own forward."""

    function: str
    output: str  # field of its output with the rows
    inputs: tuple[tuple[str, str], ...]  # its argument, output of the processor
    constants: Mapping[str, Any]
    positions: Tensor | None  # [3, L] of the tokens (M-RoPE); None: counted from 0
    levels: int = 0  # inner blocks whose rows the LLM's first layers add (DeepStack)
    projectors: tuple[str, ...] = ()  # children that its forward then applies to the rows
    padded: bool = False  # a clip's rows are followed by others, which its forward leaves out
    joins: bool = False  # files of equal widths are one call (`LibraryProcessor.joins`)

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


class _Llm(StandIn):
    """Stand-in for an LLM."""

    def __init__(self, llm: Any, width: int) -> None:
        super().__init__(llm)
        self.embed_tokens = _Table(llm.config.vocab_size, width)
        self.names = tuple(inspect.signature(llm.forward).parameters)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def get_per_layer_inputs(self, ids: Tensor, *_: Any) -> Tensor:
        return ids

    def forward(self, *args: Any, **kwargs: Any) -> None:
        raise _ReachedError(dict(zip(self.names, args, strict=False)) | kwargs)


class _Projector(StandIn):
    """Stand-in for a child of a whole model that its forward may apply to a tower's rows."""

    def __init__(self, name: str, of: nn.Module, applied: list[tuple[str, Tensor]]) -> None:
        super().__init__(of)
        self.__dict__ |= {"_name": name, "_applied": applied}

    def forward(self, rows: Tensor) -> Tensor:
        self._applied.append((self._name, rows))
        return rows


def tower_call(config: Any, given: Mapping[str, Tensor], token: int, media: Media) -> TowerCall:
    """Return how a whole model's forward calls the function of `FEATURES` for a type of file.

    Args:
        given: all outputs of its processor for a text with one file.
        token: id of its rows.

    Raises:
        SpecError: it does anything else with the rows than to make them the LLM's input.
    """
    whole, kind, text = whole_model(config), config.model_type, config.get_text_config()
    base, ids, width = whole.base, given["input_ids"][0], text.hidden_size
    stand_in = _Llm(getattr(base, whole.llm), width)
    applied = list[tuple[str, Tensor]]()
    children = {name: _Projector(name, one, applied) for name, one in base.named_children()}
    # first, as a model takes the device of its first weight for its own
    base._modules = {whole.llm: stand_in, **base._modules, **children, whole.llm: stand_in}
    function = FEATURES[media]
    if not hasattr(base, function):
        raise refused(kind, f"{type(base).__name__} has no {function}")
    rows = int((ids == token).sum())
    features = 1.0 + torch.arange(rows * width, dtype=torch.float32).view(rows, width)
    calls = list[dict[str, Any]]()
    names = tuple(inspect.signature(getattr(base, function)).parameters)
    levels = _levels(config) if media != "audio" else 0

    def forms() -> Iterator[tuple[Any, dict[str, Tensor]]]:
        yield (features,), {}
        yield features[None], {}
        yield features, {}
        if media == "audio":
            padded = torch.cat([features, torch.full((1, width), torch.nan)])[None]
            yield padded, {PADDED: torch.arange(rows + 1)[None] < rows}

    why, others = "", set[str]()
    for output, (form, mask) in product(OUTPUTS, forms()):
        calls.clear()
        applied.clear()
        made = {output: form} | mask
        base.__dict__[function] = partial(_features, calls, others, made, levels, names)
        try:
            with torch.no_grad():
                whole.model(**given)
        except _ReachedError as reached:
            positions = _checked(
                kind, reached.arguments, stand_in, ids, ids == token, features, media
            )
            deep = reached.arguments.get(DEEP_ROWS) or ()
            if not all(torch.equal(one.flatten(), features.flatten()) for _, one in applied):
                raise refused(kind, "its forward applies modules to other rows") from None
            call = _call(kind, calls, given, function, output)
            projectors = tuple(name for name, _ in applied)
            return call._replace(
                positions=positions, levels=len(deep), projectors=projectors, padded=bool(mask)
            )
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
    form = next(iter(made.values()))
    deep = [tree_map_only(Tensor, partial(torch.add, other=-n), form) for n in range(levels)]
    return _Outputs(others, **made, **{DEEP: deep or None})


def _call(
    kind: str,
    calls: list[dict[str, Any]],
    given: Mapping[str, Tensor],
    function: str,
    output: str,
) -> TowerCall:
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
    return TowerCall(function, output, tuple(inputs), constants, None)


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


_calls: dict[tuple[Any, ...], TowerCall] = {}


def tower_calls(head: LibraryItems, config: Any) -> dict[str, TowerCall]:
    """Return how a folder's model calls its tower for each type of file that is read.

    Recorded once per process.
    """
    if isinstance(head, LibraryImages):
        processors = [head.processor, *([] if head.video is None else [head.of_videos])]
    else:
        processors = [head.processor_of(head.large)]
    return {one.call.media: _call_from(one, head.digest, config) for one in processors}


def _call_from(processor: LibraryProcessor, digest: str, config: Any) -> TowerCall:
    media = processor.call.media
    key = str(processor.folder), processor.row, processor.call, digest, repr(config.to_dict())
    if key not in _calls:
        # large files may have inputs that small ones lack
        size = max(processor.call.sizes, key=lambda one: len(processor.complete(one)))
        given = processor.complete(size)
        call = tower_call(config, given, processor.row, media)
        ids = given["input_ids"][0]
        if call.positions is not None and media == "audio":
            if not torch.equal(call.positions, torch.arange(len(ids)).expand(3, -1)):
                raise refused(config.model_type, "the positions of its clips are not counted")
            call = call._replace(positions=None)
        elif call.positions is not None:
            inside, following = processor.positions(size)
            own = processor.row, torch.from_numpy(inside), following
            _check_positions(config.model_type, call.positions, ids, *own)
        # rows of padded clips are apart from each other
        _calls[key] = call._replace(joins=not call.padded and processor.joins)
    return _calls[key]

"""The library's own forward around its decoder layers, which run elsewhere.

A `Frame` is the base model with a recorder in the place of every layer: it yields each layer's
arguments (rotary factors, positions, masks as segments), and what precedes the first layer. A
`Tail` is the class with a stand-in for its base model: it yields what follows the final norm.
"""

from __future__ import annotations

import copy
from contextlib import suppress
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from disttrain_cli.models import masks
from disttrain_cli.models.attention import Rule, Segments
from disttrain_cli.models.configs.decoders import DYNAMIC
from disttrain_cli.models.host import to_device

#: Field of a configuration, and method of a base model, for per-layer embeddings of tokens.
PER_LAYER, TOKEN_INPUTS = "hidden_size_per_layer_input", "get_per_layer_inputs"
#: Method of a base model that leaves out tokens before layers which read stored keys and values.
SLICING = "_maybe_slice_kv_shared_inputs"
#: Position or name of a layer's argument.
Place = int | str
#: Runs of rows [start, stop).
Spans = tuple[tuple[int, int], ...]


class Arguments(NamedTuple):
    """Arguments of a library's layer in addition to its hidden states."""

    positional: tuple[Any, ...]
    keywords: dict[str, Any]

    def within(self, spans: Spans) -> Arguments:
        """Return the arguments with masks in which the rows of each span see each other."""

        def spanned(value: Any) -> Any:
            if not isinstance(value, Segments):
                return value
            rule = value.rule or Rule()
            return value.under(rule._replace(spans=spans, window_hides_spans=True))

        return Arguments(
            tuple(map(spanned, self.positional)),
            {name: spanned(value) for name, value in self.keywords.items()},
        )

    def at(self, place: Place) -> Any:
        """Return the argument at a position or of a name."""
        return self.positional[place] if isinstance(place, int) else self.keywords[place]


class StandIn(nn.Module):
    """Module with the attributes of another one, except its weights."""

    def __init__(self, of: nn.Module) -> None:
        super().__init__()
        self.__dict__["_of"] = of

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_of"], name)


class _Recorder(StandIn):
    """Stand-in for a decoder layer that records its arguments and returns its input."""

    def __init__(self, layer: nn.Module, frame: Frame) -> None:
        super().__init__(layer)
        self.__dict__["_frame"] = frame

    def forward(self, *given: Any, **named: Any) -> Any:
        return self.__dict__["_frame"].record(given, named)


class _Recorded(Exception):
    """All layers' arguments are recorded; what follows the layers need not run."""


class Frame:
    """The library's base model around its layers, on a device.

    Args:
        decoder: the family's `LibraryDecoder`.
        weights: module with the base model's weights beside its layers, by the same names; None: on
            stages without them, what they compute is left out of the layers' arguments.
        first_only: stop at the first layer.
    """

    def __init__(
        self,
        decoder: Any,
        device: torch.device,
        *,
        weights: nn.Module | None = None,
        first_only: bool = False,
    ) -> None:
        self._calls: list[Arguments] = []
        self._entry: Tensor | None = None
        self._first_only, self._tuples = first_only, decoder.returns_tuple
        self._reads_tokens = decoder.reads_tokens and weights is not None
        self._count = len(decoder.layers)
        self._base = copy.copy(decoder.base)
        if decoder.reads_tokens and weights is None:
            setattr(self._base, PER_LAYER, 0)
        if hasattr(self._base, SLICING):  # only a generation's last tokens need later layers
            setattr(self._base, SLICING, lambda *given, **_: given[:4])
        self._base.__dict__["_modules"] = modules = dict(decoder.base._modules)
        for name, part in decoder.base.named_children():
            if name == decoder._layers:
                modules[name] = nn.ModuleList(_Recorder(layer, self) for layer in decoder.layers)
            elif name == decoder._embedding:
                modules[name] = looked_up = nn.Identity()
                looked_up.weight = torch.empty(0, device=device)  # some base models read its device
            elif next(part.parameters(), None) is None:
                modules[name] = _on(device, _shallow(part))
            elif name != decoder._norm and weights is not None:
                modules[name] = getattr(weights, name)

    def record(self, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Record a layer's call; return its hidden states as the layer would."""
        named = dict(named)
        hidden = named.pop("hidden_states") if "hidden_states" in named else given[0]
        rest = given if not given or given[0] is not hidden else given[1:]
        if self._entry is None:
            self._entry = hidden
        self._calls.append(Arguments(rest, named))
        if self._first_only or len(self._calls) == self._count:
            raise _Recorded
        return (hidden,) if self._tuples else hidden

    def run(
        self,
        embeds_NLD: Tensor,
        positions_NL: Tensor,
        segments: Segments,
        ids_NL: Tensor | None = None,
        *,
        as_ids: bool = False,
    ) -> tuple[list[Arguments], Tensor]:
        """Return each layer's arguments, and the first layer's input.

        Args:
            positions_NL: [N, L], or [3, N, L] with M-RoPE.
            segments: of all rows, of which the library computes its masks (`masks`).
            ids_NL: token ids, which per-layer embeddings read.
            as_ids: the embeddings enter as if looked up by the base model itself.
        """
        self._calls, self._entry = [], None
        more: dict[str, Any] = {}
        if self._reads_tokens:
            more = {"per_layer_inputs": getattr(self._base, TOKEN_INPUTS)(ids_NL, None)}
        with masks.within(segments), suppress(_Recorded):
            more["input_ids" if as_ids else "inputs_embeds"] = embeds_NLD
            self._base(position_ids=positions_NL, use_cache=False, **more)
        assert self._entry is not None
        calls, entry = self._calls, self._entry
        self._calls, self._entry = [], None
        return calls, entry


class Tail:
    """The library's class after its final norm: head, logit scale, soft cap."""

    def __init__(self, model: Any, base: str) -> None:
        """
        Args:
            model: the class with a head; if it has none, the head alone outputs logits.
            base: name of its base model.
        """
        self._head, self._model = head_name(model), None
        if self._head is not None:
            self._model = copy.copy(model)
            self._base = _Given(getattr(model, base))
            self._model.__dict__["_modules"] = {**model._modules, base: self._base}

    def __call__(self, normed_RD: Tensor, head: nn.Module) -> Tensor:
        """Return logits [R, V], or those of a vocabulary shard."""
        if self._model is None:
            logits: Tensor = head(normed_RD)
            return logits
        self._model._modules[self._head] = head
        self._base.rows = normed_RD[None]
        try:
            return self._model(inputs_embeds=self._base.rows, use_cache=False).logits.squeeze(0)
        finally:
            self._base.rows = None


def head_name(model: Any) -> str | None:
    """Return the name of the linear that outputs a class's logits; None if it has none."""
    head = model.get_output_embeddings()
    return next((name for name, part in model.named_modules() if part is head), None)


class _Given(StandIn):
    """Stand-in for a base model that returns given hidden states, and nothing else."""

    rows: Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> Any:
        return _output()(last_hidden_state=self.rows)


@cache
def _output() -> Any:
    from transformers.modeling_outputs import BaseModelOutputWithPast

    class Output(BaseModelOutputWithPast):
        def __getattr__(self, name: str) -> None:
            return None

    return Output


def _shallow(part: nn.Module) -> nn.Module:
    """Return a copy of a module that shares its tensors until they are replaced."""
    made = copy.copy(part)
    made.__dict__["_buffers"] = dict(part._buffers)
    children = {
        n: child if child is None else _shallow(child) for n, child in part._modules.items()
    }
    made.__dict__["_modules"] = children
    return made


def _on(device: torch.device, part: nn.Module) -> nn.Module:
    """Move a part's buffers to a device; rotary frequencies depend on no sample's length.

    Samples longer than a "dynamic" rotary embedding's original length are refused
    (`configs.decoders.check_length`).
    """
    for module in part.modules():
        kinds = getattr(module, "rope_type", None)
        if kinds == DYNAMIC:
            module.rope_type = "default"
        elif isinstance(kinds, dict):
            module.rope_type = {
                name: "default" if kind == DYNAMIC else kind for name, kind in kinds.items()
            }
    part._apply(partial(to_device, device=device))
    return part

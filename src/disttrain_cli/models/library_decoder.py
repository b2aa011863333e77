"""A decoder family's own model in transformers, taken apart by its pipeline plan.

The library's model is constructed once per configuration, with parameters on the meta device and
buffers on the CPU. Its layers, embedding, final norm and head become pipeline layers (`decoder`)
as copies of its submodules; all else of its forward runs as it is (`library_frame`). One layer of
each kind is tried on the meta device, which shows what a layer needs next to its hidden states.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, MutableMapping, Sequence
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from disttrain_cli.models import experts, recurrent
from disttrain_cli.models.attention import Segments
from disttrain_cli.models.configs.decoders import parts_of, plan_of, published_class_of, sees_vision
from disttrain_cli.models.division import Division, colwise, per_head, rowwise
from disttrain_cli.models.empty_weights import STARTS, empty_weights, move_weights
from disttrain_cli.models.fused import RmsNorm
from disttrain_cli.models.layer import ADAPTER
from disttrain_cli.models.library_attention import packed
from disttrain_cli.models.library_frame import (
    PER_LAYER,
    TOKEN_INPUTS,
    Arguments,
    Frame,
    Place,
    head_name,
)
from disttrain_cli.models.own_kernels import with_own_kernels

#: Configurations whose models stay constructed per process.
MOST = 16
#: Parameter of a layer's forward for its attention mask.
MASK = "attention_mask"
#: Parameters of a module's forward by which a token mixer is recognised: its rows depend on others.
_MIXING = {"attention_mask", "position_embeddings", "past_key_values", "cache_params"}
#: Rules of a TP plan under which a module's sublayers are sharded here.
_SHARDED = {"colwise": colwise, "rowwise": rowwise, "replicated_with_grad_allreduce": per_head}


class Stored(NamedTuple):
    """Tensor that a layer stores for later ones, of shape [1, G, L, D]: keys or values, say."""

    key: str
    number: int  # in the entry of this key
    shape: tuple[int, int]  # (G, D)

    @property
    def name(self) -> str:
        """Name of the state tensor."""
        return f"stored.{self.key}.{self.number}"


class Store(dict[str, tuple[Tensor, ...]]):
    """Entries that layers store for later ones; notes which are read and written."""

    def __init__(self, entries: Mapping[str, tuple[Tensor, ...]] = MappingProxyType({})) -> None:
        super().__init__(entries)
        self.read, self.written = list[str](), list[str]()

    def __getitem__(self, key: str) -> tuple[Tensor, ...]:
        self.read.append(key)
        return super().__getitem__(key)

    def __setitem__(self, key: str, entry: tuple[Tensor, ...]) -> None:
        self.written.append(key)
        super().__setitem__(key, entry)

    def tensors(self, keys: list[str]) -> list[Stored]:
        """Return descriptions of the tensors of these entries."""
        return [
            Stored(key, index, (tensor.shape[1], tensor.shape[3]))
            for key in dict.fromkeys(keys)
            for index, tensor in enumerate(super(Store, self).__getitem__(key))
        ]


class Offsets:
    """Stand-in for a cache whose length is, for each row, its position less its number."""

    def __init__(self, positions_R: Tensor) -> None:
        self._offsets_R = positions_R - torch.arange(len(positions_R), device=positions_R.device)

    def get_seq_length(self, *_: Any) -> Tensor:
        """Return the offset of each row."""
        return self._offsets_R

    def update(self, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        """Return keys and values as they are."""
        return key, value


class NoPipeline(Exception):
    """A model cannot be taken apart into pipeline layers; the message is the reason."""


_decoders: dict[tuple[type, str], LibraryDecoder] = {}


def library_decoder(config: Any) -> LibraryDecoder:
    """Return the library's model of a configuration, constructed once per process.

    Raises:
        NoPipeline: it cannot be taken apart.
    """
    key = type(config), config.to_json_string(use_diff=False)
    if key not in _decoders:
        if len(_decoders) == MOST:
            _decoders.clear()
        with _disable_current_modes():  # those that count operators or fake a device
            _decoders[key] = LibraryDecoder(copy.deepcopy(config))
    return _decoders[key]


class LibraryDecoder:
    """Parts of a decoder family's own model, by their names in its class.

    Attributes:
        model: the class with the head, or the base model if the family has none.
        base: the base model.
        base_name: its name in the class with the head.
        layers: its decoder layers.
        embedding_scale: factor of the embedding module itself and of the base model's look-up, for
            tokens' rows only.
        counts_rows: attention numbers its rows itself, from the length of a cache on (`Offsets`).
        returns_tuple: a layer returns a tuple whose first entry is the hidden states.
        changes_input: the base model changes its input embeddings before the first layer.
        inputs: by layer, its arguments that weights beside the embedding compute from tokens, with
            their shapes per token.
        chosen: by kind of layer, the experts that a token chooses in its mixtures, and the width of
            its rows there.
        reads, writes: by layer, what it reads of earlier layers' entries, and what it stores.
    """

    def __init__(self, config: Any) -> None:
        self.config = packed(config)
        experts.prepare()
        made = published_class_of(type(config))
        with empty_weights():
            self.model = made(self.config)
        for part in self.model.modules():
            move_weights(part)
        self.has_head = head_name(self.model) is not None
        self.base_name = next(
            (n for n in (self.model.base_model_prefix, "model") if n and hasattr(self.model, n)),
            "model",
        )
        self.base = getattr(self.model, self.base_name) if self.has_head else self.model
        names = parts_of(config)
        if names is None:
            raise NoPipeline(f"transformers has no pipeline plan of {config.model_type}")
        for name in names:
            if not isinstance(getattr(self.base, name, None), nn.Module):
                raise NoPipeline(f"{type(self.base).__name__} has no {name}")
        self._embedding, self._layers, self._norm = names
        self.layers: Sequence[nn.Module] = getattr(self.base, self._layers)
        if not getattr(config, "is_causal", True) or any(
            getattr(part, "is_causal", True) is False for part in self.base.modules()
        ):
            raise NoPipeline("its attention is not causal")
        self.embedding_scale = self._embedding_scale() * self._scale_of_lookup()
        self.counts_rows = any(_counts_rows(layer) for layer in self.layers)
        count = len(self.layers)
        self.chosen: dict[str, set[tuple[int, int]]] = {}
        self.inputs: list[dict[Place, tuple[int, ...]]] = [{} for _ in range(count)]
        self.reads: list[list[Stored]] = [[] for _ in range(count)]
        self.writes: list[list[Stored]] = [[] for _ in range(count)]
        with _Exact():
            self._try()

    def __deepcopy__(self, _: Any) -> LibraryDecoder:
        return self

    @property
    def prefix(self) -> str:
        """Prefix of the base model's names in the class with the head."""
        return f"{self.base_name}."

    @property
    def names(self) -> dict[str, str]:
        """Names of embedding, norm and head in the class with the head."""
        return {
            "embedding": self.prefix + self._embedding,
            "norm": self.prefix + self._norm,
            "head": head_name(self.model) or "lm_head",
        }

    def layer_name(self, number: int) -> str:
        """Return a layer's name in the class with the head."""
        return f"{self.prefix}{self._layers}.{number}"

    def layer(self, number: int) -> nn.Module:
        """Return a copy of a layer, with our kernels where they compute the same."""
        return with_own_kernels(_copy(self.layers[number]))

    def norm(self) -> nn.Module:
        """Return a copy of the final norm."""
        return with_own_kernels(nn.ModuleList([_copy(getattr(self.base, self._norm))]))[0]

    def head(self) -> nn.Linear:
        """Return the linear that outputs logits."""
        if not self.has_head:
            with torch.device("meta"):
                return nn.Linear(self.config.hidden_size, self.config.vocab_size, bias=False)
        return _copy(self.model.get_output_embeddings())

    def embedding_norms(self) -> nn.ModuleDict:
        """Return copies of the norms that the embedding applies to the rows of its table."""
        return with_own_kernels(nn.ModuleDict(_copy(self._embed).named_children()))

    @property
    def _embed(self) -> nn.Module:
        embedding: nn.Module = getattr(self.base, self._embedding)
        return embedding

    def _embedding_scale(self) -> float:
        """Return the factor of the rows of the embedding's table, after its norms."""
        if type(self._embed) is nn.Embedding:
            return 1.0
        embedding, width = _copy(self._embed), self.config.hidden_size
        for part in embedding.modules():
            for name, weight in part.named_parameters(recurse=False):
                part._parameters[name] = nn.Parameter(torch.ones(weight.shape[-1:]))
        # powers of two, so that a factor is exact
        table = 2.0 ** torch.arange(2.0 * width).remainder(3).view(2, width)
        embedding._parameters["weight"] = nn.Parameter(table)
        embedding.padding_idx = None  # may be no row of this table
        rows = table
        for norm in embedding.children():
            rows = norm(rows)
        made = embedding(torch.arange(2)).detach()
        scale = made[0, 0] / rows.detach()[0, 0]
        if not torch.allclose(made, rows * scale):
            raise NoPipeline(f"its embedding {type(embedding).__name__} is of an unknown kind")
        return float(scale)

    def _scale_of_lookup(self) -> float:
        """Return the factor of rows that the base model looks up, beside rows that it is given."""
        self.returns_tuple = False
        rows = torch.rand(1, 2, self.config.hidden_size, generator=torch.Generator().manual_seed(0))
        cpu = torch.device("cpu")
        frame = Frame(self, cpu, first_only=True)
        given, looked_up = (
            frame.run(rows + 1.0, torch.arange(2)[None], Segments([2], cpu), as_ids=way)[1]
            for way in (False, True)
        )
        scale = float((looked_up / given).mean())
        if not torch.allclose(looked_up, given * scale):
            raise NoPipeline("it changes the rows of its embedding in other ways than by a factor")
        return scale

    def initialise(self, layer: nn.Module) -> None:
        """Initialise the weights of a pipeline layer as the library initialises its own."""
        for path, part in layer.named_modules():
            if isinstance(part, RmsNorm):
                nn.init.ones_(part.weight)
            elif not path.endswith(ADAPTER):
                for name, value in part.__dict__.get(STARTS, {}).items():
                    part.get_parameter(name).data.copy_(value)
                self.model._init_weights(part)

    @cached_property
    def kinds(self) -> list[str]:
        """Cost kind of each layer: equal for layers of equal structure."""
        seen: dict[tuple[Any, ...], str] = {}
        kinds: list[str] = []
        types = getattr(self.config, "layer_types", None) or []
        for number, layer in enumerate(self.layers):
            structure = tuple((n, type(p).__name__) for n, p in layer.named_modules()) + tuple(
                (name, tuple(p.shape)) for name, p in layer.named_parameters()
            )
            if structure not in seen:
                kind = "block" if not seen else f"block.{types[number] if types else number}"
                seen[structure] = kind if kind not in kinds else f"{kind}.{number}"
            kinds.append(seen[structure])
        return kinds

    def windows(self, longest: int) -> list[int]:
        """Return each layer's attention window in tokens, for samples of at most `longest`.

        Empty if no layer has a window that limits attention.
        """
        window = min(getattr(self.config, "sliding_window", None) or longest, longest)
        types = getattr(self.config, "layer_types", None)
        limited = (
            "sliding" in types[number]
            if types
            else any(
                "sliding_window" in _source(type(part))  # type: ignore[arg-type]
                for part in self.layers[number].modules()
            )
            for number in range(len(self.layers))
        )
        windows = [window if one else longest for one in limited]
        return windows if min(windows) < longest else []

    def mixture(self, number: int) -> tuple[int, int, int] | None:
        """Return the number of a layer's experts, of those that a token chooses, and their width.

        None if it has none, or mixtures of different kinds.
        """
        counts = {part.num_experts for _, part in experts.mixtures(self.layers[number])}
        chosen = self.chosen.get(self.kinds[number], set())
        if len(counts) != 1 or len(chosen) != 1:
            return None
        return counts.pop(), *min(chosen)

    @cached_property
    def heads(self) -> list[tuple[int, int, int]] | None:
        """Each layer's heads of queries, of keys and values, and their width.

        None if a layer's rows depend on others in another way than by such heads: then no CP group
        can share the rows of a sample (latent keys and values, recurrent mixers, vision tokens that
        see later ones).
        """
        if any(sees_vision(self.config)):
            return None
        known = [_heads(layer) for layer in self.layers if not recurrent.mixers(layer)]
        whole = [one for one in known if one is not None]
        return whole if len(whole) == len(self.layers) else None

    def mixers(self, number: int) -> list[str]:
        """Return the paths of a layer's token mixers: children whose rows depend on other rows."""
        return [
            name
            for name, part in self.layers[number].named_children()
            if _MIXING & inspect.signature(part.forward).parameters.keys()
        ]

    def division(self, number: int) -> tuple[Division, list[str]]:
        """Return how a layer is sharded over a TP group, and the modules whose linears are sharded.

        The rules are those of the library's plan (`base_model_tp_plan`). A module is sharded if all
        of its own rules are column- and row-parallel; others are replicated.
        """
        prefix, rules = f"{self._layers}.*.", dict[str, dict[str, str]]()
        layer = self.layers[number]
        plan = getattr(self.config, "base_model_tp_plan", None) or plan_of(self.config) or {}
        for pattern, rule in plan.items():
            path = pattern.removeprefix(prefix)
            owner, _, name = path.rpartition(".")
            part = _part(layer, owner, name) if pattern.startswith(prefix) and owner else None
            if part is not None and not (isinstance(part, nn.Parameter) and part.ndim > 2):
                rules.setdefault(owner, {})[name] = rule  # weights of experts stay whole
        made, owners = recurrent.division(layer), list(recurrent.mixers(layer))
        owners = [path for path in owners if any(name.startswith(f"{path}.") for name in made)]
        for owner, own in rules.items():
            if set(own.values()) <= _SHARDED.keys() and {"colwise", "rowwise"} <= set(own.values()):
                owners.append(owner)
                for name, rule in own.items():
                    made |= _SHARDED[rule](f"{owner}.{name}")
        return made, owners

    def beside_layers(self) -> nn.Module:
        """Return copies of the base model's weights beside its layers, embedding and norm."""
        made, own = nn.Module(), (self._layers, self._embedding, self._norm)
        for name, part in self.base.named_children():
            if name not in own and next(part.parameters(), None) is not None:
                setattr(made, name, _copy(part))
        return with_own_kernels(made)

    @property
    def reads_tokens(self) -> bool:
        """True if layers have inputs of their own for each token (per-layer embeddings)."""
        return bool(getattr(self.config, PER_LAYER, 0)) and hasattr(self.base, TOKEN_INPUTS)

    def _try(self) -> None:
        """Run the layers on the meta device, and note what they need.

        Raises:
            NoPipeline: a layer needs more than rows of this batch.
        """
        meta, rows = torch.device("meta"), 4
        hidden = torch.empty(1, rows, self.config.hidden_size, device=meta, requires_grad=True)
        positions, ids = (torch.empty(1, rows, dtype=torch.int64, device=meta) for _ in range(2))
        segments = Segments([rows], meta)
        self.returns_tuple = False
        frame = Frame(self, meta, weights=self.base, first_only=True)
        calls, before = frame.run(hidden, positions, segments, ids)
        self.changes_input = before is not hidden or bool(hidden._version)
        self.returns_tuple = isinstance(self._tried(0, calls[0], hidden, segments, Store()), tuple)
        calls, _ = Frame(self, meta, weights=self.base).run(hidden, positions, segments, ids)
        shared, kinds, store = any(_store_in(call) for call in calls), set[str](), Store()
        for number, call in enumerate(calls):
            self.inputs[number] = _computed(call, rows)
            if shared or self.kinds[number] not in kinds:
                kinds.add(self.kinds[number])
                store.read, store.written = [], []
                self._tried(number, call, hidden, segments, store)
                self.reads[number] = store.tensors(store.read)
                self.writes[number] = store.tensors(store.written)

    def _tried(
        self, number: int, call: Arguments, hidden: Tensor, segments: Segments, store: Store
    ) -> Any:
        call = self.filled(number, call, segments, {}, store)
        layer = copy.deepcopy(self.layers[number]).to("meta")
        recurrent.restart(layer)
        chosen = self.chosen.setdefault(self.kinds[number], set())
        for _, part in experts.mixtures(layer):
            part.register_forward_pre_hook(
                # positions of the interface's arguments
                lambda _, given: chosen.add((given[1].shape[-1], given[0].shape[-1]))
            )
        with recurrent.documents(segments):
            return layer(hidden.detach(), *call.positional, **call.keywords)

    def filled(
        self,
        number: int,
        call: Arguments,
        segments: Segments,
        inputs: Mapping[Place, Tensor],
        store: Store,
    ) -> Arguments:
        """Return a layer's arguments for a batch.

        Args:
            segments: of attention, if the library computes no mask for the layer.
            inputs: the arguments named in the attribute of this name.
            store: entries of earlier layers, and where this layer stores its own.
        """
        positional, keywords = list(call.positional), dict(call.keywords)
        at = _position_of_mask(type(self.layers[number]))  # type: ignore[arg-type]
        given = positional[at] if at < len(positional) else keywords.get(MASK)
        if not isinstance(given, Segments):
            given = segments
        if at < len(positional):
            positional[at] = given
        else:
            keywords[MASK] = given
        for place, tensor in inputs.items():
            if isinstance(place, int):
                positional[place] = tensor
            else:
                keywords[place] = tensor
        return Arguments(
            tuple(store if _is_store(value) else value for value in positional),
            {name: store if _is_store(value) else value for name, value in keywords.items()},
        )


def _copy(part: Any) -> Any:
    """Return a copy of a module, also inside a mode that fakes a device."""
    with _disable_current_modes():
        return copy.deepcopy(part)


def _part(layer: nn.Module, owner: str, name: str) -> nn.Module | nn.Parameter | None:
    try:
        part = getattr(layer.get_submodule(owner), name, None)
    except AttributeError:
        return None
    return part if isinstance(part, (nn.Module, nn.Parameter)) else None


@cache
def _position_of_mask(layer: Any) -> int:
    """Return the position of the mask among a layer's arguments after its hidden states."""
    names = [name for name in inspect.signature(layer.forward).parameters if name != "self"]
    return names.index(MASK) - 1 if MASK in names else len(names)


def _counts_rows(layer: nn.Module) -> bool:
    """Return True if a layer's attention numbers its rows.

    Raises:
        NoPipeline: it does so without regard to a cache.
    """
    called = [
        inspect.unwrap(type(part).forward).__code__.co_names
        for part in layer.modules()
        if recurrent.attends(part)
    ]
    counting = [names for names in called if "arange" in names]
    if not all("get_seq_length" in names for names in counting):
        raise NoPipeline("its attention numbers the rows of a batch, not of a sample")
    return bool(counting)


def _heads(layer: nn.Module) -> tuple[int, int, int] | None:
    for part in layer.modules():
        width, groups = getattr(part, "head_dim", 0), getattr(part, "num_key_value_groups", 0)
        keys: Any = getattr(part, "k_proj", None)
        if isinstance(width, int) and isinstance(keys, nn.Linear) and width and groups:
            each = keys.out_features // width
            return each * groups, each, width
    return None


def _is_store(value: Any) -> bool:
    return isinstance(value, MutableMapping) and not value


def _store_in(call: Arguments) -> bool:
    return any(map(_is_store, (*call.positional, *call.keywords.values())))


def _computed(call: Arguments, rows: int) -> dict[Place, tuple[int, ...]]:
    """Return the arguments that weights computed, with their shapes per row."""
    found: dict[Place, tuple[int, ...]] = {}
    arguments: dict[Place, Any] = dict(enumerate(call.positional))
    for place, value in (arguments | call.keywords).items():
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(value)):
            if not isinstance(value, Tensor) or value.shape[:2] != (1, rows):
                raise NoPipeline("its layers read tensors that other weights compute")
            found[place] = tuple(value.shape[2:])
    return found


class _Exact(TorchDispatchMode):
    """Mode that refuses random numbers, which would depend on the layout."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # attention is tagged for its dropout, which `attention` refuses
        if torch.Tag.nondeterministic_seeded in func.tags and "attention" not in func.name():
            raise NoPipeline(
                f"training it draws random numbers ({func}), which would depend on the layout; set"
                " the field that asks for them, as noise of a router, to 0"
            )
        return func(*args, **(kwargs or {}))


@cache
def _source(made: Any) -> str:
    try:
        return inspect.getsource(made)
    except (OSError, TypeError):
        return ""

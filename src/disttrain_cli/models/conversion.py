"""Conversion between the tensors of published files and those of the library's class.

transformers publishes rules per class and for the classes inside it: names that differ, and tensors
that are merged, split, transposed or permuted (a file per expert and projection, one tensor per
layer in the class). Its own loader applies them to all tensors of a model at once; here they become
one `Conversion` per group of tensors that depend on each other, so that a layer's are read or
written alone. Shapes follow from the same operations on the meta device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

#: Renamed attention parameters of autoencoders saved by diffusers before 0.16.
_OLD_VAE = {
    r"\.query\.": ".to_q.",
    r"\.key\.": ".to_k.",
    r"\.value\.": ".to_v.",
    r"\.proj_attn\.": ".to_out.0.",
}


@dataclass(frozen=True)
class Conversion:
    """Tensors that result together from others.

    Attributes:
        sources: names of the others, in the order in which the rule joins them.
        name: of the result; of the first one, as the library builds it, if there are several.
        rule: rule of transformers, unused so far; None: the only source is the result.
        patterns: pattern of the rule that each source matches.
        model: class on the meta device; rules read its configuration and shapes.
        rename: maps the names that the rule returns to the final ones.
    """

    sources: tuple[str, ...]
    name: str
    rule: Any = None
    patterns: tuple[str, ...] = ()
    model: Any = None
    rename: Callable[[str], str] = str

    def __call__(self, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Return the results; `read` returns a source.

        Raises:
            Exception: the shapes of the sources do not fit the rule.
        """
        if self.rule is None:
            return {self.name: read(self.sources[0])}
        rule = copy.deepcopy(self.rule)
        for source, pattern in zip(self.sources, self.patterns, strict=True):
            rule.add_tensor(self.name, source, pattern, read(source))
        results = rule.convert(self.name, model=self.model, config=self.model.config)
        return {
            self.rename(name): tensor[0] if isinstance(tensor, list) else tensor
            for name, tensor in results.items()
        }

    def shapes(self, shape: Callable[[str], Sequence[int]]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the results; `shape` returns that of a source."""
        results = self(lambda name: torch.empty(tuple(shape(name)), device="meta"))
        return {name: tuple(tensor.shape) for name, tensor in results.items()}


class Conversions:
    """Conversions of a class of transformers or diffusers, which is on the meta device."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.tensors: Mapping[str, Tensor] = model.state_dict()

    @cached_property
    def of_transformers(self) -> bool:
        """True for classes of transformers; those of diffusers have no rules."""
        from transformers import PreTrainedModel

        return isinstance(self._model, PreTrainedModel)

    def to_class(self, stored: Mapping[str, str]) -> dict[str, Conversion]:
        """Return by name in the class the conversion that it results from.

        A name that the class lacks is returned as the rules rename it. Of two forms of a tensor
        the first one in the library's order counts, as in `from_pretrained`.

        Args:
            stored: names in files, by the names that the rules apply to.
        """
        from transformers.core_model_loading import (
            WeightConverter,
            dot_natural_key,
            rename_source_key,
        )

        prefix = getattr(self._model, "base_model_prefix", None)
        renamings, converters = _kinds(self._rules_of_reading(), WeightConverter)
        groups: dict[str, list[tuple[str | None, str]]] = {}
        for name in sorted(stored, key=dot_natural_key):
            key, pattern = rename_source_key(name, renamings, converters, prefix, self.tensors)
            if key not in self.tensors and name in self.tensors:
                key, pattern = rename_source_key(name, [], [], prefix, self.tensors)
            groups.setdefault(key, []).append((pattern, stored[name]))
        rule_of = _by_pattern(converters)
        results = {}
        for key, group in groups.items():
            conversion = self._conversion(key, group, rule_of)
            for target in _targets(key, conversion.rule):
                results[target] = conversion
        return results

    def to_files(
        self, names: Iterable[str], read: Mapping[str, Conversion] | None = None
    ) -> list[Conversion]:
        """Return the conversions from tensors of the class to those that `save_pretrained` writes.

        Names that the class lacks stay as they are; a few of some classes are never written.

        Args:
            read: conversions of the files that the tensors came from (`to_class`). A tensor that
                they only rename gets its name there again: other programs read published names,
                and the library's change with its releases.
        """
        from transformers.core_model_loading import (
            WeightConverter,
            apply_converters,
            apply_renamings,
            dot_natural_key,
        )

        unwritten = set(getattr(self._model, "_keys_to_ignore_on_save", None) or ())
        renamings, converters = _kinds(self._rules_of_writing(), WeightConverter)

        def rename(name: str) -> str:
            return apply_renamings(name, renamings)

        groups: dict[str, list[tuple[str | None, str]]] = {}
        for name in sorted(set(names) - unwritten, key=dot_natural_key):
            key, pattern = name, None
            if name in self.tensors:
                key, pattern = apply_converters(name, converters)
                key = key if pattern else rename(name)
            groups.setdefault(key, []).append((pattern, name))
        rule_of = _by_pattern(converters)
        found = [self._conversion(key, group, rule_of, rename) for key, group in groups.items()]
        before = {name: one.sources[0] for name, one in (read or {}).items() if one.rule is None}
        return [
            one if one.rule else replace(one, name=before.get(one.sources[0], one.name))
            for one in found
        ]

    @cached_property
    def head(self) -> tuple[str, str] | None:
        """Names of a language model's head and embedding, which a configuration may tie."""
        if not self.of_transformers:
            return None
        name_of = {id(module): name for name, module in self._model.named_modules()}
        try:
            pair = (self._model.get_output_embeddings(), self._model.get_input_embeddings())
        except NotImplementedError:
            return None
        names = [f"{name_of.get(id(module))}.weight" for module in pair]
        return (names[0], names[1]) if {*names} <= self.tensors.keys() else None

    def dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which a tensor of the class is written in a precision.

        The library keeps some in fp32 in every precision.
        """
        if self.of_transformers and (plan := self._model._get_dtype_plan(dtype)):
            from transformers.core_model_loading import build_glob_alternation

            if build_glob_alternation(list(plan))[0].search(name):
                return torch.float32
        return dtype

    def _conversion(
        self,
        key: str,
        group: Sequence[tuple[str | None, str]],
        rule_of: Mapping[str, Any],
        rename: Callable[[str], str] = str,
    ) -> Conversion:
        first, source = group[0]
        if first is None:
            return Conversion((source,), key)
        rule = rule_of[first]
        together = [
            (pattern, name) for pattern, name in group if rule_of.get(pattern or "") is rule
        ]
        patterns, sources = zip(*together, strict=True)
        return Conversion(sources, key, rule, patterns, self._model, rename)

    def _rules_of_reading(self) -> list[Any]:
        from transformers import core_model_loading
        from transformers.conversion_mapping import get_model_conversion_mapping

        if self.of_transformers:
            return list(get_model_conversion_mapping(self._model))
        if type(self._model).__name__ == "AutoencoderKL":
            return [core_model_loading.WeightRenaming(old, new) for old, new in _OLD_VAE.items()]
        return []

    def _rules_of_writing(self) -> list[Any]:
        """Return what `revert_weight_conversion` applies to a model that was not loaded."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange

        if not self.of_transformers:
            return []
        rules = get_model_conversion_mapping(self._model, add_legacy=False)
        return [rule.reverse_transform() for rule in rules if not isinstance(rule, PrefixChange)][
            ::-1
        ]


def _kinds(rules: Iterable[Any], converter: type) -> tuple[list[Any], list[Any]]:
    """Return the renamings and the converters among rules, in order."""
    kinds: tuple[list[Any], list[Any]] = ([], [])
    for rule in rules:
        kinds[isinstance(rule, converter)].append(rule)
    return kinds


def _by_pattern(converters: Iterable[Any]) -> dict[str, Any]:
    return {pattern: rule for rule in converters for pattern in rule.source_patterns}


def _targets(key: str, rule: Any) -> list[str]:
    """Return the names of a rule's results; `key` is that of the first one."""
    if rule is None:
        return [key]
    first = rule.target_patterns[0]
    return [key.replace(first, pattern) for pattern in rule.target_patterns]

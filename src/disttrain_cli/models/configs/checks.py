"""Module configuration, its errors, and checks that all transformers share."""

from __future__ import annotations

import difflib
import inspect
import math
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from disttrain_cli.errors import SpecError
from disttrain_cli.models.lora import Lora
from disttrain_cli.models.noise import Noise
from disttrain_cli.spec.buckets import Buckets
from disttrain_cli.spec.runfile.model import ModuleSpec


@dataclass(frozen=True)
class ModuleConfig:
    """Checked configuration of a module."""

    name: str
    kind: str
    architecture: str
    # transformers' configuration; for generators a dict of all arguments of diffusers' class
    config: Any
    vae: dict[str, Any] | None = None  # all arguments of the generator's VAE, and its class
    noise: Noise | None = None  # noise schedule of a generator
    lora: Lora | None = None  # adapters
    buckets: Buckets | None = None  # sizes of a generator's images, if they differ


def refused(name: str, architecture: str, error: Exception, section: str = "config") -> SpecError:
    """Convert a library class's error about a module's configuration to a SpecError.

    An assertion without words is quoted.
    """
    said = str(error) or str(traceback.extract_tb(error.__traceback__)[-1].line)
    return SpecError(
        f"model.modules.{name}.{section} does not fit {architecture}", " ".join(said.split())
    )


def wrong(name: str, field: str, given: Any, allowed: str, section: str = "config") -> SpecError:
    """Return the error about a field's value."""
    what = f"model.modules.{name}.{section}.{field} does not fit"
    step = "Correct it in the run file, or in config.json of the folder that it comes from."
    return SpecError(what, f"given: {given!r}; allowed: {allowed}", step)


def wrong_field(name: str, field: str, given: Any, allowed: str) -> SpecError:
    """Return the error about a field of the module itself, outside its `config`."""
    what = f"model.modules.{name}.{field} does not fit"
    return SpecError(what, f"given: {given!r}; allowed: {allowed}", "Correct it in the run file.")


def refuse_unknown(
    name: str, architecture: str, given: Iterable[str], known: Iterable[str], section: str
) -> None:
    """Raise SpecError for the first field that the architecture does not have."""
    fields = set(known)
    for field in given:
        if field not in fields:
            near = difflib.get_close_matches(field, fields, n=3) or sorted(fields)
            what = f"model.modules.{name}.{section}.{field}: unknown field of {architecture}"
            raise SpecError(what, f"known: {', '.join(near)}")


def refuse_missing(name: str, config: Mapping[str, Any], section: str) -> None:
    """Raise SpecError for the first argument of a diffusers class that lacks a value."""
    for field, value in config.items():
        if value is inspect.Parameter.empty:
            what = f"model.modules.{name}.{section}.{field} is missing"
            raise SpecError(what, "its class has no default", "Give it in the run file.")


#: Upper limits of numbers in a configuration: consecutive blocks, ids and positions, all other
#: integers.
MOST_LAYERS, MOST_IDS, MOST_WIDTH = 256, 2**24, 2**17
LAYERS = re.compile(r"depth|(^|_)layers($|_)")
IDS = re.compile(r"vocab|position|window|_id($|_)|_ids$|_token_index$")
#: Fields that determine no size, or whose upper limits are checked where they are used.
FREE = re.compile(r"^(rope|initializer|max_length|sample_size|num_train)")
#: Fields that may be infinite: bounds, as of Mamba's time steps.
LIMIT = re.compile(r"_limit$")


def decoded(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the fields of a `config.json`, with infinities that transformers encodes."""
    from transformers import PreTrainedConfig

    made: dict[str, Any] = PreTrainedConfig._decode_special_floats(dict(fields))
    return made


def check_numbers(name: str, fields: Mapping[str, Any], section: str = "config") -> None:
    """Raise SpecError for the first number that no machine could build or count.

    Numbers in lists and mappings are checked, too.
    """
    for field, given in fields.items():
        if not isinstance(field, str):
            continue
        if isinstance(given, dict) and "rope" not in field:
            check_numbers(name, given, f"{section}.{field}")
            continue
        most = (
            MOST_LAYERS if LAYERS.search(field) else MOST_IDS if IDS.search(field) else MOST_WIDTH
        )
        for value in numbers_in(given):
            infinite = math.isnan(value) or (math.isinf(value) and not LIMIT.search(field))
            if infinite or (
                abs(value) > most and isinstance(value, int) and not FREE.search(field)
            ):
                raise wrong(name, field, given, f"finite numbers up to {most:,}", section)


def numbers_in(value: Any) -> Iterator[int | float]:
    """Yield the numbers of a field, recursively if it is a list or a mapping."""
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from numbers_in(part)
    elif isinstance(value, dict):
        yield from numbers_in(
            [part for key, part in value.items() if not isinstance(key, str) or "rope" not in key]
        )
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value


def arguments_of(made: type) -> dict[str, Any]:
    """Return the arguments of a diffusers class, with their defaults."""
    arguments = inspect.signature(made).parameters
    return {name: argument.default for name, argument in arguments.items()}


def check_counts(name: str, config: Mapping[str, Any], section: str) -> None:
    """Raise SpecError for values that diffusers builds silently and cannot compute."""
    for field in ("layers_per_block", "norm_num_groups"):
        if any(value < 1 for value in numbers_in(config.get(field))):
            raise wrong(name, field, config[field], "1 or more", section)


def refuse_dropout(name: str, field: str, value: float | None) -> None:
    """Raise SpecError if a dropout probability is not zero."""
    if value:
        raise wrong(name, field, value, "0: this dropout would depend on the layout")


def check_dropout(name: str, field: str, value: float) -> None:
    """Raise SpecError if a dropout probability is not in [0, 1)."""
    if not 0.0 <= value < 1.0:
        raise wrong(name, field, value, "from 0 to below 1")


#: Exceptions of the libraries' classes for unsupported values.
MISTAKES = (
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RuntimeError,
    ImportError,  # of a package that a class needs
)

#: Check of a transformers configuration; raises SpecError.
Check = Callable[[str, ModuleSpec, Any], None]


def read_transformer(
    made: str | Any,
    check: Check,
    name: str,
    architecture: str,
    spec: ModuleSpec,
    fields: dict[str, Any],
) -> Any:
    """Return the checked configuration of a transformers class.

    `made` is the class or its name. `fields` of a `config.json` are overridden by the run file's.

    Raises:
        SpecError: a field of the run file is unknown, or a value is wrong.
    """
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    from disttrain_cli.models.library_attention import packed

    made = getattr(transformers, made) if isinstance(made, str) else made
    known = {*inspect.get_annotations(made), *getattr(made, "attribute_map", {})}
    refuse_unknown(name, architecture, spec.config, known, "config")
    given = decoded(fields | spec.config)
    check_numbers(name, given)
    try:
        config = made(**given)
    except (StrictDataclassError, *MISTAKES) as error:
        raise refused(name, architecture, error) from None
    check(name, spec, config)
    return packed(config)


def check_widths(
    name: str,
    config: Any,
    width: str,
    heads: str,
    activation: str,
    *counts: str,
    heads_divide_width: bool = True,
) -> None:
    """Raise SpecError for non-positive sizes, heads not dividing the width, unknown activations."""
    from transformers.activations import ACT2FN

    for field in (width, heads, *counts):
        value = getattr(config, field)
        if not isinstance(value, int) or value < 1:
            raise wrong(name, field, value, "1 or more")
    if heads_divide_width and getattr(config, width) % getattr(config, heads):
        raise wrong(
            name, width, getattr(config, width), f"a multiple of {heads} ({getattr(config, heads)})"
        )
    if getattr(config, activation, "silu") not in ACT2FN:
        raise wrong(name, activation, getattr(config, activation), ", ".join(sorted(ACT2FN)))

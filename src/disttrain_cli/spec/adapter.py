"""Reader of a peft adapter folder: adapter_config.json, and the names in adapter_model.safetensors.

peft names an adapter's parameter by the path of its linear in the adapted model, one of
transformers or diffusers: base_model.model.PATH.lora_A.weight. A parameter trained in full next to
adapters (`modules_to_save`) is named as in that model: base_model.model.PATH.weight.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from disttrain_cli.errors import SpecError
from disttrain_cli.spec.files import parse_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE = "base_model_name_or_path"
#: Prefix of the adapted model's names in peft's model.
PREFIX = "base_model.model."
FIRST = ".lora_A.weight"  # suffix of an adapter's first matrix
#: Fields that are read, with their types.
_KINDS: dict[str, tuple[type, ...]] = {
    "r": (int,),
    "lora_alpha": (int,),
    "use_rslora": (bool,),
    "target_modules": (list, str),
    "modules_to_save": (list,),
    "lora_dropout": (float, int),
    "rank_pattern": (dict,),
    "alpha_pattern": (dict,),
}
#: Fields that change the result of a trained adapter.
NUMBERS = ("r", "lora_alpha", "use_rslora")
#: Fields of peft's configuration that change an adapter's computation, and their neutral values.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # other values modify the base model's own weights
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
    **dict.fromkeys(
        (
            "use_dora",
            "use_qalora",
            "use_bdlora",
            "lora_bias",
            "fan_in_fan_out",
            "exclude_modules",
            "layers_to_transform",
            "layer_replication",
            "trainable_token_indices",
            "target_parameters",
            "alora_invocation_tokens",
            "megatron_config",
            "arrow_config",
            "kasa_config",
            "velora_config",
        ),
        (None, False, [], {}),
    ),
}


def read_fields(folder: Path, field: str) -> dict[str, Any]:
    """Return the non-empty fields of an adapter's configuration that are read here.

    Args:
        field: field of the run file that names the folder, for error messages.

    Raises:
        SpecError: it is missing or damaged, or the adapter is of an unsupported kind.
    """
    again = f"Correct {field}."
    described = parse_json(folder / CONFIG, "adapter configuration", again)
    if not isinstance(described, dict):
        raise SpecError(f"The adapter configuration {folder / CONFIG} must be a mapping", "", again)
    for name, plain in _PLAIN.items():
        if name in described and described[name] not in plain:
            raise _refused(folder, field, name, described[name], json.dumps(plain[0]))
    found = {name: described[name] for name in _KINDS if described.get(name) not in (None, [], {})}
    wrong = [name for name, value in found.items() if not isinstance(value, _KINDS[name])]
    if wrong or "target_modules" not in found or not found.get("r", 0) > 0:
        raise SpecError(
            f"The adapter configuration {folder / CONFIG} is damaged",
            f"wrong or missing: {', '.join(wrong) or 'r (at least 1), target_modules'}",
            again,
        )
    return found


def read_names(folder: Path) -> list[str]:
    """Return the names of an adapter's tensors as in the adapted model, without peft's prefix.

    Raises:
        SpecError: the file is missing or damaged.
    """
    from safetensors import SafetensorError, safe_open

    path = folder / WEIGHTS
    try:
        with safe_open(path, framework="np") as opened:
            return [name.removeprefix(PREFIX) for name in opened.keys()]  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise SpecError(
            f"The weight file {path} is {'damaged' if path.exists() else 'missing'}",
            str(error),
            "Download or export it again.",
        ) from None


def places_of(names: Collection[str]) -> list[str]:
    """Return the paths of the linears that have adapters."""
    return [name.removesuffix(FIRST) for name in names if name.endswith(FIRST)]


def of_places(
    fields: Mapping[str, Any], places: Sequence[str], folder: Path, field: str
) -> dict[str, Any]:
    """Return the fields of the adapters at some paths, with r and lora_alpha resolved.

    `rank_pattern` and `alpha_pattern` override the defaults.

    Raises:
        SpecError: the adapters have several values.
    """
    found = dict(fields)
    for number, patterns in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern")):
        by_pattern = found.pop(patterns, None)
        if not by_pattern or not places:
            continue
        values = {_by_pattern(by_pattern, place, fields.get(number)) for place in places}
        if len(values) != 1:
            raise _refused(folder, field, patterns, by_pattern, f"one {number} in all of a module")
        found[number] = values.pop()
    return found


def numbers_at(fields: Mapping[str, Any], place: str) -> tuple[int, int]:
    """Return r and lora_alpha of the adapter at a path."""
    return (
        int(_by_pattern(fields.get("rank_pattern", {}), place, fields["r"])),
        int(_by_pattern(fields.get("alpha_pattern", {}), place, fields["lora_alpha"])),
    )


def _by_pattern(patterns: Mapping[str, Any], place: str, default: Any) -> Any:
    """Return the value for a path by peft's rule (`peft.utils.other.get_pattern_key`)."""
    found = (name for name in patterns if re.match(rf"(.*\.)?({name})$", place))
    return patterns.get(next(found, ""), default)


def _refused(folder: Path, field: str, name: str, value: Any, supported: str) -> SpecError:
    return SpecError(
        f"{field}: adapters of this kind are not supported",
        f"{folder / CONFIG}, {name}: {json.dumps(value)}; supported: {supported}",
        "Give a plain LoRA adapter, or merge this one into its model with peft.",
    )

"""A module's adapters: what the run file says, and the configuration of an adapter's folder."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from disttrain_cli.errors import SpecError
from disttrain_cli.models.lora import Lora
from disttrain_cli.spec.files import parse_json
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.runfile.lora import ALL_LINEAR

CONFIG = "adapter_config.json"
BASE = "base_model_name_or_path"
#: peft's own numbers where none are given.
DEFAULTS = {"r": 8, "lora_alpha": 8, "use_rslora": False}
FIELDS = (*DEFAULTS, "target_modules")
#: Fields of peft's configuration that change what an adapter computes, and the values that mean
#: nothing.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # others are of a model whose own weights they have changed
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
    **dict.fromkeys(
        (
            "use_dora",
            "use_qalora",
            "use_bdlora",
            "lora_bias",
            "fan_in_fan_out",
            "modules_to_save",
            "exclude_modules",
            "layers_to_transform",
            "layer_replication",
            "rank_pattern",
            "alpha_pattern",
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


def read_lora(run: Run, module: str) -> Lora | None:
    """A module's adapters as the run file and the folder that it names say; None where it has none.

    Raises:
        SpecError: the folder is of another kind of adapter, or the two disagree.
    """
    spec = run.file.model.modules[module].lora
    if spec is None:
        return None
    field = f"model.modules.{module}.lora"
    given = {name: getattr(spec, name) for name in FIELDS if getattr(spec, name) is not None}
    folder = None if spec.folder is None else run.resolve(spec.folder)
    there = {} if folder is None else read_config(folder, f"{field}.folder")
    for name in given.keys() & there.keys():
        if _plain(given[name]) != _plain(there[name]):
            raise SpecError(
                f"{field}.{name} is not that of the adapter in {folder}",
                f"given: {given[name]}, there: {there[name]}",
                f"Leave {name} out, or start from no adapter.",
            )
    found = DEFAULTS | there | given
    targets = found["target_modules"]
    if isinstance(targets, str) and targets != ALL_LINEAR:
        try:
            re.compile(targets)
        except re.error as error:
            raise SpecError(
                f"{field}.target_modules is no regular expression",
                f"given: {targets}; {error}",
                "Give a list of names to name layers by the ends of their names.",
            ) from None
    return Lora(
        module,
        found["r"],
        found["lora_alpha"],
        targets if isinstance(targets, str) else tuple(targets),
        found["use_rslora"],
        folder,
    )


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, (list, tuple)) else value


def read_config(folder: Path, field: str) -> dict[str, Any]:
    """The fields of an adapter's configuration that are read here (`FIELDS`).

    Raises:
        SpecError: it is missing or damaged, or the adapter is of a kind that is not computed here.
    """
    again = f"Correct {field}."
    described = parse_json(folder / CONFIG, "adapter configuration", again)
    if not isinstance(described, dict):
        raise SpecError(f"The adapter configuration {folder / CONFIG} must be a mapping", "", again)
    for name, plain in _PLAIN.items():
        if name in described and described[name] not in plain:
            raise SpecError(
                f"{field}: adapters of this kind are not supported",
                f"{folder / CONFIG}, {name}: {json.dumps(described[name])};"
                f" supported: {json.dumps(plain[0])}",
                "Give a plain LoRA adapter, or merge this one into its model with peft.",
            )
    found = {name: described[name] for name in FIELDS if described.get(name) is not None}
    wrong = [
        name
        for name, kinds in (
            ("r", int),
            ("lora_alpha", int),
            ("use_rslora", bool),
            ("target_modules", (list, str)),
        )
        if name in found and not isinstance(found[name], kinds)
    ]
    if wrong or not found.get("target_modules") or "r" not in found:
        raise SpecError(
            f"The adapter configuration {folder / CONFIG} is damaged",
            f"wrong or missing: {', '.join(wrong) or 'r, target_modules'}",
            again,
        )
    return found

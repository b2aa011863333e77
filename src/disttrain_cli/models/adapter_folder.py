"""Export of adapters: a folder that peft loads, for one module or for a whole published model."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from disttrain_cli.calls import argument
from disttrain_cli.errors import SpecError
from disttrain_cli.models.adapters import Unread, joint, named
from disttrain_cli.models.configs import ModuleConfig
from disttrain_cli.models.export import Read, save_tensors
from disttrain_cli.models.layer import PipelineLayer, is_adapter
from disttrain_cli.models.lora import matches
from disttrain_cli.spec.adapter import BASE, CONFIG, PREFIX, WEIGHTS
from disttrain_cli.spec.families.family import Module
from disttrain_cli.spec.hub import name_of, snapshot_of
from disttrain_cli.spec.runfile.lora import ALL_LINEAR

#: peft's task types by kind of module.
TASKS = {"llm": "CAUSAL_LM"}
_SHOWN = 4  # names listed in an error message


def one_adapter(modules: Mapping[str, ModuleConfig]) -> bool:
    """Return True if one peft configuration can describe the adapters of all modules."""
    loras = [one.lora for one in modules.values() if one.lora is not None]
    return len({lora.use_rslora for lora in loras}) == 1


@dataclass(frozen=True)
class Adapted:
    """Module with the parts of it that belong into an adapter folder.

    Attributes:
        layers: all layers of the module, without memory for their weights.
        part: the module's entry in the whole model, if the adapter covers the whole model.
        projector: True if the module's projector is written, too.
    """

    config: ModuleConfig
    layers: Sequence[PipelineLayer]
    part: Module | None = None
    projector: bool = False

    def tensors(self, read: Read) -> dict[str, torch.Tensor]:
        """Return the unsharded tensors by their names in the file."""
        found: dict[str, torch.Tensor] = {}
        for layer in self.layers:
            values = read(layer)
            here = dict(named([layer], self.part))
            if self.part is not None and self.projector:
                here |= joint([layer], self.part)
            found |= {name: values[path] for name, (_, path, _) in here.items()}
        return found


def write_adapter(
    folder: Path,
    modules: Sequence[Adapted],
    model: torch.nn.Module,
    read: Read,
    dtype: torch.dtype,
    base: Path,
    unread: Unread | None = None,
) -> int:
    """Write the adapters of a module, or of a whole model, as peft does.

    Returns the number of values written.

    Args:
        modules: modules whose adapters are written.
        model: base model, of the library's class, without memory for its weights.
        read: returns the unsharded tensors of a layer by the paths of its parameters.
        base: folder of the base model.
        unread: tensors of the initial adapter for parts of the model that no layer covers.

    Raises:
        SpecError: peft's format cannot express what was trained.
    """
    folder.mkdir(parents=True)
    tensors: dict[str, torch.Tensor] = {}
    places: dict[str, set[str]] = {}  # paths of the adapted linears by module
    for one in modules:
        own = {name: tensor.to(dtype) for name, tensor in one.tensors(read).items()}
        places[one.config.name] = {
            name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in own if is_adapter(name)
        }
        tensors |= own
    numbers: Mapping[str, tuple[int, int]] = {}
    if unread is not None:
        tensors, numbers = {**tensors, **unread.tensors}, unread.numbers
    save_tensors(tensors, folder / WEIGHTS)
    saved = [name.removeprefix(PREFIX) for name in tensors if not is_adapter(name)]
    described = _described([one.config for one in modules], places, numbers, model, saved, base)
    (folder / CONFIG).write_text(json.dumps(described, indent=2) + "\n")
    return sum(tensor.numel() for tensor in tensors.values())


def _described(
    modules: Sequence[ModuleConfig],
    places: Mapping[str, Set[str]],
    numbers: Mapping[str, tuple[int, int]],
    model: torch.nn.Module,
    saved: Sequence[str],
    base: Path,
) -> Mapping[str, Any]:
    """Return peft's `adapter_config.json`; the first module's rank and alpha are its defaults.

    Args:
        places: paths of the adapted linears by module.
        numbers: r and lora_alpha of the linears that no layer covers, by path.
        saved: names of the parameters that are trained in full (`modules_to_save`).
        base: folder of the base model.
    """
    loras = [one.lora for one in modules if one.lora is not None]
    called = snapshot_of(base)
    first, everywhere = loras[0], set(numbers).union(*places.values())
    targets = _targets([lora.target_modules for lora in loras], everywhere, model)
    at = {
        place: (lora.r, lora.lora_alpha) for lora in loras for place in sorted(places[lora.module])
    } | dict(numbers)
    others = {
        "rank_pattern": {place: r for place, (r, _) in at.items() if r != first.r},
        "alpha_pattern": {
            place: alpha for place, (_, alpha) in at.items() if alpha != first.lora_alpha
        },
    }
    return {
        "peft_type": "LORA",
        "task_type": TASKS.get(modules[0].kind) if len(modules) == 1 else None,
        BASE: name_of(base),
        "revision": None if called is None else called.commit,
        "r": first.r,
        "lora_alpha": first.lora_alpha,
        **{pattern: values for pattern, values in others.items() if values},
        "target_modules": targets if isinstance(targets, str) else sorted(targets),
        "modules_to_save": _modules_of(saved, model) or None,
        "use_rslora": first.use_rslora,
        "lora_dropout": first.lora_dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _targets(
    given: Sequence[Collection[str] | str], places: Set[str], model: torch.nn.Module
) -> Collection[str] | str:
    """Return `target_modules` that select exactly the linears at `places`.

    Tried in order: the setting of the run file, the last components of the paths, all paths.
    """
    parts = [name for name, _ in model.named_modules()]
    ends = {place.rpartition(".")[2] for place in places}
    for tried in (*given[:1], ends):
        if tried != ALL_LINEAR and {name for name in parts if matches(tried, name)} == places:
            return tried
    return places


def _modules_of(saved: Sequence[str], model: torch.nn.Module) -> list[str]:
    """Return `modules_to_save`: submodules consisting of exactly these parameters, none nested.

    Raises:
        SpecError: a submodule is trained only in part, or its name would make peft select others,
            too.
    """
    found = sorted({name.rpartition(".")[0] for name in saved})
    there = [name for name, _ in model.named_parameters()]
    rest = [
        name
        for name in there
        if name not in saved and any(name.startswith(f"{part}.") for part in found if part)
    ]
    if rest or "" in found:
        raise SpecError(
            "The weights trained besides the adapters are only a part of a module",
            f"of the same part, and not trained: {', '.join(rest[:_SHOWN])}",
            f"Export with {argument('merge', True)}.",
        )
    outer = [part for part in found if not any(part.startswith(f"{other}.") for other in found)]
    theirs = [name for name, _ in model.named_modules() if name.endswith(tuple(outer))]
    if outer and sorted(theirs) != outer:
        raise SpecError(
            "The weights trained besides the adapters have no unambiguous name in peft",
            f"modules_to_save {', '.join(outer)} would also be {', '.join({*theirs} - {*outer})}",
            f"Export with {argument('merge', True)}.",
        )
    return outer

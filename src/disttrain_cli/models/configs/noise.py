"""Checks of a generator's noise schedule: a folder's `scheduler_config.json`, and the run file's
fields over it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, get_args

from pydantic import ValidationError

from disttrain_cli.errors import SpecError
from disttrain_cli.models.configs.checks import wrong
from disttrain_cli.models.noise import Dynamic, Noise, TimeShift
from disttrain_cli.spec.runfile.model import ModuleSpec, NoiseSpec

#: Architectures that are published as flows, and the class of their scheduler.
FLOWS = ("sd3", "flux", "lumina2")
FLOW_SCHEDULER = "FlowMatchEulerDiscreteScheduler"

#: Fields of the run file by what they belong to.
_OF_FLOWS = ("density", "logit_mean", "logit_std", "mode_scale", "shift")
#: What `scheduler_config.json` calls fields that have another name here.
_PUBLISHED = {
    "prediction": "prediction_type",
    "betas": "beta_schedule",
    "timesteps": "num_train_timesteps",
}
_OF_DENSITIES = {"logit_mean": "logit_normal", "logit_std": "logit_normal", "mode_scale": "mode"}
#: Options of a flow's scheduler that change its schedule in ways that nothing here trains.
_UNSUPPORTED = (
    "invert_sigmas",
    "shift_terminal",
    "stochastic_sampling",
    "use_beta_sigmas",
    "use_exponential_sigmas",
    "use_karras_sigmas",
)


def read_noise(
    name: str, architecture: str, spec: ModuleSpec, fields: Mapping[str, Any], tokens: int
) -> Noise:
    """The noise schedule of a `scheduler_config.json`'s fields and the run file's over them.

    Args:
        tokens: of an image in the generator, by which a flow's timesteps may be shifted.

    Raises:
        SpecError: the schedule is not one that is trained here, or of another family of models.
    """
    published = str(fields.get("_class_name", ""))
    flow = published.startswith("FlowMatch")
    if architecture in FLOWS and fields and published != FLOW_SCHEDULER:
        raise SpecError(
            f"model.modules.{name}: the noise schedule of its folder is of another family",
            f"given: {published or 'no _class_name'}; {architecture} is trained with"
            f" {FLOW_SCHEDULER}",
            "Give the model its own scheduler_config.json, or take this one away.",
        )
    given: dict[str, Any] = {
        field: fields.get(_PUBLISHED.get(field, field))
        for field in ("prediction", "betas", "beta_start", "beta_end", "timesteps")
    } | {"shift": _shift(name, fields) if flow else None}
    if flow or architecture in FLOWS:
        given["prediction"] = "flow"
    own = {} if spec.noise is None else spec.noise.model_dump(exclude_none=True)
    checked = _checked(name, given, own)
    _check_fields(name, architecture, checked)
    plain = checked.model_dump(exclude_none=True)
    if plain.get("shift") == "resolution":
        plain["dynamic"], plain["shift"] = _dynamic(name, fields, tokens)
    noise = Noise(**plain)
    if noise.beta_start >= noise.beta_end:
        raise wrong(
            name, "beta_start", noise.beta_start, f"less than beta_end ({noise.beta_end})", "noise"
        )
    return noise


def _checked(name: str, published: dict[str, Any], own: dict[str, Any]) -> NoiseSpec:
    given = {field: value for field, value in published.items() if value is not None} | own
    try:
        return NoiseSpec.model_validate(given)
    except ValidationError as error:
        problem = error.errors()[0]
        field = str(problem["loc"][0])  # the run file's own fields are valid already
        raise SpecError(
            f"model.modules.{name}: {_PUBLISHED.get(field, field)} of its folder's"
            " scheduler_config.json does not fit",
            f"given: {problem['input']!r}; {problem['msg']}",
            f"Correct it there, or give noise.{field} in the run file.",
        ) from None


def _check_fields(name: str, architecture: str, noise: NoiseSpec) -> None:
    """Raise SpecError for a field that means nothing together with the others."""
    if architecture in FLOWS and noise.prediction != "flow":
        raise wrong(name, "prediction", noise.prediction, f"flow: {architecture}'s own", "noise")
    for field in _OF_FLOWS:
        if noise.prediction != "flow" and (value := getattr(noise, field)) is not None:
            raise wrong(name, field, value, "nothing: it belongs to prediction: flow", "noise")
    for field, density in _OF_DENSITIES.items():
        if noise.density != density and (value := getattr(noise, field)) is not None:
            raise wrong(name, field, value, f"nothing: it belongs to density: {density}", "noise")


def _shift(name: str, fields: Mapping[str, Any]) -> Any:
    """The shift of a flow's published schedule, as the run file's field says it."""
    for field in _UNSUPPORTED:
        if fields.get(field):
            raise SpecError(
                f"model.modules.{name}: {field} of its folder's scheduler_config.json does not fit",
                f"given: {fields[field]!r}; allowed: nothing, as flows are trained without it",
                "Remove it there.",
            )
    return "resolution" if fields.get("use_dynamic_shifting") else fields.get("shift")


def _dynamic(name: str, fields: Mapping[str, Any], tokens: int) -> tuple[Dynamic, float]:
    """The shift by an image's tokens that a schedule's fields say, and what it is for so many."""
    known = [field.name for field in dataclasses.fields(Dynamic)]
    given = {field: fields[field] for field in known if field in fields}
    try:
        dynamic = Dynamic(**given)
        shift = dynamic.shift(tokens)
        valid = 0.0 < shift < math.inf and dynamic.time_shift_type in get_args(TimeShift)
    except (ArithmeticError, TypeError):
        valid = False
    if not valid:
        raise SpecError(
            f"model.modules.{name}: its folder's scheduler_config.json gives no shift for images"
            f" of {tokens} tokens",
            f"given: {given}; allowed: a line through two sizes, above 0 for this one",
            "Correct it there, or give noise.shift a number.",
        )
    return dynamic, shift

"""Checks of a generator's noise schedule: `scheduler_config.json`, overridden by the run file."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, get_args

from pydantic import ValidationError

from disttrain_cli.errors import SpecError
from disttrain_cli.models.configs.checks import wrong
from disttrain_cli.models.configs.generators import known_fields
from disttrain_cli.models.configs.library_generators import FAMILIES
from disttrain_cli.models.noise import Dynamic, Noise, TimeShift
from disttrain_cli.spec.runfile.model import ModuleSpec, NoiseSpec

#: Architectures that are published as rectified flows, and the class of their scheduler.
FLOWS = ("sd3", "flux", "lumina2", "qwen_image", *FAMILIES)
FLOW_SCHEDULER = "FlowMatchEulerDiscreteScheduler"
#: Supported diffusers schedulers: of rectified flows, and of diffusion with betas. The latter
#: differ only in sampling: diffusers trains all of them as DDPMScheduler, too.
FLOW_SCHEDULERS = (FLOW_SCHEDULER, "FlowMatchHeunDiscreteScheduler")
DIFFUSION_SCHEDULERS = (
    "DDPMScheduler",
    "DDPMParallelScheduler",
    "DDIMScheduler",
    "DDIMParallelScheduler",
    "PNDMScheduler",
    "LMSDiscreteScheduler",
    "EulerDiscreteScheduler",
    "EulerAncestralDiscreteScheduler",
    "HeunDiscreteScheduler",
    "KDPM2DiscreteScheduler",
    "KDPM2AncestralDiscreteScheduler",
    "DPMSolverSinglestepScheduler",
    "DPMSolverMultistepScheduler",
    "DEISMultistepScheduler",
    "UniPCMultistepScheduler",
)

#: Fields of the run file that apply to flows only.
_OF_FLOWS = ("density", "logit_mean", "logit_std", "mode_scale", "shift")
#: Names in `scheduler_config.json` of fields that are named differently in the run file.
_PUBLISHED = {
    "prediction": "prediction_type",
    "betas": "beta_schedule",
    "timesteps": "num_train_timesteps",
}
_OF_DENSITIES = {"logit_mean": "logit_normal", "logit_std": "logit_normal", "mode_scale": "mode"}
#: Fields that betas of the run file override.
_BETAS = ("betas", "beta_start", "beta_end")
#: Fields of scheduler_config.json that determine the noising of images, for both kinds of classes.
FLOW_FIELDS = (
    "num_train_timesteps",
    "shift",
    "shift_terminal",
    "use_dynamic_shifting",
    *(field.name for field in dataclasses.fields(Dynamic)),
)
DIFFUSION_FIELDS = (
    "num_train_timesteps",
    "beta_schedule",
    "beta_start",
    "beta_end",
    "trained_betas",
    "prediction_type",
    "rescale_betas_zero_snr",
)
#: Fields that alter training in unsupported ways, and their values that leave it unchanged.
FLOW_PLAIN: dict[str, tuple[Any, ...]] = {
    "invert_sigmas": (False, None),
    "stochastic_sampling": (False, None),
    "use_beta_sigmas": (False, None),
    "use_exponential_sigmas": (False, None),
    "use_karras_sigmas": (False, None),
}
DIFFUSION_PLAIN: dict[str, tuple[Any, ...]] = {
    "timestep_type": ("discrete", None),
    "use_flow_sigmas": (False, None),
    "use_dynamic_shifting": (False, None),
    "shift_terminal": (None,),
}
#: Fields that affect sampling only.
DRAWING_FIELDS = (
    "algorithm_type",
    "clip_sample",
    "clip_sample_range",
    "disable_corrector",
    "dynamic_thresholding_ratio",
    "euler_at_final",
    "final_sigmas_type",
    "flow_shift",
    "interpolation_type",
    "lambda_min_clipped",
    "lower_order_final",
    "predict_x0",
    "sample_max_value",
    "set_alpha_to_one",
    "sigma_max",
    "sigma_min",
    "skip_prk_steps",
    "solver_order",
    "solver_p",
    "solver_type",
    "steps_offset",
    "thresholding",
    "time_shift_type",
    "timestep_spacing",
    "use_beta_sigmas",
    "use_exponential_sigmas",
    "use_karras_sigmas",
    "use_lu_lambdas",
    "variance_type",
)


def read_noise(
    name: str, architecture: str, spec: ModuleSpec, fields: Mapping[str, Any], tokens: int
) -> Noise:
    """Return the noise schedule: a `scheduler_config.json`'s fields overridden by the run file's.

    Args:
        tokens: tokens of an image in the generator, by which a flow's timesteps may be shifted.

    Raises:
        SpecError: the schedule is not supported, or belongs to another family of models.
    """
    fields = _flow_of(name, fields)
    published = str(fields.get("_class_name", ""))
    flow = published in FLOW_SCHEDULERS
    if architecture in FLOWS and fields and published != FLOW_SCHEDULER:
        raise SpecError(
            f"model.modules.{name}: the noise schedule of its folder is of another family",
            f"given: {published or 'no _class_name'}; {architecture} is trained with"
            f" {FLOW_SCHEDULER}",
            "Give the model its own scheduler_config.json, or take this one away.",
        )
    fields = _completed(name, fields)
    given: dict[str, Any] = {
        field: fields.get(_PUBLISHED.get(field, field))
        for field in ("prediction", *_BETAS, "timesteps")
    } | {"shift": _shift(fields) if flow else None}
    if flow or architecture in FLOWS:
        given["prediction"] = "flow"
    own = {} if spec.noise is None else spec.noise.model_dump(exclude_none=True)
    checked = _checked(name, given, own)
    _check_fields(name, architecture, checked)
    plain = checked.model_dump(exclude_none=True)
    if plain.get("shift") == "resolution":
        plain["dynamic"], plain["shift"] = _dynamic(name, fields, tokens)
    if flow and (terminal := fields.get("shift_terminal")):
        if not isinstance(terminal, (int, float)) or not 0 < terminal < 1:
            raise _refused(name, "shift_terminal", terminal, "between 0 and 1, or nothing")
        plain["terminal"] = terminal
    if checked.prediction != "flow":
        plain |= _adjusted_betas(name, fields, own, plain.get("timesteps", Noise.timesteps))
    noise = Noise(**plain)
    if noise.trained_betas is None and noise.beta_start >= noise.beta_end:
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
        field = str(problem["loc"][0])  # the run file's own fields are already validated
        raise SpecError(
            f"model.modules.{name}: {_PUBLISHED.get(field, field)} of its folder's"
            " scheduler_config.json does not fit",
            f"given: {problem['input']!r}; {problem['msg']}",
            f"Correct it there, or give noise.{field} in the run file.",
        ) from None


def _check_fields(name: str, architecture: str, noise: NoiseSpec) -> None:
    """Raise SpecError for a field that has no meaning in combination with the others."""
    if architecture in FLOWS and noise.prediction != "flow":
        raise wrong(name, "prediction", noise.prediction, f"flow: {architecture}'s own", "noise")
    for field in _OF_FLOWS:
        if noise.prediction != "flow" and (value := getattr(noise, field)) is not None:
            raise wrong(name, field, value, "nothing: it belongs to prediction: flow", "noise")
    for field, density in _OF_DENSITIES.items():
        if noise.density != density and (value := getattr(noise, field)) is not None:
            raise wrong(name, field, value, f"nothing: it belongs to density: {density}", "noise")


def _completed(name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a schedule, with the defaults of its class for missing ones.

    Raises:
        SpecError: the class is not supported, or a field alters training in an unsupported way.
    """
    if not fields:
        return {}
    published = str(fields.get("_class_name", "DDPMScheduler"))
    flow = published in FLOW_SCHEDULERS
    if not flow and published not in DIFFUSION_SCHEDULERS:
        known = ", ".join((*DIFFUSION_SCHEDULERS, *FLOW_SCHEDULERS))
        raise SpecError(
            f"model.modules.{name}: images are not made noisy here as its folder's"
            " scheduler_config.json says",
            f"_class_name: {published}; allowed: {known}",
            "Give the model's own scheduler of one of these classes there.",
        )
    complete = {**known_fields(published), **fields}
    for field, plain in (FLOW_PLAIN if flow else DIFFUSION_PLAIN).items():
        if complete.get(field) not in plain:
            raise _refused(name, field, complete[field], f"{plain[0]}, or nothing")
    return complete


def _flow_of(name: str, fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a flow's fields for those of a solver that draws flows, as Wan's and Sana's do.

    Solvers differ in sampling only; a flow is drawn by Euler's steps here.

    Raises:
        SpecError: a field alters training in an unsupported way.
    """
    solves_flows = fields.get("use_flow_sigmas") is True
    if not solves_flows or fields.get("prediction_type") != "flow_prediction":
        return fields
    complete = _completed(name, {**fields, "use_flow_sigmas": False})
    return {
        "_class_name": FLOW_SCHEDULER,
        "num_train_timesteps": complete["num_train_timesteps"],
        "shift": complete.get("flow_shift") or 1.0,
    }


def published_schedule(
    name: str, spec: ModuleSpec, fields: Mapping[str, Any], sampler: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the fields of a published schedule with the changes of the run file's `noise`.

    None if the new schedule is of another kind.

    Args:
        sampler: configuration of the scheduler used for sampling (`Noise.sampler`).
    """
    as_flow = _flow_of(name, fields)
    complete = _completed(name, as_flow)
    if not complete:
        return None
    flow = complete.get("_class_name") in FLOW_SCHEDULERS
    trained = FLOW_FIELDS if flow else DIFFUSION_FIELDS
    if spec.noise is None:
        return dict(fields)
    if flow != ("shift" in sampler) or as_flow is not fields:
        return None
    dynamic = sampler.get("use_dynamic_shifting")  # then a numeric shift is not read
    changed = {
        field: sampler[field]
        for field in trained
        if not (dynamic and field == "shift") and sampler[field] != complete.get(field)
    }
    return {**fields, **changed} if changed.keys() <= complete.keys() else None


def unread(fields: Mapping[str, Any]) -> list[str]:
    """Return the fields that no supported class has; they are ignored, as diffusers does."""
    known = {
        *FLOW_FIELDS,
        *DIFFUSION_FIELDS,
        *FLOW_PLAIN,
        *DIFFUSION_PLAIN,
        *DRAWING_FIELDS,
    }
    return [field for field in fields if field not in known and not field.startswith("_")]


def _adjusted_betas(
    name: str, fields: Mapping[str, Any], own: Mapping[str, Any], timesteps: int
) -> dict[str, Any]:
    """Return a schedule's explicit betas, and `zero_snr` if they are rescaled.

    Betas of the run file override explicit ones; rescaled betas have zero terminal SNR.
    """
    adjusted: dict[str, Any] = {}
    betas, zero_snr = fields.get("trained_betas"), fields.get("rescale_betas_zero_snr")
    if betas is not None and not own.keys() & {*_BETAS}:
        if (
            not isinstance(betas, (list, tuple))
            or len(betas) != timesteps
            or any(isinstance(one, bool) or not isinstance(one, (int, float)) for one in betas)
            or not all(0 < one < 1 for one in betas)
        ):
            shown = f"{len(betas)} values" if isinstance(betas, (list, tuple)) else repr(betas)
            allowed = f"{timesteps} numbers between 0 and 1, one for each timestep"
            raise _refused(name, "trained_betas", shown, allowed)
        adjusted["trained_betas"] = tuple(float(one) for one in betas)
    if zero_snr not in (None, True, False) or (zero_snr and timesteps < 2):
        allowed = "true, of at least 2 timesteps, or false"
        raise _refused(name, "rescale_betas_zero_snr", zero_snr, allowed)
    return adjusted | {"zero_snr": True} if zero_snr else adjusted


def _refused(name: str, field: str, given: Any, allowed: str) -> SpecError:
    return SpecError(
        f"model.modules.{name}: {field} of its folder's scheduler_config.json does not fit",
        f"given: {given!r}; allowed: {allowed}",
        "Correct it there, if the model was trained otherwise.",
    )


def _shift(fields: Mapping[str, Any]) -> Any:
    """Return the shift of a flow's published schedule in the form of the run file's field."""
    return "resolution" if fields.get("use_dynamic_shifting") else fields.get("shift")


def _dynamic(name: str, fields: Mapping[str, Any], tokens: int) -> tuple[Dynamic, float]:
    """Return a schedule's resolution-dependent shift, and its value for `tokens` tokens."""
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

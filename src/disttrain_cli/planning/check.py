"""Validation of a plan before it is run.

Plans may be edited by hand, artefacts may be mixed up, and plans may use features that the runtime
lacks.
"""

from __future__ import annotations

from typing import NamedTuple

from disttrain_cli.calls import call
from disttrain_cli.costs import experts
from disttrain_cli.costs.context import fits_nodes, misfit
from disttrain_cli.costs.freezing import owners
from disttrain_cli.costs.replicated import undealt
from disttrain_cli.costs.stage import tp_degrees
from disttrain_cli.errors import MismatchError, SpecError
from disttrain_cli.spec.files import fingerprint
from disttrain_cli.spec.plan import Plan, UnitPlan
from disttrain_cli.spec.profile import DeviceProfile, Profile
from disttrain_cli.spec.runfile import RunFile
from disttrain_cli.spec.stage_graph import stage_graph

EDIT = f"Correct the plan, or plan again: {call('plan')}"


def check(plan: Plan, run: RunFile, profile: Profile) -> None:
    """Reject a plan that does not belong to the run file and profile, or that cannot be run.

    Raises:
        MismatchError: made for another model, dataset, cluster, device or profile; both are named.
        SpecError: modules, layers, batch, rank count, trained modules or ZeRO do not fit; both
            values are named.
    """
    check_device(run, profile)
    kinds = (run.cluster.device, profile.device.kind)
    if kinds in (("cpu", "cuda"), ("cuda", "cpu")):
        raise MismatchError(
            f"The profile is of another device ({profile.device.name})",
            f"cluster.device: {kinds[0]}; measured on: {kinds[1]}",
            f"Profile and plan again: {call('profile')} && {call('plan')}",
        )
    made_for, have = plan.fingerprints, profile.fingerprints
    for what, theirs, mine in (
        ("model", made_for.model, run.model_fingerprint()),
        ("dataset", made_for.data, have.data),
        ("cluster", made_for.cluster, run.cluster_fingerprint()),
        ("profile", made_for.profile, fingerprint(profile)),
    ):
        if theirs != mine:
            raise MismatchError(
                f"The plan was made for another {what}",
                f"{what} of the plan: {theirs}; here: {mine}",
                f"Plan again: {call('plan')}",
            )
    check_layout(plan, run, profile)
    _check_choices(plan, run)
    run.check_owners(owners(profile))


def check_layout(plan: Plan, run: RunFile, profile: Profile) -> None:
    """Reject a layout that the model, the global batch or the devices do not allow.

    Raises:
        SpecError: modules, layers, batch, rank count or TP do not fit; both values are named.
    """
    _check_modules(plan, profile)
    _check_batch(plan, run, profile)
    _check_ranks(plan, run, profile)


def check_device(run: RunFile, profile: Profile) -> None:
    """Reject a profile of another device than the run file now names.

    A profile made with `disttrain profile --device` may be of another device than the run file
    names: plans are for the profile's device as long as the run file's is unchanged.

    Raises:
        MismatchError: both devices are named.
    """
    wanted, have = run.cluster.device, profile.device
    if wanted != profile.cluster.device and not names_device(wanted, have):
        raise MismatchError(
            f"The profile is of another device ({have.name})",
            f"cluster.device: {wanted}; device of the profile: {have.name} ({have.kind})",
            f"Profile again: {call('profile')}; or plan for that device:"
            f" {call('plan', profile='FILE')}",
        )


def names_device(device: str, profiled: DeviceProfile) -> bool:
    """Return True if `cluster.device` stands for a profiled device."""
    kind, _, name = device.partition(":")
    return device == "auto" or (
        kind == profiled.kind and name.lower() in ("", profiled.name.lower())
    )


def check_memory(plan: Plan, profile: Profile) -> None:
    """Reject a plan, edited by hand, whose predicted memory exceeds a device's.

    Raises:
        SpecError: names the stages, and both sizes.
    """
    over = [stage for stage in plan.predicted.memory if stage.peak_gib > stage.limit_gib]
    if over and profile.device.kind != "cpu":
        fullest = max(over, key=lambda stage: stage.peak_gib)
        named = ", ".join(f"{stage.unit} {stage.stage}" for stage in over)
        raise SpecError(
            "The plan does not fit into the devices' memory",
            f"stages {named}: up to {fullest.peak_gib:.1f} of {fullest.limit_gib:.1f} GiB",
            EDIT,
        )


class NotRun(NamedTuple):
    """Feature of a plan that training does not support; a rehearsal does."""

    what: str  # a noun: "sizes without data"
    why: str
    next_step: str


def not_run(plan: Plan, run: RunFile, profile: Profile) -> list[NotRun]:
    """Return the features of a plan that `disttrain train` lacks; empty if it runs all."""
    refused: list[NotRun] = []
    if run.data.distribution is not None:
        refused.append(
            NotRun(
                "sizes without data",
                f"data.distribution: {run.data.distribution.name}",
                "name a dataset in data.sources and profile again",
            )
        )
    if profile.device.kind == "analytic":
        refused.append(
            NotRun(
                "a device that is not here",
                f"the profile is computed for {profile.device.name}",
                "set cluster.device: auto on the machines that train and profile there",
            )
        )
    return refused


def refuse_not_run(plan: Plan, run: RunFile, profile: Profile) -> None:
    """Reject a plan that training does not support, by name (`not_run`).

    Raises:
        SpecError: every reason, with a remedy for each.
    """
    refused = not_run(plan, run, profile)
    if refused:
        steps = "; ".join(reason.next_step for reason in refused)
        raise SpecError(
            "This version does not train with "
            + ", nor with ".join(reason.what for reason in refused),
            "\n".join(f"{reason.what}: {reason.why}" for reason in refused),
            f"{steps[0].upper()}{steps[1:]}. "
            f"Or try the plan on emulated devices: {call('rehearse')}",
        )


def _check_choices(plan: Plan, run: RunFile) -> None:
    """Check settings fixed by the run file: trained modules, ZeRO stage, recomputation."""
    layout, train = plan.plan, run.train
    differing: list[tuple[str, object, object]] = []
    if _as_set(layout.trained) != _as_set(run.model.trained):
        differing.append(("model.trained", layout.trained or "all", run.model.trained or "all"))
    zero = 1 if train.zero_stage == "auto" and train.precision == "bf16" else train.zero_stage
    if zero not in ("auto", layout.zero_stage):
        differing.append(("train.zero_stage", layout.zero_stage, train.zero_stage))
    recomputes = {unit.checkpointing for unit in layout.units}
    if train.activation_checkpointing != "auto" and recomputes != {
        train.activation_checkpointing == "full"
    }:
        units = ", ".join(unit.name for unit in layout.units if unit.checkpointing) or "no unit"
        differing.append(("train.activation_checkpointing", units, train.activation_checkpointing))
    for field, planned, stated in differing:
        raise MismatchError(
            f"The plan was made for another {field}",
            f"plan: {planned}; run file: {stated}",
            f"Plan again: {call('plan')}",
        )


def _product(unit: UnitPlan) -> str:
    """Return the degrees of a unit, whose product is its GPUs."""
    cp = f" × CP {unit.cp}" if unit.cp > 1 else ""
    return f"{unit.tp}{cp} × {unit.dp} × {unit.pp}"


def _as_set(names: list[str] | None) -> set[str] | None:
    return None if names is None else set(names)


def _check_modules(plan: Plan, profile: Profile) -> None:
    expected = list(profile.modules)
    given = [name for unit in plan.plan.units for name in unit.modules]
    if given != expected:
        raise SpecError(
            "The units of the plan must hold every module once, in pipeline order",
            f"given: {', '.join(given)}; expected: {', '.join(expected)}",
            EDIT,
        )
    for unit in plan.plan.units:
        layers = sum(len(profile.modules[name].layers) for name in unit.modules)
        if sum(unit.layers_per_stage) != layers:
            raise SpecError(
                f"layers_per_stage of unit {unit.name} must add up to its modules' layers",
                f"{' + '.join(map(str, unit.layers_per_stage))} = {sum(unit.layers_per_stage)}; "
                f"{', '.join(unit.modules)}: {layers}",
                EDIT,
            )


def _check_batch(plan: Plan, run: RunFile, profile: Profile) -> None:
    layout = plan.plan
    if layout.global_batch_size != run.train.global_batch_size:
        raise SpecError(
            "The plan and the run file have different global batches",
            f"plan: {layout.global_batch_size}; train.global_batch_size:"
            f" {run.train.global_batch_size}",
            EDIT,
        )
    try:
        layout.check_slots(profile.inputs.llm)
    except ValueError as error:
        raise SpecError(
            "The slots of the plan do not add up to the global batch", str(error), EDIT
        ) from None


def _check_ranks(plan: Plan, run: RunFile, profile: Profile) -> None:
    layout = plan.plan
    if layout.left_out and profile.cluster.ranks_per_gpu > 1:
        raise SpecError(
            "A GPU that ranks share cannot be left out",
            f"left_out: {', '.join(map(str, layout.left_out))}; cluster.ranks_per_gpu:"
            f" {profile.cluster.ranks_per_gpu}",
            "Hide it from this job (CUDA_VISIBLE_DEVICES), and profile and plan again.",
        )
    wrong = [device for device in layout.left_out if device >= profile.device.count]
    if wrong or len(set(layout.left_out)) < len(layout.left_out):
        raise SpecError(
            "left_out must name devices of the cluster, each once",
            f"given: {', '.join(map(str, layout.left_out))}; allowed: 0 to"
            f" {profile.device.count - 1}",
            EDIT,
        )
    if layout.gpus_used > profile.device.count - len(layout.left_out):
        terms = " + ".join(f"{unit.name} {_product(unit)}" for unit in layout.units)
        raise SpecError(
            "The plan needs more ranks than the cluster has",
            f"{terms} = {layout.gpus_used}; the cluster has {profile.device.count}"
            + f", of which {len(layout.left_out)} are left out" * bool(layout.left_out),
            EDIT,
        )
    for unit in layout.units:
        for modules, shape in unit.parts:
            degrees = tp_degrees(profile, modules)
            if shape.tp not in degrees:
                own = f"{modules[0]} in unit" if modules[0] in unit.module_tp else "unit"
                raise SpecError(
                    f"TP {shape.tp} of {own} {unit.name} was not profiled",
                    f"profiled: TP {', '.join(map(str, degrees))}",
                    EDIT,
                )
        if (why := undealt(profile, unit)) is not None:
            raise SpecError(f"module_tp of unit {unit.name} cannot be run", why, EDIT)
        if not fits_nodes(unit.shape, run.cluster.gpus_per_node):
            both = f"TP {unit.tp}" + (f" × CP {unit.cp}" if unit.cp > 1 else "")
            raise SpecError(
                f"{both} of unit {unit.name} does not fit evenly into a node",
                f"cluster.gpus_per_node: {run.cluster.gpus_per_node}",
                EDIT,
            )
        if unit.tp_cp_size > run.cluster.gpus_per_node and profile.links.gpus_per_node is None:
            raise SpecError(
                f"CP groups of unit {unit.name} lie on several nodes",
                "the profile is of a single node",
                f"Profile again: {call('profile')}",
            )
        if (why := misfit(profile, unit.modules, unit.shape)) is not None:
            raise SpecError(f"Unit {unit.name} cannot have CP {unit.cp}", why, EDIT)
        if (why := experts.misfit(profile, unit.modules, unit.shape)) is not None:
            raise SpecError(f"Unit {unit.name} cannot have EP {unit.ep}", why, EDIT)
    for stage in stage_graph(layout, profile.inputs.llm).stages:
        if stage.ranks[0] % min(stage.unit.tp_cp_size, run.cluster.gpus_per_node):
            sizes = ", ".join(f"{unit.name} {_product(unit)}" for unit in layout.units)
            raise SpecError(
                f"{'CP' if stage.cp > 1 else 'TP'} groups of unit {stage.unit.name} would lie on"
                " two nodes",
                f"TP × DP × PP: {sizes}; nodes of {run.cluster.gpus_per_node}",
                EDIT,
            )

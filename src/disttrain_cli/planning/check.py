"""Guards a plan before it is run: plans may be edited by hand, and artefacts get mixed up."""

from __future__ import annotations

from disttrain_cli.errors import MismatchError, SpecError
from disttrain_cli.spec.files import fingerprint
from disttrain_cli.spec.plan import Plan
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.runfile import RunFile

EDIT = "Correct plan.yaml, or plan again: disttrain plan"


def check(plan: Plan, run: RunFile, profile: Profile) -> None:
    """Refuse a plan that does not belong to the run file and profile, or that cannot be run.

    Raises:
        MismatchError: made for another model, dataset, cluster or profile; both fingerprints are named.
        SpecError: modules, layers, batch or rank count do not fit; the numbers are named.
    """
    made_for, have = plan.fingerprints, profile.fingerprints
    for what, theirs, mine in (("model", made_for.model, run.model_fingerprint()),
                               ("dataset", made_for.data, have.data),
                               ("cluster", made_for.cluster, run.cluster_fingerprint()),
                               ("profile", made_for.profile, fingerprint(profile))):
        if theirs != mine:
            raise MismatchError(f"The plan was made for another {what}", f"{what} of the plan: {theirs}; here: {mine}",
                                "Plan again: disttrain plan")
    _check_modules(plan, profile)
    _check_batch(plan, run, profile)
    _check_ranks(plan, run, profile)


def _check_modules(plan: Plan, profile: Profile) -> None:
    expected = list(profile.modules)
    given = [name for unit in plan.plan.units for name in unit.modules]
    if given != expected:
        raise SpecError("The units of the plan must hold every module once, in pipeline order",
                        f"given: {', '.join(given)}; expected: {', '.join(expected)}", EDIT)
    for unit in plan.plan.units:
        layers = sum(len(profile.modules[name].layers) for name in unit.modules)
        if sum(unit.layers_per_stage) != layers:
            raise SpecError(f"layers_per_stage of unit {unit.name} must add up to its modules' layers",
                            f"{' + '.join(map(str, unit.layers_per_stage))} = {sum(unit.layers_per_stage)}; "
                            f"{', '.join(unit.modules)}: {layers}", EDIT)


def _check_batch(plan: Plan, run: RunFile, profile: Profile) -> None:
    layout = plan.plan
    if layout.global_batch_size != run.train.global_batch_size:
        raise SpecError("The plan and the run file have different global batches",
                        f"plan: {layout.global_batch_size}; train.global_batch_size: {run.train.global_batch_size}",
                        EDIT)
    try:
        layout.check_slots(profile.inputs.llm)
    except ValueError as error:
        raise SpecError("The slots of the plan do not make up the global batch", str(error), EDIT) from None


def _check_ranks(plan: Plan, run: RunFile, profile: Profile) -> None:
    layout = plan.plan
    if layout.gpus_used > profile.device.count:
        terms = " + ".join(f"{unit.name} {unit.tp} × {unit.dp} × {unit.pp}" for unit in layout.units)
        raise SpecError("The plan needs more ranks than the cluster has",
                        f"{terms} = {layout.gpus_used}; the cluster has {profile.device.count}", EDIT)
    for unit in layout.units:
        degrees = set.intersection(*(set(cost.tp) for name in unit.modules
                                     for cost in profile.modules[name].costs.values()))
        if str(unit.tp) not in degrees:
            raise SpecError(f"TP {unit.tp} of unit {unit.name} was not profiled",
                            f"profiled: TP {', '.join(sorted(degrees, key=int))}", EDIT)
        if run.cluster.gpus_per_node % unit.tp:
            raise SpecError(f"TP {unit.tp} of unit {unit.name} does not fit evenly into a node",
                            f"cluster.gpus_per_node: {run.cluster.gpus_per_node}", EDIT)

"""Any number of the run file, at its bounds and beyond: `profile` and `plan` answer in time, and
never with a bug.

The run files are drawn over the schema, not listed: a new field takes part by itself.
"""

import copy
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from annotated_types import Ge, Gt, Le, Lt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from disttrain_cli.api.presets import preset_text
from disttrain_cli.app import main
from disttrain_cli.errors import DisttrainError, SpecError
from disttrain_cli.planning.solve import solve
from disttrain_cli.spec.files import Strict, validate
from disttrain_cli.spec.plan import Plan
from disttrain_cli.spec.runfile import RunFile
from tests.planning import synthetic

LONGEST_S = 150  # of computing on a slow machine: 35 s there for the preset as it is
Path_ = tuple[str | int, ...]


def base() -> dict[str, Any]:
    """The preset tiny on sizes that nobody has here and devices of the catalogue, with every
    section given."""
    value = yaml.safe_load(preset_text("tiny"))
    few = {"images_per_sequence": 1.0, "generated_per_sequence": 1.0, "sequences": 64}
    value["data"] = {"distribution": few, "sequence_length": 512, "max_image_pixels": 4096}
    value["cluster"] = {
        "nodes": 2,
        "gpus_per_node": 4,
        "device": "analytic:A800",
        "links": {},
        "slurm": {},
    }
    value["model"]["modules"]["image_generator"]["noise"] = {}
    value["train"]["optimizer"]["modules"] = {"llm": {}}
    value["train"] |= {"checkpoint": {}, "ema": {"modules": ["llm"]}}
    value["rehearse"] = {
        "faults": [{"slow": "stage", "unit": "llm", "factor": 2.0}],
        "distribution": few,
    }
    return value


def numbers(
    kind: type[BaseModel], value: dict[str, Any], at: Path_ = ()
) -> Iterator[tuple[Path_, list[float]]]:
    """Every field of the schema that takes a number, as far as `value` has its section; and the
    number's bounds."""
    for name, field in kind.model_fields.items():
        here = (*at, name)
        for part, metadata in [(field.annotation, []), *_parts(field.annotation)]:
            if part in (int, float):
                yield (
                    here,
                    [
                        getattr(one, one.__class__.__name__.lower())
                        for one in metadata or field.metadata
                        if isinstance(one, (Ge, Gt, Le, Lt))
                    ],
                )
        inside = value.get(name)
        models = [
            part
            for part, _ in [(field.annotation, []), *_parts(field.annotation)]
            if isinstance(part, type) and issubclass(part, Strict)
        ]
        for model in models:
            if isinstance(inside, list):
                for place, item in enumerate(inside):
                    yield from numbers(model, item, (*here, place))
            elif isinstance(inside, dict) and set(inside) <= set(model.model_fields):
                yield from numbers(model, inside, here)
            elif isinstance(inside, dict):
                for key, item in inside.items():
                    yield from numbers(model, item, (*here, key))


def _parts(annotation: Any) -> list[tuple[Any, list[Any]]]:
    """Types inside a union, a list, a mapping or an annotation, each with its bounds."""
    found = []
    for part in get_args(annotation):
        if hasattr(part, "__metadata__"):
            bounds = [
                bound for one in part.__metadata__ for bound in getattr(one, "metadata", [one])
            ]
            found.append((part.__origin__, bounds))
        elif not isinstance(part, str):
            found += [(part, []), *_parts(part)]
    return found


def configured(value: dict[str, Any]) -> Iterator[Path_]:
    """Every number of the modules' configurations."""
    for name, module in value["model"]["modules"].items():
        for field, number in module["config"].items():
            if isinstance(number, int) and not isinstance(number, bool):
                yield ("model", "modules", name, "config", field)


def changed(value: dict[str, Any], at: Path_, number: Any) -> dict[str, Any]:
    changed = copy.deepcopy(value)
    inside: Any = changed
    for key in at[:-1]:
        inside = inside[key]
    inside[at[-1]] = number
    return changed


ODD = [
    0,
    -1,
    1,
    2,
    3,
    0.5,
    1e-300,
    1e300,
    10**9,
    10**18,
    10**30,
    True,
    "many",
    None,
    [],
    [5, -3],
    float("nan"),
    float("inf"),
]
FIELDS = list(numbers(RunFile, base()))
CONFIGURED = list(configured(base()))


@st.composite
def run_files(draw: st.DrawFn) -> dict[str, Any]:
    """One or two numbers at their bounds, just beyond them, or odd."""
    value = base()
    for _ in range(draw(st.integers(1, 2))):
        at, bounds = draw(
            st.one_of(
                st.sampled_from(FIELDS),
                st.sampled_from([(at, [1, 256, 2**17]) for at in CONFIGURED]),
            )
        )
        near = [bound + step for bound in bounds for step in (-1, 0, 1)]
        value = changed(
            value,
            at,
            draw(st.one_of(*[st.sampled_from(part) for part in (near, bounds, ODD) if part])),
        )
    return value


def test_the_schema_bounds_every_number() -> None:
    known = {at for at, _ in FIELDS}
    assert len(known) > 50
    unbounded = [
        at
        for at, _ in FIELDS
        if at[-1] != "version"
        and not any(len(bounds) >= 2 for place, bounds in FIELDS if place == at)
    ]
    assert not unbounded, unbounded


class LateError(BaseException):
    """No answer in time; no `Exception`, which the command line would take for a bug."""


def late(*_: object) -> None:
    raise LateError


@pytest.fixture
def in_time() -> Iterator[Any]:
    before = signal.signal(signal.SIGPROF, late)
    yield lambda: signal.setitimer(signal.ITIMER_PROF, LONGEST_S)
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, before)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(run_files())
def test_any_number_is_read_or_refused(value: dict[str, Any]) -> None:
    try:
        validate(RunFile, value, Path("disttrain.yaml"), "run file")
    except SpecError as error:
        assert error.why


@pytest.mark.slow
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(run_files())
def test_any_number_is_planned_or_refused(in_time: Any, value: dict[str, Any]) -> None:
    """With a profile that is at hand."""
    try:
        run = validate(RunFile, value, Path("disttrain.yaml"), "run file")
        in_time()
        solve(run, synthetic.tiny(run), gpus=min(16, run.cluster.gpus), top=0)
    except DisttrainError as error:
        assert error.what
    signal.setitimer(signal.ITIMER_PROF, 0)


def answer(words: list[str], capsys: pytest.CaptureFixture[str]) -> int:
    """Exit code of a command that is no bug and in time."""
    signal.setitimer(signal.ITIMER_PROF, LONGEST_S)
    with pytest.raises(SystemExit) as left:
        main(words)
    signal.setitimer(signal.ITIMER_PROF, 0)
    said = capsys.readouterr()
    assert "a bug in disttrain" not in said.err and left.value.code in (0, 1, 3), said.err
    return int(left.value.code)


@pytest.mark.slow
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(value=run_files())
def test_any_number_goes_through_profile_and_plan(
    tmp_path: Path, in_time: Any, capsys: pytest.CaptureFixture[str], value: dict[str, Any]
) -> None:
    (tmp_path / "disttrain.yaml").write_text(yaml.safe_dump(value))
    if answer(["profile", str(tmp_path), "--quiet"], capsys) == 0:
        answer(["plan", str(tmp_path), "--quiet"], capsys)


@pytest.mark.parametrize(
    ("at", "number"),
    [
        (("model", "modules", "llm", "config", "hidden_size"), 10**12),
        (("model", "modules", "image_encoder", "merge"), 1000),
        (("model", "modules", "image_encoder", "config", "num_hidden_layers"), 10**6),
        (("model", "modules", "image_generator", "config", "block_out_channels"), [32, 10**9]),
    ],
)
def test_models_that_nobody_could_build(
    tmp_path: Path, in_time: Any, capsys: pytest.CaptureFixture[str], at: Path_, number: Any
) -> None:
    (tmp_path / "disttrain.yaml").write_text(yaml.safe_dump(changed(base(), at, number)))
    assert answer(["profile", str(tmp_path), "--quiet"], capsys) == 1


def leaves(value: Any, at: Path_ = ()) -> Iterator[Path_]:
    """Places of everything in a plan that is no mapping or list, and of the lists."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, item in items:
        if not isinstance(item, dict):
            yield (*at, key)
        yield from leaves(item, (*at, key))


@pytest.fixture(scope="module")
def made() -> tuple[RunFile, Any, dict[str, Any]]:
    run = synthetic.run_file(batch=24, gpus=6)
    profile = synthetic.tiny(run)
    return run, profile, solve(run, profile, top=1).model_dump(mode="json")


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_damage_to_a_plan_is_taken_or_refused(
    made: tuple[RunFile, Any, dict[str, Any]], data: st.DataObject
) -> None:
    """What training, a rehearsal and the next `plan` do with the plan in place before they run
    anything."""
    from disttrain_cli.planning.changes import changes, not_comparable
    from disttrain_cli.planning.check import check
    from disttrain_cli.planning.predict import simulated_step
    from disttrain_cli.planning.solve import cluster_of

    run, profile, value = made
    at = data.draw(st.sampled_from(list(leaves(value))))
    damaged = changed(
        value,
        at,
        data.draw(st.sampled_from([*ODD, "../../evil", "<script>", "", {}, 65_536, 16_384])),
    )
    sound = Plan.model_validate(value)
    try:
        plan = validate(Plan, damaged, Path("plan.yaml"), "plan")
        if not not_comparable(plan, sound):
            changes(plan, sound, run, profile, cluster_of(run, profile))
        check(plan, run, profile)
        simulated_step(profile, plan.plan, cluster_of(run, profile))
    except DisttrainError as error:
        assert error.what

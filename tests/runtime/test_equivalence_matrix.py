"""The equivalence matrix: layouts of eight ranks drawn from everything that a plan may choose,
beside named ones.

Each equals the single process in losses, gradient norms and parameters (fp32, 1e-5). Of many draws
of a seeded generator those are trained that bring most pairs of choices which no other case has.
Each is named by what was drawn, so that a failure names its layout.
"""

import random
from dataclasses import dataclass, replace
from itertools import accumulate, combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from disttrain_cli.data.indexing.building import build_index
from disttrain_cli.data.sample_data import write_sample_data
from disttrain_cli.models.graph import describe, layer_table
from disttrain_cli.spec.plan import UnitPlan
from disttrain_cli.spec.progress import silent
from disttrain_cli.spec.runfile import Run, read_run
from tests.data.dataset import interleaved, text, write_tar
from tests.runtime.equivalence_worker import check_equals, reference
from tests.runtime.factory import plan_of, unit, write_run
from tests.runtime.layouts import train

RANKS, STEPS, BATCH, SEED = 8, 2, 12, 20
LAUNCHES, POOL, DRAWN = 2, 160, 23
ENCODER, LLM, GENERATOR = EVERYTHING = ("image_encoder", "llm", "image_generator")
REFINER = "refiner"
TWO = (*EVERYTHING, REFINER)
COUNTS = {ENCODER: 4, LLM: 5, GENERATOR: 8, REFINER: 6}
#: Of whole models; `best` wants a profile, and the tests' own knows the first only.
ORDERINGS = {EVERYTHING: ["none", "none", "paper", "best"], TWO: ["none", "none", "paper"]}


@dataclass(frozen=True)
class Case:
    """One layout and what it trains."""

    units: tuple[UnitPlan, ...]
    microbatch: int = 1
    modules: tuple[str, ...] = EVERYTHING
    trained: tuple[str, ...] | None = None
    zero_stage: int = 0
    ordering: str = "none"
    overlap: bool = False
    tied: bool = False

    @property
    def name(self) -> str:
        """What was drawn."""
        short = {ENCODER: "E", LLM: "L", GENERATOR: "G", REFINER: "R"}
        units = "_".join(
            f"{''.join(short[m] for m in u.modules)}.tp{u.tp}.dp{u.dp}."
            f"{'+'.join(map(str, u.layers_per_stage))}{'.recomputed' if u.checkpointing else ''}"
            f"{'.overlapped' if u.tp_overlap else ''}"
            f"{''.join(f'.whole{short[m]}' for m in u.module_tp)}"
            f"{'' if u.weight_delay is None else '.later' + '+'.join(map(str, u.weight_delay))}"
            for u in self.units
        )
        trained = (
            ""
            if self.trained is None
            else "-trains." + "+".join(short.get(name, name) for name in self.trained)
        )
        overlap = f"{'-overlap' if self.overlap else ''}{'-tied' if self.tied else ''}"
        known = f"{units}-m{self.microbatch}-zero{self.zero_stage}-{self.ordering}"
        return f"{known}{overlap}{trained}"

    @property
    def model(self) -> tuple[tuple[str, ...], tuple[str, ...] | None, bool]:
        """What its reference depends on."""
        return self.modules, self.trained, self.tied

    @property
    def pairs(self) -> set[Any]:
        """Every two choices that meet in a unit, and TP and DP of every two neighbouring units."""
        found: set[Any] = set()
        for u in self.units:
            choices = {
                "units": len(self.units),
                "model": self.modules,
                "modules": tuple(u.modules),
                "tp": u.tp,
                "dp": u.dp,
                "pp": u.pp,
                "recomputed": u.checkpointing,
                "overlapped": u.tp_overlap,
                "later": u.weight_delay is not None,
                "whole": bool(u.module_tp),
                "microbatch": self.microbatch,
                "trained": self.trained,
                "zero": self.zero_stage,
                "ordering": self.ordering,
                "overlap": self.overlap,
                "tied": self.tied and ("apart" if self.apart else "together"),
            }
            found.update(combinations(choices.items(), 2))
            found.add(("several", u.tp > 1, u.dp > 1, u.pp > 1))
        for one, other in pairwise(self.units):
            found |= {("tp", one.tp, other.tp), ("dp", one.dp, other.dp)}
        return found

    @property
    def apart(self) -> bool:
        """Whether the LLM's embedding and head are on different stages."""
        layers = [name for name in self.modules for _ in range(COUNTS[name])]
        own = next(u for u in self.units if LLM in u.modules)
        first = layers.index(LLM) - layers.index(own.modules[0])
        stages = [stage for stage, count in enumerate(own.layers_per_stage) for _ in range(count)]
        return stages[first] != stages[first + COUNTS[LLM] - 1]


def draw(generator: random.Random) -> Case:
    """A layout of eight ranks."""
    modules = generator.choice([EVERYTHING] * 5 + [TWO] * 3 + [(ENCODER, LLM), (LLM, GENERATOR)])
    while True:
        units = tuple(_unit(generator, group) for group in _grouped(generator, modules))
        dp = next(u.dp for u in units if LLM in u.modules)
        microbatch = generator.choice([1, 2, 3])
        if sum(u.gpus for u in units) == RANKS and BATCH % (dp * microbatch) == 0:
            break
    trained = generator.choice([None] * 5 + [(LLM, "projectors"), ("projectors",)])
    overlap = random.Random(repr(units)).random() < 0.6
    return Case(
        tuple(map(_dealt, map(_overlapping, units))),
        microbatch,
        modules,
        trained,
        generator.choice([0, 1]),
        generator.choice(ORDERINGS.get(modules, ["none"])),
        overlap,
    )


def _grouped(generator: random.Random, modules: tuple[str, ...]) -> list[list[str]]:
    groups = [[modules[0]]]
    for module in modules[1:]:
        if generator.random() < 0.65:
            groups.append([])
        groups[-1].append(module)
    return groups


def _unit(generator: random.Random, modules: list[str]) -> UnitPlan:
    layers = sum(COUNTS[module] for module in modules)
    ends = sorted(generator.sample(range(1, layers), generator.choice([0, 0, 1, 2])))
    stages = [stop - start for start, stop in zip([0, *ends], [*ends, layers], strict=True)]
    made = unit(
        "".join(modules),
        modules,
        stages,
        generator.choice([1, 1, 2, 3, 4]),
        generator.choice([1, 2, 2, 4]),
    )
    return made.model_copy(update={"checkpointing": generator.random() < 0.25})


def _overlapping(one: UnitPlan) -> UnitPlan:
    """Two units of three compute weights' gradients later (of those that do not recompute), and
    overlap their TP groups' messages."""
    generator = random.Random(repr(one))
    one = one.model_copy(update={"tp_overlap": one.tp > 1 and generator.random() < 2 / 3})
    if one.checkpointing or generator.random() < 1 / 3:
        return one
    delays = [generator.choice([0, 0, 1, 2, 5]) for _ in range(one.pp)]
    return one.model_copy(update={"weight_delay": delays})


def _dealt(one: UnitPlan) -> UnitPlan:
    """The unit with modules whole on every rank of a TP group: half of those that lie beside the
    LLM, on one stage."""
    generator, stop, whole = random.Random(repr(one)), 0, list[str]()
    ends = set(accumulate(one.layers_per_stage))
    for name in one.modules:
        start, stop = stop, stop + COUNTS[name]
        if name != LLM and not ends & set(range(start + 1, stop)) and generator.random() < 0.5:
            whole.append(name)
    divides = one.tp > 1 and LLM in one.modules
    return one.model_copy(update={"module_tp": dict.fromkeys(whole, 1) if divides else {}})


def _three(
    encoder: tuple[int, int], llm: tuple[int, int], generator: tuple[int, int]
) -> tuple[UnitPlan, ...]:
    """Units of their own, each with (TP, DP)."""
    return tuple(
        unit(name, [name], [COUNTS[name]], dp, tp)
        for name, (tp, dp) in zip(EVERYTHING, (encoder, llm, generator), strict=True)
    )


#: Replicas that do not divide each other's, every layer group on a stage of its own, and stages of
#: encoder and LLM between those of others.
NAMED = [
    Case(_three((2, 1), (1, 3), (1, 3))),
    Case(
        (
            unit("e", [ENCODER], [1, 3], 1, 2),
            unit("l", [LLM], [2, 3], 1, 1),
            unit("g", [GENERATOR], [8], 1, 2),
        ),
        2,
    ),
    Case((unit("all", list(EVERYTHING), [3, 9, 1, 4], 1, 2),), 3),
    Case((unit("all", list(EVERYTHING), [2, 2, 2, 2, 2, 2, 2, 3]),)),
    Case(_three((1, 1), (1, 2), (1, 5))),
]


def _all_cases() -> dict[str, Case]:
    """The named ones, and of the draws, tied or not, those that bring most new pairs."""
    generator = random.Random(SEED)
    drawn = [draw(generator) for _ in range(POOL)]
    pool = {one.name: one for one in [*drawn, *(replace(one, tied=True) for one in drawn[::2])]}
    cases = {one.name: one for one in NAMED}
    seen = set[Any]().union(*(one.pairs for one in NAMED))
    new = {name: one.pairs - seen for name, one in pool.items()}
    while len(cases) < len(NAMED) + DRAWN:
        name = max(new, key=lambda name: len(new[name]))
        cases[name] = pool[name]
        new = {other: pairs - cases[name].pairs for other, pairs in new.items()}
    return cases


CASES = _all_cases()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Eight ranks train every case, a third of them in each launch; every model is trained alone
    once too."""
    folder = tmp_path_factory.mktemp("matrix")
    write_sample_data(folder / "data")
    texts = [
        interleaved(f"{n:03d}", text(f"Text {n}: " + "no image here, only words. " * 8))
        for n in range(200)
    ]
    write_tar(folder / "data" / "interleaved" / "text.tar", texts)
    written: dict[Any, Run] = {}
    cases = []
    for name, case in CASES.items():
        key = (*case.model, case.zero_stage, case.ordering)
        if key not in written:
            written[key] = _run(folder / f"run-{len(written)}", folder / "data", case)
        plan = plan_of(written[key], list(case.units), case.microbatch, case.overlap)
        cases.append((name, written[key], plan))
    for first in range(LAUNCHES):
        train(cases[first::LAUNCHES], STEPS, folder, timeout_s=1200)
    models = {
        case.model: replace(case, zero_stage=0, ordering="none", overlap=False)
        for case in CASES.values()
    }
    alone = {
        model: _run(folder / f"alone-{place}", folder / "data", case)
        for place, (model, case) in enumerate(models.items())
    }
    return {
        "out": folder / "out",
        "references": {model: reference(run, STEPS)[:2] for model, run in alone.items()},
    }


def _run(folder: Path, data: Path, case: Case) -> Run:
    run = write_run(
        folder,
        data,
        name=folder.name,
        modules=case.modules,
        tied=case.tied,
        zero_stage=case.zero_stage,
        ordering=case.ordering,
        global_batch_size=BATCH,
    )
    content = yaml.safe_load(run.path.read_text())
    content["model"]["trained"] = None if case.trained is None else list(case.trained)
    content["cluster"]["gpus_per_node"] = RANKS
    run.path.write_text(yaml.safe_dump(content))
    run = read_run(run.path)
    build_index(run, describe(run), silent)
    assert {
        name: [info.module for info in layer_table(run)].count(name) for name in case.modules
    } == {name: COUNTS[name] for name in case.modules}
    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_layout_equals_single_process(runs: dict[str, Any], name: str) -> None:
    check_equals(runs["out"] / name, *runs["references"][CASES[name].model])


def test_the_draws_cover_what_a_plan_may_choose() -> None:
    drawn = list(CASES.values())[len(NAMED) :]
    units = [u for case in drawn for u in case.units]
    assert len(set[Any]().union(*(case.pairs for case in CASES.values()))) > 1100
    assert (
        {u.tp for u in units} == {1, 2, 4}
        and len({u.dp for u in units}) > 2
        and {u.pp for u in units} == {1, 2, 3}
    )
    assert any(u.tp > 1 and u.dp > 1 and u.pp > 1 for u in units) and any(
        u.checkpointing for u in units
    )
    split = [u for u in units if u.weight_delay is not None]
    assert len(split) >= 12 and {u.tp for u in split} == {1, 2, 4} and any(u.dp > 1 for u in split)
    overlapped = [u for u in units if u.tp_overlap]
    assert {u.tp for u in overlapped} == {2, 4} and any(u.checkpointing for u in overlapped)
    assert any(u in overlapped for u in split) and any(u.tp > 1 for u in units if not u.tp_overlap)
    dealt = [u for u in units if u.module_tp]
    assert {name for u in dealt for name in u.module_tp} >= {ENCODER, GENERATOR}
    assert any(u.dp > 1 for u in dealt) and any(u.pp > 1 for u in dealt)
    assert {case.zero_stage for case in drawn} == {0, 1}
    overlapping = [case for case in drawn if case.overlap]
    assert 8 <= len(overlapping) < len(drawn) - 5
    beside = [(case.zero_stage, u) for case in overlapping for u in case.units if u.dp > 1]
    assert {zero for zero, _ in beside} == {u.weight_delay is None for _, u in beside} == {0, 1}
    assert any(u.tp > 1 for _, u in beside)
    assert {case.ordering for case in drawn} == {"none", "paper", "best"}
    assert {len(case.units) for case in drawn} == {1, 2, 3, 4} and {
        case.trained for case in drawn
    } > {None}
    assert len({case.modules for case in drawn}) == 4
    tied = [case for case in CASES.values() if case.tied]
    assert {case.apart for case in tied} == {True, False}
    trained = [case for case in tied if case.apart and case.trained != ("projectors",)]
    of_llm = [next(u for u in case.units if LLM in u.modules) for case in trained]
    assert any(u.tp > 1 for u in of_llm) and any(u.dp > 1 for u in of_llm)
    assert any(u.weight_delay is not None for u in of_llm)
    assert {case.overlap for case in trained} == {case.zero_stage for case in trained} == {0, 1}

"""Messages of all ranks go together: over layouts that tests train, over drawn plans, and on 1,296
ranks."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from disttrain_cli.api.presets import preset_text
from disttrain_cli.data.indexing.building import open_index
from disttrain_cli.data.ordering.orders import Orders
from disttrain_cli.models.graph import describe
from disttrain_cli.runtime.messages.hollow import record_steps
from disttrain_cli.runtime.messages.proof import faults
from disttrain_cli.spec.plan import Layout
from disttrain_cli.spec.runfile import read_run
from disttrain_cli.spec.stage_graph import stage_graph
from tests.runtime import test_equivalence, test_equivalence_matrix, test_several_of_a_kind
from tests.runtime.factory import plan_of, unit
from tests.runtime.messages.drawing import (
    EYE,
    FIRST,
    LLM,
    MOST_RANKS,
    OTHER_EYE,
    SECOND,
    Drawn,
    draw,
    step_of,
    write_model,
    write_models,
)
from tests.runtime.messages.test_exchanges import as_messages

PLANS = 40  # 500 of them take six minutes; they were proven when the order was made


def _trained_layouts(folder: Path) -> list[Drawn]:
    """Every layout that the equivalence tests train, with data of its own."""
    generator = random.Random(0)
    three = write_model(folder / "three", (EYE, LLM, FIRST))
    cases = [
        (three, units, microbatch)
        for units, microbatch in test_equivalence._layouts(three).values()
    ]
    two = write_model(folder / "two", (EYE, LLM, FIRST, SECOND))
    cases += [(two, units, 1) for units in test_several_of_a_kind._layouts(two).values()]
    seeing = write_model(folder / "seeing", (EYE, OTHER_EYE, LLM))
    cases += [(seeing, units, 1) for units in test_several_of_a_kind._seeing(seeing).values()]
    for number, case in enumerate(test_equivalence_matrix.CASES.values()):
        cases.append(
            (
                write_model(folder / str(number), case.modules, case.trained, tied=case.tied),
                list(case.units),
                case.microbatch,
            )
        )
    return [
        step_of(
            f"{units}, {overlap}", run, plan_of(run, units, microbatch, overlap).plan, generator
        )
        for overlap in (False, True)
        for run, units, microbatch in cases
    ]


@pytest.mark.slow
def test_layouts_that_tests_train(tmp_path: Path) -> None:
    steps = _trained_layouts(tmp_path)
    assert len(steps) >= 78
    assert {one.name: found for one in steps if (found := faults(one.records()))} == {}


@pytest.mark.slow
def test_drawn_plans(tmp_path: Path) -> None:
    runs, most = write_models(tmp_path), 0
    for seed in range(PLANS):
        one = draw(runs, seed)
        most = max(most, one.graph.world_size)
        records = one.records()
        assert (one.name, faults(records)) == (one.name, [])
        if any(unit.ep > 1 for unit in one.layout.units):  # also as messages of any size
            assert (one.name, faults(list(map(as_messages, records)))) == (one.name, [])
    assert most == MOST_RANKS


@pytest.mark.slow
def test_the_largest_preset_on_1296_ranks(tmp_path: Path) -> None:
    """As it is planned; every rank of it, in as many slots as fill its pipeline and empty it
    again."""
    (tmp_path / "disttrain.yaml").write_text(preset_text("mllm-72b"))
    run = read_run(tmp_path / "disttrain.yaml")
    units = [
        unit(EYE, [EYE], [17, 17], 108),
        unit(LLM, [LLM], [17, 16, 16, 16, 17], 48, tp=4),
        unit(FIRST, [FIRST], [13], 120),
    ]
    layout = Layout(
        global_batch_size=1920, microbatch_size=1, microbatches=40, gpus_used=1296, units=units
    )
    graph = stage_graph(layout, "llm")
    packed = run.file.model_copy(
        update={"train": run.file.train.model_copy(update={"ordering": "none"})}
    )
    order, _ = Orders(packed, layout, open_index(run, describe(run))).of(0)
    records = list(record_steps(run, graph, replace(order, slots=order.slots[:10]), overlap=True))
    assert len(records) == 1296 and sum(len(record.operations) for record in records) > 100_000
    assert faults(records) == []

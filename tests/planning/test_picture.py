"""Pictures of a predicted step: valid, small, and true to the timeline."""

import dataclasses
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain_cli.costs.overlap import Hidden
from disttrain_cli.planning.picture import MOST_ROWS, gantt, rows_of, seconds, stretches, svg
from disttrain_cli.simulation.pipeline import simulate
from disttrain_cli.simulation.timeline import Pipeline
from disttrain_cli.spec.plan import Layout, UnitPlan
from disttrain_cli.spec.trace import BACKWARD, FORWARD


def made(shapes: list[tuple[int, int]], slots: int, step_s: float = 0.1) -> tuple[Pipeline, Layout]:
    """A layout of units of (DP, PP), every forward 1 s and every backward 2 s on replica 0, half
    that on others."""
    units = [
        UnitPlan(
            name=f"unit{n}",
            modules=[f"m{n}"],
            dp=dp,
            pp=pp,
            gpus=dp * pp,
            layers_per_stage=[1] * pp,
        )
        for n, (dp, pp) in enumerate(shapes)
    ]
    layout = Layout(
        global_batch_size=slots,
        microbatch_size=1,
        microbatches=slots,
        gpus_used=sum(unit.gpus for unit in units),
        units=units,
    )
    replicas = np.array([unit.dp for unit in units for _ in range(unit.pp)])
    entry = np.array([stage == 0 for unit in units for stage in range(unit.pp)])
    speed = np.where(np.arange(replicas.max()) == 0, 1.0, 0.5)
    forward = np.broadcast_to(speed, (slots, len(replicas), replicas.max())).copy()
    cuts = tuple(pairwise(range(len(replicas))))
    return Pipeline(
        replicas,
        entry,
        cuts,
        forward,
        2 * forward,
        np.zeros(len(replicas) - 1),
        np.full(len(replicas), 0.5),
        step_s,
    ), layout


def bars(document: str, kind: str) -> int:
    """Bars of one kind, without the one of the legend."""
    root = ET.fromstring(document)
    paths = root.findall("{http://www.w3.org/2000/svg}path")
    return (
        sum(path.attrib["d"].count("M") for path in paths if path.attrib.get("class") == kind) - 1
    )


def test_svg_draws_every_operation_of_a_short_step_once() -> None:
    pipeline, layout = made([(2, 1), (1, 3), (3, 1)], slots=4)
    document = svg(pipeline, simulate(pipeline), layout)
    assert bars(document, "f") == bars(document, "b") == 5 * 4
    assert bars(document, "r") == bars(document, "o") == 5
    for word in (
        "unit0 ×2",
        "unit1 2/3",
        "unit2 ×3",
        "4 slots",
        "8 GPUs",
        "prefers-color-scheme",
        "waiting",
    ):
        assert word in document
    assert "<script" not in document and "http" not in document.replace(
        "http://www.w3.org/2000/svg", ""
    )


def test_encoders_side_by_side_start_at_the_same_time() -> None:
    pipeline, layout = made([(2, 2), (1, 1), (1, 1), (1, 1)], slots=3)
    pipeline = replace(pipeline, cuts=((0, 1), (1, 3), (2, 3), (3, 4)))
    rows = rows_of(pipeline, simulate(pipeline), layout)
    assert [row.label for row in rows] == [
        "unit0 1/2 ×2",
        "unit0 2/2 ×2",
        "unit1",
        "unit2",
        "unit3",
    ]
    assert [row.forward[0, 0] for row in rows] == [0.0, 1.0, 0.0, 2.0, 3.0]


def test_a_long_step_is_its_beginning_middle_and_end_and_stays_small() -> None:
    pipeline, layout = made([(1, 2), (1, 40), (1, 1)], slots=1920)
    timeline = simulate(pipeline)
    document = svg(pipeline, timeline, layout)
    ET.fromstring(document)
    assert len(document) < 300_000
    assert "Drawn: the beginning, the middle and the end" in document
    rows = rows_of(pipeline, timeline, layout)
    assert len(rows) <= MOST_ROWS + 2 and {row.unit for row in rows} == {"unit0", "unit1", "unit2"}
    assert {"unit1 1/40", "unit1 40/40"} <= {row.label for row in rows}
    first, middle, last = stretches(rows, timeline.iteration_s, 4800)
    assert (
        first[0] == 0
        and last[1] == timeline.iteration_s
        and first[1] < middle[0] < middle[1] < last[0]
    )


def test_rows_show_the_busiest_replica() -> None:
    pipeline, layout = made([(3, 1)], slots=2)
    row = rows_of(pipeline, simulate(pipeline), layout)[0]
    assert (row.forward[:, 1] - row.forward[:, 0]).tolist() == [1.0, 1.0]


def test_names_are_escaped() -> None:
    pipeline, layout = made([(1, 1)], slots=1)
    unit = layout.units[0].model_copy(update={"name": "a<b&c"})
    ET.fromstring(svg(pipeline, simulate(pipeline), layout.model_copy(update={"units": [unit]})))


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=3),
    st.integers(1, 60),
    st.integers(20, 160),
)
def test_gantt_fits_and_shows_every_unit(
    shapes: list[tuple[int, int]], slots: int, columns: int
) -> None:
    pipeline, layout = made(shapes, slots)
    lines = gantt(pipeline, simulate(pipeline), layout, columns)
    assert all(len(line) <= max(columns, 45) for line in lines)
    for unit in layout.units:
        assert any(line.startswith(unit.name) for line in lines)
    letters = "".join(line.split("  ", 1)[1] for line in lines[:-1])
    assert set(letters) <= set("FBR. ") and {"F", "B"} <= set(letters)


def test_weights_parts_are_drawn_between_backward_and_reduction() -> None:
    pipeline, layout = made([(1, 1), (1, 1)], slots=2, step_s=0.0)
    split = dataclasses.replace(
        pipeline, weight_s=2.0 * pipeline.forward_s, weight_delay=np.array([0, 1])
    )
    timeline = simulate(split)
    row = rows_of(split, timeline, layout)[1]
    assert row.weights[0, 0] >= row.backward[1, 1]  # a slot later
    assert row.reduction[0, 0] == row.weights[1, 1]
    assert any("W" in line for line in gantt(split, timeline, layout, columns=80))
    assert 'class="g"' in svg(split, timeline, layout)
    assert 'class="g"' not in svg(pipeline, simulate(pipeline), layout)


def test_what_is_left_of_messages_behind_passes_is_drawn_at_the_ends() -> None:
    pipeline, layout = made([(1, 1), (1, 1)], slots=2)
    first, last = (
        Hidden(np.full(2, operation), np.array([[0.3, 0.3], [1.0, 4.0]]), before, np.zeros(2))
        for operation, before in (
            (FORWARD, np.array([[0.0, 0.0], [0.5, 0.5]])),
            (BACKWARD, np.array([[0.0, 0.0], [0.5, 0.5]])),
        )
    )
    behind = dataclasses.replace(pipeline, gathering=first, reducing=last)
    timeline = simulate(behind)
    rows = rows_of(behind, timeline, layout)
    assert [row.optimizer.tolist() for row in rows] == [[[0.0, 0.5]], [[0.0, 3.5]]]
    assert rows[0].forward[0, 0] == 0.5
    for row, left_s in zip(rows, (0.3, 3.0), strict=True):
        done = row.backward[-1, 1]
        assert row.reduction.tolist() == [[done, done + left_s]]
    assert timeline.iteration_s == max(row.reduction[0, 1] for row in rows)


def test_gantt_of_one_slot_reads_as_it_happens() -> None:
    pipeline, layout = made([(1, 1), (1, 1)], slots=1, step_s=0.0)
    lines = gantt(pipeline, simulate(pipeline), layout, columns=7 + 26)
    assert lines[0].split()[1].strip(".").startswith("F") and lines[0].rstrip().endswith("R")
    assert lines[1].split()[1].startswith("...") and "FBB" in lines[1].replace("FF", "F")
    assert lines[2].split()[-2:] == ["6.5", "s"]


@pytest.mark.parametrize(
    ("value", "step", "said"),
    [
        (0.0123, None, "12.3 ms"),
        (4.867, None, "4.87 s"),
        (1234.5, None, "1234 s"),
        (2.0, 1.0, "2 s"),
        (2.5, 0.5, "2.5 s"),
        (0.02, 0.02, "20 ms"),
    ],
)
def test_times_have_units(value: float, step: float | None, said: str) -> None:
    assert seconds(value, step) == said

"""Other layouts are looked for where steps have changed, and not where they have not."""

from dataclasses import replace

import pytest

from disttrain_cli.analysis.job.database import open_database
from disttrain_cli.analysis.job.graph import build_graph
from disttrain_cli.analysis.losses import explain
from disttrain_cli.analysis.watching import remembering
from disttrain_cli.analysis.watching.remembering import SAME, KnownLayouts
from tests.analysis import synthetic


@pytest.fixture
def database(tmp_path):
    synthetic.write(tmp_path, synthetic.Synthetic())
    opened = open_database([tmp_path])
    yield opened
    opened.close()


@pytest.fixture
def asked(monkeypatch):
    """Says how often other layouts were looked for; every answer is its number."""
    answers = []

    def other_layouts(database, graph, why, moved_on):
        answers.append(len(answers))
        return answers[-1]

    monkeypatch.setattr(remembering, "other_layouts", other_layouts)
    return answers


def slower(graph, factor):
    """The same steps with all passes of one unit slower for their work."""
    times = graph.recorded.compute.copy()
    times[[unit == graph.unit[0] for unit in graph.unit]] *= factor
    return replace(graph, recorded=replace(graph.recorded, compute=times))


def test_an_answer_holds_until_a_unit_slows_or_the_data_move(database, asked):
    known, graph = KnownLayouts(), build_graph(database)

    def ask(graph, moved_on=False):
        return known(
            database, graph, explain(graph, graph.recorded.compute, graph.predicted), moved_on
        )

    assert ask(graph) == ask(graph) == ask(slower(graph, 1 + SAME / 2)) == 0
    slow = slower(graph, 1 + 2 * SAME)
    # asked in turn of steps with a fault and without it, it knows both
    assert [ask(slow), ask(graph), ask(slow), ask(graph)] == [1, 0, 1, 0]
    assert [ask(slow, moved_on=True), ask(slow)] == [2, 1]
    known.forget()
    assert ask(slow) == 3
    database.run = "another start"
    assert ask(slow) == 4 and asked == [0, 1, 2, 3, 4]

"""The replay engine against the recursion that it stands for."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain_cli.analysis.walk import walk_of


@st.composite
def graphs(draw):
    """(previous, sources, time, lag) of nodes that depend on earlier ones, numbered at random."""
    count = draw(st.integers(1, 12))
    previous = [draw(st.integers(-1, node - 1)) for node in range(count)]
    sources = [
        draw(st.lists(st.integers(0, node - 1), unique=True)) if node else []
        for node in range(count)
    ]
    number = draw(st.permutations(range(count)))
    time, lag = (
        np.array(
            draw(st.lists(st.integers(0, 9), min_size=2 * count, max_size=2 * count)), dtype=float
        ).reshape(count, 2)
        for _ in range(2)
    )
    moved = np.empty(count, dtype=np.int64)
    moved[list(number)] = [number[node] if node >= 0 else -1 for node in previous]
    fed = [np.empty(0, dtype=np.int64)] * count
    for node, own in enumerate(sources):
        fed[number[node]] = np.array([number[source] for source in own], dtype=np.int64)
    return moved, fed, time, lag


@settings(deadline=None, max_examples=50)
@given(graph=graphs(), data=st.data())
def test_ends_are_those_of_the_recursion(graph, data):
    previous, sources, time, lag = graph
    feeds = (
        [
            np.array(
                data.draw(st.lists(st.booleans(), min_size=2 * len(own), max_size=2 * len(own))),
                dtype=bool,
            ).reshape(len(own), 2)
            for own in sources
        ]
        if data.draw(st.booleans())
        else None
    )
    walk = walk_of(previous, sources, feeds)
    found = walk.ends(time[walk.node], lag[walk.node])

    def end(node):
        before = end(previous[node]) if previous[node] >= 0 else np.zeros(2)
        ends = [
            end(source) if feeds is None else np.where(feeds[node][place], end(source), -np.inf)
            for place, source in enumerate(sources[node])
        ]
        return np.max([before + lag[node], *ends], axis=0) + time[node]

    for place, node in enumerate(walk.node):
        assert found[place] == pytest.approx(end(node))


def test_what_waits_for_itself_cannot_be_walked():
    assert walk_of(np.array([1, 0]), [np.empty(0, dtype=np.int64)] * 2) is None

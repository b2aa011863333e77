"""Who fed whom, step by step, by what ranks recorded of their messages."""

import numpy as np
import pytest

from disttrain_cli.analysis.job.database import open_database
from disttrain_cli.analysis.job.graph import _messages, build_graph
from tests.analysis import synthetic

NAN = np.nan
#: Two replicas of a stage feed two of the next unit; of their TP groups the first rank is recorded.
COLUMNS = {
    "depth": np.array([0, 0, 1, 1]),
    "replica": np.array([0, 1, 0, 1]),
    "rank": np.array([0, 2, 4, 6]),
}


def met(sent_bytes, sent_peer, received_bytes, received_peer):
    """Whether passes 0 and 1 can have fed pass 2, [2, steps], of values [steps] for each of the
    four passes."""
    given = {
        "sent_bytes": sent_bytes,
        "sent_peer": sent_peer,
        "received_bytes": received_bytes,
        "received_peer": received_peer,
    }
    table = {name: np.array(values, dtype=float).reshape(4, -1) for name, values in given.items()}
    return _messages(COLUMNS, table)(np.array([0, 1]), 2).tolist()


def test_who_sends_nothing_or_to_another_feeds_nobody_else():
    steps = met(
        sent_bytes=[[8, 8, 0], [8, 8, 8], [NAN] * 3, [NAN] * 3],
        sent_peer=[
            [4, 7, -1],
            [-1, 5, 4],
            [NAN] * 3,
            [NAN] * 3,
        ],  # 5 and 7: of the TP groups of 4 and 6
        received_bytes=[[NAN] * 3, [NAN] * 3, [8] * 3, [8] * 3],
        received_peer=[[NAN] * 3] * 2 + [[-1] * 3] * 2,
    )
    assert steps == [[True, False, False], [True, True, True]]


def test_who_receives_nothing_or_from_another_is_not_fed():
    steps = met(
        sent_bytes=[[8] * 3] * 2 + [[NAN] * 3] * 2,
        sent_peer=[[-1] * 3] * 2 + [[NAN] * 3] * 2,
        received_bytes=[[NAN] * 3, [NAN] * 3, [8, 8, 0], [8] * 3],
        received_peer=[[NAN] * 3, [NAN] * 3, [3, -1, -1], [-1] * 3],
    )
    assert steps == [[False, True, False], [True, True, False]]


@pytest.mark.parametrize("size", [0.0, NAN])
def test_what_was_not_recorded_is_no_contradiction(size):
    assert met(*[[[size]] * 4, [[NAN]] * 4] * 2) == [[True], [True]]


def test_the_recorded_steps_replay_as_they_were(tmp_path):
    synthetic.write(tmp_path, synthetic.Synthetic(steps=4, slow_rank={3: 1.4}))
    graph = build_graph(open_database([tmp_path]))
    assert graph.replay(graph.recorded) == pytest.approx(graph.window, rel=1e-6)

"""The benchmarks run in their smallest form and print what they measured; no figure of time is judged."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import common, decode, levelling, planner, strategies

ROOT = Path(__file__).parent.parent


def only(tables):
    """The rows of the only table."""
    (rows,) = tables.values()
    return rows


def test_calls_alternate_and_the_first_round_is_not_counted():
    order, now = [], iter(range(100))
    seconds = common.alternate({name: lambda name=name: order.append(name) for name in "AB"}, 2, lambda: next(now))
    assert "".join(order) == "ABABAB" and {name: len(own) for name, own in seconds.items()} == {"A": 2, "B": 2}
    assert common.paired_ratio([2.0, 9.0, 8.0], [1.0, 3.0, 2.0]) == 3.0


def test_decode():
    for rows in decode.measure(small=True).values():
        assert [row["way"] for row in rows][:3] == ["disttrain", "bare loop", "Pillow"]
        assert all(row["ms per image"] > 0 for row in rows)


def test_pillow_and_disttrain_prepare_the_same_image():
    data = decode.picture(quality=90)
    ours = decode.decode_image(data, decode.GRID, decode.IMAGE)
    theirs = decode.normalised(decode.pillow(data))
    assert ours.shape == theirs.shape and abs(ours - theirs).mean() < 0.05


def test_levelling_by_images_is_never_worse_than_by_sequences():
    rows = only(levelling.measure(small=True))
    assert [row["DP"] for row in rows[:3]] == [2, 4, 8] and rows == only(levelling.measure(small=True))
    for row in rows:
        assert 1 <= row["images (disttrain)"] <= row["sequences levelled"] <= row["sequences in order"]


def test_synthetic_sizes_have_the_stated_marginals():
    import numpy as np

    short = levelling.sizes(200_000, np.random.default_rng(1)).min(axis=1)
    for pixels, millions in ((256, 211), (512, 67), (1024, 9.6)):
        assert 413 * (short >= pixels).mean() == pytest.approx(millions, rel=0.06)


def test_planner_has_no_gap_to_brute_force():
    search, simulation, gaps = planner.measure(small=True).values()
    assert search[0]["GPUs"] == 6 and simulation[0]["slots"] >= 1
    assert all(abs(float(row["gap"])) < 1e-9 for row in gaps)


def test_the_command_prints_tables_or_one_document():
    command = [sys.executable, "-m", "benchmarks.planner", "--small"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    document = json.loads(subprocess.run([*command, "--json"], cwd=ROOT, capture_output=True, check=True).stdout)
    assert all(title in shown for title in document) and "| costs" in shown


@pytest.mark.slow
def test_strategies():
    steps, ratio = strategies.measure(small=True).values()
    assert [row["strategy"] for row in steps] == list(strategies.STRATEGIES)
    assert all(row["measured"] > 0 and row["predicted"] > 0 for row in steps) and ratio[0]["measured"] > 0

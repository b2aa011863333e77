"""Who a job that hangs waits for, from its dumps; torch's own analyzer says the same where it says
anything."""

import argparse
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from disttrain_cli.analysis.flight.verdict import Dumped, analyze_dumps
from disttrain_cli.analysis.formats import find_format
from tests.analysis.flight.recorded import entry, message, write
from tests.commands.test_train import call

REPLICAS = ("1", "replicas of llm stage 0")
GROUPS = {"0": ("default_pg", range(4)), "1": (REPLICAS[1], [1, 3])}
STARTED = {"state": "started"}


def cases() -> dict[str, tuple[list[list[dict[str, Any]]], dict[str, Any]]]:
    """Dumps by rank, and what is to be said: cause, ranks, group, number."""
    done = [entry(0), entry(1)]
    join = entry(2, "all_reduce", **STARTED)
    other = entry(2, "broadcast", **STARTED)
    longer = entry(2, "all_reduce", sizes=(8,), **STARTED)
    half = entry(2, "all_reduce", dtype="Half", **STARTED)
    return {
        "one is missing": (
            [[*done, join], [*done, join], done, [*done, join]],
            {"cause": "missing", "ranks": [2], "number": 2},
        ),
        "the first is missing": (
            [done, [*done, join], [*done, join], [*done, join]],
            {"cause": "missing", "ranks": [0], "number": 2},
        ),
        "another operation": (
            [[*done, join], [*done, join], [*done, other], [*done, join]],
            {"cause": "other operation", "ranks": [2], "number": 2},
        ),
        "another size": (
            [[*done, join], [*done, join], [*done, join], [*done, longer]],
            {"cause": "other size", "ranks": [3], "number": 2},
        ),
        "another dtype": (
            [[*done, join], [*done, half], [*done, join], [*done, join]],
            {"cause": "other dtype", "ranks": [1], "number": 2},
        ),
        "not started by one": (
            [[*done, join]] * 3 + [[*done, entry(2, state="scheduled")]],
            {"cause": "not started", "ranks": [3], "number": 2},
        ),
        "the network": (
            [[*done, join]] * 4,
            {"cause": "not finished", "ranks": [0, 1, 2, 3], "number": 2},
        ),
        "all is well": ([done] * 4, {"cause": "nothing pending", "ranks": [], "number": None}),
    }


def judged(folder: Path, ranks: list[list[dict[str, Any]]], **more: Any) -> Dumped:
    return analyze_dumps(write(folder, ranks, **more))


@pytest.mark.parametrize("form", ["pickle", "json"])
@pytest.mark.parametrize("case", cases())
def test_the_cause_is_named(tmp_path: Path, case: str, form: str) -> None:
    ranks, said = cases()[case]
    found = judged(tmp_path, ranks, form=form)
    verdict = found.verdict
    assert (verdict.cause, verdict.ranks) == (said["cause"], said["ranks"]), verdict.sentence
    assert (verdict.row and verdict.row.sequence) == said["number"]
    assert not found.without_dump and not found.warnings


@pytest.mark.parametrize("case", cases())
def test_torchs_analyzer_says_the_same(tmp_path: Path, case: str) -> None:
    """Which collective is the first that is wrong, who is missing, and who has another one."""
    builder = pytest.importorskip("torch.distributed.flight_recorder.components.builder")
    ranks, _ = cases()[case]
    files = write(tmp_path, ranks)
    details = {
        file.name: pickle.loads(file.read_bytes()) | {"rank": rank}
        for rank, file in enumerate(files)
    }
    asked = argparse.Namespace(
        verbose=False, just_print_entries=False, allow_incomplete_ranks=True, mismatch_cap=10
    )
    wrong = [
        one
        for one in builder.build_db(details, asked, "2.10").collectives
        if not one.pass_check or one.missing_ranks
    ]
    own = [row for row in analyze_dumps(files).collectives if row.problem != "not finished"]
    assert bool(wrong) == bool(own)  # what all have joined alike it does not mention
    if own:
        (row,) = own
        assert wrong[0].collective_seq_id == row.sequence
        others = wrong[0].missing_ranks or {*(wrong[0].mismatch_collectives or {})}
        assert others == {*row.ranks}
        if row.problem.startswith("other"):
            kinds = {
                "other operation": "COLLECTIVE_TYPE_MISMATCH",
                "other size": "SIZE_OR_SYNTAX_MISMATCH",
                "other dtype": "COLLECTIVE_DTYPE_MISMATCH",
            }
            (one,) = wrong[0].mismatch_collectives.values()
            assert one.type_of_mismatch.state.name == kinds[row.problem]


def test_a_rank_that_waits_elsewhere_is_not_the_cause(tmp_path: Path) -> None:
    """0 and 2 wait for 1 and 3 in the world; 1 waits for 3 among the replicas; 3 for nobody."""
    world = entry(0, **STARTED)
    replicas = entry(0, "_reduce_scatter_base", group=REPLICAS, sizes=(8,), output=(4,), **STARTED)
    found = judged(tmp_path, [[world], [replicas], [world], []], groups=GROUPS)
    assert (found.verdict.cause, found.verdict.ranks) == ("missing", [3])
    assert found.verdict.row is not None
    assert {row.group for row in found.collectives} == {"the world", REPLICAS[1]}
    assert [place.waits_for for place in found.places] == [[1, 3], [3], [1, 3], []]
    assert found.places[0].line == "/home/me/train.py:40 (train)"


def test_ranks_that_wait_in_a_circle_are_named(tmp_path: Path) -> None:
    world, replicas = entry(0, **STARTED), entry(0, group=REPLICAS, **STARTED)
    groups = {"0": ("default_pg", [0, 1]), "1": (REPLICAS[1], [0, 1])}
    found = judged(tmp_path, [[world], [replicas]], groups=groups)
    assert (found.verdict.cause, found.verdict.ranks) == ("circle", [0, 1])


def test_a_message_that_nobody_answers_names_its_peer(tmp_path: Path) -> None:
    groups = {"0": ("default_pg", range(4)), "1": ("encoder to llm", [1, 3])}
    to_llm = ("1", "encoder to llm")
    sent = message(1, "send 0->1", group=to_llm)  # of the group: 1 to 3
    found = judged(tmp_path / "a", [[], [sent], [], []], groups=groups)
    assert (found.verdict.cause, found.verdict.ranks) == ("message", [3])
    taken = message(1, "recv 1<-0", group=to_llm)
    found = judged(tmp_path / "b", [[], [sent], [], [taken]], groups=groups)
    assert not any(place.waits_for for place in found.places)


@pytest.mark.parametrize(
    ("dumps", "sentence"),
    [
        ("jd", "Rank 1 has not joined all_reduce number 2 of the world, in which rank 0 waits;"),
        (
            "jdd",
            "Ranks 1 and 2 have not joined all_reduce number 2 of the world, in which rank 0 w",
        ),
        (
            "djj",
            "Rank 0 has not joined all_reduce number 2 of the world, in which ranks 1 and 2 wa",
        ),
        ("js", "rank 1 has not started it: the device is busy"),
        ("jss", "ranks 1 and 2 have not started it: their devices are busy"),
        ("jo", "number 2 of the world: rank 0: all_reduce; rank 1: broadcast"),
        ("jjo", "number 2 of the world: ranks 0 and 1: all_reduce; rank 2: broadcast"),
        ("mn", "Rank 1 does not answer messages that rank 0 waits for;"),
        ("d", "Nothing is pending in 1 dump"),
        ("dd", "Nothing is pending in 2 dumps"),
    ],
)
def test_verbs_agree_with_the_number_of_ranks(tmp_path: Path, dumps: str, sentence: str) -> None:
    done = [entry(0), entry(1)]
    last = {
        "d": [],
        "j": [entry(2, **STARTED)],
        "s": [entry(2, state="scheduled")],
        "o": [entry(2, "broadcast", **STARTED)],
    }
    ranks = [[*done, *last[one]] for one in dumps if one in last]
    if dumps == "mn":
        ranks = [[message(1, "send 0->1")], []]
    groups = {"0": ("default_pg", range(len(ranks)))}
    assert sentence in judged(tmp_path, ranks, groups=groups).verdict.sentence


def test_what_the_buffer_has_dropped_is_not_missed(tmp_path: Path) -> None:
    """Rank 1's buffer begins later: its first collectives are not missing."""
    late = [entry(sequence) for sequence in range(5, 8)]
    ranks = [[entry(sequence) for sequence in range(8)], late]
    assert not judged(tmp_path, ranks, first=[0, 5]).collectives


def test_ranks_without_a_dump_are_told(tmp_path: Path) -> None:
    files = write(tmp_path, [[entry(0, **STARTED)]] * 4)
    for lacking, dump in ([3], "is no dump of rank 3"), ([2, 3], "are no dumps of ranks 2 and 3"):
        found = analyze_dumps(files[: lacking[0]])
        assert found.without_dump == lacking and found.verdict.cause == "unknown"
        row = found.verdict.row
        assert row is not None and row.problem == "no dump"
        assert found.verdict.ranks == row.ranks == lacking
        assert dump in found.verdict.sentence and dump[-6:] in found.verdict.next_step
    assert "without a dump" not in analyze_dumps(files).verdict.sentence


def test_the_newest_of_several_versions_counts_by_its_numbers(tmp_path: Path) -> None:
    older, newer = write(tmp_path, [[entry(0, **STARTED)]] * 2, form="json")
    older.write_text(older.read_text().replace('"2.10"', '"2.9"'))
    found = analyze_dumps([older, newer])
    assert found.version == "2.10" and "dumps of several versions: 2.9, 2.10" in found.warnings


def test_gloo_tells_no_states_and_no_ranks(tmp_path: Path) -> None:
    """As torch 2.13 writes them: always scheduled, retired at their end, groups without ranks."""
    done = entry(1, backend="gloo", state="scheduled", retired=True)
    here = entry(2, backend="gloo", state="scheduled")
    groups: dict[str, Any] = {"": ("", [])}
    found = judged(tmp_path, [[done, here], [done, here], [done]], groups=groups)
    assert (found.verdict.cause, found.verdict.ranks) == ("missing", [2])


def test_the_command_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "dumps"
    write(folder, cases()["one is missing"][0])
    (folder / "notes.txt").write_text("ours")
    dumps = find_format([folder])
    assert (dumps.format, len(dumps.files), dumps.said) == ("flight recorder", 4, [])
    code, out, _ = call(["analyze", folder], capsys)
    assert code == 0 and out.startswith(
        "Rank 2 has not joined all_reduce number 2 of the world, in which ranks 0, 1 and 3 wait;"
        " rank 2 last ran all_reduce of the world."
    )
    assert "train.py:42" in out
    code, out, _ = call(["analyze", folder / "nccl_trace_rank_0", "--json", "--quiet"], capsys)
    document = json.loads(out)
    assert document["format"] == "flight recorder" and document["without_dump"] == [1, 2, 3]
    assert {*document["verdict"]} == {"cause", "sentence", "ranks", "row", "next_step"}
    for option in (["--html", "x"], ["--sql", "SELECT 1"], ["--fail-if", "job.ranks > 1"]):
        code, _, err = call(["analyze", folder, *option], capsys)
        assert code == 2 and f"{option[0]} needs traces" in err
    (folder / "trace.json").write_text('{"traceEvents": []}')
    assert find_format([folder]).said[0].startswith("trace.json in the same folder left out")
    code, _, err = call(["analyze", tmp_path, "--compare", folder], capsys)
    assert code == 1 and "Traceback" not in err

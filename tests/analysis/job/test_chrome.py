"""Own traces as Chrome JSON: every operation, arrows from sends to receives, counters; whole steps,
bounded."""

import gzip
import json
from collections import Counter

import pytest

from disttrain_cli.analysis.analyze import analyze, ask
from disttrain_cli.analysis.job.chrome import write_chrome_trace
from disttrain_cli.analysis.job.database import open_database
from disttrain_cli.errors import DataError, SpecError, UsageError
from tests.analysis import synthetic
from tests.cases import first_fast


@pytest.fixture(scope="module")
def written(clean, tmp_path_factory):
    """(what was written, its document, the truth) of the clean run."""
    out = tmp_path_factory.mktemp("chrome") / "trace.json"
    return write_chrome_trace(open_database([clean[0]]), out), json.loads(out.read_text()), clean[2]


def test_every_operation_of_the_measured_steps_is_there(written):
    result, document, truth = written
    events = document["traceEvents"]
    rows = [
        row for row in truth.rows if row["step"] in result.steps and row["operation"] != "memory"
    ]
    drawn = [event for event in events if event["ph"] == "X" and event["cat"] != "iteration"]
    assert (
        result.steps == list(range(2, 8))
        and len(drawn) == len(rows)
        and result.events == len(events)
    )
    assert sum(event["dur"] for event in drawn) == pytest.approx(
        sum(r["end_ns"] - r["start_ns"] for r in rows) / 1e3
    )
    row = next(row for row in rows if row["operation"] == "backward" and row["rank"] == 3)
    ts = (row["start_ns"] - document["baseTimeNanoseconds"]) / 1e3
    event = next(
        e for e in drawn if (e["tid"], e["ts"], e["cat"]) == (3, pytest.approx(ts), "backward")
    )
    assert event["args"]["step"] == row["step"] and event["args"]["tokens"] == row["tokens"]
    tracks = {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    assert tracks == {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["encoder", "llm", "generator", "job"]


def test_events_have_what_the_format_asks(written):
    for event in written[1]["traceEvents"]:
        assert (
            event["ph"] in "XMCsf"
            and isinstance(event["name"], str)
            and event["ts"] >= 0
            and "pid" in event
        )
        assert event["ph"] != "X" or event["dur"] >= 0
        assert event["ph"] != "f" or event["bp"] == "e"
        assert event["ph"] != "C" or all(
            isinstance(value, int | float) for value in event["args"].values()
        )


def test_an_arrow_leads_from_the_send_to_the_receive_that_waited_for_it(written):
    events = written[1]["traceEvents"]
    tails, heads = (
        {event["id"]: event for event in events if event["ph"] == phase} for phase in "sf"
    )
    receives = [
        event for event in events if event["ph"] == "X" and event["cat"].startswith("receive")
    ]
    assert tails.keys() == heads.keys() and len(heads) == len(receives)
    bars = [event for event in events if event["ph"] == "X" and event["cat"] != "iteration"]

    def bar(end: dict) -> dict:
        """The bar that a viewer ties an arrow's end to."""
        return next(
            b
            for b in bars
            if (b["pid"], b["tid"]) == (end["pid"], end["tid"])
            and b["ts"] <= end["ts"] < b["ts"] + b["dur"]
        )

    for number in list(heads)[::37]:
        sent, received = bar(tails[number]), bar(heads[number])
        assert sent["cat"] == received["cat"].replace("receive", "send")
        assert (
            sent["args"]["slot"] == received["args"]["slot"]
            and sent["ts"] < received["ts"] + received["dur"]
        )


def test_counters_end_where_they_began(written):
    computing = [
        event for event in written[1]["traceEvents"] if event["name"] == "ranks that compute"
    ]
    last = {event["pid"]: event["args"]["ranks"] for event in computing}
    memory = [event for event in written[1]["traceEvents"] if event["name"] == "memory of rank 3"]
    assert len(memory) == 6 and all(event["args"]["GiB"] > 0 for event in memory)
    assert (
        last == dict.fromkeys(last, 0) and max(event["args"]["ranks"] for event in computing) == 4
    )
    assert Counter(e["name"] for e in written[1]["traceEvents"] if e["ph"] == "C")["loss"] == 6


def test_whole_steps_up_to_a_bound_compressed(clean, tmp_path):
    database = open_database([clean[0]])
    result = write_chrome_trace(database, tmp_path / "trace.json.gz", most_events=1)
    assert (result.steps, result.steps_left_out) == ([2], 7)
    assert (
        len(json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"])
        == result.events
    )
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json.gz"]


def test_a_file_that_cannot_be_written_is_an_error_with_a_next_step(clean, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecError, match="Cannot write"):
        write_chrome_trace(open_database([clean[0]]), tmp_path / "file" / "trace.json")


@pytest.mark.slow
@pytest.mark.parametrize("packed", first_fast([False, True]))
def test_what_was_written_reads_back_to_the_same_figures(clean, tmp_path, packed):
    out = tmp_path / ("trace.json.gz" if packed else "trace.json")
    write_chrome_trace(open_database([clean[0]]), out)
    own, again = (json.dumps(analyze([path]).to_json()) for path in (clean[0], out))
    own, again = json.loads(own), json.loads(again.replace(str(out), str(clean[0].parent)))
    assert (own["job"].pop("name"), again["job"].pop("name")) == (clean[0].parent.name,) * 2
    # losses are not written
    assert again.pop("learning") is None is not own.pop("learning")
    assert again == own
    question = (
        "SELECT * FROM trace WHERE step > 1 ORDER BY rank, start_ns, end_ns, operation, module,"
        " slot"
    )
    assert ask([out], question).rows == ask([clean[0]], question).rows
    with pytest.raises(UsageError):
        ask([out], "SELECT * FROM read_text('/etc/hostname')")


def test_a_damaged_file_of_ours_is_said_to_be_one(clean, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    out = tmp_path / "trace.json"
    write_chrome_trace(open_database([clean[0]]), out)
    text = out.read_text()
    for damaged in (
        text[: len(text) // 2],
        text.replace('"version": 1', '"version": 7', 1),
        text.replace('"ranks": [', '"ranking": [', 1),
        text.replace('"window_s"', '"x"', 1),
        text[: text.index('"traceEvents"')] + '"traceEvents": []}',
        text.replace('"dur":', '"dur": "x", "d":', 1),
    ):
        out.write_text(damaged)
        with pytest.raises(DataError, match="cannot be read"):
            analyze([out])


@pytest.mark.slow
def test_strange_names_stay_strings_and_the_kineto_reader_takes_the_file(tmp_path, monkeypatch):
    from disttrain_cli.analysis.kineto.database import open_kineto

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(synthetic.MODULES, "llm", 'a"b\\c\n</script>')
    truth = synthetic.write(tmp_path / "traces", synthetic.Synthetic(steps=2))
    (tmp_path / "traces" / "job.json").unlink()
    written = write_chrome_trace(open_database([tmp_path / "traces"]), tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {
        event["args"]["module"]
        for event in events
        if event["ph"] == "X" and event["cat"] == "forward"
    } >= {'a"b\\c\n</script>'}
    read = open_kineto([tmp_path / "trace.json"]).sql(
        "SELECT count(*) AS n FROM events WHERE category = 'forward'"
    )
    rows = [
        row for row in truth.rows if row["step"] in written.steps and row["operation"] == "forward"
    ]
    assert read[0]["n"] == len(rows)

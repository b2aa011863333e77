"""The output sink: what goes to stdout and stderr in each mode."""

import codecs
import json
import sys

import numpy as np
import pytest

from disttrain_cli.console import Console, format_table, nearest_letters, to_json
from disttrain_cli.spec.profile import Distribution
from disttrain_cli.spec.work import Work


def speak(console: Console) -> None:
    console.note("chatter")
    console.say("text")
    console.table("title", ["a", "b"], [["x", 1]])
    console.result({"answer": 42}, "some/path")
    console.hint("disttrain next")


@pytest.mark.parametrize("json_mode", [False, True])
@pytest.mark.parametrize("quiet", [False, True])
def test_stdout_holds_the_result_only(json_mode, quiet, capsys):
    speak(Console(json_mode=json_mode, quiet=quiet))
    shown = capsys.readouterr()
    if json_mode:
        assert json.loads(shown.out) == {"answer": 42}
    elif quiet:
        assert shown.out == "some/path\n"
    else:
        assert shown.out == "text\n\ntitle\na  b\n-  -\nx  1\n"
    assert shown.err == ("" if quiet else "chatter\n\nNext: disttrain next\n")


def test_errors_are_on_stderr_or_the_one_document(capsys):
    Console().error("what", "why\nmore", "do this")
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "Error: what\n  why\n  more\nNext: do this\n")
    Console(json_mode=True).error("what", "why", "do this", 3)
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {
        "error": {"what": "what", "why": "why", "next": "do this", "exit_code": 3}
    }
    assert shown.err == ""


def test_plain_progress_says_start_and_end_of_each_operation(capsys):
    with Console().progress() as progress:
        for done in range(1000):
            progress("reading", done, 999)
        progress("writing", 0, 0)
        progress("writing", 0, 0)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "reading  0/999" and lines[-2:] == ["reading  999/999", "writing"]
    assert len(lines) < 50


def test_progress_says_rate_and_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = ((20, 100.0), (21, 130.0), (50, 160.0), (10_000, 200.0), (10_220, 201.0))
    with Console().progress() as progress:
        for done, now_s in reports:
            monkeypatch.setattr("disttrain_cli.console.time.monotonic", lambda now_s=now_s: now_s)
            progress("reading", done, 10_220)
    assert capsys.readouterr().err.splitlines() == [
        "reading  20/10220",
        "reading  21/10220, 2/min, 84 h 59 min left",
        "reading  50/10220, 30/min, 5 h 39 min left",
        "reading  10000/10220, 99.8/s, 2 s left",
        "reading  10220/10220",
    ]


def test_quiet_progress_says_nothing(capsys):
    with Console(quiet=True).progress() as progress:
        progress("reading", 0, 10)
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_live_bar(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with Console().progress() as progress:
        progress("reading [brackets]", 1, 2)
        progress("writing", 2, 2)
    shown = capsys.readouterr()
    assert shown.out == "" and "writing" in shown.err


def test_tables_align_numbers_to_the_right():
    assert (
        format_table(["name", "n"], [["a", 1], ["bcdef", 100]])
        == "name     n\n-----  ---\na        1\nbcdef  100"
    )


def test_tables_fit_into_the_terminal(monkeypatch, capsys):
    headers = ["what is told", "n", "seconds per step and rank", "advice"]
    rows = [
        [
            "forward_of_the_encoder",
            123456,
            0.5,
            "Give it more devices, or fewer of its samples to each replica",
        ],
        ["x", 7, 12.25, ""],
    ]
    whole = format_table(headers, rows)
    assert format_table(headers, rows, 200) == whole and len(whole.splitlines()) == 4
    for width in (60, 45, 34):
        text = format_table(headers, rows, width)
        assert max(map(len, text.splitlines())) <= width
        for word in (
            *whole.split()[len(headers) :],
            "forward_of_the_encoder",
            "123456",
            "12.25",
            "replica",
        ):
            assert word.strip("-") in text
    assert "\n\n" in format_table(headers, rows, 34)  # the columns that have no room, below
    monkeypatch.setenv("COLUMNS", "60")
    Console().table("title", headers, rows)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 60


def test_json_takes_models_and_numpy_anywhere():
    mean = Distribution(mean=1, p50=1, p95=2, p99=3, max=4)
    document = json.loads(to_json({"mean": mean, "n": np.int64(3), "work": Work(1, 2, 3)}))
    assert document == {"mean": mean.model_dump(), "n": 3, "work": [1, 2, 3]}


EVIL = "k\x1b[2J\x1b]0;owned\x07\x9b31m\u202edesrever\x00\rgone\u2028 \udc80"


def harmless(text):
    return not any(letter in text for letter in "\x1b\x07\x9b\u202e\x00\r\u2028\udc80")


def test_what_is_said_cannot_steer_a_terminal(capsys):
    console = Console()
    console.say(EVIL)
    console.note(EVIL)
    console.hint(EVIL)
    console.error(EVIL, EVIL, EVIL)
    console.table(EVIL, [EVIL], [[EVIL]])
    console.answer([EVIL], [[EVIL], ["two\nlines\tand more"]])
    said = capsys.readouterr()
    assert harmless(said.out) and harmless(said.err)
    assert "k?[2J?]0;owned??31m?desrever??gone? ?" in said.out and "two lines and more" in said.out


def test_columns_stay_aligned_and_other_letters_as_they_are():
    assert format_table(["naïve", "µs"], [["größe – × 模型", 5], ["a\nb", 10]]).splitlines() == [
        "naïve         µs",
        "------------  --",
        "größe – × 模型   5",
        "a b           10",
    ]


def test_json_holds_the_same_value_escaped():
    text = to_json({EVIL: [EVIL, "模型", float("nan")]})
    assert (
        harmless(text.replace("\\r", ""))
        and json.loads(text) == {EVIL: [EVIL, "模型", None]}
        and "模型" in text
    )


def test_letters_that_a_stream_lacks_become_the_nearest():
    codecs.register_error("nearest", nearest_letters)
    assert (
        "TP×DP×PP: 1×2×1 → 2×1×1, 3 µs – 模".encode("ascii", "nearest")
        == b"TPxDPxPP: 1x2x1 > 2x1x1, 3 us - ?"
    )


def test_a_grid_has_a_cell_of_every_row_below_each_header(capsys):
    Console().grid("Units", ["llm", "eye"], [("name", lambda row: row), ("letters", len)])
    Console().grid("Nothing", [], [("name", str)])
    assert [line.split() for line in capsys.readouterr().out.splitlines()[1:]] == [
        ["Units"],
        ["name", "letters"],
        ["----", "-------"],
        ["llm", "3"],
        ["eye", "3"],
    ]

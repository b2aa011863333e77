"""Scores of answers: exact match, and functions of other packages."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from disttrain_cli.data.metrics import metrics_named, scored
from disttrain_cli.errors import SpecError
from disttrain_cli.spec import plugins
from disttrain_cli.spec.samples import Answer, Samples

ANSWERS = [
    Answer(prompt="1 + 1?", text="2", recorded="2"),
    Answer(prompt="Why?", text="no", recorded="yes"),
]


def length(answer: Answer) -> float:
    return len(answer.text) / len(answer.recorded)


def fails(answer: Answer) -> float:
    return 1 / (len(answer.text) - 2)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        EntryPoint(one, f"{__name__}:{one}", "disttrain.metrics") for one in ("length", "fails")
    ]
    monkeypatch.setattr(plugins, "entry_points", lambda group: entries)
    monkeypatch.setattr(EntryPoint, "load", lambda entry: globals()[entry.name])


def test_answers_are_scored_by_all_metrics(
    installed: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that fails at an answer leaves the others alone, and the log names it."""
    answers = scored(ANSWERS, ["length", "fails"])
    assert [one.scores for one in answers] == [
        {"exact_match": 1.0, "length": 1.0, "fails": -1.0},
        {"exact_match": 0.0, "length": pytest.approx(2 / 3), "fails": None},
    ]
    assert "warning: the metric fails failed: ZeroDivisionError" in capsys.readouterr().out
    samples = Samples(checkpoint="c", step=1, answers=answers)
    assert samples.metrics == {"exact_match": 0.5, "length": pytest.approx(5 / 6), "fails": -1.0}


def test_a_metric_that_is_not_installed_is_refused_before_training(installed: None) -> None:
    with pytest.raises(SpecError, match="no metric 'bleu'") as caught:
        metrics_named(["bleu"])
    assert "exact_match, fails, length" in caught.value.why

"""Scores of answers and judges of images, of this package and of others."""

from collections.abc import Sequence
from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from disttrain_cli.data.metrics import check_scores, judged, scored
from disttrain_cli.errors import SpecError
from disttrain_cli.spec import plugins
from disttrain_cli.spec.runfile.samples import SampleSpec
from disttrain_cli.spec.samples import Answer, Drawn, Judge, Samples, Written

ANSWERS = [
    Answer(prompt="1 + 1?", text="2", recorded="2"),
    Answer(prompt="Why?", text="no", recorded="yes"),
]


def length(answer: Answer) -> float:
    return len(answer.text) / len(answer.recorded)


def fails(answer: Answer) -> float:
    return 1 / (len(answer.text) - 2)


class Brightness:
    """Says of an image whether it is dark, and of a text which it asks for."""

    name = "mean brightness"
    accuracy = None

    def recognise(self, images: Sequence[NDArray[np.uint8]]) -> list[str]:
        return ["dark" if image.mean() < 100 else "light" for image in images]

    def named(self, text: str) -> str | None:
        return next((word for word in ("dark", "light") if word in text), None)


class Few(Brightness):
    """Leaves one image out."""

    def recognise(self, images: Sequence[NDArray[np.uint8]]) -> list[str]:
        return super().recognise(images)[1:]


INSTALLED = {"disttrain.metrics": ["length", "fails"], "disttrain.judges": ["Brightness", "Few"]}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def entries(group: str) -> list[EntryPoint]:
        return [EntryPoint(one, f"{__name__}:{one}", group) for one in INSTALLED[group]]

    monkeypatch.setattr(plugins, "entry_points", entries)
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


def test_a_judge_of_another_package_says_what_images_show(
    installed: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that fails leaves the samples as they are, and the log names it."""
    samples = Samples(
        checkpoint="c",
        step=1,
        drawn=[
            Drawn(file=f"{number}.png", prompt=prompt)
            for number, prompt in enumerate(["a dark one", "a light one", "a dark one", "any"])
        ],
        written=[
            Written(prompt="", text="it is dark", recorded="dark"),
            Written(prompt="", text="it is", recorded="light"),
            Written(prompt="", text="?", recorded="?"),
            Written(prompt="", text="dark"),
        ],
    )
    black, white = np.zeros((2, 2, 3), np.uint8), np.full((2, 2, 3), 255, np.uint8)
    of_generators = {"one": [black, black], "two": [black, white]}
    seen = judged(samples, of_generators, "Brightness")
    assert [one.recognised for one in seen.drawn] == ["dark", "dark", "dark", "light"]
    assert [one.names_it for one in seen.written] == [True, False, False, None]
    assert (seen.recognised, seen.named) == (2, 1)
    assert seen.judge == Judge(name="mean brightness", accuracy=None)
    assert judged(samples, of_generators, None) is judged(samples, of_generators, "Few") is samples
    assert "warning: the judge Few failed: ValueError" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("spec", "field", "names"),
    [
        ({"metrics": ["bleu"]}, "samples.metrics", "exact_match, fails, length"),
        ({"judge": "bleu"}, "samples.judge", "digits, Brightness, Few"),
    ],
)
def test_what_is_not_installed_is_refused_before_training(
    installed: None, spec: dict[str, Any], field: str, names: str
) -> None:
    with pytest.raises(SpecError, match=f"{field}: there is none called 'bleu'") as caught:
        check_scores(SampleSpec.model_validate(spec))
    assert names in caught.value.why
    check_scores(SampleSpec(metrics=["length"], judge="Few"))

"""Scores of held-out answers: exact match, and metrics of plugins (group disttrain.metrics)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from disttrain_cli.errors import SpecError
from disttrain_cli.spec.plugins import with_plugins
from disttrain_cli.spec.samples import Answer

#: Score of an answer: `prompt`, `text`, and `recorded`, the answer in the data.
Metric = Callable[[Answer], float]


def exact_match(answer: Answer) -> float:
    """Return 1 if the model's answer equals the recorded one, word for word."""
    return float(answer.text == answer.recorded)


def metrics_named(names: Sequence[str]) -> dict[str, Metric]:
    """Return the metrics of these names, and exact match.

    Raises:
        SpecError: there is no metric of a name, or one cannot be loaded.
    """
    known: dict[str, Metric] = with_plugins("disttrain.metrics", {"exact_match": exact_match})
    for name in names:
        if name not in known:
            raise SpecError(
                f"samples.metrics: there is no metric {name!r}",
                f"installed: {', '.join(known)}",
                "Correct the name, or install the package that has it as an entry point of the"
                " group disttrain.metrics.",
            )
    return {name: known[name] for name in dict.fromkeys(["exact_match", *names])}


def scored(answers: Sequence[Answer], names: Sequence[str]) -> list[Answer]:
    """Return the answers with their scores; None if a metric fails, which is logged."""
    metrics = metrics_named(names)
    return [
        one.model_copy(
            update={"scores": {name: _score(name, metrics[name], one) for name in metrics}}
        )
        for one in answers
    ]


def _score(name: str, metric: Metric, answer: Answer) -> float | None:
    try:
        score = float(metric(answer))
    except Exception as error:  # a plugin's: finished answers must not be lost
        print(f"warning: the metric {name} failed: {type(error).__name__}: {error}", flush=True)
        return None
    return score if math.isfinite(score) else None

"""Verdict on whether a run learns; computed by `analysis/learning.py` from the recorded losses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from disttrain_cli.spec.meta import doc

Verdict = Literal["diverging", "not learning", "overfitting", "too early to say", "learning"]


@dataclass(frozen=True)
class LossCourse:
    """One loss from the first to the last step that is judged."""

    loss: Annotated[str, doc("text, image, or the module, if there are several generators.")]
    verdict: Verdict
    why: Annotated[str, doc("Summary of the figures behind the verdict.")]
    first: Annotated[float | None, doc("Median of the first steps.")] = None
    last: Annotated[float | None, doc("Median of the last steps.")] = None
    error: Annotated[
        float | None, doc("Standard error of the difference between the two, from batch noise.")
    ] = None
    to_beat: Annotated[float | None, doc("Loss of a model that has not learned the task.")] = None
    basis: Annotated[str, doc("Information that such a model uses.")] = ""
    held_out: Annotated[list[tuple[int, float]], doc("(step, loss) of every evaluation.")] = field(
        default_factory=list
    )


@dataclass(frozen=True)
class Learning:
    """Verdict on the run: the worst verdict on any of its losses."""

    verdict: Verdict
    steps: Annotated[
        int, doc("Number of steps in the verdict: those of the last phase of the data.")
    ] = 0
    losses: list[LossCourse] = field(default_factory=list)
    advice: Annotated[str, doc("Settings to check; empty if nothing is wrong.")] = ""

    @property
    def bad(self) -> bool:
        """True if something should be changed."""
        return self.verdict not in ("learning", "too early to say")

    @property
    def headline(self) -> str:
        """One sentence for the user."""
        parts = [
            f"{one.loss} {one.why}"
            if one.verdict == self.verdict
            else f"{one.loss} {one.verdict} ({one.why})"
            for one in self.losses
        ]
        return f"{self.verdict}: {'; '.join(parts)}" if parts else self.verdict

    @property
    def lines(self) -> list[str]:
        """The last lines of a run's output."""
        return [
            f"Verdict     {self.headline}",
            *([f"            {self.advice}"] * bool(self.advice)),
        ]

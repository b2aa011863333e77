"""Deviation of the data from a plan's assumptions; detected by `data/drift.py`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct

from disttrain_cli.spec.meta import doc


class Drift(Struct, frozen=True, kw_only=True):
    """One mean that has deviated."""

    what: Annotated[str, doc("Such as 'images read per sequence'.")]
    planned: Annotated[float, doc("Mean of the sizes in the profile.")]
    seen: Annotated[float, doc("Mean over the last steps.")]
    change_pct: Annotated[float | None, doc("(seen − planned) ÷ planned; null if planned is 0.")]
    z: Annotated[float, doc("(seen − planned) ÷ its standard error.")]
    from_step: Annotated[
        int | None, doc("First step of the drift; null: from the first step on.")
    ] = None

    @property
    def sentence(self) -> str:
        """One sentence for the user."""
        change = "" if self.change_pct is None else f" ({self.change_pct:+.0f} %)"
        since = "" if self.from_step is None else f", from step {self.from_step} on"
        return (
            f"The data have {self.seen:.3g} {self.what} instead of the planned"
            f" {self.planned:.3g}{change}{since}"
        )

"""One figure of the data that has moved away from what a plan was made for; `data/drift.py` finds them."""

from __future__ import annotations

from pydantic import Field

from disttrain_cli.spec.files import Strict


class Drift(Strict):
    """One mean that has moved."""

    what: str = Field(description="Such as 'images read per sequence'.")
    planned: float = Field(description="Mean of the sizes that the profile keeps.")
    seen: float = Field(description="Mean of the last steps.")
    change_pct: float | None = Field(description="(seen − planned) ÷ planned; null where there were none.")
    z: float = Field(description="(seen − planned) ÷ its standard error.")
    from_step: int | None = Field(None, description="The step from which on it is so; null: from the first on.")

    @property
    def sentence(self) -> str:
        """For the user."""
        change = "" if self.change_pct is None else f" ({self.change_pct:+.0f} %)"
        since = "" if self.from_step is None else f", from step {self.from_step} on"
        made_for = f"{self.planned:.3g}" if self.planned else "none"
        return f"The data brings {self.seen:.3g} {self.what} where the plan was made for {made_for}{change}{since}"

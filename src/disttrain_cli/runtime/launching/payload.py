"""Entry points of ranks, and the payload they receive."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from disttrain_cli.spec.runfile import Run

if TYPE_CHECKING:
    from disttrain_cli.spec.plan import Plan
    from disttrain_cli.spec.profile import Profile

#: Entry points of ranks.
TRAIN, PREFLIGHT = "disttrain_cli.runtime.worker:main", "disttrain_cli.runtime.worker:preflight"


def payload_of(
    run: Run,
    plan: Plan,
    profile: Profile,
    profile_steps: range | None = None,
    origin: Path | None = None,
) -> dict[str, Any]:
    """Return the payload of a rank, apart from the fields of its start."""
    profiled = (
        {}
        if profile_steps is None
        else {"profile_steps": [profile_steps.start, profile_steps.stop]}
    )
    return (
        {
            "run": run.source,
            "plan": plan.model_dump(mode="json"),
            "device": profile.device.kind,
            "profile": profile.model_dump(mode="json"),
        }
        | profiled
        | ({"from": str(origin)} if origin else {})
    )

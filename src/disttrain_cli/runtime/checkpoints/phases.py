"""How a run goes on to draw its data: as its checkpoint says up to its step, then as the run file
does."""

from __future__ import annotations

from disttrain_cli.calls import call
from disttrain_cli.data.index.sample_index import Index
from disttrain_cli.data.mixtures import Phases, go_on
from disttrain_cli.errors import SpecError
from disttrain_cli.runtime.checkpoints.folder import Begun
from disttrain_cli.spec.profile import Profile


def phases_of(index: Index, before: Begun) -> tuple[Phases, int]:
    """(how the sources are drawn from which step on; the step of the checkpoint that says it, 0
    where the run file does)."""
    same = before.sources == index.of_sources[: len(before.sources)]
    phases = go_on(before.phases if same else [], before.step, index.phases)
    return phases, 0 if phases == index.phases else before.step


def check_begins(profile: Profile) -> None:
    """SpecError where a run starts at step 0 with a profile that goes on from a checkpoint."""
    if profile.data.goes_on_from:
        raise SpecError(
            f"The profile goes on from a checkpoint of step {profile.data.goes_on_from}",
            "that run mixed its sources otherwise than the run file does",
            f"Go on from it: {call('train', resume=True)}. Or move the checkpoints away, and start"
            f" anew: {call('profile')} && {call('plan')} && {call('train')}",
        )

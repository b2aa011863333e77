"""Data mixture of a resumed run: the checkpoint's up to its step, then the run file's."""

from __future__ import annotations

from disttrain_cli.calls import call
from disttrain_cli.data.index.sample_index import Index
from disttrain_cli.data.mixtures import Phases, go_on
from disttrain_cli.errors import SpecError
from disttrain_cli.runtime.checkpoints.folder import Begun
from disttrain_cli.spec.profile import Profile


def phases_of(index: Index, before: Begun) -> tuple[Phases, int]:
    """Return (phases of the mixture, step of the checkpoint that determines their start).

    The step is 0 where the run file alone determines them.
    """
    same = before.sources == index.of_sources[: len(before.sources)]
    phases = go_on(before.phases if same else [], before.step, index.phases)
    return phases, 0 if phases == index.phases else before.step


def check_begins(profile: Profile) -> None:
    """Raise SpecError where a run starts at step 0 with a profile continued from a checkpoint."""
    if profile.data.goes_on_from:
        raise SpecError(
            f"The profile goes on from a checkpoint of step {profile.data.goes_on_from}",
            "that run mixed its sources otherwise than the run file does",
            f"Go on from it: {call('train', resume=True)}. Or move the checkpoints away, and start"
            f" at step 0: {call('profile')} && {call('plan')} && {call('train')}",
        )

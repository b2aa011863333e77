"""Errors meant for the user; each class carries the exit code of the process.

A message says what happened, why, and the next command. Any other exception is a bug in disttrain.
"""

from __future__ import annotations

from disttrain_cli.calls import call, spelled


class DisttrainError(Exception):
    """An error that the user can act on (exit code 1).

    `what` is one sentence; `why` gives the evidence (values given, values allowed); `next_step` is
    the exact command or edit that helps, or `usual_step` if none is given. Calls and arguments in
    them are spelled for the reader; `parts` are the texts before that, for another process.
    """

    exit_code = 1
    usual_step = ""
    on_every_rank = False  # True if all ranks of a job raise it together: it is reported once

    def __init__(self, what: str, why: str = "", next_step: str = "") -> None:
        super().__init__(what)
        self.parts = [what, why, next_step or self.usual_step]
        self.what, self.why, self.next_step = map(spelled, self.parts)

    def __str__(self) -> str:
        return "\n".join(part for part in (self.what, self.why, self.next_step) if part)


class UsageError(DisttrainError):
    """The command line, or the arguments of a function, are wrong (exit code 2)."""

    exit_code = 2


class SpecError(DisttrainError):
    """A file the user wrote or edited (run file, plan, profile) is malformed (exit code 1)."""

    usual_step = (
        f"Correct it and run the command again; docs/runfile.md and {call('schema')} explain"
        " every field of the run file."
    )


class MismatchError(DisttrainError):
    """Artefacts that do not belong together; both fingerprints are named (exit code 1)."""


class DataError(DisttrainError):
    """The dataset is missing, empty, changed or too damaged to continue (exit code 1)."""


class InfeasibleError(DisttrainError):
    """No plan fits; `why` names the limit in the way (exit code 3)."""

    exit_code = 3


class RankFailedError(DisttrainError):
    """A worker or rank failed (exit code 4).

    `what` names it and `why` gives the path of its log.
    """

    exit_code = 4


class RankLostError(RankFailedError):
    """A rank died or hangs without reporting a reason.

    A restart may help, and `train.restarts` allows automatic ones. `rank` is its number, where it
    is known. `begun` is False if the start ended before anything in the run's folder was changed.
    """

    rank: int | None = None
    begun = True


class Terminated(SystemExit):
    """SIGTERM ends this process (exit code 143); not an error that anything may handle."""

    def __init__(self) -> None:
        super().__init__(143)


class ConditionHoldsError(DisttrainError):
    """A condition on the figures of a run holds (exit code 5)."""

    exit_code = 5

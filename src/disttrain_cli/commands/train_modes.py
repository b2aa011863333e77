"""Modes and options of `disttrain train`, and checks of which exclude each other."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from disttrain_cli.api import checked_plan, open_run
from disttrain_cli.api.ranks import Kind
from disttrain_cli.api.training import check_start, find_origin
from disttrain_cli.errors import UsageError

if TYPE_CHECKING:
    from disttrain_cli.spec.plan import Plan
    from disttrain_cli.spec.profile import Profile
    from disttrain_cli.spec.runfile import Run


@dataclass(frozen=True)
class Asked:
    """The options of the command line."""

    run_file: Path
    settings: tuple[str, ...]
    plan: Path | None
    steps: int | None
    resume: bool
    restart: bool
    origin: Path | None
    profile_steps: str | None
    rehearse: bool
    preflight: bool
    dry_run: bool
    device: str | None
    emit: Kind | None
    out: Path | None


@dataclass(frozen=True)
class Chosen:
    """The files and values that the options name, read and checked.

    The plan is read on first use, because training may have to write it first.
    """

    asked: Asked
    run: Run
    profiled: range | None  # steps of which torch's profile is recorded

    @cached_property
    def planned(self) -> tuple[Plan, Profile]:
        """The plan and the profile.

        Raises as `api.checked_plan`, and UsageError where the run has none of the steps to profile.
        """
        plan, profile = checked_plan(self.run, self.asked.plan)
        if self.profiled is not None:
            from disttrain_cli.runtime.train import check_profiled

            check_profiled(self.profiled, self.total)
        return plan, profile

    @property
    def plan(self) -> Plan:
        """The plan to run."""
        return self.planned[0]

    @property
    def profile(self) -> Profile:
        """The profile from which the plan was made."""
        return self.planned[1]

    @property
    def total(self) -> int:
        """Number of steps."""
        steps = self.asked.steps
        return steps if steps is not None else self.run.file.train.total_steps


def choose(asked: Asked) -> Chosen:
    """Read the files that the command line names.

    Raises:
        UsageError: options exclude each other, or would have no effect.
        SpecError: a file is missing or wrong.
    """
    run = open_run(asked.run_file, *asked.settings)
    _check_modes(asked)
    check_start(asked.resume, asked.restart, asked.origin)
    profiled = _steps_to_profile(asked)
    find_origin(asked.origin)
    return Chosen(asked, run, profiled)


def _check_modes(asked: Asked) -> None:
    """Raise UsageError where options exclude each other, or would have no effect."""
    if asked.out is not None and asked.emit is None:
        raise UsageError(
            "--out names a folder for the files of --emit",
            "given: no --emit",
            "disttrain train --help",
        )
    if asked.emit is not None and asked.rehearse:
        raise UsageError(
            "--emit cannot be combined with --rehearse",
            "a rehearsal runs only on this machine",
            "Remove one of them.",
        )
    if asked.device is not None and (not asked.dry_run or asked.rehearse or asked.emit is not None):
        raise UsageError(
            "--device can only be combined with --dry-run",
            f"given: --device {asked.device}"
            + " --rehearse" * asked.rehearse
            + f" --emit {asked.emit}" * (asked.emit is not None),
            "disttrain train --dry-run --device cuda",
        )
    preflight = asked.preflight and asked.emit is None
    for option, is_set in (
        ("rehearse", preflight and asked.rehearse),
        ("dry-run", preflight and asked.dry_run),
        ("restart", (preflight or asked.rehearse) and asked.restart),
        ("resume", preflight and asked.resume),
        ("from", preflight and asked.origin is not None),
    ):
        if is_set:
            mode = "--preflight" if preflight else "--rehearse"
            raise UsageError(
                f"{mode} cannot be combined with --{option}",
                f"--{option} would have no effect",
                "Remove one of the two.",
            )
    if asked.origin is not None and asked.rehearse:
        raise UsageError(
            "--from cannot be combined with --rehearse",
            "emulated devices have no weights",
            "Remove one of the two.",
        )


def _steps_to_profile(asked: Asked) -> range | None:
    """Parse A:B as the steps from A to before B.

    Raises:
        UsageError: it is not of this form or names no step, or nothing runs that could be profiled.
    """
    steps = asked.profile_steps
    if steps is None:
        return None
    if asked.rehearse or asked.preflight:
        raise UsageError(
            "--profile-steps cannot be combined with"
            f" --{'rehearse' if asked.rehearse else 'preflight'}",
            "emulated devices compute nothing" if asked.rehearse else "--preflight runs no step",
            "Train with it, or remove it.",
        )
    first, _, last = steps.partition(":")
    if not (
        first.isascii()
        and first.isdigit()
        and last.isascii()
        and last.isdigit()
        and int(first) < int(last)
    ):
        raise UsageError(
            "--profile-steps takes A:B with A < B: steps A to B (exclusive), counted from 0",
            f"given: {steps}",
            "disttrain train --profile-steps 5:8",
        )
    return range(int(first), int(last))

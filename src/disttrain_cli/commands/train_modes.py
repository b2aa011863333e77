"""Which options of `disttrain train` go together."""

from __future__ import annotations

from pathlib import Path

from disttrain_cli.errors import UsageError


def check_modes(
    origin: Path | None,
    rehearse: bool,
    dry_run: bool,
    device: str | None,
    emit: str | None,
    out: Path | None,
) -> None:
    """UsageError where options exclude each other, or would have no effect."""
    if out is not None and emit is None:
        raise UsageError(
            "--out names a folder for what --emit writes",
            "given: no --emit",
            "disttrain train --help",
        )
    if emit is not None and rehearse:
        raise UsageError(
            "--emit does not go with --rehearse",
            "a rehearsal runs on this machine alone",
            "Leave one of them out.",
        )
    if device is not None and (not dry_run or rehearse or emit is not None):
        raise UsageError(
            "--device goes with --dry-run alone",
            f"given: --device {device}"
            + " --rehearse" * rehearse
            + f" --emit {emit}" * (emit is not None),
            "disttrain train --dry-run --device cuda",
        )
    if origin is not None and rehearse:
        raise UsageError(
            "--from does not go with --rehearse",
            "emulated devices have no weights",
            "Leave one of the two out.",
        )


def steps_to_profile(given: str | None, rehearse: bool, preflight: bool) -> range | None:
    """A:B as the steps from A to before B.

    Raises:
        UsageError: it is not of this form or names no step, or nothing that could be profiled is
        run.
    """
    if given is None:
        return None
    if rehearse or preflight:
        raise UsageError(
            f"--profile-steps does not go with --{'rehearse' if rehearse else 'preflight'}",
            "emulated devices compute nothing" if rehearse else "--preflight runs no step",
            "Train with it, or leave it out.",
        )
    first, _, last = given.partition(":")
    if not (
        first.isascii()
        and first.isdigit()
        and last.isascii()
        and last.isdigit()
        and int(first) < int(last)
    ):
        raise UsageError(
            "--profile-steps takes A:B with A < B: the steps from A to before B, counted from 0",
            f"given: {given}",
            "disttrain train --profile-steps 5:8",
        )
    return range(int(first), int(last))

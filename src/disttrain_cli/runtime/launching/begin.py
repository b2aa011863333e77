"""Preparation of a start, before torchrun or srun starts a job's ranks.

As a program, `python -m disttrain_cli.runtime.launching.begin JOB.json`: run once per start, on the
first host, it prepares the run's folder as `disttrain train` would, and writes the start's name
next to the job file for rank 0. `--again N`: the job has been started N times before and resumes
from its newest checkpoint. `--port P`: check that the port is free.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
from pathlib import Path

from disttrain_cli.calls import Reader, read_by
from disttrain_cli.errors import DisttrainError
from disttrain_cli.runtime.checkpoints.folder import changed_since, latest
from disttrain_cli.runtime.checkpoints.phases import check_begins
from disttrain_cli.runtime.launching.rank import JobFile, read_job_file
from disttrain_cli.runtime.launching.starts import (
    alone,
    begin_start,
    check_fresh,
    job_of,
    step_to_resume,
)
from disttrain_cli.spec.plan import Plan
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.rundir import RunDir
from disttrain_cli.spec.runfile import Run, read_run
from disttrain_cli.spec.whole import write_whole


def begin(job: JobFile, again: int = 0) -> str:
    """Prepare a start, write it for rank 0, and return its name.

    Raises:
        SpecError, MismatchError: no matching checkpoint to resume from; or there are checkpoints,
            and the job neither resumes nor restarts.
        DisttrainError: another training of this run is in progress.
    """
    payload = job.payload
    run, folder = read_run(*payload["run"]), RunDir(Path(payload["logs"]).parent)
    with alone(folder):  # rank 0 takes this lock when it joins
        return _begin(job, again, run, folder)


def _begin(job: JobFile, again: int, run: Run, folder: RunDir) -> str:
    payload = job.payload
    plan, profile = Plan.model_validate(payload["plan"]), Profile.model_validate(payload["profile"])
    resume = bool(payload["resume"]) or (again > 0 and latest(folder.checkpoints) is not None)
    if resume and payload["steps"]:
        step_to_resume(run, profile, folder, payload["steps"])
        for note in changed_since(folder.checkpoints, run):
            print(note)
    elif not (resume or payload.get("restart")):
        check_fresh(folder)
    if not resume:
        check_begins(profile)
        run.fetch_weights()
    name, reports, notes = begin_start(folder, job_of(run, plan, profile), resume)
    for note in notes:
        print(note)
    write_whole(
        Path(payload["start_file"]),
        json.dumps({"name": name, "resume": resume, "steps_file": str(reports)}),
    )
    return name


def check_port(port: int) -> None:
    """Raise DisttrainError if a port of this host is in use."""
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        raise DisttrainError(
            f"Port {port} of {socket.gethostname()} is in use",
            str(error),
            "Set another cluster.port in the run file and write the scripts again, or end what"
            " uses it.",
        ) from None


def main(arguments: list[str]) -> None:
    """Run the program: JOB_FILE [--again N] [--port P]."""
    read_by(Reader(shell=True))
    parser = argparse.ArgumentParser()
    parser.add_argument("job", type=Path)
    parser.add_argument("--again", type=int, default=0)
    parser.add_argument("--port", type=int)
    options = parser.parse_args(arguments)
    try:
        if options.port is not None:
            check_port(options.port)
        print(begin(read_job_file(options.job), options.again))
    except DisttrainError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main(sys.argv[1:])

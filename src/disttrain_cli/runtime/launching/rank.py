"""Main function of one rank's process, started by `launch`, torchrun, or Slurm's srun.

As a program, `python -m disttrain_cli.runtime.launching.rank JOB.json`, it reads its rank from
RANK, LOCAL_RANK, WORLD_SIZE and MASTER_* (torchrun) or SLURM_* (srun). The job file holds the
arguments of `launch`: target, payload, log folder, ranks.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NoReturn

from disttrain_cli.calls import Reader, argument, call, read_by
from disttrain_cli.errors import DisttrainError, SpecError
from disttrain_cli.runtime.launching.ending import Ending, begin_ending
from disttrain_cli.spec.files import Strict, parse_json, validate
from disttrain_cli.spec.rundir import pulses, rank_log

Target = Callable[[dict[str, Any]], None]
#: Variables of a rank's coordinates: torchrun's names, and srun's.
PLACES = {"RANK": "SLURM_PROCID", "LOCAL_RANK": "SLURM_LOCALID", "WORLD_SIZE": "SLURM_NTASKS"}
#: Variables that torch's CUDA allocator reads.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class JobFile(Strict):
    """Job file of a rank that torchrun or srun starts; written by `--emit`."""

    version: Literal[1] = 1
    target: str
    payload: dict[str, Any]
    logs: str
    ranks: int


def read_job_file(path: Path) -> JobFile:
    """Read and check a job file; raises SpecError."""
    again = f"Write it again: {call('emit', kind='torchrun', out='DIR')}"
    return validate(JobFile, parse_json(path, "job file", again), path, "job file", again)


def settle(kind: str) -> None:
    """Set DeepSpeed's and torch's environment for a rank's device, before they are imported.

    DeepSpeed would look for devices while it is imported. Without NVML that takes the CUDA runtime,
    which makes CUDA unusable in processes that are forked afterwards; and it uses devices that it
    detects, even if the run is on the CPU. torch's allocator is configured for sizes that change
    from slot to slot, unless the user configures it.

    Args:
        kind: "cuda" or "cpu".
    """
    os.environ.setdefault("DS_ACCELERATOR", kind)
    if kind == "cuda" and not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[0]] = "expandable_segments:True"


def resolve(target: str) -> tuple[Any, Target]:
    """Return the module and the function that "package.module:function" names."""
    where, _, name = target.partition(":")
    module = importlib.import_module(where)
    return module, getattr(module, name)


def live(
    rank: int,
    function: Target,
    payload: dict[str, Any],
    log: Path,
    tell: Callable[[DisttrainError], None] = lambda error: None,
) -> NoReturn:
    """Run the function with its output in the log, and exit the process.

    `tell` reports an error to the launcher, if there is one: a log on a full disk may fail.
    """
    ending = begin_ending(Ending(rank, log, pulses(log.parent), tell))
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        with suppress(OSError):  # a full disk
            print(f"rank {rank} of {os.environ['WORLD_SIZE']}, process {os.getpid()}")
        function(payload)
    except BaseException as error:
        ending.tell(error)
    finally:
        ending.leave()


def place_in_job(job: JobFile) -> int:
    """Return this process's rank, and set torchrun's variables if srun started it.

    Raises:
        SpecError: it was not started by torchrun or srun, or the number of ranks is not the plan's.
    """
    for name, slurm in PLACES.items():
        if name not in os.environ and slurm in os.environ:
            os.environ[name] = os.environ[slurm]
    missing = [name for name in (*PLACES, "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise SpecError(
            f"{', '.join(missing)} not set in a rank's environment",
            "torchrun and srun set them",
            f"Start the ranks with the scripts of: {call('emit', kind='slurm')}, or"
            f" {argument('kind', 'torchrun')}",
        )
    if int(os.environ["WORLD_SIZE"]) != job.ranks:
        raise SpecError(
            f"{os.environ['WORLD_SIZE']} ranks were started for a plan of {job.ranks}",
            next_step=f"Write the scripts again: {call('emit', kind='slurm')}, or"
            f" {argument('kind', 'torchrun')}",
        )
    return int(os.environ["RANK"])


def main(arguments: list[str]) -> None:
    """Run a rank that torchrun or srun starts: JOB_FILE."""
    read_by(Reader(shell=True))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYTHONUNBUFFERED"] = "1"
    try:
        job = read_job_file(Path(arguments[0]))
        rank = place_in_job(job)
        log = rank_log(Path(job.logs), rank)
        log.parent.mkdir(parents=True, exist_ok=True)
        settle(job.payload.get("device", "cpu"))
        module, function = resolve(job.target)
        if hasattr(module, "before_fork"):
            module.before_fork(job.payload)
    except DisttrainError as error:
        sys.exit(f"{error.what}\n{error.why}\n{error.next_step}")
    live(rank, function, job.payload | {"console": os.dup(1)}, log)


if __name__ == "__main__":
    main(sys.argv[1:])

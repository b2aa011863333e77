"""Joining of a training job by a rank: inputs are read, compared among ranks, and tested."""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from disttrain_cli.data.index.index_checks import check_profiled_data
from disttrain_cli.data.index.sample_index import Index, read_index
from disttrain_cli.data.serving.identity import identity_of
from disttrain_cli.errors import RankLostError
from disttrain_cli.models import flash4
from disttrain_cli.models.graph import layer_table
from disttrain_cli.models.tying import tied_layers
from disttrain_cli.runtime.launching.cores import bind_cores
from disttrain_cli.runtime.launching.descriptors import needed, raise_limit
from disttrain_cli.runtime.launching.devices import check_devices, identity, rank_device
from disttrain_cli.runtime.launching.ending import follow
from disttrain_cli.runtime.launching.fitness import check_fit, check_memory
from disttrain_cli.runtime.launching.launch import LISTENER
from disttrain_cli.runtime.launching.meeting import HOSTS, MEETING_S, Guest, check_name, meet
from disttrain_cli.runtime.launching.process import (
    joined,
    rendezvous,
    serves_rendezvous,
    set_cuda_environment,
)
from disttrain_cli.runtime.launching.starts import alone
from disttrain_cli.runtime.task import Task
from disttrain_cli.runtime.watching.hang import HangWatch
from disttrain_cli.runtime.watching.pulse import Pulse, interval_s
from disttrain_cli.spec.files import fingerprint
from disttrain_cli.spec.plan import Plan
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.rundir import RunDir, pulses
from disttrain_cli.spec.runfile import Run, read_run
from disttrain_cli.spec.stage_graph import RankCoords, StageGraph, stage_graph

#: Environment variable: addresses of this job's preprocessing workers, separated by commas.
WORKERS = "DISTTRAIN_WORKERS"


@dataclass(frozen=True)
class Joined:
    """State of a rank after the rendezvous."""

    task: Task
    index: Index
    graph: StageGraph
    coords: RankCoords
    device: torch.device
    pulse: Pulse
    store: dist.Store  # of the rendezvous


def join(payload: dict[str, Any], stack: ExitStack) -> Joined:
    """Join the other ranks: rendezvous, comparison of all inputs, and process group.

    The process group is left when `stack` exits.

    Raises:
        DisttrainError: the hosts are not equal, ranks are missing, or the network does not carry
            their messages.
        MismatchError: the data are not those of the profile.
    """
    run = read_run(*payload["run"])
    plan, profile = Plan.model_validate(payload["plan"]), Profile.model_validate(payload["profile"])
    graph = stage_graph(plan.plan, profile.inputs.llm, tied_layers(layer_table(run)))
    coords, train = graph.coords(int(os.environ["RANK"])), run.file.train
    if coords.rank == 0 and LISTENER not in os.environ:  # `launch` holds the lock itself
        stack.enter_context(alone(RunDir(Path(payload["logs"]).parent)))
    pulse = stack.enter_context(
        Pulse(pulses(Path(payload["logs"])), coords.rank, train.longest_hang_s, follow).beating()
    )
    index = read_index(run, profile.inputs)
    check_profiled_data(index.fingerprint, profile)
    facts = identity_of(run, plan.plan, index, profile) | {
        "run file": fingerprint(run.file),
        "revisions": json.dumps(run.revisions),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    pulse.begin("joining")
    limit_s = min(MEETING_S, train.timeout_s)
    if profile.device.kind == "cuda":
        print(set_cuda_environment(run.file.cluster.ranks_per_gpu), flush=True)
    device = rank_device(profile.device.kind)
    if device.type == "cuda":
        print(bind_cores(device), flush=True)
    check_fit(run, profile.device, device)
    flash4.use(profile.device.flash_attention)
    check_memory(plan, profile.device, coords, device)
    raise_limit(
        needed(
            graph.world_size,
            (
                *(coords.unit.dp_cp_size, coords.unit.tp, coords.unit.cp),
                *((coords.unit.ep, coords.unit.expert_replicas) if coords.unit.ep > 1 else ()),
            ),
            gloo=device.type == "cpu",
            first=coords.rank == 0,
            serves=serves_rendezvous(),
        )
    )
    check_name(os.environ["MASTER_ADDR"])
    store = rendezvous(timedelta(seconds=limit_s))

    def decide(guests: list[Guest]) -> dict[str, Any]:
        check_devices([(guest.host, guest.device) for guest in guests])
        return _start_of(payload)

    start = meet(
        store,
        coords.rank,
        graph.world_size,
        Guest(facts, identity(device)),
        decide,
        limit_s,
        hosts=_hosts(payload),
        say=partial(_say, payload),
    )
    if LISTENER not in os.environ and coords.rank in (0, graph.world_size - 1):
        _watch_for_hangs(run, Path(payload["logs"]), graph)
    stack.enter_context(joined(device, train.timeout_s, store=store))
    task = Task.of(payload | start, with_workers(run), plan, profile)
    return Joined(task, index, graph, coords, device, pulse, store)


def _hosts(payload: dict[str, Any]) -> list[str]:
    """Return the host of every rank, if the job's script passes their names."""
    names, counts = os.environ.get(HOSTS, "").split(), payload.get("ranks_of_hosts", [])
    return (
        [name for name, count in zip(names, counts, strict=True) for _ in range(count)]
        if len(names) == len(counts)
        else []
    )


def _say(payload: dict[str, Any], text: str) -> None:
    """Print text to the rank's log, and to the terminal or job log where no launcher has it."""
    with suppress(OSError):
        print(text, flush=True)
        if "console" in payload:
            os.write(payload["console"], f"{text}\n".encode())


def _start_of(payload: dict[str, Any]) -> dict[str, Any]:
    """Return rank 0's record of this start, from the launcher or from `begin`, which ran before."""
    known = (
        json.loads(Path(payload["start_file"]).read_text()) if "start_file" in payload else payload
    )
    return {name: known[name] for name in ("name", "resume", "steps_file")}


def with_workers(run: Run) -> Run:
    """Return the run with the preprocessing workers that the job's script has started, if any."""
    addresses = os.environ.get(WORKERS, "").split(",")
    if not addresses[0]:
        return run
    preprocess = run.file.preprocess.model_copy(update={"addresses": addresses})
    return run.model_copy(update={"file": run.file.model_copy(update={"preprocess": preprocess})})


def _watch_for_hangs(run: Run, logs: Path, graph: StageGraph) -> None:
    """Monitor the job for hangs from inside, where `launch` does not.

    Two ranks do so, as one of them may hang.
    """

    def look() -> None:
        watch = HangWatch(pulses(logs), logs, graph.stages, run.file.train.longest_hang_s)
        while True:
            time.sleep(interval_s(run.file.train.longest_hang_s))
            try:
                watch.poll()
            except RankLostError as error:
                print(error, flush=True)
                os._exit(error.exit_code)

    threading.Thread(target=look, name="hang", daemon=True).start()

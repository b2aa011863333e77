"""What each process of `disttrain profile` does: links first, then its share of the modules' layers.

There are as many processes as the run will have ranks on this machine, and all are busy until the last one has
its measurements, because on a CPU they share cores, caches and memory as the ranks will. Modules go round the
processes, so that different modules are measured beside each other, again as in the run.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from disttrain_cli.models.graph import layer_table
from disttrain_cli.profiling.compute import Slowdown
from disttrain_cli.profiling.links import measure_links
from disttrain_cli.profiling.trial import ModuleTrial
from disttrain_cli.runtime.process import rendezvous
from disttrain_cli.spec.runfile import read_run

RENDEZVOUS_TIMEOUT = timedelta(minutes=5)
#: Draws that a process repeats while it waits for the others.
WAITING_DRAWS = 4


@dataclass(frozen=True)
class Share:
    """What one process measures of one module: every `step`-th draw from `first` on."""

    module: str
    first: int
    step: int


def shares(modules: list[str], rank: int, processes: int) -> list[Share]:
    """The shares of a process; together the processes measure every draw of every module once."""
    turns = range(max(len(modules), processes))
    takers = Counter(turn % len(modules) for turn in turns)
    return [Share(modules[turn % len(modules)], turn // len(modules), takers[turn % len(modules)])
            for turn in turns if turn % processes == rank]


def before_fork(payload: dict[str, Any]) -> None:
    """Import the model's classes once for all processes."""
    layer_table(read_run(Path(payload["run"])))


def main(payload: dict[str, Any]) -> None:
    """Measure and write `payload["folder"]/RANK.json`; RANK.done beside it counts the draws measured so far.

    payload: run (path of the run file), device ("cpu" or "cuda"), draws (module → arguments of `probe_batch`),
    passes (over the draws, at most), budget_s (for the passes after the first), folder.
    """
    rank, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    run = read_run(Path(payload["run"]))
    device = torch.device("cpu")
    if payload["device"] == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    store = rendezvous(RENDEZVOUS_TIMEOUT)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=rank, world_size=processes)
    links = measure_links(device)

    draws: dict[str, list[dict[str, Any]]] = payload["draws"]
    with_work = [module for module, own in draws.items() if own]
    own = [(share, ModuleTrial(run, share.module, draws[share.module][share.first :: share.step], device))
           for share in shares(with_work, rank, processes)]
    for _, trial in own:
        trial.warm_up()
    memory = [trial.activation_bytes() for _, trial in own]
    dist.barrier()
    folder = Path(payload["folder"])
    slowdown = measure_together([trial for _, trial in own], int(payload["passes"]), float(payload["budget_s"]),
                                folder / f"{rank}.done")
    wait_busily([trial for _, trial in own], store, processes)
    result = {"links": links.model_dump(), "slowdown": slowdown, "shares": [
        {"module": share.module, "first": share.first, "step": share.step, "times": trial.measured(), "memory": kept}
        for (share, trial), kept in zip(own, memory, strict=True)]}
    (folder / f"{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def measure_together(trials: list[ModuleTrial], passes: int, budget_s: float, progress_file: Path) -> float:
    """Measure every draw of all trials once, and again in passes while the time lasts.

    Returns wall time over CPU time of this process: how long it waited for its turn, on a CPU.
    """
    work = [(trial, draw) for trial in trials for draw in range(len(trial.draws))]
    clock = Slowdown()
    deadline = time.monotonic() + budget_s
    for number in range(passes * len(work)):
        if number >= len(work) and time.monotonic() > deadline:
            break
        trial, draw = work[number % len(work)]
        trial.run(draw)
        progress_file.write_text(str(number + 1))
    progress_file.write_text(str(passes * len(work)))
    return clock.read()


def wait_busily(trials: list[ModuleTrial], store: dist.TCPStore, processes: int) -> None:
    """Keep this core as busy as before until every process has its measurements."""
    done = store.add("measured", 1)
    while done < processes:
        for trial in trials:
            for draw in range(min(WAITING_DRAWS, len(trial.draws))):
                trial.run(draw, keep=False)
        done = store.add("measured", 0)

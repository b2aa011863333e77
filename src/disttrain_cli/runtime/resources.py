"""Waits and memory of the ranks: measured in every step, recorded, and what grows extrapolated."""

from __future__ import annotations

import os
import resource
import sys

import torch

from disttrain_cli.runtime.engine.engine import UnitEngine
from disttrain_cli.runtime.hooks import Hook, Step
from disttrain_cli.runtime.task import Task
from disttrain_cli.runtime.watching.core_wait import UNKNOWN, CoreWait
from disttrain_cli.runtime.watching.host_memory import share_of_host, watched_memory


class Resources(Hook):
    """Waits for data and for a core, memory, and growth of memory of this rank.

    Args:
        first: first step of the start, after which memory outside torch's allocator is read.
        idle_gib: memory of the process before it had a stage; None: no rows of memory.
    """

    def __init__(self, task: Task, first: int, engine: UnitEngine, idle_gib: float | None) -> None:
        self._task, self._first, self._engine, self._idle_gib = task, first, engine, idle_gib
        self._reserve_gib = next(
            (
                stage.reserve_gib
                for stage in task.plan.predicted.memory
                if (stage.unit, stage.stage) == (engine.coords.unit.name, engine.coords.stage.index)
            ),
            0.0,
        )
        self._memory, self._core_wait = watched_memory(), CoreWait()
        self._outside_gib, self._warned = UNKNOWN, False

    def begin(self, step: int) -> None:
        self._core_wait.begin_step()

    def measure(self) -> dict[str, float]:
        """Return the waits and the memory.

        Of memory: the peak, that outside the allocator, what of it the plan does not reserve, and
        the share of its host's available memory by which the host's ranks grow each step.
        """
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return {
            "data_wait_s": self._engine.data_wait_ns / 1e9,
            "core_wait_s": self._core_wait.of_step(),
            "memory_gib": peak_gib(self._engine.device),
            "outside_gib": self._outside_gib,
            "unplanned_gib": self._outside_gib - self._reserve_gib,
            "growth": share_of_host(self._memory.end_step(), ranks),
        }

    def stepped(self, step: Step) -> None:
        """Record this rank's memory, report all ranks' largest waits and peak, and warn."""
        if self._idle_gib is not None:
            self._record(step.number, self._idle_gib)
        largest = step.largest
        core_wait_s = largest["core_wait_s"]
        step.row |= {
            "data_wait_s": largest["data_wait_s"],
            "memory_gib": largest["memory_gib"],
            "core_wait_s": None if core_wait_s == UNKNOWN else core_wait_s,
        }
        if self._engine.coords.rank:
            return
        if step.number == self._first + 1 and largest["outside_gib"] != UNKNOWN:
            self._task.say(_compared(largest["outside_gib"], largest["unplanned_gib"]))
        if not self._warned and largest["growth"] * (self._task.steps - step.number) > 1:
            self._warned = True
            self._task.say(
                "The ranks' memory grows: at the rate of the fastest-growing rank a host's is"
                f" full at about step {step.number + 1 / largest['growth']:,.0f} of"
                f" {self._task.steps:,}. train.checkpoint.every_steps limits what is lost then."
            )

    def _record(self, step: int, idle_gib: float) -> None:
        tracer, device = self._engine.tracer, self._engine.device
        now, held = tracer.mark(), peak_gib(device) - idle_gib
        tracer.record("memory", now, now, bytes=round(max(0.0, held) * 2**30))
        alone = self._task.run.file.cluster.ranks_per_gpu == 1
        if step == self._first and alone and (device_bytes := of_device(device)):
            for module, size in device_bytes.items():
                tracer.record("memory", now, now, module=module, bytes=size)
            self._outside_gib = (device_bytes["device"] - device_bytes["allocator"]) / 2**30


def _compared(outside_gib: float, unplanned_gib: float) -> str:
    """Return a sentence on devices' memory outside torch's allocator, and the plan's reserve."""
    against = (
        f"up to {unplanned_gib:.2f} GiB more than"
        if unplanned_gib > 0
        else f"everywhere at least {-unplanned_gib:.2f} GiB less than"
    )
    return (
        f"After the first step up to {outside_gib:.2f} GiB of a device are in use outside PyTorch's"
        f" allocator, {against} the plan reserves."
    )


def peak_gib(device: torch.device) -> float:
    """Return this rank's peak memory in GiB: on its GPU, or of its process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / (2**30 if sys.platform == "darwin" else 2**20)


def of_device(device: torch.device) -> dict[str, int]:
    """Return the bytes in use on a GPU, by its driver and by torch's allocator; empty for a CPU.

    The driver counts all processes, and with this one's its context, kernels and NCCL's buffers.
    """
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    return {"device": total - free, "allocator": torch.cuda.memory_reserved(device)}

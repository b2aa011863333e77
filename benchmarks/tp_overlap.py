"""TP messages overlapped with GEMMs, and not: a block of a 7B and of a 70B LLM, bf16 on an A800.

On 8,192 tokens, TP 4 and TP 8.

*Priced*: kernels and messages of the block by the hardware catalogue (`profiling.tp_overlap`).
*Rehearsed*: the ranks of the TP group as processes that run the very code over gloo on a block of
64 features. Every message is sent; the device is emulated: what a rank computes between two
messages takes as long, on a clock that is slowed down, as it does in the real block, and messages
carry the time at which the link will have brought them. Beside the gains that the paper reports for
StepCCL (DistTrain, SIGCOMM 2025). Nothing here was measured on a GPU.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import Tables, main
from benchmarks.waiting import costs
from disttrain_cli.spec.runfile import Run, RunFile

MODELS = {"7B": "mllm-9b", "70B": "mllm-72b"}
PAPER = {4: 1.10, 8: 1.15}
SLOWER = 100.0  # per rank of a group, than a device, so that two cores serve eight of them
#: By pass, what happens: ("kernels", ms), ("begun", number, ms) or ("waited", number).
Script = list[list[Any]]
SMALL_LENGTH = 64
HOW = PLAIN, OVERLAPPED = "plain", "overlapped"


def priced(name: str, tp: int, overlap: bool) -> tuple[list[Script], float]:
    """Forward and backward of the block of a frozen model on one sequence, and their ms."""
    from disttrain_cli.costs.hardware import KernelWork, analytic_device, kernels_ms, link_profile
    from disttrain_cli.models.footprint import Begun
    from disttrain_cli.models.timeline import Event, timeline
    from disttrain_cli.profiling.footprints import probes_of
    from disttrain_cli.profiling.tp_overlap import joined_shard, message_ms, on_device

    run = Run(path=Path("disttrain.yaml"), file=costs(name)[0])
    device = analytic_device("A800", run.file.cluster, "bf16")
    links = link_profile(device, run.file.cluster).of(True)
    probes = probes_of(run, "llm", [tp])
    index = next(index for index in probes.layers if probes.table[index].kind == "block")
    layer, batch = joined_shard(run, probes, index, overlap, tp=tp), probes.batches[0]

    def script(events: Sequence[Event]) -> Script:
        steps: Script = []
        for event in events:
            if isinstance(event, KernelWork):
                steps.append(["kernels", kernels_ms(device, "bf16", event)])
            elif isinstance(event, Begun):
                steps.append(["begun", event.number, message_ms(event.message, links, tp=tp)])
            else:
                steps.append(["waited", event.number])
        return steps

    line = timeline(layer, probes.state(layer, index, batch, tp=tp), batch)
    duration = on_device(device, "bf16", links, tp=tp)
    passes = (line.forward, line.backward)
    return [script(events) for events in passes], sum(map(duration, passes))


class Device:
    """The emulated device of one rank: a clock in ms, which the host does not run ahead of."""

    def __init__(self, script: Script, slower: float) -> None:
        self._slower = slower
        self._script, self._start_s = iter(script), time.perf_counter()
        self.now = self.travelled = 0.0

    def begin(self) -> float:
        """Compute until a message begins; when the link will have brought it."""
        _, ms = self._next("begun")
        self.travelled = max(self.now, self.travelled) + ms
        return self.travelled

    def wait(self, arrival: float) -> None:
        """Compute until a message is needed, and wait for it."""
        self._next("waited")
        self._spend(max(0.0, arrival - self.now))

    def finish(self) -> float:
        """Compute to the end; ms by this process's own clock."""
        for what, ms in self._script:
            assert what == "kernels", what
            self._spend(ms)
        return 1e3 * (time.perf_counter() - self._start_s) / self._slower

    def _next(self, wanted: str) -> list[Any]:
        for what, *numbers in self._script:
            if what != "kernels":
                assert what == wanted, (what, wanted)
                return numbers
            self._spend(numbers[0])
        raise AssertionError(f"{wanted} after the end")

    def _spend(self, ms: float) -> None:
        self.now += ms
        time.sleep(max(0.0, self._start_s + self._slower * self.now / 1e3 - time.perf_counter()))


def ranks(payload: dict[str, Any]) -> None:
    """Run the passes with and without overlap in turns; the first rank writes the ms of each."""
    import torch
    import torch.distributed as dist

    from disttrain_cli.models.graph import build_layers
    from disttrain_cli.models.tensor_parallel import join
    from disttrain_cli.profiling.footprints import probes_of
    from disttrain_cli.runtime.launching.process import joined

    with joined("cpu", 300.0):
        rank, tp = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        run = _small_run()
        probes = probes_of(run, "llm", [tp])
        index = next(index for index in probes.layers if probes.table[index].kind == "block")
        found: dict[str, list[float]] = {name: [] for name in payload["scripts"]}
        for counted in [False] + [True] * payload["rounds"]:
            for name, (forward, backward) in payload["scripts"].items():
                (layer,) = build_layers(run, index, index + 1, tp=tp)
                group = _paced(dist.group.WORLD, tp, rank, name == OVERLAPPED)
                join(layer, group)
                batch = _small_batch(probes.inputs)
                state = {"hidden": torch.randn(SMALL_LENGTH // tp, 64, requires_grad=True)}
                with torch.no_grad():  # what a stage prepares once
                    layer(dict(state), batch)
                total = 0.0
                with _device(group, forward) as device:
                    made = layer(state, batch)["hidden"]
                    total += _longest(device.finish())
                with _device(group, backward) as device:
                    made.backward(torch.ones_like(made))
                    total += _longest(device.finish())
                if counted:
                    found[name].append(total)
        if rank == 0:
            Path(payload["out"]).write_text(json.dumps(found))


def _small_run() -> Run:
    config = {
        "vocab_size": 264,
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "intermediate_size": 128,
    }
    file = {
        "name": "small",
        "model": {"modules": {"llm": {"kind": "llm", "architecture": "llama", "config": config}}},
        "data": {"sources": [{"path": "none"}], "sequence_length": SMALL_LENGTH},
        "cluster": {"nodes": 1, "gpus_per_node": 8},
        "train": {"global_batch_size": 8, "steps": 1, "precision": "fp32"},
    }
    return Run(path=Path("disttrain.yaml"), file=RunFile.model_validate(file))


def _small_batch(inputs: Any) -> Any:
    from disttrain_cli.models.probe import probe_batch

    return probe_batch(inputs, documents=[[SMALL_LENGTH]])


def _longest(ms: float) -> float:
    """Of all ranks."""
    import torch
    import torch.distributed as dist

    most = torch.tensor([ms], dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return float(most)


@contextmanager
def _device(group: Any, script: Script) -> Iterator[Device]:
    """The group's messages take time on a device of this pass, which all ranks begin together."""
    import torch.distributed as dist

    dist.barrier()
    group.device.append(Device(script, SLOWER * group.size))
    yield group.device[-1]
    group.device.clear()


def _paced(process_group: Any, size: int, rank: int, overlap: bool) -> Any:
    """A TP group whose messages carry the time at which they arrive; without a device none is
    told."""
    from dataclasses import dataclass, field

    import torch
    import torch.distributed as dist

    from disttrain_cli.models.group import Group, Underway

    @dataclass(frozen=True)
    class Paced(Group):
        device: list[Device] = field(default_factory=list)

        def all_gather(self, whole: Any, local: Any) -> None:
            self._at_once(lambda: Group.all_gather(self, whole, local))

        def reduce_scatter(self, local: Any, partial: Any) -> None:
            self._at_once(lambda: Group.reduce_scatter(self, local, partial))

        def begin_all_gather(self, whole: Any, local: Any) -> Underway:
            return self._later(Group.begin_all_gather(self, whole, local), self._agreed())

        def pass_on(self, chunk: Any, into: Any) -> Underway:
            if not self.device:
                return Group.pass_on(self, chunk, into)
            stamp = torch.tensor([self.device[0].begin()], dtype=torch.float64)
            theirs = torch.zeros(1, dtype=torch.float64)
            travelling = Group.pass_on(self, stamp, theirs)
            return self._later(Group.pass_on(self, chunk, into), lambda: _of(travelling, theirs))

        def _at_once(self, send: Any) -> None:
            arrival = self._agreed()
            send()
            self._later(Underway(), arrival).wait()

        def _agreed(self) -> Any:
            """When a collective arrives: once the last rank has begun it."""
            if not self.device:
                return None
            most = torch.tensor([self.device[0].begin()], dtype=torch.float64)
            work = dist.all_reduce(most, dist.ReduceOp.MAX, group=self.ranks, async_op=True)
            return lambda: _of(work, most)

        def _later(self, underway: Underway, arrival: Any) -> Underway:
            def arrived() -> None:
                underway.wait()
                if self.device:
                    self.device[0].wait(arrival())

            return Underway(arrived=arrived)

    return Paced(process_group, size, rank, overlap)


def _of(travelling: Any, stamp: Any) -> float:
    travelling.wait()
    return float(stamp)


def measure(small: bool) -> Tables:
    """One table."""
    from disttrain_cli.runtime.launching.launch import launch

    rows = []
    for model, name in MODELS.items():
        for tp in (4,) if small else (4, 8):
            if small and model == "70B":
                continue
            made = {how: priced(name, tp, how == OVERLAPPED) for how in HOW}
            scripts, ms = ({how: one[part] for how, one in made.items()} for part in (0, 1))
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder, "times.json")
                payload = {"scripts": scripts, "rounds": 1 if small else 2, "out": str(out)}
                launch(
                    tp,
                    "benchmarks.tp_overlap:ranks",
                    payload,
                    Path(folder, "logs"),
                    timeout_s=900,
                )
                found = json.loads(out.read_text())
            rehearsed = {how: median(times) for how, times in found.items()}
            rows.append(
                {
                    "block": model,
                    "TP": tp,
                    "plain ms": ms[PLAIN],
                    "overlapped ms": ms[OVERLAPPED],
                    "gain": ms[PLAIN] / ms[OVERLAPPED],
                    "StepCCL's": PAPER[tp],
                    "rehearsed plain ms": rehearsed[PLAIN],
                    "rehearsed overlapped ms": rehearsed[OVERLAPPED],
                    "rehearsed gain": rehearsed[PLAIN] / rehearsed[OVERLAPPED],
                }
            )
    return {"A block of an LLM, forward and backward": rows}


if __name__ == "__main__":
    main(__doc__, measure)

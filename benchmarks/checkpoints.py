"""Writing and reading a checkpoint beside torch.save and DeepSpeed's own, and how long training
stands still for one.

Two ranks, data parallel with ZeRO-1, hold the same Llama three times over; each way takes its turn
(A B C A B C …), and is timed until all of its files are on the disk (fsync). torch.save writes the
very tensors that a rank keeps, one file per rank: the least that any of them can do. DeepSpeed
saves the same weights, moments and masters, and leaves out checksums and any order by parameter:
its files open in the same layout only. Wall seconds of the slower rank and CPU seconds of both, per
GiB of tensors. `stands still` is what `Saver.save` takes before training goes on.

    python -m benchmarks.checkpoints
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.small_llm import write_run

RANKS = 2
#: hidden width, blocks, rounds
SIZES, SMALL = (1024, 4, 5), (64, 1, 1)
GIB = 2**30
TRAIN = {"global_batch_size": RANKS, "steps": 1, "precision": "fp32", "zero_stage": 1}
WAYS = ("disttrain", "torch.save", "DeepSpeed")


def measure(small: bool) -> common.Tables:
    """Seconds per GiB, and ratios of paired rounds."""
    from disttrain_cli.runtime.launching.launch import launch

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = write_run(folder, *(SMALL if small else SIZES)[:2], 128, TRAIN)
        payload = {"run": str(run), "folder": name, "rounds": (SMALL if small else SIZES)[2]}
        launch(RANKS, "benchmarks.checkpoints:ranks", payload, folder / "logs", timeout_s=3600)
        ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]
    gib = sum(rank["bytes"] for rank in ranks) / GIB

    def slowest(what: str) -> list[float]:
        return [max(rounds) for rounds in zip(*(rank["wall"][what] for rank in ranks), strict=True)]

    def together(what: str) -> list[float]:
        return [sum(rounds) for rounds in zip(*(rank["cpu"][what] for rank in ranks), strict=True)]

    rows = []
    for what in ("save", "load"):
        for way in WAYS:
            own = f"{what} {way}"
            rows.append(
                {
                    "does": what,
                    "way": way,
                    "s per GiB": float(np.median(slowest(own))) / gib,
                    "over torch.save's": common.paired_ratio(
                        slowest(own), slowest(f"{what} torch.save")
                    ),
                    "over DeepSpeed's": common.paired_ratio(
                        slowest(own), slowest(f"{what} DeepSpeed")
                    ),
                    "CPU s per GiB": float(np.median(together(own))) / gib,
                    "CPU over torch.save's": common.paired_ratio(
                        together(own), together(f"{what} torch.save")
                    ),
                    "CPU over DeepSpeed's": common.paired_ratio(
                        together(own), together(f"{what} DeepSpeed")
                    ),
                }
            )
    stands = slowest("stands still")
    return {
        f"{gib:.3f} GiB of weights and moments on {RANKS} ranks": rows,
        "Training stands still for": [
            {
                "s per GiB": float(np.median(stands)) / gib,
                "share of saving": common.paired_ratio(stands, slowest("save disttrain")),
                "over torch.save's": common.paired_ratio(stands, slowest("save torch.save")),
                "over DeepSpeed's": common.paired_ratio(stands, slowest("save DeepSpeed")),
            }
        ],
    }


def ranks(payload: dict[str, Any]) -> None:
    """One rank: every way in turn; the first turn, in which memory is allocated, is not counted."""
    import torch
    import torch.distributed as dist

    from disttrain_cli.runtime.checkpoints import checkpoint
    from disttrain_cli.runtime.checkpoints.owning import allocate_moments, staged
    from disttrain_cli.runtime.launching.process import joined

    rank, folder = int(os.environ["RANK"]), Path(payload["folder"])
    with joined("cpu", 600.0) as device:
        engine = _engine(payload, device)
        allocate_moments(engine)
        kept = {key: values for key, _, values in staged(engine)}
        stock = _stock(engine)
        made_from = {"model": "benchmark"}
        wall: dict[str, list[float]] = {"stands still": []}
        cpu: dict[str, list[float]] = {}
        with checkpoint.Saver(folder / "ours", made_from, engine, 1) as saver:

            def ours() -> None:
                begun = time.perf_counter()
                saver.save(1)
                wall["stands still"].append(time.perf_counter() - begun)
                saver.wait()

            calls: dict[str, Callable[[], object]] = {
                "save disttrain": ours,
                "save torch.save": lambda: _torch_save(torch, kept, folder / f"torch-{rank}.pt"),
                "save DeepSpeed": lambda: _stock_save(stock, folder / "stock", dist),
                "load disttrain": lambda: checkpoint.load(
                    folder / "ours" / "step-000001", made_from, engine
                ),
                "load torch.save": lambda: _torch_load(torch, kept, folder / f"torch-{rank}.pt"),
                "load DeepSpeed": lambda: stock.load_checkpoint(str(folder / "stock"), "step"),
            }
            for turn in range(payload["rounds"] + 1):
                for name, call in calls.items():
                    dist.barrier()
                    begun, used = time.perf_counter(), time.process_time()
                    call()
                    if turn:
                        wall.setdefault(name, []).append(time.perf_counter() - begun)
                        cpu.setdefault(name, []).append(time.process_time() - used)
            del wall["stands still"][0]
        size = sum(values.numel() * values.element_size() for values in kept.values())
        (folder / f"rank-{rank}.json").write_text(
            json.dumps({"bytes": size, "wall": wall, "cpu": cpu})
        )


def before_fork(payload: dict[str, Any]) -> None:
    """Import what all ranks need."""
    from disttrain_cli.models.graph import layer_table
    from disttrain_cli.spec.runfile import read_run

    layer_table(read_run(Path(payload["run"])))


def _engine(payload: dict[str, Any], device: Any) -> Any:
    from disttrain_cli.models.graph import layer_table
    from disttrain_cli.runtime.engine.assemble import build_engine
    from disttrain_cli.runtime.watching.tracing import Tracer, wall_clock
    from disttrain_cli.spec.plan import Layout, Plan, Search, UnitPlan
    from disttrain_cli.spec.prediction import Prediction
    from disttrain_cli.spec.profile import Fingerprints
    from disttrain_cli.spec.runfile import read_run
    from disttrain_cli.spec.stage_graph import stage_graph

    run = read_run(Path(payload["run"]))
    table = layer_table(run)
    unit = UnitPlan(
        name="llm", modules=["llm"], dp=RANKS, gpus=RANKS, layers_per_stage=[len(table)]
    )
    layout = Layout(
        global_batch_size=RANKS,
        microbatch_size=1,
        microbatches=1,
        gpus_used=RANKS,
        units=[unit],
        zero_stage=1,
    )
    plan = Plan(
        fingerprints=Fingerprints(model="", data="", cluster=""),
        plan=layout,
        search=Search(solve_s=0, candidates=1, exact=True),
        predicted=Prediction(
            iteration_s=1,
            sequences_per_s=1,
            mfu=0,
            warmup_s=0,
            steady_s=0,
            bubble_fraction=0,
            memory=[],
        ),
    )
    graph = stage_graph(layout, "llm")
    place = graph.coords(int(os.environ["RANK"]))
    return build_engine(
        run, plan, graph, place, device, Tracer(Path(payload["folder"]), "b", place, wall_clock())
    )


def _stock(engine: Any) -> Any:
    """DeepSpeed's engine over copies of the same weights, after a step that gave it moments."""
    import deepspeed
    import torch

    class Weights(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = torch.nn.ParameterList(
                [p.detach().clone() for p in engine.module.parameters()]
            )

        def forward(self) -> torch.Tensor:
            return torch.stack([weight.mean() for weight in self.weights]).sum()

    model = Weights()
    stock, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        config={
            "train_batch_size": RANKS,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
        },
    )
    stock.backward(stock())
    stock.step()
    return stock


def _torch_save(torch: Any, tensors: dict[str, Any], path: Path) -> None:
    with path.open("wb") as file:
        # of views it saves all storage
        torch.save({key: values.clone() for key, values in tensors.items()}, file)
        file.flush()
        os.fsync(file.fileno())


def _torch_load(torch: Any, tensors: dict[str, Any], path: Path) -> None:
    with torch.no_grad():
        for key, values in torch.load(path, weights_only=True).items():
            tensors[key].copy_(values)


def _stock_save(stock: Any, folder: Path, dist: Any) -> None:
    stock.save_checkpoint(str(folder), "step")
    if dist.get_rank() == 0:
        for path in folder.rglob("*.pt"):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    dist.barrier()


if __name__ == "__main__":
    common.main(__doc__, measure)

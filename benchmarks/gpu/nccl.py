"""Six ranks on one device over NCCL: layouts next to one rank, with and without one launch order.

They communicate through sockets on loopback (`runtime.launching.process.SHARED_DEVICE`), and their
kernels take turns: what it shows is that they are right and do not hang, not how fast they are.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.setting import Figures, Setting
from disttrain_cli.costs import buckets
from disttrain_cli.data.indexing.building import build_index
from disttrain_cli.data.loader import Loader
from disttrain_cli.data.sample_data import write_sample_data
from disttrain_cli.models.graph import describe, layer_table
from disttrain_cli.models.tying import tied_layers
from disttrain_cli.runtime.checkpoints import checkpoint
from disttrain_cli.runtime.checkpoints import folder as checkpoint_folder
from disttrain_cli.runtime.engine.assemble import build_engine
from disttrain_cli.runtime.engine.optimizer import set_lrs
from disttrain_cli.runtime.feeding import fetcher, fields_of, message_dtype
from disttrain_cli.runtime.launching.devices import rank_device
from disttrain_cli.runtime.launching.groups import check_groups
from disttrain_cli.runtime.launching.launch import launch
from disttrain_cli.runtime.launching.process import joined, rendezvous, set_cuda_environment
from disttrain_cli.runtime.units.grid import UnitGrid
from disttrain_cli.runtime.units.routes import place_of
from disttrain_cli.runtime.watching.tracing import Tracer, wall_clock
from disttrain_cli.spec.plan import Plan, UnitPlan
from disttrain_cli.spec.progress import silent
from disttrain_cli.spec.runfile import read_run
from disttrain_cli.spec.stage_graph import stage_graph
from tests.runtime.equivalence_worker import BUCKET_NUMBERS, as_over_nccl, check_twins, orders_of
from tests.runtime.factory import plan_of, unit, write_run

ENCODER, LLM, GENERATOR = "image_encoder", "llm", "image_generator"
ALL = [ENCODER, LLM, GENERATOR]
RANKS, STEPS = 6, 2
LIMIT_S = 90.0
BOUNDS = {"fp32": 1e-4, "bf16": 0.05}  # relative, of losses and norms
#: Layouts that are trained again without one order of launches.
UNORDERED = ("3-2-1", "zero1")


def layouts(layers: Mapping[str, int]) -> dict[str, tuple[dict[str, Any], list[UnitPlan], bool]]:
    """Return by name: fields of `train`, units, and whether reductions overlap with passes."""
    e, m, g = (layers[name] for name in ALL)

    def apart(dp: int, **of_llm: Any) -> list[UnitPlan]:
        middle = unit("llm", [LLM], [m], 2).model_copy(update=of_llm)
        return [unit("enc", [ENCODER], [e], dp), middle, unit("gen", [GENERATOR], [g])]

    fenced = [e + 1, m + 1, g - 2]
    ring = unit("all", ALL, fenced, tp=2).model_copy(update={"tp_overlap": True})
    bf16 = {"zero_stage": 1, "precision": "bf16"}
    return {
        "3-2-1": ({}, apart(3), False),
        "tp2": ({}, apart(1, tp=2, gpus=4), False),
        "cp2": ({}, apart(1, cp=2, gpus=4), False),
        "cp2-gathered": ({}, apart(1, cp=2, gpus=4, cp_comm_type="all_gather"), False),
        "ring": ({}, [ring], False),
        "zero1": ({"zero_stage": 1}, [unit("all", ALL, fenced, 2)], True),
        "bf16": (bf16, apart(1, tp=2, gpus=4), True),
    }


def nccl(setting: Setting) -> None:
    """Train every layout with six ranks and with one, and compare losses, norms and weights."""
    write_sample_data(setting.folder / "data")
    runs: dict[str, Any] = {}
    cases: dict[str, dict[str, Any]] = {}
    counts = dict.fromkeys(ALL, 9)
    for name in UNORDERED if setting.small else layouts(counts):
        train = layouts(counts)[name][0]
        key = json.dumps(train, sort_keys=True)
        if key not in runs:
            folder = setting.folder / f"run-{len(runs)}"
            runs[key] = write_run(folder, setting.folder / "data", name=f"run{len(runs)}", **train)
            build_index(runs[key], describe(runs[key]), silent)
            table = [info.module for info in layer_table(runs[key])]
            counts = {module: table.count(module) for module in ALL}
        _, units, hidden = layouts(counts)[name]
        for label, made, ahead in (
            (name, units, hidden),
            (f"alone/{key}", [unit("all", ALL, [sum(counts.values())])], False),
        ):
            cases[label] = {
                "run": str(runs[key].path.resolve()),
                "plan": plan_of(runs[key], made, 1, ahead).model_dump(mode="json"),
                "out": str(setting.folder / "out" / str(len(cases))),
                "alone": f"alone/{key}",
            }
    again = {
        f"{name}, any order": cases[name] | {"out": str(setting.folder / "out" / name)}
        for name in UNORDERED
    }
    together = {name: case for name, case in cases.items() if not name.startswith("alone/")}
    for ranks, ordered, named in (
        (1, True, {name: case for name, case in cases.items() if name.startswith("alone/")}),
        (RANKS, True, together),
        (RANKS, False, again),
    ):
        logs = setting.folder / "logs" / f"{ranks}-{ordered}"
        payload = {"cases": named, "device": setting.kind, "ordered": ordered}
        started = time.monotonic()
        launch(ranks, f"{__name__}:rank", payload, logs, timeout_s=LIMIT_S)
        setting.tell(
            f"seconds of {ranks} ranks, {'one order' if ordered else 'any order'}",
            time.monotonic() - started,
        )
        for name, case in named.items():
            if ranks > 1:
                setting.tell(name, _compared(case, cases[case["alone"]]))


def _compared(case: dict[str, Any], alone: dict[str, Any]) -> Figures:
    told, wanted = (
        json.loads((Path(one["out"]) / "told.json").read_text()) for one in (case, alone)
    )
    weights = []
    for one in (case, alone):
        newest = checkpoint_folder.latest(Path(one["out"]) / "checkpoints")
        assert newest is not None
        weights.append(checkpoint.read_tensors(newest))
    off = max(
        abs(found - right) / max(abs(right), 1e-3)
        for pair in zip(told["history"], wanted["history"], strict=True)
        for found, right in zip(*pair, strict=True)
    )
    apart = max(float((weights[0][key] - value).abs().max()) for key, value in weights[1].items())
    precision = read_run(Path(case["run"])).file.train.precision
    return {
        "losses_and_norms_off": off,
        "weights_apart": apart,
        "equal": off < BOUNDS[precision],
        "steps_s": told["steps_s"],
        "groups_s": told["groups"],
        "outside_allocator_mib": told["outside_allocator_mib"],
    }


def before_fork(payload: dict[str, Any]) -> None:
    """Import the model's classes once for all ranks."""
    layer_table(read_run(Path(next(iter(payload["cases"].values()))["run"])))


def rank(payload: dict[str, Any]) -> None:
    """Train every case as one of the ranks; rank 0 leaves losses, norms and seconds."""
    buckets.BUCKET_NUMBERS = BUCKET_NUMBERS
    if payload["device"] == "cuda":
        if not payload["ordered"]:
            os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] = "0"
        print(set_cuda_environment(RANKS), flush=True)
    device = rank_device(payload["device"])
    with joined(device, LIMIT_S, store=rendezvous(timedelta(seconds=LIMIT_S))) as device:
        in_order = device.type == "cuda" or dist.get_world_size() == 1
        for case in payload["cases"].values():
            out = Path(case["out"])
            with nullcontext() if in_order else as_over_nccl(out / "records"):
                _train(case, out, device)


def _train(case: dict[str, Any], out: Path, device: torch.device) -> None:
    run, plan = read_run(Path(case["run"])), Plan.model_validate(case["plan"])
    graph = stage_graph(plan.plan, LLM, tied_layers(layer_table(run)))
    if int(os.environ["RANK"]) >= graph.world_size:
        return
    place = graph.coords(int(os.environ["RANK"]))
    layers = layer_table(run)[place.stage.layers.start : place.stage.layers.stop]
    tracer = Tracer(out / "traces", "test", place, wall_clock())
    grid = UnitGrid(graph, place)
    told: Figures = {"groups": check_groups(grid, place, device, LIMIT_S)}
    engine = build_engine(run, plan, graph, place, device, tracer, grid=grid)
    told |= {"steps_s": [], "outside_allocator_mib": [], "history": []}
    orders, fields = orders_of(run, plan.plan), fields_of(layers, place.unit)
    with Loader(run, orders, unit=place.unit.name, replica=place.replica, fields=fields) as loader:
        fetch = fetcher(loader, device, message_dtype(run.file.train), place_of(place))
        for step in range(STEPS):
            tracer.step, order = step, loader.order(step)
            set_lrs(engine.optimizer, engine.train_spec, step)
            started = time.perf_counter()
            engine.run_step(order, fetch(order))
            told["steps_s"].append(time.perf_counter() - started)
            if device.type == "cuda":  # of all ranks on the device, less this rank's tensors
                free, total = torch.cuda.mem_get_info(device)
                outside = total - free - torch.cuda.memory_reserved(device)
                told["outside_allocator_mib"].append(outside / 2**20)
            told["history"].append([*engine.step_losses.values(), engine.grad_norm()])
            tracer.end_step()
    check_twins(engine)
    checkpoint.save(out / "checkpoints", STEPS, {"model": "test"}, engine, keep=1)
    tracer.close()
    if place.rank == 0:
        (out / "told.json").write_text(json.dumps(told))
    engine.stage.destroy()
    dist.barrier(device_ids=[device.index]) if device.type == "cuda" else dist.barrier()

"""A physically plausible 1F1B run of three units, written as a trace, with its true numbers kept
beside.

Encoder DP 1 → LLM DP 2, PP 2 → generator DP 1: ranks 0 | 1, 2 (stage 0), 3, 4 (stage 1) | 5. Every
duration is chosen here, every start follows from the dependencies, so the tests compare SQL with
plain Python.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from disttrain_cli.analysis.job.analysis import analyze_database
from disttrain_cli.analysis.job.database import open_database
from disttrain_cli.analysis.result.summary import Analysis
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.layer_costs import Polynomial
from disttrain_cli.spec.plan import Layout, UnitPlan
from disttrain_cli.spec.prediction import Prediction, UnitTime
from disttrain_cli.spec.profile import (
    DeviceProfile,
    Fingerprints,
    ModuleProfile,
    ModuleTime,
    PreprocessProfile,
    Profile,
)
from disttrain_cli.spec.runfile.cluster import ClusterSpec
from disttrain_cli.spec.trace import STEP_COLUMNS, TRACE_COLUMNS, Job, arrow_schema
from disttrain_cli.spec.work import Work
from tests import profiles

MS = 1_000_000
MODULES = {"encoder": "image_encoder", "llm": "llm", "generator": "image_generator"}
#: ms per token of one stage, FLOPs per token of one stage, forward; backward takes and counts
#: twice as much.
RATE_MS = {"encoder": 0.02, "llm": 0.01, "generator": 0.02}
FLOPS = {"encoder": 2e6, "llm": 1e6, "generator": 1.5e6}


@dataclass
class Synthetic:
    """What to simulate; faults are factors and extra milliseconds."""

    steps: int = 8
    slots: int = 6
    dp: int = 2
    pp: int = 2
    unit_factor: dict[str, float] = field(default_factory=dict)
    slow_rank: dict[int, float] = field(default_factory=dict)
    slow_stage: dict[int, float] = field(default_factory=dict)
    cp: int = 1  # of the LLM: its ranks for rank, and again from `len(ranks)` on
    slow_cp_rank: int | None = None  # that makes `slow_rank` slow: the others wait for it
    load_ms: float = 0.2
    gap_ms: float = 0.0
    transfer_ms: float = 0.3
    late_ms: float = 0.0  # what every third slot's transfers take more
    emulated: bool = False  # that is a rehearsal, whose host is late with these messages
    load_replica: int | None = None  # the only one of the LLM whose data take `load_ms`
    gap_rank: int | None = None  # the only one with `gap_ms`
    skew: float = 0.0  # spread of work over replicas
    slot_skew: float = 0.0  # spread of work over slots
    device: str = "cuda"
    cores: int = 2
    peak_tflops: float = 0.2
    core_wait_s: float | None = None  # of every step
    # SM clock and throttle bits of a rank's GPU in a step
    clocks: Callable[[int, int], tuple[int, int]] | None = None
    profiled_mhz: float | None = None
    run: str = "demo"
    seed: int = 1  # of the work

    @property
    def ranks(self) -> list[tuple[str, int, int]]:
        """(unit, stage, replica) of every rank."""
        llm = [("llm", stage, replica) for stage in range(self.pp) for replica in range(self.dp)]
        return [("encoder", 0, 0), *llm, ("generator", 0, 0)]


@dataclass
class Truth:
    """What the trace contains, known without reading it."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    windows: list[tuple[int, int]] = field(default_factory=list)
    flops: float = 0.0


def simulate(spec: Synthetic) -> Truth:
    """Play the pipeline and keep every row."""
    random_ = random.Random(spec.seed)
    truth, clock = Truth(), 10**18
    for step in range(spec.steps):
        tokens = {
            (unit, slot, replica): _tokens(spec, unit, slot, random_)
            for slot in range(spec.slots)
            for unit, stage, replica in spec.ranks
            if stage == 0
        }
        clock = _step(spec, step, clock, tokens, truth)
    truth.rows = [one for row in truth.rows for one in _of_group(spec, row)]
    for row in truth.rows if spec.clocks is not None else ():
        if row["operation"] == "step":
            mhz, throttle = spec.clocks(row["rank"], row["step"])
            row |= {"sm_mhz": mhz, "power_w": 690, "throttle": throttle}
    return truth


def _of_group(spec: Synthetic, row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The row of every rank of its CP group: a tenth of their passes is in exchanges, which are
    over when the slow one has come."""
    for cp_rank in range(spec.cp if row["unit"] == "llm" else 1):
        one = row | {"cp_rank": cp_rank, "rank": row["rank"] + cp_rank * len(spec.ranks)}
        if spec.cp > 1 and row["unit"] == "llm" and row["operation"] in ("forward", "backward"):
            waits = spec.slow_cp_rank not in (None, cp_rank)
            factor = spec.slow_rank.get(row["rank"], 1.0) if waits else 1.0
            length = row["end_ns"] - row["start_ns"]
            one["exchange_ns"] = length - int(0.9 * length / factor)
        yield one


def _tokens(spec: Synthetic, unit: str, slot: int, random_: random.Random) -> int:
    base = {"encoder": 500.0 * spec.dp, "llm": 1000.0 * spec.dp, "generator": 500.0 * spec.dp}[unit]
    spread = 1 + spec.skew * random_.choice((-1, 1)) * (unit == "llm")
    return int(base * spread * (1 + spec.slot_skew * (slot % 3 - 1)))


def _step(
    spec: Synthetic, step: int, start: int, tokens: dict[tuple[str, int, int], int], truth: Truth
) -> int:
    ranks = spec.ranks
    depth = {
        ("encoder", 0): 0,
        **{("llm", s): 1 + s for s in range(spec.pp)},
        ("generator", 0): 1 + spec.pp,
    }
    deepest = 1 + spec.pp
    orders = [_one_f_one_b(spec.slots, deepest - depth[unit, stage]) for unit, stage, _ in ranks]
    free, done, place = [start] * len(ranks), {}, [0] * len(ranks)

    def emit(
        rank: int, operation: str, begin: int, length: int, slot: int = -1, count: int = 0
    ) -> int:
        unit, stage, replica = ranks[rank]
        image_unit = unit != "llm"
        truth.rows.append(
            {
                "run": spec.run,
                "step": step,
                "slot": slot,
                "unit": unit,
                "module": MODULES[unit],
                "stage": stage,
                "replica": replica,
                "tp_rank": 0,
                "rank": rank,
                "host": "host-a",
                "operation": operation,
                "start_ns": begin,
                "end_ns": begin + length,
                "tokens": count,
                "images": 2 if image_unit and count else 0,
                "sequences": 0 if image_unit or not count else 1,
                "sum_length_sq": 0,
                "bytes": 0,
                "peer": -1,
            }
        )
        return begin + length

    while any(place[rank] < len(orders[rank]) for rank in range(len(ranks))):
        moved = False
        for rank, (unit, stage, replica) in enumerate(ranks):
            if place[rank] == len(orders[rank]):
                continue
            kind, slot = orders[rank][place[rank]]
            near = depth[unit, stage] + (-1 if kind == "forward" else 1)
            sources = [
                r
                for r, (u, s, d) in enumerate(ranks)
                if depth[u, s] == near and (u != unit or d == replica)
            ]
            if not all((kind, slot, source) in done for source in sources):
                continue
            now = free[rank]
            ready = max((done[kind, slot, source] for source in sources), default=0)
            if sources:
                late = int(spec.late_ms * (slot % 3 == 0) * MS)
                arrived = max(now, ready) + int(spec.transfer_ms * MS) + late
                now = emit(
                    rank,
                    "receive_activation" if kind == "forward" else "receive_gradient",
                    now,
                    arrived - now,
                    slot,
                )
                truth.rows[-1]["late_ns"] = late * spec.emulated
            if kind == "forward" and stage == 0:
                waits = spec.load_replica is None or (unit, replica) == ("llm", spec.load_replica)
                now = emit(rank, "load", now, int(spec.load_ms * waits * MS), slot)
            now += int(spec.gap_ms * (spec.gap_rank in (None, rank)) * MS)
            count = tokens[unit, slot, replica]
            factor = spec.unit_factor.get(unit, 1.0) * spec.slow_rank.get(rank, 1.0)
            factor *= spec.slow_stage.get(stage, 1.0) / spec.cp if unit == "llm" else 1.0
            passes = 1 if kind == "forward" else 2
            now = emit(
                rank, kind, now, int(passes * RATE_MS[unit] * count * factor * MS), slot, count
            )
            truth.flops += passes * FLOPS[unit] * count
            done[kind, slot, rank] = now
            if depth[unit, stage] < deepest if kind == "forward" else depth[unit, stage] > 0:
                now = emit(
                    rank,
                    "send_activation" if kind == "forward" else "send_gradient",
                    now,
                    MS // 10,
                    slot,
                )
            free[rank] = now
            place[rank] += 1
            moved = True
        assert moved, "the synthetic schedule is stuck"
    last = max(free)
    for rank in range(len(ranks)):
        group = [free[r] for r, place_ in enumerate(ranks) if place_[:2] == ranks[rank][:2]]
        reduced = emit(rank, "reduce", free[rank], max(group) + MS // 2 - free[rank])
        truth.rows[-1]["bytes"] = 1000 * (len(group) > 1)
        emit(rank, "step", reduced, last + 2 * MS - reduced)
        emit(rank, "memory", last + 2 * MS, 0)
        truth.rows[-1]["bytes"] = (rank + 1 + step) * 2**20
    truth.windows.append((start, last + 2 * MS))
    return last + 2 * MS


def _one_f_one_b(slots: int, behind: int) -> list[tuple[str, int]]:
    ahead = min(slots, behind)
    order = [("forward", slot) for slot in range(ahead)]
    for slot in range(slots - ahead):
        order += [("forward", ahead + slot), ("backward", slot)]
    return order + [("backward", slot) for slot in range(slots - ahead, slots)]


def write(folder: Path, spec: Synthetic, segments: int = 2, name: str = "segment") -> Truth:
    """Write the run as the trainer would, in several segments per rank, and return the truth."""
    truth = simulate(spec)
    for rank in sorted({row["rank"] for row in truth.rows}):
        rows = [row for row in truth.rows if row["rank"] == rank]
        size = -(-len(rows) // segments)
        for part in range(segments):
            table(
                folder / f"rank-{rank:05d}" / f"{name}-{part:05d}.parquet",
                rows[part * size : (part + 1) * size],
                TRACE_COLUMNS,
            )
    steps = [
        {
            "run": spec.run,
            "step": step,
            "loss": 5.0 / (step + 1),
            "loss_text": 4.0 / (step + 1),
            "loss_image": 1.0 / (step + 1),
            "grad_norm": 1.0,
            "learning_rate": 1e-3,
            "iteration_s": (end - start) / 1e9,
            "sequences_per_s": 1.0,
            "mfu": 0.3,
            "data_wait_s": 0.0,
            "core_wait_s": spec.core_wait_s,
            "tokens": 230 * spec.dp * spec.slots,  # the means of `profiles.data`
            "images": 3 * spec.dp * spec.slots,
            "targets": spec.dp * spec.slots,
            "model_flops": truth.flops / spec.steps,
            "end_ns": end,
        }
        for step, (start, end) in enumerate(truth.windows)
    ]
    table(folder / "steps" / f"{name}-00000.parquet", steps, STEP_COLUMNS)
    (folder / "job.json").write_text(make_job(spec).model_dump_json())
    return truth


def judged(folder: Path) -> Analysis:
    """Analyse a folder without other layouts, which take half of an analysis and more."""
    return analyze_database(open_database([folder]), lambda *_: [])


def table(path: Path, rows: list[dict[str, Any]], columns: dict[str, str]) -> None:
    """Write rows as one Parquet segment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=arrow_schema(columns)), path)


def make_job(spec: Synthetic) -> Job:
    """`job.json` of the run: one layer per stage, linear in tokens, right unless a fault is
    injected."""

    def module(unit: str, kind: Any, layers: int) -> ModuleProfile:
        cost = profiles.cost(
            Polynomial(per_token=RATE_MS[unit]), flops=Polynomial(per_token=FLOPS[unit])
        )
        return ModuleProfile(
            kind=kind,
            parameters=1,
            layers=["block"] * layers,
            costs={"block": cost},
            tp={"1": ModuleTime(forward_ms=1, backward_ms=2, fit_error_pct=0)},
            work_per_sequence=Work(1, 500, 0),
            max_work_per_sequence=Work(1, 500, 0),
            cut_bytes_per_sequence=[1.0] * layers,
        )

    gpus = len(spec.ranks) + (spec.cp - 1) * spec.dp * spec.pp
    profile = Profile(
        precision="fp32",
        fingerprints=Fingerprints(model="m", data="d", cluster="c"),
        cluster=ClusterSpec(),
        provenance={},
        device=DeviceProfile(
            name="synthetic",
            kind=spec.device,
            count=gpus,
            memory_gib=1,  # type: ignore[arg-type]
            peak_tflops=spec.peak_tflops,
            shared_by=1,
            cores=spec.cores,
            sm_mhz=spec.profiled_mhz,
        ),
        inputs=ModelInputs(llm="llm", vocabulary=256, sequence_length=1024),
        modules={
            "image_encoder": module("encoder", "encoder", 1),
            "llm": module("llm", "llm", spec.pp),
            "image_generator": module("generator", "generator", 1),
        },
        links=profiles.links(),
        data=profiles.data(),
        preprocess=PreprocessProfile(images_per_s_per_core=1, sequences_per_s_per_core=1),
    )
    layout = Layout(
        global_batch_size=spec.dp * spec.slots,
        microbatch_size=1,
        microbatches=spec.slots,
        gpus_used=gpus,
        units=[
            UnitPlan(name="encoder", modules=["image_encoder"], gpus=1, layers_per_stage=[1]),
            UnitPlan(
                name="llm",
                modules=["llm"],
                dp=spec.dp,
                pp=spec.pp,
                cp=spec.cp,
                gpus=spec.cp * spec.dp * spec.pp,
                layers_per_stage=[1] * spec.pp,
            ),
            UnitPlan(name="generator", modules=["image_generator"], gpus=1, layers_per_stage=[1]),
        ],
    )
    predicted = Prediction(
        iteration_s=0.5,
        sequences_per_s=10,
        mfu=0.3,
        warmup_s=0.1,
        steady_s=0.4,
        bubble_fraction=0.2,
        memory=[],
        units=[
            UnitTime(unit="encoder", forward_ms=20, backward_ms=40, stage_ms=60),
            UnitTime(unit="llm", forward_ms=20, backward_ms=40, stage_ms=30),
            UnitTime(unit="generator", forward_ms=18, backward_ms=36, stage_ms=54),
        ],
    )
    return Job(
        run=spec.run, strategy="disaggregated", layout=layout, predicted=predicted, profile=profile
    )

"""A run as it would be recorded if its costs were those of another profile: simulated steps,
written as traces."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from disttrain_cli.costs.layout import amount, optimizer_s, stages_of
from disttrain_cli.data.ordering.assigning import assign, count_costs
from disttrain_cli.data.ordering.loads import replica_loads
from disttrain_cli.data.sizes import sampled_batch, sizes_of_sample
from disttrain_cli.models.graph import describe, layer_table
from disttrain_cli.schedule.one_f_one_b import inputs
from disttrain_cli.simulation.pipeline import simulate
from disttrain_cli.simulation.step import pipeline_of
from disttrain_cli.simulation.timeline import Timeline
from disttrain_cli.spec.layer_costs import Polynomial
from disttrain_cli.spec.plan import Layout, UnitPlan
from disttrain_cli.spec.prediction import Prediction, UnitTime
from disttrain_cli.spec.profile import Profile, SizeSample
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.trace import COMPUTE, SIZE_COLUMNS, TRACE_COLUMNS, Job, Rehearsed
from tests.analysis.synthetic import table

TIMES = ("forward_ms", "backward_ms", "backward_input_ms")
STEP_NS = 10**12


@dataclass
class Recording:
    """A run to be recorded: the profile it was planned with, and the costs it really had."""

    planned: Profile
    true: Profile
    layout: Layout
    sample: SizeSample
    steps: int = 4
    gpus_per_node: int = 8
    slow_ranks: dict[int, float] = field(default_factory=dict)
    stalls: float = 0.0  # share of the passes that take five times as long
    noise: float = 0.0
    sharing: float = 1.0
    sizes_per_step: int = 0
    rehearsed: bool = False
    seed: int = 1

    def write(self, folder: Path) -> Path:
        """The traces folder; returns it."""
        stages = stages_of(self.true, self.layout)
        random = np.random.default_rng(self.seed)
        first = np.concatenate([[0], np.cumsum([stage.unit.dp for stage in stages])])
        sizes, rows = sizes_of_sample(self.sample), []
        for step in range(self.steps):
            batch = sampled_batch(sizes, self.layout.global_batch_size, step)
            places = assign(
                count_costs(batch, self.true.inputs), self.layout, self.true.inputs.llm, "paper"
            )
            loads = replica_loads(batch, self.true.inputs, self.layout, places)
            timeline, parts = self._simulate(stages, loads, first, random)
            rows += self._rows(step, stages, loads, first, timeline, parts)
        for rank in sorted({row["rank"] for row in rows}):
            table(
                folder / f"rank-{rank:05d}" / "segment-00000.parquet",
                [row for row in rows if row["rank"] == rank],
                TRACE_COLUMNS,
            )
        if self.sizes_per_step:
            count = len(self.sample.tokens)
            chosen = [
                (step, (step * self.sizes_per_step + place) % count)
                for step in range(self.steps)
                for place in range(self.sizes_per_step)
            ]
            table(
                folder / "sizes" / "segment-00000.parquet",
                [
                    {
                        "run": "start",
                        "step": step,
                        "tokens": self.sample.tokens[place],
                        "length_sq": self.sample.length_sq[place],
                        "images": self.sample.images[place],
                        "targets": self.sample.targets[place],
                        "clips": 0,
                    }
                    for step, place in chosen
                ],
                SIZE_COLUMNS,
            )
        (folder / "job.json").write_text(self._job().model_dump_json())
        return folder

    def _simulate(
        self, stages: list[Any], loads: dict[str, Any], first: Any, random: Any
    ) -> tuple[Timeline, Any]:
        """The step, and by (pass, stage, module) its seconds [n, DP]."""
        pipeline = pipeline_of(self.true, self.layout, stages, loads, self.gpus_per_node)
        parts = {}
        for number, stage in enumerate(stages):
            for operation, total in enumerate(pipeline.parts_s):
                direction = COMPUTE[operation]
                total[:, number] = 0.0
                for cost in stage.costs:
                    seconds = (
                        amount(cost.parts_ms[operation], loads[cost.module]) / 1e3 * self.sharing
                    )
                    seconds = seconds * (1.0 + self.noise * random.standard_normal(seconds.shape))
                    seconds = seconds * np.where(
                        random.random(seconds.shape) < self.stalls, 5.0, 1.0
                    )
                    seconds = seconds * [
                        self.slow_ranks.get(int(first[number]) + replica, 1.0)
                        for replica in range(stage.unit.dp)
                    ]
                    parts[direction, number, cost.module] = seconds
                    total[:, number, : stage.unit.dp] += seconds
        return simulate(pipeline), parts

    def _rows(
        self,
        step: int,
        stages: list[Any],
        loads: dict[str, Any],
        first: Any,
        timeline: Timeline,
        parts: Any,
    ) -> list[dict[str, Any]]:
        pipeline = pipeline_of(self.true, self.layout, stages, loads, self.gpus_per_node)
        received = inputs(pipeline.cuts)
        rows: list[dict[str, Any]] = []
        last_s = max(
            float(np.nanmax(_ends(timeline)[:, number])) + float(pipeline.reduce_s[number])
            for number in range(len(stages))
        )
        for number, stage in enumerate(stages):
            for replica in range(stage.unit.dp):
                own = {
                    "run": "start",
                    "step": step,
                    "slot": -1,
                    "unit": stage.unit.name,
                    "module": "",
                    "stage": stage.index,
                    "replica": replica,
                    "tp_rank": 0,
                    "rank": int(first[number]) + replica,
                    "host": "host",
                    "tokens": 0,
                    "images": 0,
                    "sequences": 0,
                    "sum_length_sq": 0,
                    "bytes": 0,
                    "peer": -1,
                }

                def emit(
                    operation: str,
                    start_s: float,
                    end_s: float,
                    own: dict[str, Any] = own,
                    **more: Any,
                ) -> None:
                    rows.append(
                        own
                        | {
                            "operation": operation,
                            "start_ns": step * STEP_NS + round(1e9 * start_s),
                            "end_ns": step * STEP_NS + round(1e9 * end_s),
                        }
                        | more
                    )

                starts = {"forward": timeline.forward_start, "backward": timeline.backward_start}
                if stage.weight_delay is not None:
                    starts["weights"] = timeline.weight_start
                passes = sorted(
                    (float(starts[direction][slot, number, replica]), slot, direction)
                    for direction in starts
                    for slot in range(self.layout.microbatches)
                )
                free_s = 0.0
                for start_s, slot, direction in passes:
                    if (COMPUTE.index(direction), number) in received:
                        emit(
                            "receive_activation" if direction == "forward" else "receive_gradient",
                            free_s,
                            start_s,
                            slot=slot,
                            bytes=1,
                        )
                    for cost in stage.costs if direction == "forward" else reversed(stage.costs):
                        end_s = start_s + float(
                            parts[direction, number, cost.module][slot, replica]
                        )
                        work = loads[cost.module][slot, replica]
                        items = "sequences" if cost.module == self.true.inputs.llm else "images"
                        amounts: dict[str, Any] = {
                            items: int(work[0]),
                            "tokens": int(work[1]),
                            "sum_length_sq": int(work[2]),
                        }
                        emit(direction, start_s, end_s, slot=slot, module=cost.module, **amounts)
                        start_s = end_s
                    free_s = start_s
                end_s = free_s + float(pipeline.reduce_s[number])
                emit("reduce", free_s, end_s)
                emit(
                    "step",
                    end_s,
                    last_s + optimizer_s(self.true, self.layout, stage, self.gpus_per_node),
                )
        return rows

    def _job(self) -> Job:
        units = [
            UnitTime(unit=unit.name, forward_ms=1, backward_ms=2, stage_ms=3, sharing=self.sharing)
            for unit in self.layout.units
        ]
        predicted = Prediction(
            iteration_s=1,
            sequences_per_s=1,
            mfu=0.3,
            warmup_s=0,
            steady_s=1,
            bubble_fraction=0.1,
            memory=[],
            units=units,
        )
        how = (
            Rehearsed(processes=1, time_scale=1, messages="scaled", noise=0, faults=[])
            if self.rehearsed
            else None
        )
        return Job(
            run="start",
            strategy="disaggregated",
            layout=self.layout,
            predicted=predicted,
            profile=self.planned,
            gpus_per_node=self.gpus_per_node,
            rehearsed=how,
        )


def _ends(timeline: Timeline) -> Any:
    """When the gradients of every slot are there, those of the weights too."""
    return timeline.backward_end if timeline.weight_end is None else timeline.weight_end


def layout(
    encoder: tuple[int, int, list[int]],
    llm: tuple[int, int, list[int]],
    generator: tuple[int, int, list[int]],
    batch: int = 12,
    checkpointing: bool = False,
    trained: list[str] | None = None,
) -> Layout:
    """Three units, each (TP, DP, layers of its stages); microbatches of one sequence."""
    units = [
        UnitPlan(
            name=name,
            modules=[name],
            tp=tp,
            dp=dp,
            pp=len(stages),
            gpus=tp * dp * len(stages),
            layers_per_stage=stages,
            checkpointing=checkpointing,
        )
        for name, (tp, dp, stages) in (
            ("image_encoder", encoder),
            ("llm", llm),
            ("image_generator", generator),
        )
    ]
    return Layout(
        global_batch_size=batch,
        microbatch_size=1,
        microbatches=batch // llm[1],
        units=units,
        gpus_used=sum(unit.gpus for unit in units),
        trained=trained,
    )


def varied(
    count: int = 256, images: float = 3.0, targets: float = 1.0, seed: int = 2
) -> SizeSample:
    """Sequences of different lengths, images and targets."""
    random = np.random.default_rng(seed)
    tokens = random.integers(60, 257, count)
    length_sq = (tokens**2 * random.uniform(0.1, 1.0, count)).astype(int)
    return SizeSample(
        tokens=tokens.tolist(),
        length_sq=length_sq.tolist(),
        images=[random.integers(10, 90, random.poisson(images)).tolist() for _ in range(count)],
        targets=random.poisson(targets, count).tolist(),
    )


def sequences_with(images: int, patches: int = 16, count: int = 96) -> SizeSample:
    """Alike but for one image more or less."""
    return SizeSample(
        tokens=[200] * count,
        length_sq=[20_000] * count,
        targets=[1] * count,
        images=[[patches] * (images + place % 3 - 1) for place in range(count)],
    )


def with_layers(profile: Profile, run: Run) -> Profile:
    """The profile with the layers and inputs of the run file's model, each as costly as the
    module's first."""
    layers, modules = layer_table(run), {}
    for name, module in profile.modules.items():
        kinds = [layer.kind for layer in layers if layer.module == name]
        modules[name] = module.model_copy(
            update={
                "layers": kinds,
                "costs": dict.fromkeys(kinds, module.costs[module.layers[0]]),
                "cut_bytes_per_sequence": [1e5] * len(kinds),
            }
        )
    return profile.model_copy(update={"modules": modules, "inputs": describe(run)})


def retimed(profile: Profile, factor: Any) -> Profile:
    """The profile with each time multiplied: factor(module, kind, TP, time, term)."""
    modules = {}
    for name, module in profile.modules.items():
        costs = {
            kind: cost.model_copy(
                update={
                    "tp": {
                        tp: shard.model_copy(
                            update={
                                time: Polynomial(
                                    **{
                                        term: value * factor(name, kind, tp, time, term)
                                        for term, value in getattr(shard, time).model_dump().items()
                                    }
                                )
                                for time in TIMES
                            }
                        )
                        for tp, shard in cost.tp.items()
                    }
                }
            )
            for kind, cost in module.costs.items()
        }
        modules[name] = module.model_copy(update={"costs": costs})
    return profile.model_copy(update={"modules": modules})

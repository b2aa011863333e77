"""The plan (`plan.yaml`): modules, TP, DP and PP of each unit; readable and editable by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, model_validator

from disttrain_cli.calls import call
from disttrain_cli.spec.files import Strict, parse_yaml, validate
from disttrain_cli.spec.forms import Form
from disttrain_cli.spec.prediction import Prediction
from disttrain_cli.spec.profile import Fingerprints
from disttrain_cli.spec.runfile.bounds import MOST_GPUS, MOST_SEQUENCES
from disttrain_cli.spec.runfile.model import UNIT_NAME, UNIT_NAME_WORDS
from disttrain_cli.spec.shape import CpCommType, ParallelShape
from disttrain_cli.spec.whole import keep_before, write_whole

Strategy = Literal["auto", "disaggregated", "megatron"]


GpuCount = Annotated[int, Field(ge=1, le=MOST_GPUS)]
SequenceCount = Annotated[int, Field(ge=1, le=MOST_SEQUENCES)]


class UnitPlan(Strict):
    """Consecutive modules that share one (TP, CP, DP, PP) on their own ranks."""

    name: Annotated[str, Form(UNIT_NAME, UNIT_NAME_WORDS)]
    modules: list[str] = Field(min_length=1)
    tp: GpuCount = 1
    cp: GpuCount = Field(
        1,
        description="Context-parallel size: ranks that shard the tokens of a replica's sequences"
        " and the rows of its images, all with the same weights; for units without generators.",
    )
    cp_comm_type: CpCommType = Field(
        "a2a",
        description="Communication of attention in a CP group: a2a exchanges rows for heads,"
        " all_gather gathers keys and values for each rank's queries, with tokens balanced by"
        " work.",
    )
    ep: GpuCount = Field(
        1,
        description="Expert-parallel size: ranks of a stage that hold different experts; it"
        " divides tp × cp × dp. Experts themselves are not divided.",
    )
    dp: GpuCount = 1
    pp: GpuCount = 1
    chunks: GpuCount = Field(
        1,
        description="Stages of each rank: above 1 the pipeline has pp × chunks stages, stage s is"
        " on the s mod pp-th ranks, and the order is interleaved 1F1B. For a plan of one unit.",
    )
    gpus: GpuCount = Field(description="tp × cp × dp × pp.")
    layers_per_stage: list[int] = Field(
        description="Number of layers of each of the pp × chunks stages; the sum is the number of"
        " layers of the modules."
    )
    checkpointing: bool = Field(
        False,
        description="Recompute activations in the backward instead of keeping them from the"
        " forward.",
    )
    weight_delay: list[Annotated[int, Field(strict=True)] | None] | None = Field(
        None,
        description="By stage, delay in slots of the weight gradients after the split backward;"
        " null, for a stage or for all: no split.",
    )
    tp_overlap: bool = Field(
        False,
        description="Communication of a TP group is overlapped chunk by chunk with the GEMMs that"
        " consume or produce it.",
    )
    ep_overlap: bool = Field(
        False,
        description="A rank's rows go to experts in two halves: exchanges of one overlap with the"
        " experts' GEMMs of the other.",
    )

    module_tp: dict[str, Annotated[int, Field(strict=True)]] = Field(
        default_factory=dict,
        description="TP of modules that the unit's TP does not divide, by name; 1: every rank of a"
        " TP group holds the complete module and computes other items of its replica, distributed"
        " by size. For encoders and generators in the LLM's unit, each on one stage.",
    )

    @model_validator(mode="after")
    def _products(self) -> UnitPlan:
        if self.gpus != self.tp_cp_size * self.dp * self.pp:
            between, cp = (" × cp", f" × {self.cp}") if self.cp > 1 else ("", "")
            raise ValueError(
                f"gpus must be tp{between} × dp × pp = {self.tp}{cp} × {self.dp} × {self.pp} = "
                f"{self.tp_cp_size * self.dp * self.pp}; given: {self.gpus}"
            )
        if self.tp_cp_size * self.dp % self.ep:
            raise ValueError(
                f"ep must divide the ranks of a stage, tp × cp × dp = {self.tp} × {self.cp} ×"
                f" {self.dp} = {self.tp_cp_size * self.dp}; given: {self.ep}"
            )
        if len(self.layers_per_stage) != self.stages:
            raise ValueError(
                f"layers_per_stage must list {self.stages} stage(s)"
                f" ({'pp' if self.chunks == 1 else 'pp × chunks'}); given:"
                f" {len(self.layers_per_stage)}"
            )
        if self.chunks > 1 and (self.pp == 1 or self.weight_delay is not None):
            raise ValueError(
                "chunks needs a pipeline: pp is 1, which sends nothing"
                if self.pp == 1
                else "chunks and weight_delay exclude each other: interleaved 1F1B has no split"
                " backward"
            )
        if min(self.layers_per_stage) < 1:
            raise ValueError("layers_per_stage must give every stage at least one layer")
        if self.tp_overlap and self.tp == 1:
            raise ValueError("tp_overlap needs a TP group: tp is 1, which sends nothing")
        if self.ep_overlap and self.ep == 1:
            raise ValueError("ep_overlap needs an EP group: ep is 1, which sends nothing")
        if self.gathers and self.cp == 1:
            raise ValueError(
                "cp_comm_type all_gather needs a CP group: cp is 1, which sends nothing"
            )
        self._check_module_tp()
        if self.weight_delay is not None:
            if len(self.weight_delay) != self.pp or any((d or 0) < 0 for d in self.weight_delay):
                raise ValueError(
                    f"weight_delay must list {self.pp} stage(s) (pp), each 0 or more, or null;"
                    f" given: {self.weight_delay}"
                )
            if self.checkpointing:
                raise ValueError(
                    "weight_delay and checkpointing exclude each other: recomputed activations"
                    " would have to be kept for the deferred weight gradients"
                )
        return self

    def _check_module_tp(self) -> None:
        for name, tp in self.module_tp.items():
            if name not in self.modules:
                raise ValueError(
                    f"module_tp names {name}, which is not among the unit's modules:"
                    f" {', '.join(self.modules)}"
                )
            if tp != 1:
                raise ValueError(
                    f"module_tp of {name} must be 1, the complete module on every rank; given:"
                    f" {tp}. Without an entry the unit's tp divides it"
                )
        if self.module_tp and self.tp == 1:
            raise ValueError("module_tp needs a TP group: tp is 1, which divides no module")
        if self.module_tp and self.cp > 1:
            raise ValueError(
                f"module_tp and cp exclude each other: cp {self.cp} divides the rows of every"
                " image, module_tp distributes whole images"
            )

    @property
    def stages(self) -> int:
        """Number of stages: one or, with `chunks`, several of each rank."""
        return self.pp * self.chunks

    @property
    def shape(self) -> ParallelShape:
        return ParallelShape(
            tp=self.tp,
            cp=self.cp,
            ep=self.ep,
            dp=self.dp,
            pp=self.pp,
            recompute=self.checkpointing,
            cp_comm_type=self.cp_comm_type,
            ep_overlap=self.ep_overlap,
        )

    def tp_of(self, module: str) -> int:
        """Return the number of ranks that shard the layers of a module."""
        return self.module_tp.get(module, self.tp)

    def dealt_over(self, module: str) -> int:
        """Return the number of TP ranks over which the items of a module are distributed."""
        return self.tp // self.tp_of(module)

    @property
    def replicated(self) -> tuple[str, ...]:
        """Modules that are replicated on every rank of a TP group."""
        return tuple(name for name in self.modules if name in self.module_tp)

    @property
    def parts(self) -> list[tuple[list[str], ParallelShape]]:
        """Consecutive modules that the unit's shape shards alike, and each with a TP of its own.

        Each with its shape.
        """
        alike = groupby(self.modules, lambda name: name if name in self.module_tp else None)
        return [
            (list(modules), replace(self.shape, tp=self.module_tp.get(name or "", self.tp)))
            for name, modules in alike
        ]

    @property
    def gathers(self) -> bool:
        """True if its CP groups gather keys and values."""
        return self.cp_comm_type == "all_gather"

    @property
    def tp_cp_size(self) -> int:
        """Ranks that share the work of a replica on one stage."""
        return self.tp * self.cp

    @property
    def dp_cp_size(self) -> int:
        """Ranks that hold the same weights."""
        return self.cp * self.dp

    @property
    def expert_replicas(self) -> int:
        """Ranks that hold the same experts."""
        return self.tp_cp_size * self.dp // self.ep

    @property
    def replicas_together(self) -> int:
        """Neighbouring replicas that wait for each other in every layer with experts."""
        return math.lcm(self.ep, self.tp_cp_size) // self.tp_cp_size

    @property
    def cp_degree(self) -> str:
        """CP degree in words, with `cp_comm_type` if its groups gather keys and values."""
        return f"{self.cp} {self.cp_comm_type}" if self.gathers else str(self.cp)

    @property
    def tp_degree(self) -> str:
        """TP degree in words, with the modules that have another one."""
        others = ", ".join(f"{name} {tp}" for name, tp in self.module_tp.items())
        return f"{self.tp} ({others})" if others else str(self.tp)

    @property
    def pp_degree(self) -> str:
        """PP in words, with the number of each rank's stages if there are several."""
        return f"{self.pp} × {self.chunks} chunks" if self.chunks > 1 else str(self.pp)

    @property
    def degrees(self) -> str:
        """TP, DP and PP in words, and CP and EP if they are not 1."""
        cp = f"CP {self.cp_degree} " if self.cp > 1 else ""
        ep = f"EP {self.ep} " if self.ep > 1 else ""
        return f"TP {self.tp_degree} {cp}{ep}DP {self.dp} PP {self.pp_degree}"


class Layout(Strict):
    """Part of a plan that determines the placement of modules on ranks."""

    strategy: Strategy = "auto"
    global_batch_size: SequenceCount = Field(description="Number of packed sequences per step.")
    microbatch_size: SequenceCount = Field(
        description="Number of packed sequences per LLM replica and slot (M)."
    )
    microbatches: SequenceCount = Field(
        description="Number of slots per step (n = BS / (DP_lm · M))."
    )
    zero_stage: Literal[0, 1] = Field(
        1, description="1: optimizer states are sharded over the replicas of a unit."
    )
    overlap: bool = Field(
        False,
        description="Reduce gradients in buckets during the last pass of a step that produces any,"
        " and gather updated weights ahead of the next step's forwards.",
    )
    gpus_used: GpuCount
    trained: list[str] | None = Field(
        None, description="Trained modules, and 'projectors'; None = everything."
    )
    left_out: list[Annotated[int, Field(ge=0, lt=MOST_GPUS)]] = Field(
        default_factory=list,
        description="Devices of the cluster without a rank: node × gpus_per_node + index in the"
        " node. The ranks use the others in order.",
    )
    units: list[UnitPlan] = Field(min_length=1, description="Units in pipeline order.")

    @model_validator(mode="after")
    def _consistent(self) -> Layout:
        names = [unit.name for unit in self.units]
        if len(set(names)) != len(names):
            raise ValueError(f"unit names must differ; given: {', '.join(names)}")
        total = sum(unit.gpus for unit in self.units)
        if self.gpus_used != total:
            raise ValueError(
                f"gpus_used must be the sum over units = {total}; given: {self.gpus_used}"
            )
        for unit in self.units:
            if unit.chunks > 1 and (len(self.units) > 1 or self.microbatches % unit.pp):
                raise ValueError(
                    f"chunks of unit {unit.name} need a plan of one unit, whose microbatches are a"
                    f" multiple of pp; given: {len(self.units)} unit(s), {self.microbatches}"
                    f" microbatches, pp {unit.pp}"
                )
        return self

    @property
    def devices(self) -> list[int]:
        """Device index in the cluster, by rank."""
        out = set(self.left_out)
        return [device for device in range(self.gpus_used + len(out)) if device not in out][
            : self.gpus_used
        ]

    def index_of(self, module: str) -> int:
        """Return the index of the unit that holds a module."""
        return next(index for index, unit in enumerate(self.units) if module in unit.modules)

    def unit_of(self, module: str) -> UnitPlan:
        """Return the unit that holds a module."""
        return self.units[self.index_of(module)]

    def check_slots(self, llm: str) -> None:
        """Raise ValueError unless DP_lm · M · n = global batch size."""
        dp = self.unit_of(llm).dp
        if dp * self.microbatch_size * self.microbatches != self.global_batch_size:
            raise ValueError(
                f"dp of {llm} × microbatch_size × microbatches = {dp} × {self.microbatch_size} ×"
                f" {self.microbatches} = {dp * self.microbatch_size * self.microbatches} must be"
                f" global_batch_size = {self.global_batch_size}"
            )

    def describe(self) -> str:
        """Return one line: unit names with their degrees."""
        return " → ".join(f"{unit.name} ({unit.degrees})" for unit in self.units)


class Baseline(Strict):
    """Best layout of another strategy, simulated like the plan."""

    iteration_s: float = Field(gt=0)
    sequences_per_s: float = Field(gt=0)
    mfu: float = Field(description="MFU over all devices, as for the plan.")
    gpus_used: int
    layout: str
    plan: Layout | None = Field(
        None,
        description=("The layout in the format of the plan; None for fsdp, which has no units."),
    )


class Alternative(Strict):
    """Runner-up among the simulated finalists, with its cost."""

    layout: str
    iteration_s: float = Field(gt=0)
    gpus_used: int
    slower_pct: float = Field(
        description="Excess of the simulated time over the plan's; below 0 if a strategy's rule"
        " made the choice, or the cores that ranks share."
    )
    plan: Layout | None = Field(None, description="The layout in the format of the plan.")


class Search(Strict):
    solve_s: float
    candidates: int
    exact: bool
    simulated: int = Field(1, description="Number of finalists that the simulator ranked.")


class Plan(Strict):
    """The complete plan."""

    version: Literal[1] = 1
    fingerprints: Fingerprints
    provenance: dict[str, str] = Field(default_factory=dict)
    plan: Layout
    predicted: Prediction
    baselines: dict[str, Baseline | None] = Field(
        default_factory=dict,
        description="Baselines by strategy and, on GPUs, of sharded data parallelism (fsdp). None"
        " if no such layout fits.",
    )
    alternatives: list[Alternative] = Field(default_factory=list)
    search: Search


def read_plan(path: Path) -> Plan:
    """Read and check a plan; raise SpecError."""
    value: Any = parse_yaml(path, "plan", f"Create one with: {call('plan')}")
    return validate(Plan, value, path, "plan", f"Correct it, or plan again: {call('plan')}")


def write_plan(path: Path, plan: Plan) -> Path:
    """Write `plan.yaml`, keys in the order of the specification.

    A replaced file is kept as `plan.yaml.before`.
    """
    header = (
        "# Written by `disttrain plan`. Edit `plan:` manually if needed; `disttrain train` checks"
        " it.\n"
    )
    body = yaml.safe_dump(
        plan.model_dump(mode="json"), sort_keys=False, default_flow_style=None, width=110
    )
    keep_before(path)
    return write_whole(path, header + body)

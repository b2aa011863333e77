"""The plan: which unit runs which modules, with which TP, DP and PP (`plan.yaml`), readable and editable by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, model_validator

from disttrain_cli.spec.files import Strict, parse_yaml, validate, write_whole
from disttrain_cli.spec.profile import Fingerprints

Strategy = Literal["disaggregated", "megatron", "distmm", "paper"]


class UnitPlan(Strict):
    """Consecutive modules that share one (TP, DP, PP) on their own ranks."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_+-]*$")
    modules: list[str] = Field(min_length=1)
    tp: int = Field(1, ge=1)
    dp: int = Field(1, ge=1)
    pp: int = Field(1, ge=1)
    gpus: int = Field(ge=1, description="tp × dp × pp.")
    layers_per_stage: list[int] = Field(description="Layers of each stage; their sum is the layers of the modules.")

    @model_validator(mode="after")
    def _products(self) -> UnitPlan:
        if self.gpus != self.tp * self.dp * self.pp:
            raise ValueError(f"gpus must be tp × dp × pp = {self.tp} × {self.dp} × {self.pp} = "
                             f"{self.tp * self.dp * self.pp}; given: {self.gpus}")
        if len(self.layers_per_stage) != self.pp:
            raise ValueError(f"layers_per_stage must list {self.pp} stage(s) (pp); given: {len(self.layers_per_stage)}")
        if min(self.layers_per_stage) < 1:
            raise ValueError("layers_per_stage must give every stage at least one layer")
        return self


class Layout(Strict):
    """The part of a plan that decides what runs where."""

    strategy: Strategy = "disaggregated"
    global_batch_size: int = Field(ge=1, description="Packed sequences per step.")
    microbatch_size: int = Field(ge=1, description="Packed sequences per LLM replica and slot (M).")
    microbatches: int = Field(ge=1, description="Slots per step (n = BS / (DP_lm · M)).")
    gpus_used: int = Field(ge=1)
    units: list[UnitPlan] = Field(min_length=1, description="In pipeline order.")

    @model_validator(mode="after")
    def _consistent(self) -> Layout:
        names = [unit.name for unit in self.units]
        if len(set(names)) != len(names):
            raise ValueError(f"unit names must differ; given: {', '.join(names)}")
        total = sum(unit.gpus for unit in self.units)
        if self.gpus_used != total:
            raise ValueError(f"gpus_used must be the sum over units = {total}; given: {self.gpus_used}")
        return self

    def unit_of(self, module: str) -> UnitPlan:
        """The unit that holds a module."""
        return next(unit for unit in self.units if module in unit.modules)

    def check_slots(self, llm: str) -> None:
        """Raise ValueError unless DP_lm · M · n = global batch size."""
        dp = self.unit_of(llm).dp
        if dp * self.microbatch_size * self.microbatches != self.global_batch_size:
            raise ValueError(
                f"dp of {llm} × microbatch_size × microbatches = {dp} × {self.microbatch_size} × {self.microbatches} = "
                f"{dp * self.microbatch_size * self.microbatches} must be global_batch_size = {self.global_batch_size}")

    def describe(self) -> str:
        """One line: unit names with TP × DP × PP."""
        return " → ".join(f"{u.name} (TP {u.tp} DP {u.dp} PP {u.pp})" for u in self.units)


class StageMemory(Strict):
    unit: str
    stage: int
    peak_gib: float
    limit_gib: float


class UnitTime(Strict):
    """Predicted times of one unit for one slot, in ms."""

    unit: str
    forward_ms: float
    backward_ms: float
    stage_ms: float = Field(description="Slowest stage, forward + backward: what one more slot costs.")
    sharing: float = Field(1.0, description="Time expected in the run over these times: 1 on devices of their own; "
                           "below 1 where ranks share cores and do not all compute at once.")


class Prediction(Strict):
    """What the cost model expects of a layout."""

    iteration_s: float
    sequences_per_s: float
    mfu: float
    warmup_s: float
    steady_s: float
    bubble_fraction: float
    memory: list[StageMemory]
    units: list[UnitTime] = Field(default_factory=list)


class Baseline(Strict):
    iteration_s: float
    sequences_per_s: float
    mfu: float
    gpus_used: int
    layout: str


class Alternative(Strict):
    """A runner-up, with what it would cost."""

    layout: str
    iteration_s: float
    gpus_used: int
    slower_pct: float


class Search(Strict):
    solve_s: float
    candidates: int
    exact: bool


class Plan(Strict):
    """The whole plan."""

    version: Literal[1] = 1
    fingerprints: Fingerprints
    provenance: dict[str, str] = Field(default_factory=dict)
    plan: Layout
    predicted: Prediction
    baselines: dict[str, Baseline | None] = Field(default_factory=dict, description="None where no such layout fits.")
    alternatives: list[Alternative] = Field(default_factory=list)
    search: Search


def read_plan(path: Path) -> Plan:
    """Read and check a plan; raises SpecError."""
    value: Any = parse_yaml(path, "plan", "Make one with: disttrain plan")
    return validate(Plan, value, path, "plan", "Correct it, or plan again: disttrain plan")


def write_plan(path: Path, plan: Plan) -> Path:
    """Write `plan.yaml`, keys in the order of the specification; what it replaces is kept as `plan.yaml.before`."""
    header = "# Made by `disttrain plan`. Edit `plan:` by hand if you like; `disttrain train` checks it.\n"
    body = yaml.safe_dump(plan.model_dump(mode="json"), sort_keys=False, default_flow_style=None, width=110)
    if path.is_file():
        path.replace(path.with_name(f"{path.name}.before"))
    return write_whole(path, header + body)

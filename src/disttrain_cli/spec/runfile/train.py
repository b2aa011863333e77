"""`train`: steps, batch, precision, optimizer, checkpoints, evaluation."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, PrivateAttr, model_validator

from disttrain_cli.calls import call
from disttrain_cli.errors import SpecError
from disttrain_cli.spec.files import Strict
from disttrain_cli.spec.runfile.bounds import MOST_S, MOST_SEQUENCES, MOST_STEPS

Beta = Annotated[float, Field(ge=0, lt=1)]


class ModuleOptimizerSpec(Strict):
    """Optimizer settings that differ for one module; fields not given follow the whole model's."""

    lr: float | None = Field(
        None, ge=0, le=1e3, description="Learning rate after the warm-up; 0 = not trained."
    )
    weight_decay: float | None = Field(None, ge=0, le=1e3, description="Decoupled weight decay.")
    warmup_steps: int | None = Field(
        None, ge=0, le=MOST_STEPS, description="Steps of linear warm-up."
    )
    schedule: Literal["constant", "cosine", "linear"] | None = Field(
        None, description="The rate after the warm-up."
    )
    min_lr_fraction: float | None = Field(
        None, ge=0, le=1, description="Where cosine and linear end, as a share of lr."
    )


class OptimizerSpec(Strict):
    """AdamW and its learning rate."""

    lr: float = Field(1e-3, gt=0, le=1e3, description="Learning rate after the warm-up.")
    betas: tuple[Beta, Beta] = Field(
        (0.9, 0.95), description="Decay per step of the averages of gradients and their squares."
    )
    eps: float = Field(
        1e-8, gt=0, le=1, description="Added to the root of the squares' average, a divisor."
    )
    weight_decay: float = Field(
        0.0,
        ge=0,
        le=1e3,
        description=(
            "Decoupled decay of matrices, kernels and embeddings; biases, norms and other "
            "single vectors do not decay."
        ),
    )
    warmup_steps: int = Field(
        0, ge=0, le=MOST_STEPS, description="Steps of linear warm-up, before the schedule begins."
    )
    schedule: Literal["constant", "cosine", "linear"] = Field(
        "constant",
        description=(
            "The rate after the warm-up: constant, or falling to min_lr_fraction at the last of"
            " train.steps or train.epochs."
        ),
    )
    min_lr_fraction: float = Field(
        0.0, ge=0, le=1, description="Where cosine and linear end, as a share of lr."
    )
    modules: dict[str, ModuleOptimizerSpec] = Field(
        default_factory=dict,
        description="Other values by module, and 'projectors' for the layers that join modules.",
    )

    def of(self, module: str) -> OptimizerSpec:
        """Return the settings of one module, or of the projectors."""
        override = self.modules.get(module)
        return (
            self
            if override is None
            else self.model_copy(update=override.model_dump(exclude_none=True))
        )


class CheckpointSpec(Strict):
    """Schedule of checkpoints."""

    every_steps: int = Field(
        0, ge=0, le=MOST_STEPS, description="Steps between checkpoints; 0 = only at the end."
    )
    keep: int = Field(2, ge=1, le=MOST_STEPS, description="Newest checkpoints kept.")


class EvaluationSpec(Strict):
    """Losses on data that are never trained on.

    The data are `data.held_out`, else the validation splits of the folders in `data.sources`.
    """

    every_steps: Annotated[int, Field(ge=1, le=MOST_STEPS)] | Literal["auto"] = Field(
        "auto",
        description=(
            "Steps between evaluations; auto: ten in a run, the last after its last step, or fewer"
            " where they would take more than 3 % of it (a global batch counts as 0.45 of a step)."
        ),
    )
    sequences: Annotated[int, Field(ge=1, le=10**6)] | Literal["auto"] = Field(
        "auto",
        description=(
            "Packed sequences evaluated, rounded up to whole global batches; auto: those of the"
            " held-out data, or fewer by the same 3 %."
        ),
    )
    keep_best: bool = Field(
        False,
        description=(
            "Write a checkpoint after every evaluation with the lowest loss so far, and keep the"
            " best one besides the newest; images and answers are then the best one's."
        ),
    )
    stop_after: int = Field(
        0,
        ge=0,
        le=MOST_STEPS,
        description=(
            "Evaluations in succession without a lower loss after which training ends; 0 = never."
        ),
    )


class EmaSpec(Strict):
    """Exponential moving averages of weights, used for image generation and `disttrain export`."""

    decay: float = Field(
        0.9999, gt=0, lt=1, description="Share of the average that stays at each step."
    )
    modules: list[str] = Field(
        min_length=1, description="Modules whose weights are averaged, such as the generator."
    )


Ordering = Literal["none", "paper", "best"]


class TrainSpec(Strict):
    """The optimisation."""

    global_batch_size: int = Field(
        ge=1,
        le=MOST_SEQUENCES,
        description="Packed sequences per optimizer step, over the whole job.",
    )
    steps: int | None = Field(
        None, ge=1, le=MOST_STEPS, description="Optimizer steps; this or epochs must be given."
    )
    epochs: float | None = Field(
        None,
        gt=0,
        le=1e6,
        description=(
            "Instead of steps: passes over the data. In one pass every source is drawn as often as"
            " its weight says, all of its samples once at weight 1; rounded up to whole steps."
        ),
    )
    precision: Literal["fp32", "bf16"] = Field(
        "bf16", description="Of activations and computation; master weights are fp32."
    )
    zero_stage: Literal[0, 1, "auto"] = Field(
        1,
        description=(
            "1 splits optimizer states over the replicas of a unit, 0 does not; auto lets the plan"
            " choose."
        ),
    )
    activation_checkpointing: Literal["none", "full", "auto"] = Field(
        "auto",
        description=(
            "Recompute activations in the backward: never, in every unit, or where the plan"
            " needs it."
        ),
    )
    optimizer: OptimizerSpec = Field(
        default_factory=OptimizerSpec, description="AdamW, its rate and schedule."
    )
    gradient_clipping: float = Field(
        1.0, ge=0, le=1e6, description="Largest global gradient norm; 0 = no clipping."
    )
    on_bad_loss: Literal["stop", "skip"] = Field(
        "stop",
        description=(
            "When a loss or the gradient norm is not finite: stop and name the module, or skip the "
            "step (weights stay as they were), and stop after ten such steps in a row."
        ),
    )
    checkpoint: CheckpointSpec = Field(
        default_factory=CheckpointSpec, description="How often, and how many are kept."
    )
    evaluation: EvaluationSpec | Literal["auto"] | None = Field(
        "auto",
        description=(
            "Losses on held-out data. auto: with the defaults where data.held_out is above 0; {}:"
            " on a folder's validation split, too; null: none."
        ),
    )
    ema: EmaSpec | None = Field(None, description="Moving averages of weights; none if not given.")
    ordering: Ordering | Literal["auto"] = Field(
        "auto",
        description=(
            "How samples are ordered in a global batch: as packed, by the paper's two rules, or by "
            "a search that the simulator drives; auto searches where every rank has a device of its"
            " own, and takes the paper's rules where ranks share the cores of a CPU."
        ),
    )
    seed: int = Field(
        0, ge=0, lt=2**32, description="Of new weights, the data's order, noise and dropout."
    )
    timeout_s: float = Field(
        600.0, ge=1e-3, le=MOST_S, description="Longest wait of a rank for another one."
    )
    hang_s: float | None = Field(
        None,
        ge=1e-3,
        le=MOST_S,
        description=(
            "Longest time without progress of any rank, after which the job ends and "
            "names the rank that the others wait for; three quarters of timeout_s if not given."
        ),
    )
    restarts: int = Field(
        0,
        ge=0,
        le=10**6,
        description=(
            "How often the job is started again from its newest checkpoint when a rank dies "
            "or hangs, or is left out."
        ),
    )
    on_straggler: Literal["tell", "replan"] = Field(
        "tell",
        description=(
            "When a rank or a node stays slow: say so, or save, plan anew without it and go on by"
            " itself, where a new plan gains 5 % of a step (one of restarts). With replan, a rank"
            " that is lost twice in succession is left out, too. Ranks that train starts itself;"
            " not those of --emit."
        ),
    )
    keep_trace_steps: int | None = Field(
        None,
        ge=1,
        le=MOST_STEPS,
        description=(
            "Newest steps whose traces are kept, in whole segments: older segments are deleted"
            " while training goes on. All are kept if not given. Every step's losses and speed, the"
            " logs and torch's profiles always stay."
        ),
    )
    track: list[Literal["tensorboard", "wandb"]] = Field(
        default_factory=list,
        description="Where every step's figures go besides the console and the traces.",
    )

    #: Packed sequences of one pass over the data, once they are profiled.
    _sequences: int | None = PrivateAttr(None)

    @property
    def total_steps(self) -> int:
        """`steps`, or those of `epochs`; raises SpecError if these are not known yet."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None, "one of both is given"
        if self._sequences is None:
            raise SpecError(
                f"train.epochs: {self.epochs:g} are not known in steps yet",
                "how many packed sequences an epoch has is known once the data are profiled",
                call("profile"),
            )
        steps = self.epochs * self._sequences / self.global_batch_size
        return max(1, math.ceil(round(steps, 6)))

    @property
    def ends_by(self) -> str:
        """Field that determines the end of training."""
        return "train.epochs" if self.steps is None else "train.steps"

    def count_epochs(self, sequences: int) -> None:
        """Set the number of packed sequences of one pass over the data."""
        self._sequences = sequences

    @property
    def asks_evaluation(self) -> bool:
        """True if the run file sets `evaluation`: then data must be held out."""
        return isinstance(self.evaluation, EvaluationSpec)

    @property
    def evaluated(self) -> EvaluationSpec | None:
        """`evaluation`, or its defaults for auto, for runs that hold data out."""
        return EvaluationSpec() if self.evaluation == "auto" else self.evaluation

    @property
    def longest_hang_s(self) -> float:
        """`hang_s`, or its default."""
        return self.hang_s if self.hang_s is not None else 0.75 * self.timeout_s

    def ordering_on(self, device: str | None) -> Ordering:
        """Return `ordering`, resolving `auto` by the kind of device (`DeviceProfile.kind`)."""
        if self.ordering != "auto":
            return self.ordering
        return "paper" if device in (None, "cpu") else "best"

    @model_validator(mode="after")
    def _steps_or_epochs(self) -> TrainSpec:
        if (self.steps is None) == (self.epochs is None):
            given = "both" if self.steps is not None else "neither"
            raise ValueError(
                f"give either steps (optimizer steps) or epochs (passes over the data); given:"
                f" {given}"
            )
        return self

    @model_validator(mode="after")
    def _hang_before_timeout(self) -> TrainSpec:
        if self.longest_hang_s >= self.timeout_s:
            raise ValueError(
                "hang_s must be shorter than timeout_s, after which waits fail by themselves;"
                f" given: {self.hang_s:g} and {self.timeout_s:g}"
            )
        return self

    @model_validator(mode="after")
    def _replan_restarts(self) -> TrainSpec:
        if self.on_straggler == "replan" and self.restarts == 0:
            raise ValueError(
                "on_straggler: replan starts the job again, so restarts must be 1 or more; given: 0"
            )
        return self

    @model_validator(mode="after")
    def _precision_and_zero(self) -> TrainSpec:
        if self.precision == "bf16" and self.zero_stage == 0:
            raise ValueError(
                "precision bf16 accumulates gradients in fp32, which needs zero_stage 1"
            )
        return self

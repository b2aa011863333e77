"""What our code works around is still there: a test that fails names a trap of docs/deepspeed.md
that the installed DeepSpeed has closed, and code of ours that may go."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import deepspeed
import pytest
from deepspeed.runtime import bf16_optimizer, engine, utils
from deepspeed.runtime.checkpoint_engine import torch_checkpoint_engine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

BF16 = bf16_optimizer.BF16_Optimizer
comm = importlib.import_module("deepspeed.comm.torch")  # as an attribute it is torch itself

#: Number of a trap, the code of DeepSpeed that has it, and what it says there.
WRITTEN: list[tuple[str, Callable[..., Any] | type, str]] = [
    ("1", deepspeed.initialize, "if not isinstance(model, PipelineModule):"),
    ("5", engine.DeepSpeedEngine.clip_fp32_gradients, "parameters=self.module.parameters()"),
    ("6", utils.clip_grad_norm_, "group=mpu.get_model_parallel_group()"),
    ("7", DeepSpeedZeroOptimizer.scaled_global_norm, "norm = self.get_grad_norm_direct("),
    (
        "7",
        DeepSpeedZeroOptimizer.get_grad_norm_direct,
        "dist.all_reduce(total_norm, op=dist.ReduceOp",
    ),
    ("22", DeepSpeedZeroOptimizer, "torch.empty(int(self.reduce_bucket_size)"),
    ("26", torch_checkpoint_engine.TorchCheckpointEngine.load, "weights_only=False"),
    ("28", engine.DeepSpeedEngine, "if not self._running_engine_backward:"),
    ("30", DeepSpeedZeroOptimizer.get_grad_norm_direct, "for g, p in zip(param_gradients, params)"),
    ("34", DeepSpeedZeroOptimizer, "if not self._hp_optimizer_states_linked:"),
    ("35", BF16.step, "get_global_norm_of_tensors(input_tensors=non_expert_grads_for_norm"),
    ("35", BF16.step, "if is_invalid_grad_norm(all_groups_norm):"),
    ("36", engine.DeepSpeedEngine._set_distributed_vars, "else self.local_rank"),
    ("37", BF16._setup_for_real_optimizer, "bf16_dp_partitions[partition_id].clone().float()"),
    ("38", engine.DeepSpeedEngine._configure_distributed_model, "if isinstance(module, MoE):"),
    ("scalars", engine.DeepSpeedEngine._broadcast_model, "p.data.view(torch.uint8)"),
    ("Muon", BF16.__init__, "import MuonWithAuxAdam"),
    ("shared memory", comm.TorchBackend, "self.shm_comm_op = build_shm_op()"),
]


@pytest.mark.parametrize(
    ("trap", "code", "text"), WRITTEN, ids=[f"{trap}: {text[:30]}" for trap, _, text in WRITTEN]
)
def test_what_is_worked_around_is_still_written(
    trap: str, code: Callable[..., Any] | type, text: str
) -> None:
    assert text in inspect.getsource(code), f"trap {trap}: see docs/deepspeed.md"


def test_no_engine_class_can_be_asked_for() -> None:
    """Trap 1."""
    assert not any("engine" in name for name in inspect.signature(deepspeed.initialize).parameters)

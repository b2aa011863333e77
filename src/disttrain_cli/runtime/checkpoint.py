"""Checkpoints: per-parameter tensors keyed by layer and parameter, so that any layout can read them.

    checkpoints/step-000060/stage-00.safetensors   weights (fp32 masters), exp_avg, exp_avg_sq of its layers
    checkpoints/step-000060/checkpoint.json        step, fingerprints, and which file holds which layer

Keys of tensors are `weight/LAYER/PARAMETER`, `exp_avg/…`, `exp_avg_sq/…`. A folder is written under a temporary
name and renamed when every stage has written its part: a crash leaves the previous checkpoint usable. ZeRO's
partitions are put together by DeepSpeed's own accessors. Nothing is pickled.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from disttrain_cli.errors import SpecError
from disttrain_cli.models.layer import PipelineLayer
from disttrain_cli.runtime.checkpoint_folder import check_belongs, describe
from disttrain_cli.spec.files import write_whole

if TYPE_CHECKING:
    from disttrain_cli.runtime.engine import UnitEngine

MOMENTS = ("exp_avg", "exp_avg_sq")


def named_parameters(layers: Sequence[PipelineLayer]) -> list[tuple[str, nn.Parameter]]:
    """(LAYER/PARAMETER, parameter) of every parameter."""
    return [(f"{layer.name}/{name}", p) for layer in layers for name, p in layer.named_parameters()]


def save(checkpoints: Path, step: int, model_fingerprint: str, data_fingerprint: str, engine: UnitEngine,
         keep: int) -> Path:
    """Write a checkpoint; every rank calls this at the same step. Returns its folder."""
    from safetensors.torch import save_file

    stage = engine.place.stage
    final, temporary = checkpoints / f"step-{step:06d}", checkpoints / f".step-{step:06d}.partial"
    tensors = _collect(engine)  # every replica takes part: partitions are gathered
    if engine.place.rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    torch.distributed.barrier()
    name = f"stage-{stage.number:02d}.safetensors"
    if engine.place.replica == 0:
        save_file(tensors, temporary / name)
        write_whole(temporary / f"{name}.json", json.dumps([layer.name for layer in engine.module.layers]))
    torch.distributed.barrier()
    if engine.place.rank == 0:
        parts = sorted(temporary.glob("stage-*.safetensors"))
        files = {}
        for part in parts:
            listed = temporary / f"{part.name}.json"
            files[part.name] = json.loads(listed.read_text())
            listed.unlink()
        write_whole(temporary / "checkpoint.json",
                    json.dumps({"version": 1, "step": step, "model": model_fingerprint,
                                "dataset": data_fingerprint, "files": files}, indent=1))
        shutil.rmtree(final, ignore_errors=True)
        os.replace(temporary, final)
        for old in sorted(checkpoints.glob("step-*"))[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
    torch.distributed.barrier()
    return final


def load(folder: Path, model_fingerprint: str, data_fingerprint: str, engine: UnitEngine) -> int:
    """Set weights and optimizer state of this rank's layers from a checkpoint of any layout; returns its step.

    Raises:
        MismatchError: it was made from another model or dataset.
        SpecError: it lacks a tensor.
    """
    step = check_belongs(folder, model_fingerprint, data_fingerprint)
    tensors = read_tensors(folder, [layer.name for layer in engine.module.layers], ("weight", *MOMENTS))
    for name, parameter in named_parameters(engine.module.layers):
        _set_weight(engine, parameter, tensors[f"weight/{name}"])
    _set_moments(engine, tensors, step)
    return step


def read_tensors(folder: Path, layers: Sequence[str], groups: Sequence[str]) -> dict[str, Tensor]:
    """Tensors of some layers and groups (`weight`, `exp_avg`, …), read file by file.

    Raises:
        SpecError: a layer is in none of the files, or a file is damaged.
    """
    from safetensors import SafetensorError, safe_open

    wanted, found = set(layers), {}
    for name, listed in describe(folder)["files"].items():
        if not wanted & set(listed):
            continue
        try:
            with safe_open(folder / name, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118
                    group, layer, _ = key.split("/", 2)
                    if layer in wanted and group in groups:
                        found[key] = file.get_tensor(key)
        except (OSError, SafetensorError) as error:
            raise SpecError(f"The checkpoint file {folder / name} is damaged", str(error)) from None
        wanted -= set(listed)
    if wanted:
        raise SpecError(f"The checkpoint {folder} lacks the layers {', '.join(sorted(wanted))}")
    return found


def _collect(engine: UnitEngine) -> dict[str, Tensor]:
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    tensors = {}
    for name, parameter in named_parameters(engine.module.layers):
        if _partitioned(engine):
            tensors[f"weight/{name}"] = safe_get_full_fp32_param(parameter)
            for moment in MOMENTS:
                tensors[f"{moment}/{name}"] = safe_get_full_optimizer_state(parameter, moment)
        else:
            tensors[f"weight/{name}"] = parameter.detach()
            for moment in MOMENTS:
                tensors[f"{moment}/{name}"] = engine.optimizer.state[parameter][moment]
    return {name: tensor.detach().to("cpu", torch.float32).contiguous().clone() for name, tensor in tensors.items()}


def _partitioned(engine: UnitEngine) -> bool:
    return engine.zero_optimization()


def _set_weight(engine: UnitEngine, parameter: nn.Parameter, value: Tensor) -> None:
    from deepspeed.utils import safe_set_full_fp32_param

    if parameter.shape != value.shape:
        raise SpecError("A tensor of the checkpoint has another shape",
                        f"checkpoint: {tuple(value.shape)}, model: {tuple(parameter.shape)}")
    with torch.no_grad():
        parameter.copy_(value)
    if _partitioned(engine):
        safe_set_full_fp32_param(parameter, value.to(engine.device))


def _set_moments(engine: UnitEngine, tensors: dict[str, Tensor], step: int) -> None:
    """Give the optimizer its moments, allocating its state where no step has done so yet."""
    from deepspeed.utils import safe_set_full_optimizer_state

    base = engine.basic_optimizer
    for group in base.param_groups:
        for parameter in group["params"]:
            state = base.state[parameter]
            state["step"] = torch.tensor(float(step))
            for moment in MOMENTS:
                state.setdefault(moment, torch.zeros_like(parameter))
    if _partitioned(engine):
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for name, parameter in named_parameters(engine.module.layers):
        for moment in MOMENTS:
            value = tensors[f"{moment}/{name}"].to(engine.device)
            if _partitioned(engine):
                safe_set_full_optimizer_state(parameter, value, moment)
            else:
                base.state[parameter][moment].copy_(value)

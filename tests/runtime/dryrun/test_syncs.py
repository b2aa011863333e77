"""Waits for a device: what counts as one, and that no slot of any architecture has any."""

from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from torch.utils._pytree import tree_map_only

from disttrain_cli.models.layer import Batch, Items
from tests.models.conftest import AUDIO, LLAMA, MROPE
from tests.models.test_generators import GENERATORS
from tests.models.test_towers import TOWERS
from tests.runtime.dryrun.on_fake_cuda import on_fake_cuda


def cases() -> dict[str, list[str]]:
    """By case what the detector says waits; numbers of a test's own lines are left out."""
    from torch._subclasses.fake_tensor import DynamicOutputShapeException

    from disttrain_cli.models.host import constant, read, to_device
    from disttrain_cli.models.torch_versions import all_gather
    from disttrain_cli.runtime.dryrun.syncs import Waits
    from disttrain_cli.runtime.messages.hollow import alone

    cuda = torch.device("cuda")
    rows, mask = torch.randn(4, 3, device=cuda), torch.ones(4, dtype=torch.bool, device=cuda)
    counts = torch.ones(4, dtype=torch.int64, device=cuda)
    asked: dict[str, Any] = {
        "pageable": lambda: torch.ones(3).to(cuda),
        "pageable, asynchronous": lambda: torch.ones(3).to(cuda, non_blocking=True),
        "page-locked, blocking": lambda: torch.ones(3).pin_memory().to(cuda),
        "into a tensor": lambda: rows.copy_(torch.ones(4, 3)),
        "to the host": lambda: rows.cpu(),
        "to pageable memory": lambda: torch.empty(4, 3).copy_(rows, non_blocking=True),
        "item": lambda: rows[0, 0].item(),
        "float": lambda: float(rows[0, 0]),
        "bool": lambda: bool(mask.all()),
        "equal": lambda: torch.equal(rows, rows),
        "nonzero": lambda: mask.nonzero(),
        "mask": lambda: rows[mask],
        "put by mask": lambda: rows.index_put_((mask,), rows[0, 0]),
        "repeats": lambda: rows.repeat_interleave(counts, 0),
        "read": lambda: read(rows[0]),
        "device": torch.cuda.synchronize,
        "stream": lambda: torch.cuda.current_stream().synchronize(),
        "event": lambda: torch.cuda.Event().synchronize(),
        "barrier": dist.barrier,
        # and what does not:
        "page-locked": lambda: torch.ones(3).pin_memory().to(cuda, non_blocking=True),
        "a view of page-locked": lambda: torch.empty(4, 3, pin_memory=True)[1:].to(
            cuda, non_blocking=True
        ),
        "to page-locked memory": lambda: torch.empty(4, 3, pin_memory=True).copy_(
            rows, non_blocking=True
        ),
        "to_device": lambda: to_device([1, 2], cuda),
        "constant": lambda: constant(torch.arange, 3, device=cuda),
        "a number put": lambda: rows.__setitem__(0, 1.0),
        "a number put by mask": lambda: rows.__setitem__(mask, 1.0),
        "places": lambda: rows[to_device([0, 2], cuda)],
        "cast": lambda: rows.bfloat16(),
        "repeats, counted": lambda: rows.repeat_interleave(counts, 0, output_size=4),
        "on the host": lambda: torch.ones(3).tolist(),
        "sum": lambda: dist.all_reduce(rows),
        "gather": lambda: all_gather(rows, rows[:1], None),
    }
    found = {}
    with alone(0, 4):
        for name, ask in asked.items():
            with (
                suppress(DynamicOutputShapeException),
                Waits() as waits,
            ):  # not known here: that it is asked for counts
                ask()
            found[name] = [f"{what} @ {where.split(':')[0]}" for what, where in waits.counts]
        for name, refused in {
            "sum of the host's": lambda: dist.all_reduce(torch.ones(3)),
            "objects": lambda: dist.broadcast_object_list([1], device=torch.device("cpu")),
        }.items():
            with suppress(RuntimeError), Waits():
                refused()
                found[name] = ["not refused"]
    return found


def test_what_waits_is_found_with_its_line_and_nothing_else() -> None:
    found = on_fake_cuda(cases)
    own = "dryrun/test_syncs.py"
    waiting = dict(list(found.items())[:19])
    assert {name: said[0].split(" @ ")[0] for name, said in waiting.items() if len(said) == 1} == {
        "pageable": "copy cpu to cuda from pageable memory",
        "pageable, asynchronous": "copy cpu to cuda from pageable memory",
        "page-locked, blocking": "copy cpu to cuda from pageable memory",
        "into a tensor": "copy cpu to cuda from pageable memory",
        "to the host": "copy cuda to cpu",
        "to pageable memory": "copy cuda to cpu",
        "item": "aten::_local_scalar_dense",
        "float": "aten::_local_scalar_dense",
        "bool": "aten::_local_scalar_dense",
        "equal": "aten::equal",
        "nonzero": "aten::nonzero",
        "mask": "aten::index",
        "put by mask": "aten::index_put_",
        "repeats": "aten::repeat_interleave",
        "read": "copy cuda to cpu",
        "device": "torch.cuda.synchronize",
        "stream": "Stream.synchronize",
        "event": "Event.synchronize",
        "barrier": "c10d::barrier",
    }
    assert {said[0].split(" @ ")[1] for name, said in waiting.items() if name != "read"} == {own}
    assert waiting["read"][0].endswith("@ models/host.py")
    assert {name: said for name, said in list(found.items())[19:] if said} == {}


#: Encoder, LLM, generator: together every class, with heads that flash attention takes (of 8) and
#: others (12).
RUNS = {
    "vit, llama, sd 2.1": (
        "vit",
        {"hidden_dropout_prob": 0.1},
        "llama",
        {"hidden_size": 64},
        "sd 2.1",
        {"dropout": 0.1},
    ),
    "clip, mistral, sd xl": (
        "clip_vision_model",
        {},
        "mistral",
        {"sliding_window": 16},
        "sd xl",
        {},
    ),
    "siglip, qwen2, pixart": (
        "siglip_vision_model",
        {},
        "qwen2",
        {"hidden_size": 64},
        "pixart",
        {"dropout": 0.1},
    ),
    "vit, llama, sd3.5": ("vit", {}, "llama", {}, "sd3.5", {}),
    "clip, llama, flux": ("clip_vision_model", {}, "llama", {}, "flux", {}),
    "clip, llama, lumina2": ("clip_vision_model", {}, "llama", {}, "lumina2", {}),
    "qwen's, qwen3, flow": (
        "qwen2_5_vl_vision",
        {},
        "qwen3",
        {"hidden_size": 64},
        "pixart, small",
        {},
    ),
    "qwen3-vl, sd 2.1": (
        "qwen3_vl_vision",
        {},
        "qwen3_vl_text",
        MROPE | {"head_dim": 12},
        "sd 2.1",
        {},
    ),
    "audio, llama, velocity": ("vit", {}, "llama", {}, "pixels, velocity", {}),
}


def write(folder: Path, name: str) -> Path:
    """A run file of small classes."""
    eye, eye_config, llm, llm_config, generator, its_config = RUNS[name]
    hand = {
        "kind": "generator",
        "image_size": 16,
        "context_tokens": 4,
        "architecture": "unet2d_condition",
        **GENERATORS[generator],
    }
    hand["config"] = hand["config"] | its_config
    audio = AUDIO | {"config": AUDIO["config"] | {"dropout": 0.1, "activation_dropout": 0.1}}
    modules = {
        "eye": {
            "kind": "encoder",
            "architecture": eye,
            **TOWERS[eye],
            "config": TOWERS[eye]["config"] | eye_config,
        },
        **({"ear": audio} if name.startswith("audio") else {}),
        "llm": {"kind": "llm", "architecture": llm, "config": LLAMA | llm_config},
        "hand": hand,
    }
    path = folder / f"{name}.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "name": "small",
                "model": {"modules": modules},
                "data": {
                    "sources": [{"path": "data"}],
                    "sequence_length": 48,
                    "max_image_pixels": 4096,
                },
                "train": {"global_batch_size": 4, "steps": 1, "precision": "fp32"},
            }
        )
    )
    return path


def slot(path: str, bf16: bool, recompute: bool) -> list[list[Any]]:
    """Waits in the second slot of all layers of a run, forward and backward; constants are made in
    the first."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    from disttrain_cli.models.graph import build_layers, describe, layer_table, live_tensors
    from disttrain_cli.models.probe import probe_batch
    from disttrain_cli.models.qwen_vision import QwenLayer
    from disttrain_cli.runtime.dryrun.syncs import Waits
    from disttrain_cli.runtime.engine.faults import Sums
    from disttrain_cli.runtime.engine.stage import StageRunner, build_segments
    from disttrain_cli.spec.runfile import read_run
    from disttrain_cli.spec.runfile.model import PROJECTORS

    run, cuda = read_run(Path(path)), torch.device("cuda")
    with unset_fake_temporarily():
        table, inputs = layer_table(run), describe(run)
        layers = build_layers(run, 0, len(table), "meta", torch.bfloat16 if bf16 else torch.float32)
    for part in (part for layer in layers for part in layer.modules()):
        for key, whole in part.named_parameters(recurse=False):
            setattr(
                part,
                key,
                torch.nn.Parameter(torch.empty_like(whole, device=cuda), whole.requires_grad),
            )
    runner = StageRunner(
        build_segments(layers, 0, lambda cut: live_tensors(table, cut)),
        recompute,
        Sums([*run.file.model.order, PROJECTORS]),
    )
    with unset_fake_temporarily():
        batch = probe_batch(
            inputs,
            image=[(4, 4), (4, 4), (4, 8)],
            audio=2 if inputs.of("audio") else 0,
            documents=[[20, 20], [41], [4, 30]],
            target=3,
        )
        for layer in layers:  # what the host computes of sizes alone
            if isinstance(layer, QwenLayer):
                layer.layout(4, 4), layer.layout(4, 8)
    there = partial(torch.empty_like, device=cuda)  # what brings a batch there is `feeding`'s
    batch = replace(
        Batch(**tree_map_only(torch.Tensor, there, vars(batch))),
        items={
            item: replace(
                Items(**tree_map_only(torch.Tensor, there, vars(own))), noise_seeds=own.noise_seeds
            )
            for item, own in batch.items.items()
        },
    )
    with Waits() as waits:
        outputs = runner.forward(0, {}, batch, lambda module: lambda: None)
        runner.backward(0, {}, lambda module: lambda: None)
    assert not outputs and {name.partition("/")[0] for name in runner.losses} == {"text", "image"}
    trained = [p for layer in layers for p in layer.parameters() if p.requires_grad]
    assert all(parameter.grad is not None for parameter in trained)
    return [[*key, count] for key, count in waits.counts.items()]


def slots(cases: list[list[Any]]) -> list[list[list[Any]]]:
    """The same of several runs, in one process."""
    return [slot(*case) for case in cases]


@pytest.mark.slow
def test_a_slot_waits_nowhere(tmp_path: Path) -> None:
    cases = [(name, True, False) for name in RUNS]
    cases += [(name, False, True) for name in RUNS if name.startswith("vit")]
    found = on_fake_cuda(slots, [[str(write(tmp_path, name)), *how] for name, *how in cases])
    assert dict(zip(cases, found, strict=True)) == {case: [] for case in cases}

"""What stages hold while they run, as storages on a fake CUDA device tell, against what a plan says
of them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from disttrain_cli.costs.memory import GIB, layout_memory
from disttrain_cli.models.footprint import Noted, footprint
from disttrain_cli.models.graph import build_layers, describe, layer_table
from disttrain_cli.models.probe import probe_batch, probe_work, state_at
from disttrain_cli.models.tensor_parallel import join
from disttrain_cli.profiling.analytic import analytic_profile
from disttrain_cli.spec.layer_costs import Polynomial
from disttrain_cli.spec.plan import Layout, UnitPlan
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.runfile import Run, RunFile
from tests.runtime.dryrun.on_fake_cuda import on_fake_cuda

#: Layers as wide as those of mllm-9b, and few of them.
MODULES: dict[str, dict[str, Any]] = {
    "eye": {
        "kind": "encoder",
        "architecture": "vit",
        "merge": 2,
        "config": {
            "hidden_size": 1280,
            "num_hidden_layers": 3,
            "num_attention_heads": 16,
            "intermediate_size": 5120,
            "patch_size": 14,
            "image_size": 224,
        },
    },
    "llm": {
        "kind": "llm",
        "architecture": "llama",
        "config": {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "num_hidden_layers": 3,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 11008,
        },
    },
    "brush": {
        "kind": "generator",
        "architecture": "unet2d_condition",
        "image_size": 512,
        "context_tokens": 77,
        "config": {
            "in_channels": 4,
            "out_channels": 4,
            "layers_per_block": 2,
            "block_out_channels": [320, 640, 1280, 1280],
            "down_block_types": [*["CrossAttnDownBlock2D"] * 3, "DownBlock2D"],
            "up_block_types": ["UpBlock2D", *["CrossAttnUpBlock2D"] * 3],
            "cross_attention_dim": 1024,
            "attention_head_dim": [5, 10, 20, 20],
            "use_linear_projection": True,
        },
        "vae": {
            "in_channels": 3,
            "out_channels": 3,
            "latent_channels": 4,
            "layers_per_block": 2,
            "sample_size": 768,
            "block_out_channels": [128, 256, 512, 512],
            "down_block_types": ["DownEncoderBlock2D"] * 4,
            "up_block_types": ["UpDecoderBlock2D"] * 4,
        },
    },
}
LENGTH = 4096
SIZES: dict[str, dict[str, Any]] = {
    "eye": {"image": [[36, 36]] * 8},
    "llm": {"documents": [[LENGTH]]},
    "brush": {"target": 8},
}


def run_file(modules: dict[str, Any]) -> RunFile:
    return RunFile.model_validate(
        {
            "name": "t",
            "model": {"modules": modules},
            "data": {
                "distribution": {
                    "images_per_sequence": 2,
                    "generated_per_sequence": 2,
                    "sequences": 50,
                },
                "sequence_length": LENGTH,
                "max_image_pixels": 2**18,
            },
            "cluster": {"nodes": 2, "gpus_per_node": 4},
            "train": {"global_batch_size": 8, "steps": 1, "precision": "bf16"},
        }
    )


#: Module, its layers, TP, slots in flight, whether the stage recomputes, how its TP group sends.
Case = tuple[str, int, int, int, int, bool, str]
#: How a TP group sends: overlapping or not, through symmetric memory or not.
SENDS = {"waits": (False, False), "ring": (True, False), "symmetric": (True, True)}
#: Single blocks.
BLOCKS: list[Case] = [
    (module, 1, 2, 4, 1, recompute, sends)
    for module in ("llm", "eye")
    for recompute in (False, True)
    for sends in SENDS
]
CASES: list[Case] = [
    ("llm", 1, 3, 1, 3, False, "waits"),
    ("llm", 1, 3, 4, 3, False, "waits"),
    ("llm", 3, 5, 1, 1, False, "waits"),
    ("llm", 3, 5, 4, 1, False, "waits"),
    ("llm", 3, 5, 4, 1, False, "symmetric"),  # the head holds most, beside the blocks' memory
    ("llm", 1, 3, 4, 3, False, "symmetric"),
    ("llm", 1, 3, 1, 3, True, "waits"),
    ("llm", 1, 3, 4, 3, True, "waits"),
    ("llm", 0, 2, 1, 3, False, "waits"),
    ("eye", 0, 5, 1, 3, False, "waits"),
    ("eye", 0, 3, 4, 3, False, "waits"),
    ("eye", 0, 3, 4, 3, True, "waits"),
    ("eye", 1, 4, 4, 3, False, "waits"),
    ("eye", 1, 4, 4, 3, True, "waits"),
    ("brush", 0, 13, 1, 1, False, "waits"),
    ("brush", 0, 13, 1, 1, True, "waits"),
]


def executed(cases: list[Any]) -> list[int]:
    """Peak bytes beside the weights of each stage, in a process with a fake CUDA device."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    return [_peak(*case) for case in cases]


def _peak(
    module: str,
    first: int,
    last: int,
    tp: int,
    flight: int,
    recompute: bool,
    sends: str,
) -> int:
    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.utils._pytree import tree_map

    from disttrain_cli.models.graph import build_layers, layer_table, live_tensors
    from disttrain_cli.models.group import Group
    from disttrain_cli.models.layer import Batch, Items
    from disttrain_cli.models.probe import probe_batch, state_at
    from disttrain_cli.models.tensor_parallel import join
    from disttrain_cli.runtime.dryrun.storages import Storages
    from disttrain_cli.runtime.engine.stage import StageRunner, build_segments

    run = Run(path=Path("disttrain.yaml"), file=run_file(MODULES))
    with unset_fake_temporarily():
        table, inputs = layer_table(run), describe(run)
        start = first + next(place for place, info in enumerate(table) if info.module == module)
        layers = build_layers(run, start, start + last - first, "meta", torch.bfloat16, tp=tp)
    group = Group(dist.group.WORLD, tp, 0, *SENDS[sends]) if tp > 1 else None
    read = {name for layer in layers for name in layer.reads}
    split = {spec.name for spec in live_tensors(table, start) if spec.split}

    def forget(weight: torch.Tensor) -> None:
        weight.grad = None

    def moved(value: Any) -> Any:
        return (
            torch.empty(value.shape, device="cuda", dtype=value.dtype)
            if torch.is_tensor(value)
            else value
        )

    def entering(whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            name: torch.empty(
                (
                    group.local_rows(len(tensor)).stop if group and name in split else len(tensor),
                    *tensor.shape[1:],
                ),
                device="cuda",
                dtype=torch.bfloat16,
            )
            for name, tensor in whole.items()
            if name in read
        }

    with Storages() as storages:
        for layer in layers:
            for owner in layer.modules():
                for name, weight in list(owner.named_parameters(recurse=False)):
                    made = torch.nn.Parameter(
                        torch.empty(weight.shape, device="cuda", dtype=torch.bfloat16)
                    )
                    made.__dict__.update(weight.__dict__)
                    setattr(owner, name, made.requires_grad_(not layer.frozen))
            join(layer, group)
            layer.trained = layer.passes = not layer.frozen
            for weight in layer.parameters():
                if weight.requires_grad:
                    weight.register_post_accumulate_grad_hook(forget)
        runner = StageRunner(
            build_segments(
                layers,
                start,
                lambda cut: [
                    spec for spec in live_tensors(table, cut) if cut > start or spec.name in read
                ],
            ),
            recompute=recompute,
        )
        with unset_fake_temporarily():
            batch = probe_batch(inputs, **SIZES[module])
            whole = state_at(table, start, inputs, batch, "meta")
        items = {
            item: Items(
                **{
                    name: value if name.endswith("seeds") else tree_map(moved, value)
                    for name, value in vars(own).items()
                }
            )
            for item, own in batch.items.items()
        }
        rest = {name: value for name, value in vars(batch).items() if name != "items"}
        batch = Batch(items, **tree_map(moved, rest))
        before = storages.peak_bytes = storages.alive_bytes
        for slot in range(flight):
            made = {
                name: tensor.shape
                for name, tensor in runner.forward(
                    slot, entering(whole), batch, lambda _: lambda: None
                ).items()
            }
        runner.backward(
            0,
            {
                name: torch.empty(shape, device="cuda", dtype=torch.bfloat16)
                for name, shape in made.items()
            },
            lambda _: lambda: None,
        )
        return storages.peak_bytes - before


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """Of a mix in which every sequence brings each module exactly the work of `SIZES`; `_peak`
    counts no batch."""
    run = Run(path=tmp_path_factory.mktemp("run") / "disttrain.yaml", file=run_file(MODULES))
    made = analytic_profile(run, "A800")
    inputs = describe(run)
    modules = {}
    for name, module in made.modules.items():
        work = probe_work(inputs, name, **SIZES[name])
        costs = {
            kind: cost.model_copy(
                update={
                    "tp": {
                        tp: shard.model_copy(update={"batch_bytes": Polynomial()})
                        for tp, shard in cost.tp.items()
                    }
                }
            )
            for kind, cost in module.costs.items()
        }
        modules[name] = module.model_copy(
            update={"work_per_sequence": work, "max_work_per_sequence": work, "costs": costs}
        )
    return made.model_copy(update={"modules": modules})


def planned(
    profile: Profile,
    module: str,
    layers: slice,
    tp: int,
    flight: int,
    recompute: bool,
    sends: str,
) -> float:
    """Bytes of activations and of what comes and goes on a stage with these layers of a module."""
    counts = [
        layers.start,
        layers.stop - layers.start,
        len(profile.modules[module].layers) - layers.stop,
    ]
    place, own = counts[0] > 0, [count for count in counts if count]
    units = [
        UnitPlan(
            name=name,
            modules=[name],
            tp=tp if name == module else 1,
            pp=len(own) if name == module else 1,
            gpus=tp * len(own) if name == module else 1,
            checkpointing=recompute and name == module,
            tp_overlap=SENDS[sends][0] and name == module,
            layers_per_stage=own if name == module else [len(other.layers)],
        )
        for name, other in profile.modules.items()
    ]
    layout = Layout(
        global_batch_size=flight,
        microbatch_size=1,
        microbatches=flight,
        units=units,
        gpus_used=sum(unit.gpus for unit in units),
    )
    stage = next(
        stage
        for stage in layout_memory(profile, layout, 80.0)
        if (stage.unit, stage.stage) == (module, int(place))
    )
    return GIB * (stage.activations_gib + stage.transient_gib)


@pytest.mark.slow
def test_stages_hold_what_the_plan_says(profile: Profile) -> None:
    for case, held in zip(CASES, on_fake_cuda(executed, CASES), strict=True):
        module, start, stop, *how = case
        said = planned(profile, module, slice(start, stop), *how)
        assert said == pytest.approx(held, rel=0.03), case


@pytest.mark.slow
def test_blocks_hold_what_is_noted_on_meta(tmp_path: Path) -> None:
    """Also where messages overlap with GEMMs: chunks come and go, symmetric memory stays."""
    run = Run(path=tmp_path / "disttrain.yaml", file=run_file(MODULES))
    table, inputs = layer_table(run), describe(run)
    for case, held in zip(BLOCKS, on_fake_cuda(executed, BLOCKS), strict=True):
        module, first, _, tp, _, recompute, sends = case
        overlap, symmetric = SENDS[sends]
        place = first + next(i for i, info in enumerate(table) if info.module == module)
        layer = build_layers(run, place, place + 1, "meta", torch.bfloat16, tp=tp)[0]
        join(layer, Noted(size=tp, overlap=overlap, symmetric=symmetric))
        batch = probe_batch(inputs, device="meta", **SIZES[module])
        state = state_at(table, place, inputs, batch, "meta", torch.bfloat16, tp=tp)
        noted = footprint(
            layer, {name: state[name] for name in table[place].reads}, batch, recompute
        )
        most = noted.kept_bytes + noted.transient_bytes + noted.symmetric_bytes
        assert most == pytest.approx(held, rel=0.03), case

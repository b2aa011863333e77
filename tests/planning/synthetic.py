"""Synthetic profiles and run files: the shapes of tiny and of the paper's 9B model, with plausible
costs."""

import itertools
from typing import Any

import numpy as np

from disttrain_cli.data.ordering.loads import replica_loads
from disttrain_cli.data.ordering.orders import Policy
from disttrain_cli.data.sizes import sampled_batch, sizes_of_sample
from disttrain_cli.spec.heads import AudioInput, ImageInput, TargetInput
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.layer_costs import Experts, Heads, LayerCost, Polynomial
from disttrain_cli.spec.plan import Layout
from disttrain_cli.spec.profile import (
    DeviceProfile,
    Fingerprints,
    LinkProfile,
    ModuleProfile,
    ModuleTime,
    PreprocessProfile,
    Profile,
)
from disttrain_cli.spec.runfile import RunFile
from disttrain_cli.spec.work import Work
from tests import profiles
from tests.heads import with_heads

MODULES = ("image_encoder", "llm", "image_generator")
KINDS = {
    "image_encoder": "encoder",
    "audio_encoder": "encoder",
    "llm": "llm",
    "image_generator": "generator",
}


def layer(
    per_token_ms: float,
    base_ms: float,
    parameters: int,
    activation_bytes: float,
    tps: tuple[int, ...],
    flops_per_token: float,
    hidden: float = 0.0,
) -> LayerCost:
    """A layer whose cost grows with tokens only; backward takes twice as long; TP is 90 % efficient
    per doubling, and may hide a part of the time."""
    return profiles.cost(
        Polynomial(base=base_ms, per_token=per_token_ms),
        parameters,
        Polynomial(per_token=activation_bytes),
        Polynomial(per_token=flops_per_token),
        tps,
        0.9,
        hidden,
    )


def module(
    kind: str,
    layers: list[str],
    costs: dict[str, LayerCost],
    mean: Work,
    worst: Work,
    output_bytes: float,
) -> ModuleProfile:
    tps = next(iter(costs.values())).tp
    return ModuleProfile(
        kind=kind,
        parameters=sum(costs[k].parameters for k in layers),
        layers=layers,
        costs=costs,
        tp={tp: ModuleTime(forward_ms=1.0, backward_ms=2.0, fit_error_pct=2.0) for tp in tps},
        work_per_sequence=mean,
        max_work_per_sequence=worst,
        cut_bytes_per_sequence=[output_bytes] * len(layers),
    )


def run_file(
    batch: int = 24,
    gpus: int = 6,
    nodes: int = 1,
    precision: str = "fp32",
    zero_stage: int = 1,
    **cluster: Any,
) -> RunFile:
    """A run file with three modules."""
    return RunFile.model_validate(
        {
            "name": "test",
            "model": {
                "modules": {
                    "image_encoder": {"kind": "encoder", "architecture": "vit"},
                    "llm": {"kind": "llm", "architecture": "llama"},
                    "image_generator": {
                        "kind": "generator",
                        "architecture": "unet2d_condition",
                        "image_size": 32,
                    },
                }
            },
            "data": {"sources": [{"path": "data"}], "sequence_length": 256},
            "cluster": {"nodes": nodes, "gpus_per_node": gpus // nodes, **cluster},
            "train": {
                "global_batch_size": batch,
                "steps": 1,
                "precision": precision,
                "zero_stage": zero_stage,
            },
        }
    )


def profile_for(
    run: RunFile, modules: dict[str, ModuleProfile], device: DeviceProfile, links: LinkProfile
) -> Profile:
    """A profile that belongs to the run file; its sample of sizes has the modules' mean work."""
    encoder, llm, generator = (modules[name].work_per_sequence for name in MODULES)
    inputs = ModelInputs(
        llm="llm",
        vocabulary=300,
        sequence_length=run.data.sequence_length,
        heads=[
            ImageInput(module="image_encoder", patch_px=8, max_pixels=4096),
            TargetInput(
                module="image_generator",
                size_px=32,
                context_tokens=4,
                latent_pixels=round(generator.tokens / generator.items),
            ),
        ],
    )
    return Profile(
        precision=run.train.precision,
        fingerprints=Fingerprints(
            model=run.model_fingerprint(), data="d" * 16, cluster=run.cluster_fingerprint()
        ),
        cluster=run.cluster,
        provenance={"made_by": "test"},
        device=device,
        inputs=inputs,
        modules=modules,
        links=links,
        data=profiles.data(
            images=round(encoder.items),
            tokens=round(llm.tokens),
            targets=round(generator.items),
            patches=round(encoder.tokens / encoder.items),
            length_sq=round(llm.sum_length_sq),
        ),
        preprocess=PreprocessProfile(images_per_s_per_core=1000, sequences_per_s_per_core=300),
    )


def tiny(
    run: RunFile,
    *,
    kind: str = "cpu",
    memory_gib: float = 4.0,
    tps: tuple[int, ...] = (1,),
    cores: int = 2,
) -> Profile:
    """Milliseconds and megabytes: three small modules, the LLM the heaviest."""
    encoder = {
        "embed": layer(0.001, 0.1, 10_000, 500.0, tps, 1e4),
        "block": layer(0.01, 0.2, 50_000, 4e3, tps, 1e5),
        "projector": layer(0.002, 0.1, 20_000, 1e3, tps, 4e4),
    }
    llm = {
        "embed": layer(0.0005, 0.1, 40_000, 500.0, tps, 1e2),
        "block": layer(0.02, 0.3, 200_000, 8e3, tps, 4e5),
        "head": layer(0.01, 0.2, 40_000, 4e3, tps, 8e4),
    }
    unet = {
        "projector": layer(0.002, 0.1, 20_000, 1e3, tps, 4e4),
        "down": layer(0.02, 0.3, 80_000, 6e3, tps, 2e5),
        "up": layer(0.04, 0.5, 120_000, 9e3, tps, 4e5),
    }
    modules = {
        "image_encoder": module(
            "encoder",
            ["embed", "block", "block", "projector"],
            encoder,
            Work(3, 120, 7000),
            Work(9, 500, 40000),
            30_000.0,
        ),
        "llm": module(
            "llm",
            ["embed", *["block"] * 4, "head"],
            llm,
            Work(1, 230, 20000),
            Work(1, 256, 65536),
            8_000.0,
        ),
        "image_generator": module(
            "generator",
            ["projector", "down", "up", "up"],
            unet,
            Work(1, 64, 4096),
            Work(4, 256, 16384),
            0.0,
        ),
    }
    device = DeviceProfile(
        name="test",
        kind=kind,
        count=run.cluster.gpus,
        memory_gib=memory_gib,
        peak_tflops=0.5,
        shared_by=run.cluster.gpus if kind == "cpu" else 1,
        cores=cores,
    )
    return profile_for(run, modules, device, profiles.links(8, 50, 4, 100))


def with_audio(profile: Profile, clips: int = 2, share: float = 1.0) -> Profile:
    """The profile with an audio encoder beside the image encoder: like it, with `share` of its work
    per sequence."""
    encoder = profile.modules["image_encoder"]
    head = AudioInput(
        module="audio_encoder",
        mel_bins=8,
        frames=max(2, 2 * round(share * encoder.work_per_sequence.tokens / clips)),
    )
    work = head.work(clips)
    audio = encoder.model_copy(update={"work_per_sequence": work, "max_work_per_sequence": work})
    image, *others = profile.modules.items()
    data = profile.data.model_copy(
        update={
            "clips": clips * profile.data.sequences,
            "sample": profile.data.sample.model_copy(
                update={"clips": [clips] * len(profile.data.sample.tokens)}
            ),
        }
    )
    return profile.model_copy(
        update={
            "modules": dict([image, ("audio_encoder", audio), *others]),
            "data": data,
            "inputs": with_heads(profile.inputs, "audio", head),
        }
    )


def attending(
    profile: Profile, heads: Heads | None, length: int, encoder: Heads | None = None
) -> Profile:
    """The profile of sequences of so many tokens, whose LLM and image encoder have such attention
    in their blocks."""
    modules = dict(profile.modules)
    for name, has in (("llm", heads), ("image_encoder", encoder)):
        costs = {
            kind: cost.model_copy(update={"heads": has if kind == "block" else None})
            for kind, cost in modules[name].costs.items()
        }
        modules[name] = modules[name].model_copy(update={"costs": costs})
    inputs = profile.inputs.model_copy(update={"sequence_length": length})
    return profile.model_copy(update={"inputs": inputs, "modules": modules})


def heavier(module: ModuleProfile, factor: float) -> ModuleProfile:
    """A module whose layers have so many times the parameters, in the same time."""
    costs = {
        kind: cost.model_copy(
            update={
                "parameters": factor * cost.parameters,
                "tp": {
                    tp: shard.model_copy(update={"parameters": factor * shard.parameters})
                    for tp, shard in cost.tp.items()
                },
            }
        )
        for kind, cost in module.costs.items()
    }
    return module.model_copy(update={"costs": costs})


def mixed(cost: LayerCost, share: float, total: int, width: int) -> LayerCost:
    """The layer with such a share of its parameters in experts, which a TP group does not
    divide."""
    count = round(share * cost.parameters)
    shards = {
        tp: shard.model_copy(
            update={"parameters": shard.parameters + round(count * (1 - 1 / int(tp)))}
        )
        for tp, shard in cost.tp.items()
    }
    return cost.model_copy(update={"tp": shards, "experts": Experts(total, 2, width, count, count)})


def mixture() -> Profile:
    """Two blocks of an LLM with four experts each, which are most of its parameters, and one of an
    encoder."""
    run = run_file(batch=2, gpus=4, precision="bf16")
    known = tiny(run, kind="cuda", tps=(1, 2))
    modules: dict[str, ModuleProfile] = {}
    for name, count in (("image_encoder", 1), ("llm", 2)):
        one = heavier(known.modules[name], 100)
        block = one.costs["block"]
        costs = {"block": mixed(block, 0.9, 4, 64) if name == "llm" else block}
        sent = one.cut_bytes_per_sequence[:count]
        modules[name] = one.model_copy(
            update={"layers": ["block"] * count, "costs": costs, "cut_bytes_per_sequence": sent}
        )
    return known.model_copy(update={"modules": modules})


def on_nodes(profile: Profile, gpus_per_node: int, speed: float = 0.5) -> Profile:
    """The profile of a cluster of such nodes, between which links are so fast beside those inside
    where it has none."""
    links = profile.links
    between = links.inter_node or profiles.links(8, 50, 4, 100, speed).inter_node
    known = {"gpus_per_node": gpus_per_node, "inter_node": between}
    return profile.model_copy(update={"links": links.model_copy(update=known)})


def with_refiner(profile: Profile, share: float = 1.0) -> Profile:
    """The profile with a second generator beside the first: like it, with `share` of its pixels."""
    first, target = profile.modules["image_generator"], profile.inputs.target
    head = target.model_copy(
        update={"module": "refiner", "latent_pixels": round(share * target.latent_pixels)}
    )
    work, most = (
        head.work(own.items) for own in (first.work_per_sequence, first.max_work_per_sequence)
    )
    refiner = first.model_copy(update={"work_per_sequence": work, "max_work_per_sequence": most})
    return profile.model_copy(
        update={
            "modules": profile.modules | {"refiner": refiner},
            "inputs": with_heads(profile.inputs, "target", target, head),
        }
    )


def paper_9b(
    run: RunFile, *, memory_gib: float = 80.0, tps: tuple[int, ...] = (1, 2, 4, 8)
) -> Profile:
    """ViT-Huge, a 7B LLM and SD 2.1's U-Net at about 180 TFLOP/s, 8,192 tokens, 8 images read, 2
    generated."""
    rate = 180e9  # FLOP per ms
    vit = 0.3346e12 / 257 / 32
    block, head = 4.415e12 / 8192, 2 * 4096 * 32000
    encoder = {"block": layer(vit / rate, 0.02, 19_700_000, 40e3, tps, vit)}
    llm = {
        "embed": layer(1e-7, 0.02, 131_000_000, 8e3, tps, 0.0),
        "block": layer(block / rate, 0.05, 202_000_000, 140e3, tps, block),
        "head": layer(head / rate, 0.05, 131_000_000, 130e3, tps, head),
    }
    unet = {
        "part": layer(
            0.804e12 / 11 / 4096 / rate, 0.3, 79_000_000, 300e3, tps, 0.804e12 / 11 / 4096
        )
    }
    modules = {
        "image_encoder": module(
            "encoder",
            ["block"] * 32,
            encoder,
            Work(8, 8 * 257, 8 * 257.0**2),
            Work(24, 24 * 257, 24 * 257.0**2),
            8 * 257 * 8192.0,
        ),
        "llm": module(
            "llm",
            ["embed", *["block"] * 32, "head"],
            llm,
            Work(1, 7800, 3e7),
            Work(1, 8192, 6.7e7),
            77 * 2 * 8192.0,
        ),
        "image_generator": module(
            "generator",
            ["part"] * 11,
            unet,
            Work(2, 2 * 4096, 2 * 4096.0**2),
            Work(8, 8 * 4096, 8 * 4096.0**2),
            0.0,
        ),
    }
    device = DeviceProfile(
        name="A800", kind="cuda", count=run.cluster.gpus, memory_gib=memory_gib, peak_tflops=312.0
    )
    return profile_for(run, modules, device, profiles.links(1600, 10, 1600, 30, 1 / 16))


def paper_72b(
    run: RunFile, *, memory_gib: float = 80.0, tps: tuple[int, ...] = (1, 2, 4, 8)
) -> Profile:
    """A ViT of 48 layers, a 70B LLM of 82, a U-Net of 25 at 1024²; 16 images read and 4 generated
    per sequence."""
    rate = 180e9  # FLOP per ms
    vit = 2 * 5.5e9 / 48
    block, head = 2 * 0.856e9 + 4 * 8192 * 4096, 2 * 8192 * 32000
    encoder = {
        "embed": layer(1e-6, 0.02, 4_000_000, 8e3, tps, 0.0),
        "block": layer(vit / rate, 0.02, 115_000_000, 90e3, tps, vit),
        "projector": layer(0.2 * vit / rate, 0.02, 60_000_000, 30e3, tps, 0.2 * vit),
    }
    llm = {
        "embed": layer(1e-7, 0.02, 262_000_000, 16e3, tps, 0.0),
        "block": layer(block / rate, 0.05, 856_000_000, 230e3, tps, block),
        "head": layer(head / rate, 0.05, 262_000_000, 130e3, tps, head),
    }
    outer, inner = 0.1 * 4.675e12 / 16384, 0.02 * 4.675e12 / 16384
    unet = {
        "outer": layer(outer / rate, 0.3, 20_000_000, 300e3, tps, outer),
        "inner": layer(inner / rate, 0.3, 50_000_000, 80e3, tps, inner),
    }
    modules = {
        "image_encoder": module(
            "encoder",
            ["embed", *["block"] * 46, "projector"],
            encoder,
            Work(16, 16 * 1024, 16 * 1024.0**2),
            Work(32, 32 * 1024, 32 * 1024.0**2),
            16 * 256 * 16384.0,
        ),
        "llm": module(
            "llm",
            ["embed", *["block"] * 80, "head"],
            llm,
            Work(1, 7800, 3e7),
            Work(1, 8192, 6.7e7),
            4 * 77 * 16384.0,
        ),
        "image_generator": module(
            "generator",
            ["outer"] * 3 + ["inner"] * 19 + ["outer"] * 3,
            unet,
            Work(4, 4 * 16384, 4 * 16384.0**2),
            Work(8, 8 * 16384, 8 * 16384.0**2),
            0.0,
        ),
    }
    device = DeviceProfile(
        name="A800", kind="cuda", count=run.cluster.gpus, memory_gib=memory_gib, peak_tflops=312.0
    )
    return profile_for(run, modules, device, profiles.links(1600, 10, 1600, 30, 1 / 16))


def paper_policy(profile: Profile, layout: Layout) -> Policy:
    """How the policy `paper` orders batches for a layout."""
    return Policy("paper", layout, profile.inputs, None, gpus_per_node=8)


def loads_of(profile: Profile, layout: Layout, policy: Policy, number: int) -> dict[str, Any]:
    """By module [n slots, DP, 3]: the work of every replica in the `number`-th global batch drawn
    from the data."""
    batch = sampled_batch(sizes_of_sample(profile.data.sample), layout.global_batch_size, number)
    return replica_loads(batch, profile.inputs, layout, policy(batch))


def cuts(layers: int, stages: int) -> list[list[int]]:
    """Every way to split layers into non-empty stages."""
    inner = itertools.combinations(range(1, layers), stages - 1)
    return [list(np.diff([0, *places, layers])) for places in inner]

"""Profiles of devices that are not here: exact polynomials, tensor parallelism, freezing, links,
figures given."""

from pathlib import Path
from typing import Any

import pytest
import torch

from disttrain_cli.costs.hardware import analytic_device, kernels_ms, lookup
from disttrain_cli.costs.links import COLLECTIVES, ring_bytes
from disttrain_cli.errors import SpecError
from disttrain_cli.models.footprint import Noted, footprint
from disttrain_cli.models.graph import build_layers, describe, layer_table
from disttrain_cli.models.operators import layer_operators
from disttrain_cli.models.probe import probe_batch, probe_work, state_at
from disttrain_cli.models.tensor_parallel import join
from disttrain_cli.profiling.analytic import analytic_profile
from disttrain_cli.profiling.measure import measure
from disttrain_cli.spec.layer_costs import Polynomial
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.runfile import Run, RunFile
from disttrain_cli.spec.work import Work
from tests.cases import first_fast
from tests.models.any_decoder import fields_of

MODULES: dict[str, dict[str, Any]] = {
    "eye": {
        "kind": "encoder",
        "architecture": "vit",
        "merge": 2,
        "config": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "image_size": 32,
            "patch_size": 4,
        },
    },
    "llm": {
        "kind": "llm",
        "architecture": "llama",
        "config": {
            "vocab_size": 264,
            "hidden_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "intermediate_size": 96,
        },
    },
    "brush": {
        "kind": "generator",
        "architecture": "unet2d_condition",
        "image_size": 16,
        "context_tokens": 4,
        "config": {
            "in_channels": 3,
            "out_channels": 3,
            "block_out_channels": [16, 32],
            "layers_per_block": 1,
            "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
            "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
            "cross_attention_dim": 24,
            "attention_head_dim": 4,
            "norm_num_groups": 8,
        },
    },
}
SIZES = {
    "eye": {"image": [(6, 10)] * 4},
    "llm": {"documents": [[96]] * 3, "length": 96},
    "brush": {"target": 3},
}


def make_run(
    folder: Path, modules: dict[str, Any] | None = None, length: int = 256, **cluster: Any
) -> Run:
    file = RunFile.model_validate(
        {
            "name": "t",
            "model": {"modules": modules or MODULES},
            "data": {
                "distribution": {
                    "images_per_sequence": 2,
                    "generated_per_sequence": 2,
                    "sequences": 300,
                },
                "sequence_length": length,
                "max_image_pixels": 256,
            },
            "cluster": {"nodes": 2, "gpus_per_node": 4} | cluster,
            "train": {"global_batch_size": 8, "steps": 1},
        }
    )
    return Run(path=folder / "disttrain.yaml", file=file)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def profile(run: Run) -> Profile:
    return measure(run, "analytic:A800")


@pytest.mark.slow
def test_it_is_whole_and_says_where_its_figures_are_from(run: Run, profile: Profile) -> None:
    device = profile.device
    assert (device.name, device.kind, device.count, device.peak_tflops) == (
        "A800",
        "analytic",
        8,
        312,
    )
    assert device.memory_gib == lookup("A800").memory_gib
    assert 0.01 < device.optimizer_ns_per_parameter < 0.03
    assert (
        profile.links.inter_node is not None
        and profile.links.inter_node.p2p_gbps < profile.links.p2p_gbps
    )
    assert "A100" in profile.provenance["device"] and "ampere" in profile.provenance["kernels"]
    assert list(profile.modules) == ["eye", "llm", "brush"]
    assert set(profile.modules["llm"].tp) == {"1", "2"} and "4" in profile.modules["eye"].tp
    for name, module in profile.modules.items():
        # some bytes of positions go with the sides of an image
        most_pct = 0.1 if name == "eye" else 1e-6
        assert all(time.fit_error_pct < most_pct for time in module.tp.values())
        assert module.work_per_sequence.items > 0
    assert Profile.model_validate_json(profile.model_dump_json()) == profile


@pytest.mark.slow
def test_costs_are_those_of_the_operators_at_any_size(run: Run, profile: Profile) -> None:
    table, inputs, device = layer_table(run), describe(run), lookup("A800")
    for name in (
        "eye.block.0",
        "eye.projector",
        "llm.embed",
        "llm.block.1",
        "llm.head",
        "brush.down.0",
    ):
        place = next(place for place, info in enumerate(table) if info.name == name)
        info, sizes = table[place], SIZES[table[place].module]
        kind = run.file.model.modules[info.module].kind
        work = probe_work(inputs, info.module, **{k: v for k, v in sizes.items() if k != "length"})
        if kind == "llm":  # rows are those of whole sequences, padding included
            work = Work(work.tokens / inputs.sequence_length, work.tokens, work.sum_length_sq)
        cost = profile.modules[info.module].costs[info.kind]
        for tp in [1, 2] if "2" in cost.tp else [1]:
            shard = cost.tp[str(tp)]
            layer = build_layers(run, place, place + 1, "meta", torch.bfloat16, tp=tp)[0]
            join(layer, None if tp == 1 else Noted(None, tp, 0))
            batch = probe_batch(inputs, device="meta", **sizes)
            state = state_at(table, place, inputs, batch, "meta", torch.bfloat16, tp=tp)
            own = {key: tensor for key, tensor in state.items() if key in info.reads}
            sent = footprint(layer, own, batch)
            trained = layer_operators(layer, state, batch)
            frozen = layer_operators(layer.requires_grad_(False), state, batch)
            less = footprint(layer, own, batch)
            for time_ms, kernels, messages in (
                (shard.forward_ms, trained.forward, sent.forward),
                (shard.backward_ms, trained.backward, sent.backward),
                (shard.backward_input_ms, frozen.backward, less.backward),
            ):
                expected = kernels_ms(device, "bf16", kernels) + 1e3 * sum(
                    COLLECTIVES[one.operation](profile.links, one.bytes, tp) for one in messages
                )
                assert time_ms(work) == pytest.approx(expected if sum(kernels) else 0.0), name
            for name_of_pass, messages in (("forward", sent.forward), ("backward", sent.backward)):
                moved = sum(ring_bytes(one.operation, one.bytes, tp) for one in messages)
                assert shard.sent_bytes.get(name_of_pass, Polynomial())(work) == pytest.approx(
                    moved
                )
            assert shard.activation_bytes(work) == pytest.approx(trained.saved_bytes)
            assert shard.frozen_activation_bytes(work) == pytest.approx(frozen.saved_bytes)
            assert shard.parameters == sum(weight.numel() for weight in layer.parameters())


def test_padding_costs_an_llm_as_much_as_tokens(profile: Profile) -> None:
    block = profile.modules["llm"].costs["block"].tp["1"]
    assert (
        block.forward_ms.per_token == pytest.approx(0.0, abs=1e-12)
        and block.forward_ms.per_item > 0
    )
    assert block.forward_ms.per_length_sq > 0


def test_shards_do_less_but_not_as_well(profile: Profile) -> None:
    module = profile.modules["llm"]
    work = module.work_per_sequence
    whole, half = (module.costs["block"].tp[tp] for tp in "12")
    assert whole.parameters > half.parameters > whole.parameters / 2
    assert half.activation_bytes(work) == pytest.approx(whole.activation_bytes(work) / 2, rel=1e-4)
    assert half.input_bytes(work) == pytest.approx(whole.input_bytes(work) / 2)
    assert half.forward_ms(work) > whole.forward_ms(work) / 2
    for cost in (*module.costs.values(), *profile.modules["brush"].costs.values()):
        for shard in cost.tp.values():
            own = (
                work
                if cost in module.costs.values()
                else profile.modules["brush"].work_per_sequence
            )
            assert shard.backward_input_ms(own) <= shard.backward_ms(own)
            assert shard.frozen_activation_bytes(own) <= shard.activation_bytes(own)


@pytest.mark.slow
def test_other_devices_and_figures(tmp_path: Path, profile: Profile) -> None:
    only_llm = {"llm": MODULES["llm"]}
    with pytest.raises(SpecError, match="X9"):
        analytic_profile(make_run(tmp_path, only_llm), "X9")
    given = make_run(
        tmp_path, only_llm, nodes=1, peak_tflops=100, memory_gib=32, links={"intra_node_gbps": 200}
    )
    found = measure(given, "analytic:X9")
    assert (found.device.name, found.device.memory_gib, found.device.peak_tflops) == ("X9", 32, 100)
    assert (
        "generic" in found.provenance["kernels"]
        and "peak_tflops 100" in found.provenance["run_file"]
    )
    assert found.links.inter_node is None
    work = found.modules["llm"].work_per_sequence
    assert found.modules["llm"].costs["block"].tp["1"].forward_ms(work) > 0


def layer_mfu(run: Run, name: str, device: str, tp: int = 1, **sizes: Any) -> float:
    """Model FLOPs of one layer over what the device could have done, without messages."""
    from disttrain_cli.models.flops import layer_flops

    table, inputs = layer_table(run), describe(run)
    place = next(place for place, info in enumerate(table) if info.name == name)
    batch = probe_batch(inputs, device="meta", **sizes)
    state = state_at(table, place, inputs, batch, "meta", torch.bfloat16)
    shard, whole = (
        build_layers(run, place, place + 1, "meta", torch.bfloat16, tp=t)[0] for t in (tp, 1)
    )
    done = layer_operators(shard, state, batch)
    known = analytic_device(device, run.file.cluster, "bf16")
    counted = layer_flops(whole, state, batch)
    time_ms = kernels_ms(known, "bf16", done.forward) + kernels_ms(known, "bf16", done.backward)
    return (counted.forward + counted.backward) / tp / (time_ms * 1e-3 * known.peak_tflops * 1e12)


def test_a_real_layer_of_llama_runs_as_fast_as_published_ones(tmp_path: Path) -> None:
    """FlashAttention-2 (arXiv 2307.08691, table 1): 72 % of an A100's peak end to end with 8,192
    tokens."""
    llama = {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "num_hidden_layers": 1,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "intermediate_size": 11008,
    }
    run = make_run(
        tmp_path, {"llm": {"kind": "llm", "architecture": "llama", "config": llama}}, length=8192
    )
    whole, shard = (layer_mfu(run, "llm.block.0", "A800", tp, documents=[[8192]]) for tp in (1, 8))
    assert 0.68 < whole < 0.82
    assert 0.8 * whole < shard + 0.05 and shard < whole - 0.05
    assert layer_mfu(run, "llm.block.0", "H100", documents=[[8192]]) < whole


def test_divided_blocks_say_what_overlapping_saves(profile: Profile) -> None:
    for module in profile.modules.values():
        work = module.work_per_sequence
        for kind, cost in module.costs.items():
            for tp, shard in cost.tp.items():
                assert bool(shard.hidden_ms) == (
                    tp != "1" and (module.kind, kind) in (("encoder", "block"), ("llm", "block"))
                )
                for name, saved in shard.hidden_ms.items():
                    if name in shard.sent_bytes:  # at 160 GB/s and 20 us for each of some messages
                        sent_ms = shard.sent_bytes[name](work) / 1.6e8
                        assert saved(work) < sent_ms + 12 * 0.02


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "more"),
    first_fast(
        [
            ("gpt_oss", {}),  # no TP
            ("lfm2", {"layer_types": ["conv", "full_attention"]}),
            ("qwen3_5_text", {"layer_types": ["linear_attention", "full_attention"]}),
            # save_pretrained encodes its infinite time_step_limit
            ("falcon_h1", {"num_hidden_layers": 1, "mamba_d_ssm": 64, "mamba_n_heads": 4}),
        ]
    ),
)
def test_decoders_of_the_library_have_costs(
    tmp_path: Path, architecture: str, more: dict[str, Any]
) -> None:
    from transformers import CONFIG_MAPPING

    sizes = {"num_hidden_layers": 2, "vocab_size": 264} | more
    CONFIG_MAPPING[architecture](**fields_of(architecture) | sizes).save_pretrained(tmp_path / "m")
    llm = {"kind": "llm", "folder": "m"}
    run = make_run(tmp_path, {"llm": llm}, 128, nodes=1, gpus_per_node=1)
    (module,) = measure(run, "analytic:H100").modules.values()
    blocks = {name: cost for name, cost in module.costs.items() if cost.parameters > 1000}
    assert len(blocks) > 1
    for name, cost in blocks.items():  # 2 per weight, more with states, less with experts
        each = cost.forward_flops.per_token / cost.parameters
        assert name == "embed" or 0.5 < each < 20, (name, each)

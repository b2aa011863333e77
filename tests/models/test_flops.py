import pytest
import torch

from disttrain_cli.models import decoder, unet, vae, vit, whisper
from disttrain_cli.models.flops import count_flops, layer_flops
from disttrain_cli.models.generator import Canvas
from disttrain_cli.models.graph import build_layers, describe, layer_table
from disttrain_cli.models.library_attention import packed
from disttrain_cli.models.noise import Noise
from disttrain_cli.models.probe import probe_batch, probe_work, state_at
from disttrain_cli.models.projectors import Joint
from disttrain_cli.spec.heads import AudioInput, ImageInput, TargetInput
from disttrain_cli.spec.inputs import ModelInputs
from tests.cases import first_fast


@pytest.mark.slow
def test_polynomials_hold_at_other_sizes_and_by_hand(make_run):
    run = make_run(audio_encoder={})
    table, inputs, flops = layer_table(run), describe(run), count_flops(run)
    sizes = {
        "audio_encoder": {"audio": 3},
        "image_encoder": {"image": [(4, 2), (6, 6), (6, 6)]},
        "llm": {"documents": [[40], [40]], "length": 40},
        "image_generator": {"target": 5},
    }
    for index, info in enumerate(table):
        batch = probe_batch(inputs, device="meta", **sizes[info.module])
        layer = build_layers(run, index, index + 1, device="meta")[0]
        own = {k: v for k, v in sizes[info.module].items() if k != "length"}
        work = probe_work(inputs, info.module, **own)
        costs = flops[info.module][info.kind]
        expected = layer_flops(layer, state_at(table, index, inputs, batch, "meta"), batch)
        assert (
            costs.forward(work),
            costs.backward(work),
            costs.backward_input(work),
        ) == expected, info.name
        assert costs.parameters == info.parameters

        layer.requires_grad_(False)  # frozen: only the gradients of inputs are left
        frozen = layer_flops(layer, state_at(table, index, inputs, batch, "meta"), batch)
        assert frozen == (expected.forward, expected.backward_input, expected.backward_input), (
            info.name
        )

    # By hand: two FLOPs per weight and token forward, twice that backward; 4·D per pair of tokens
    # in attention.
    head = flops["llm"]["head"]
    assert (head.forward.per_token, head.backward.per_token) == (2 * 48 * 261, 4 * 48 * 261)
    block = flops["llm"]["block"]
    weights = 48 * 48 * 2 + 48 * 24 * 2 + 3 * 48 * 96
    assert block.forward.per_token == 2 * weights and block.forward.per_length_sq == 4 * 48
    assert (
        block.backward_input.per_token == 2 * weights
        and block.backward_input.per_length_sq == 8 * 48
    )


@pytest.mark.slow
def test_flops_of_a_patch_need_not_be_whole(make_run):
    """A block of 5 × 5 patches goes through the projector once."""
    run = make_run(image_encoder={"merge": 5})
    table, inputs = layer_table(run), describe(run)
    batch = probe_batch(inputs, image=[(10, 5), (5, 5)], device="meta")
    work = probe_work(inputs, "image_encoder", image=[(10, 5), (5, 5)])
    index = next(i for i, info in enumerate(table) if info.name == "image_encoder.projector")
    layer = build_layers(run, index, index + 1, device="meta")[0]
    expected = layer_flops(layer, state_at(table, index, inputs, batch, "meta"), batch)
    costs = count_flops(run)["image_encoder"][table[index].kind]
    assert costs.forward(work) == pytest.approx(expected.forward, rel=1e-12)
    assert costs.forward.per_token != round(costs.forward.per_token)


@pytest.mark.parametrize(
    ("family", "fields", "windows"),
    first_fast(
        [
            ("mistral", {"sliding_window": 5}, (5, 5, 5)),
            ("mistral", {"sliding_window": 1}, (1, 1, 1)),
            ("mistral", {"sliding_window": 4096}, ()),
            ("mistral", {"sliding_window": None}, ()),
            ("llama", {}, ()),
            (
                "qwen2",
                {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
                (48, 7, 7),
            ),
            (
                "qwen2",
                {"use_sliding_window": False, "sliding_window": 7, "max_window_layers": 1},
                (),
            ),
        ],
        3,
    ),
)
def test_flops_of_attention_follow_the_window_of_every_block(make_run, family, fields, windows):
    given = {
        "hidden_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "vocab_size": 261,
    }
    run = make_run(
        llm={"architecture": family, "config": given | fields},
        image_encoder=None,
        image_generator=None,
    )
    inputs, block = describe(run), count_flops(run)["llm"]["block"]
    assert tuple(inputs.windows) == windows
    lengths = [1, 2, 5, 6, 19, 31]
    seen = 0
    for window in windows or (48, 48, 48):
        for length in lengths:  # both sides of the diagonal, as model FLOPs leave causality out
            apart = (torch.arange(length)[:, None] - torch.arange(length)).abs()
            seen += int((apart < window).sum())
    work = probe_work(inputs, "llm", documents=[lengths])
    assert work.sum_length_sq == seen // 3
    assert block.forward(work) == block.forward.per_token * sum(lengths) + 4 * 48 * (seen // 3)


def test_meta_and_cpu_count_the_same_matmuls(make_run):
    run = make_run()
    table, inputs = layer_table(run), describe(run)
    index = next(i for i, info in enumerate(table) if info.name == "image_generator.out")
    counts = []
    for device in ("meta", "cpu"):
        batch = probe_batch(inputs, target=2, device=device)
        layer = build_layers(run, index, index + 1, device=device)[0]
        counts.append(layer_flops(layer, state_at(table, index, inputs, batch, device), batch))
    assert counts[0] == counts[1]


def forward_tflop(makers, batch):
    """Forward of consecutive layers on the meta device, without those before the first or after the
    last."""
    from torch.utils.flop_counter import FlopCounterMode

    layers = [maker.on_meta() for maker in makers]
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        state = {
            name: value for layer in layers for name, value in START.items() if name in layer.reads
        }
        for layer in layers:
            state.update(layer(state, batch))
    return counter.get_total_flops() / 1e12


START: dict[str, torch.Tensor] = {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("side", "expected"), first_fast([(224, 0.3346), (448, 1.463), (504, 1.910), (1022, 11.37)])
)
def test_vit_huge(side, expected):
    from transformers import ViTConfig

    config = ViTConfig(
        hidden_size=1280,
        num_hidden_layers=32,
        num_attention_heads=16,
        intermediate_size=5120,
        image_size=224,
        patch_size=14,
    )
    config = packed(config)
    image = ImageInput(module="vit", patch_px=14, max_pixels=side * side)
    inputs = ModelInputs(llm="llm", vocabulary=261, sequence_length=64, heads=[image])
    batch = probe_batch(inputs, image=[(side // 14, side // 14)], device="meta")
    assert forward_tflop(
        vit.makers("vit", config, Joint("mlp", 1, 64, 64))[:-1], batch
    ) == pytest.approx(expected, rel=5e-4)


@pytest.mark.slow
def test_whisper_large_v3():
    """By hand for a clip's 1500 positions: 12·D² weights and 4·1500·D of attention per layer, two
    convolutions."""
    from transformers import WhisperConfig

    config = WhisperConfig(
        d_model=1280,
        encoder_layers=32,
        encoder_attention_heads=20,
        encoder_ffn_dim=5120,
        num_mel_bins=128,
    )
    config = packed(config)
    audio = AudioInput(module="ear", mel_bins=128, frames=3000, merge=4)
    inputs = ModelInputs(llm="llm", vocabulary=261, sequence_length=64, heads=[audio])
    layers = 32 * 1500 * (2 * 12 * 1280**2 + 4 * 1500 * 1280)
    convolutions = 2 * 3 * 1280 * (3000 * 128 + 1500 * 1280)
    makers = whisper.makers("ear", config, 4, 64, 64)[:-1]
    assert sum(p.numel() for maker in makers for p in maker.on_meta().parameters()) == 635_046_400
    tflop = forward_tflop(makers, probe_batch(inputs, audio=1, device="meta"))
    assert tflop == pytest.approx((layers + convolutions) / 1e12) == pytest.approx(2.2737, abs=1e-4)


@pytest.mark.parametrize(
    ("width", "ffn", "heads", "kv_heads", "expected"),
    [(4096, 11008, 32, 32, 4.415), (5120, 13824, 40, 40, 6.571), (8192, 28672, 64, 8, 16.218)],
)
def test_one_llama_layer_at_8192_tokens(monkeypatch, width, ffn, heads, kv_heads, expected):
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=ffn,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
    )
    config = packed(config)
    inputs = ModelInputs(llm="llm", vocabulary=32000, sequence_length=8192)
    batch = probe_batch(inputs, documents=[[8192]], device="meta")
    monkeypatch.setitem(START, "hidden", torch.empty(8192, width, device="meta"))
    block = decoder.makers("llm", config, (), (), False, 1.0)[1]
    assert forward_tflop([block], batch) == pytest.approx(expected, abs=5e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "expected"), first_fast([(64, 0.804), (128, 4.675)]))
def test_stable_diffusion_2_1_unet(monkeypatch, size, expected):
    from disttrain_cli.models.configs import known_fields

    config = {
        **known_fields("unet2d_condition"),
        "sample_size": size,
        "cross_attention_dim": 1024,
        "attention_head_dim": [5, 10, 20, 20],
        "use_linear_projection": True,
    }
    target = TargetInput(
        module="unet", size_px=size, channels=4, context_tokens=77, latent_pixels=size * size
    )
    inputs = ModelInputs(llm="llm", vocabulary=261, sequence_length=128, heads=[target])
    batch = probe_batch(inputs, target=1, device="meta")
    monkeypatch.setitem(START, "conditioning", torch.empty(77, 1024, device="meta"))
    canvas = Canvas((4, size, size), Noise(), 8 * size, reads_latents=False)
    layers = unet.makers("unet", config, canvas, 77, 1024, 4096, 1.0)[1:]
    assert forward_tflop(layers, batch) == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize(("size", "expected"), first_fast([(512, 1.117), (1024, 4.879)]))
def test_stable_diffusions_vae_encoder(size, expected):
    from disttrain_cli.models.configs import known_fields

    config = {
        "_class_name": "AutoencoderKL",
        **known_fields("AutoencoderKL"),
        "block_out_channels": [128, 256, 512, 512],
        "layers_per_block": 2,
        "down_block_types": ["DownEncoderBlock2D"] * 4,
        "up_block_types": ["UpDecoderBlock2D"] * 4,
    }
    target = TargetInput(
        module="unet", size_px=size, context_tokens=77, latent_pixels=(size // 8) ** 2
    )
    inputs = ModelInputs(llm="llm", vocabulary=261, sequence_length=128, heads=[target])
    batch = probe_batch(inputs, target=1, device="meta")
    assert forward_tflop([vae.encoder_maker("unet", config, size)], batch) == pytest.approx(
        expected, abs=5e-4
    )

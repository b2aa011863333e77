"""Stock models with recurrent mixers: packed documents equal documents one at a time."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from disttrain_cli.models import recurrent
from disttrain_cli.models.attention import Segments
from disttrain_cli.models.division import piece, shard_of, whole_shape
from disttrain_cli.models.flops import layer_flops
from disttrain_cli.models.layer import Batch, PipelineLayer
from disttrain_cli.models.library_attention import PACKED, _attend, packed
from disttrain_cli.models.operators import layer_operators
from disttrain_cli.models.tensor_parallel import pieces, shard
from disttrain_cli.models.weight_parts import split

#: Alone, shorter than a convolution's kernel and than a chunk, longer than both, several of one
#: length; the last one stands for padding.
LENGTHS = [5, 1, 9, 3, 70, 2, 5, 130, 1, 6]
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 61,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
KDA = {
    **EXPERTS,
    "num_key_value_heads": 4,
    "linear_num_heads": 2,
    "linear_head_dim": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "layer_types": ["linear_attention", "full_attention"],
}
MAMBA = {"mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_chunk_size": 16}
#: Mixers of each family, and its tiny configuration.
FAMILIES: dict[str, tuple[set[str], dict[str, Any]]] = {
    "qwen3_5_text": ({"Qwen3_5GatedDeltaNet"}, DELTA),
    "qwen3_5_moe_text": (
        {"Qwen3_5MoeGatedDeltaNet"},
        {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 16},
    ),
    "qwen3_next": (
        {"Qwen3NextGatedDeltaNet"},
        {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 16},
    ),
    "olmo_hybrid": ({"OlmoHybridGatedDeltaNet"}, {**DELTA, "linear_num_key_heads": 4}),
    "kimi_linear": ({"KimiLinearDeltaAttention"}, KDA),
    "bailing_hybrid": ({"BailingHybridDeltaAttention"}, KDA),
    "minimax": (
        {"MiniMaxLightningAttention"},
        {
            "num_local_experts": 4,
            "block_size": 16,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "lfm2": ({"Lfm2ShortConv"}, {"layer_types": ["conv", "full_attention"]}),
    "lfm2_moe": (
        {"Lfm2MoeShortConv"},
        {**EXPERTS, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    ),
    "lfm3": ({"Lfm3ShortConv"}, {}),
    "bamba": ({"BambaMixer"}, {**MAMBA, "attn_layer_indices": [1]}),
    "falcon_h1": ({"FalconH1Mixer"}, {**MAMBA, "mamba_d_ssm": 64}),
    "granitemoehybrid": (
        {"GraniteMoeHybridMambaLayer"},
        {**MAMBA, "num_local_experts": 4, "layer_types": ["mamba", "attention"]},
    ),
    "nemotron_h": (
        {"NemotronHMamba2Mixer"},
        {
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "chunk_size": 16,
            "n_groups": 1,
            "layers_block_type": ["linear_attention", "full_attention"],
        },
    ),
    "zamba": (
        {"ZambaMambaMixer", "ZambaMambaDecoderLayer"},
        {
            "num_hidden_layers": 3,
            "layers_block_type": ["mamba", "hybrid", "hybrid"],
            "mamba_dt_rank": 4,
            "attention_hidden_size": 64,
        },
    ),
    "zamba2": (
        {"Zamba2MambaMixer", "Zamba2MambaDecoderLayer"},
        {
            "layers_block_type": ["mamba", "hybrid"],
            "n_mamba_heads": 4,
            "mamba_d_state": 8,
            "chunk_size": 16,
        },
    ),
    "jamba": (
        {"JambaMambaMixer"},
        {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_dt_rank": 4},
    ),
    "mamba": ({"MambaMixer"}, {"time_step_rank": 4}),
    "mamba2": ({"Mamba2Mixer"}, {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1}),
    "falcon_mamba": ({"FalconMambaMixer"}, {"time_step_rank": 4}),
    "recurrent_gemma": (
        {"RecurrentGemmaRecurrentBlock"},
        {"block_types": ["recurrent", "attention"], "lru_width": 32},
    ),
    "zaya": (
        {"ZayaCCAProjection"},
        {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 16},
    ),
    "rwkv": ({"RwkvSelfAttention", "RwkvFeedForward"}, {"attention_hidden_size": 32}),
    "xlstm": ({"xLSTMLayer"}, {"num_blocks": 2, "num_heads": 4}),
}


def model_of(family: str) -> Any:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    kind = CONFIG_MAPPING[family]
    fields = kind()
    sizes = {name: value for name, value in SIZES.items() if hasattr(fields, name)}
    if isinstance(getattr(kind, "head_dim", None), property):
        del sizes["head_dim"]
    torch.manual_seed(0)
    config = kind(**{**sizes, **FAMILIES[family][1]})
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 or name.endswith("A_log"):  # slow decays: more to leak, less rounding
            nn.init.normal_(parameter, std=0.1)
    return model


#: One family of each kind of mixer; the others take as long again.
EACH_KIND = ("qwen3_5_text", "kimi_linear", "minimax", "lfm2", "bamba", "jamba", "zaya")


@pytest.mark.parametrize(
    "family",
    [pytest.param(one, marks=[pytest.mark.slow] * (one not in EACH_KIND)) for one in FAMILIES],
)
def test_packed_documents_equal_documents_one_at_a_time(family, monkeypatch):
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model = model_of(family)
    ids = torch.randint(3, 61, (sum(LENGTHS),))
    alone = [model(input_ids=one[None], use_cache=False).logits[0] for one in ids.split(LENGTHS)]
    loss = torch.randn(len(ids) - LENGTHS[-1], 61)
    expected = torch.cat(alone[:-1])
    (expected * loss).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()

    within = Segments(LENGTHS, torch.device("cpu"))
    packed(model.config)
    monkeypatch.setitem(
        ALL_ATTENTION_FUNCTIONS,
        PACKED,
        lambda module, q, k, v, mask, **named: _attend(module, q, k, v, within, **named),
    )
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS, PACKED, lambda *_, **__: None)
    model.set_attn_implementation(PACKED)
    layers = next(part for part in model.modules() if isinstance(part, nn.ModuleList))
    found = [mixer for layer in layers for mixer in recurrent.mixers(layer).values()]
    assert {type(mixer).__name__ for mixer in found} == FAMILIES[family][0]
    for layer in layers:
        recurrent.restart(layer)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    given = {} if family in ("rwkv", "xlstm") else {"position_ids": positions}
    with recurrent.documents(within):
        made = model(input_ids=ids[None], use_cache=False, **given).logits[0]
    made = made[: -LENGTHS[-1]]
    (made * loss).sum().backward()
    same(made, expected, family)
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (gradients[name] is None), name
        if parameter.grad is not None:
            # sums of terms that cancel: the attention's rounding shows in them
            cancels = name.endswith(("A_log", "dt_bias"))
            same(parameter.grad, gradients[name], name, 2e-5 if cancels else 1e-5)


def mixer_of(family: str) -> tuple[nn.Module, str]:
    """Return the first decoder layer of a family, and the path of its mixer."""
    model = model_of(family)
    layer = next(part for part in model.modules() if isinstance(part, nn.ModuleList))[0]
    return layer, next(iter(recurrent.mixers(layer)))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_a_mixer_restarts_in_all_sequences_of_a_microbatch(dtype, tolerance):
    layer, path = mixer_of("qwen3_5_text")
    stock = layer.get_submodule(path).to(dtype)
    lengths = [3, 70, 7, 65, 3, 12]  # two sequences of 80 rows
    hidden, weights = torch.randn(2, 2, 80, 32).to(dtype)
    rows = hidden.clone().requires_grad_()
    alone = [stock(part[None])[0] for part in rows.flatten(0, 1).split(lengths)]
    expected = torch.cat(alone).view_as(hidden)
    (expected * weights).sum().backward()
    gradients = [parameter.grad for parameter in stock.parameters()]
    stock.zero_grad()

    assert recurrent.restart(layer) == [path]
    given = hidden.clone().requires_grad_()
    with recurrent.documents(Segments(lengths, hidden.device)):
        made = stock(hidden_states=given)
    (made * weights).sum().backward()
    same(made, expected, "output", tolerance)
    same(given.grad, rows.grad, "gradient of the input", tolerance)
    for (name, parameter), gradient in zip(stock.named_parameters(), gradients, strict=True):
        same(parameter.grad, gradient, name, tolerance)


def test_the_trial_of_a_class_leaves_no_trace(monkeypatch):
    """A first forward can be recomputed, and linears with a split backward have no gradient yet."""
    layer, path = mixer_of("qwen3_5_text")
    recurrent.restart(layer)
    split(layer)
    rows, gradients = torch.randn(1, 12, 32, requires_grad=True), []
    with recurrent.documents(Segments([5, 7], rows.device)):
        for _ in range(2):
            monkeypatch.setattr(recurrent, "_tried", {})
            made = checkpoint(layer.get_submodule(path), rows, use_reentrant=False)
            assert recurrent._tried
            assert all(parameter.grad is None for parameter in layer.parameters())
            gradients += torch.autograd.grad(made.square().sum(), rows)
            layer.zero_grad()
    assert gradients[0].any() and torch.equal(*gradients)


@pytest.mark.parametrize("family", ["qwen3_5_text", "bamba", "lfm2"])
def test_padding_that_is_not_finite_stays_in_its_document(family):
    layer, path = mixer_of(family)
    recurrent.restart(layer)
    hidden = torch.randn(1, 20, 32)
    hidden[:, 12:] = torch.inf
    hidden.requires_grad_()
    with recurrent.documents(Segments([5, 7, 8], hidden.device)):
        made = layer.get_submodule(path)(hidden)[:, :12]
    made.sum().backward()
    assert made.isfinite().all() and hidden.grad[:, :12].isfinite().all()


def test_rows_without_documents_are_refused():
    layer, path = mixer_of("lfm2")
    recurrent.restart(layer)
    with pytest.raises(LookupError):
        layer.get_submodule(path)(torch.randn(1, 4, 32))


class Summing(nn.Module):
    """Mixer with a kernel that takes borders, and heeds them if `heeds`."""

    def __init__(self, heeds: bool) -> None:
        super().__init__()
        self.heeds, self.calls = heeds, 0

    def forward(self, rows, state=None, cu_seq_lens_q=None, seq_idx=None):
        self.calls += 1
        if not self.heeds or seq_idx is None:
            return rows.cumsum(1)
        whole = cu_seq_lens_q.diff().tolist()
        assert seq_idx[0].bincount().tolist() == whole
        return torch.cat([part.cumsum(1) for part in rows.split(whole, 1)], 1)


@pytest.mark.parametrize("heeds", [False, True])
def test_kernels_that_heed_borders_run_once_over_all_rows(heeds):
    recurrent._tried.clear()
    mixer = Summing(heeds)
    layer = nn.Sequential(mixer)
    assert recurrent.restart(layer) == ["0"]
    rows = torch.randn(1, 12, 4)
    lengths = [3, 5, 4]
    with recurrent.documents(Segments(lengths, rows.device)):
        layer(rows)  # tries
        mixer.calls = 0
        made = layer(rows)
    assert mixer.calls == (1 if heeds else len(lengths))
    assert torch.equal(made, torch.cat([part.cumsum(1) for part in rows.split(lengths, 1)], 1))
    recurrent._tried.clear()


class Counted(PipelineLayer):
    """Recurrent mixer as a pipeline layer."""

    name, module, kind, reads, by_rows = "llm.block.0", "llm", "block", ("hidden",), True

    def __init__(self, family: str) -> None:
        super().__init__()
        layer, path = mixer_of(family)
        recurrent.restart(layer)
        self.mixer = layer.get_submodule(path)

    def is_empty(self, state: dict[str, Tensor], batch: Batch) -> bool:
        return False

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        hidden, lengths = state["hidden"], batch.sample_lengths
        assert lengths
        with recurrent.documents(Segments(lengths, hidden.device)):
            made = self.mixer(hidden.unflatten(0, batch.token_ids.shape))
        return {"hidden": made.flatten(0, 1)}


@pytest.mark.parametrize("family", ["qwen3_5_text", "kimi_linear", "lfm2", "bamba"])
def test_model_flops_are_linear_in_the_tokens(family):
    """Chunks are counted in full on the meta device, where nothing can be tried."""
    layer = Counted(family).to("meta").bfloat16()
    counts = []
    for sequences, length in ((1, 256), (1, 512), (2, 512)):
        rows = torch.empty(sequences * length, 32, device="meta", dtype=torch.bfloat16)
        ids = torch.empty(sequences, length, device="meta", dtype=torch.int64)
        batch = Batch(token_ids=ids, sample_lengths=[length] * sequences)
        counts.append(layer_flops(layer, {"hidden": rows.requires_grad_()}, batch))
        kernels = layer_operators(layer, {"hidden": rows}, batch)
    one, two, four = (count.forward for count in counts)
    assert four == 2 * two and two == pytest.approx(2 * one, rel=0.06)
    assert counts[0].backward == pytest.approx(2 * one, rel=0.1)
    if family in ("qwen3_5_text", "kimi_linear"):  # the kernels, not a loop over chunks
        assert kernels.forward.kernels + kernels.backward.kernels < 200
        assert kernels.saved_bytes / (1024 * 32 * 2) < 40


BY_HEADS = ("qwen3_5_text", "qwen3_next", "olmo_hybrid", "kimi_linear", "bailing_hybrid")


@pytest.mark.parametrize("family", BY_HEADS)
def test_shards_by_heads_sum_to_the_whole_mixer(family):
    layer, path = mixer_of(family)
    whole = layer.get_submodule(path)
    layer.name, layer.division = family, recurrent.division(layer)
    layer.unsharded = False
    assert layer.division and not any(count % 2 for count in pieces(layer))
    shards = [shard(copy.deepcopy(layer), tp=2, rank=rank) for rank in range(2)]
    mixers = [one.get_submodule(path) for one in shards]
    hidden = torch.randn(2, 70, 32)
    inputs = [hidden.clone().requires_grad_() for _ in range(3)]
    expected, *sums = [mixer(rows) for mixer, rows in zip((whole, *mixers), inputs, strict=True)]
    weights = torch.randn_like(expected)
    for made in (expected, *sums):
        (made * weights).sum().backward()
    same(sum(sums), expected, "output")
    same(inputs[1].grad + inputs[2].grad, inputs[0].grad, "gradient of the input")
    for name, parameter in whole.named_parameters():
        own = [mixer.get_parameter(name) for mixer in mixers]
        if shard_of(own[0]) is None:
            same(own[0].grad + own[1].grad, parameter.grad, name)
        for one in own:
            if shard_of(one) is not None:
                assert whole_shape(one) == parameter.shape
                assert torch.equal(one, piece(parameter, shard_of(one)))
                same(one.grad, piece(parameter.grad, shard_of(one)), name)


def same(made: Tensor, expected: Tensor, what: str, tolerance: float = 1e-5) -> None:
    error = float(((made - expected).abs().max() / expected.abs().max().clamp(min=1e-6)).detach())
    assert error < tolerance, f"{what}: {error:.1e}"

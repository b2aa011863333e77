import copy
import threading

import pytest
import torch

from disttrain_cli.models.division import Shard, own_rows, piece, shard_of, whole_shape
from disttrain_cli.models.flops import layer_flops
from disttrain_cli.models.graph import build_layers, describe, layer_table
from disttrain_cli.models.probe import probe_batch, state_at
from disttrain_cli.models.sharding import tp_degrees
from disttrain_cli.models.tensor_parallel import linears, shard
from tests.cases import first_fast

TP = 2
DIVISIBLE = {"llm": {"config": {"vocab_size": 264}}}
SIZES = {"image": [(4, 4), (2, 6)], "audio": 2, "documents": [[20, 20], [41]], "target": 2}


def placed(run, name):
    """Place of a layer in the model, its inputs, and the whole layer."""
    table, inputs = layer_table(run), describe(run)
    index = next(i for i, info in enumerate(table) if info.name == name)
    batch = probe_batch(inputs, **SIZES)
    return state_at(table, index, inputs, batch), batch, build_layers(run, index, index + 1)[0]


def in_lockstep(shards, state, batch):
    """Run all ranks' shards together, with the sums over the group that the rules ask for."""
    barrier, partial = threading.Barrier(len(shards), timeout=20), {}

    def reduce_with(rank):
        def hook(linear, given, made):
            bias = 0.0 if linear.bias is None else linear.bias
            partial[rank] = made - bias
            barrier.wait()
            total = sum(partial[r] for r in range(len(shards)))
            barrier.wait()
            return total + bias

        return hook

    results = {}

    def run(rank, layer):
        for linear in linears(layer, 1):
            linear.register_forward_hook(reduce_with(rank))
        results[rank] = layer(dict(state), copy.copy(batch))

    threads = [threading.Thread(target=run, args=item) for item in enumerate(shards)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[rank] for rank in range(len(shards))]


@pytest.mark.parametrize(
    "name",
    [
        "image_encoder.block.0",
        "image_encoder.projector",
        "audio_encoder.block.0",
        "audio_encoder.projector",
        "llm.block.0",
        "image_generator.projector",
        "image_generator.down.0",
        "image_generator.mid",
        "image_generator.up.1",
    ],
)
@pytest.mark.parametrize("tp", [2, 4])
def test_summed_partial_outputs_of_all_ranks_equal_the_whole_layer(make_run, name, tp):
    run = make_run(llm={"config": {"num_key_value_heads": tp}}, audio_encoder={})
    state, batch, whole = placed(run, name)
    shards = [shard(copy.deepcopy(whole), tp=tp, rank=rank) for rank in range(tp)]
    expected = whole(dict(state), batch)
    for made in in_lockstep(shards, state, batch):
        for key, tensor in expected.items():
            torch.testing.assert_close(made[key], tensor, rtol=1e-5, atol=1e-5)
    # Every divided weight is there once, and all others on every rank.
    divided = 0
    divided += sum(p.numel() for part in linears(whole, 0) for p in part.parameters())
    divided += sum(linear.weight.numel() for linear in linears(whole, 1))
    assert divided > 0
    total = sum(p.numel() for layer in shards for p in layer.parameters())
    assert total == divided + tp * (sum(p.numel() for p in whole.parameters()) - divided)


def test_gradients_of_all_ranks_are_slices_of_the_whole_ones(make_run):
    state, batch, whole = placed(make_run(), "llm.block.0")
    shards = [shard(copy.deepcopy(whole), tp=TP, rank=rank) for rank in range(TP)]
    whole(dict(state), batch)["hidden"].square().sum().backward()
    expected = state["hidden"].grad
    state["hidden"].grad = None
    in_lockstep(shards, state, batch)[0]["hidden"].square().sum().backward()
    torch.testing.assert_close(state["hidden"].grad, expected, rtol=1e-4, atol=1e-4)
    for path, dim in (
        ("self_attn.k_proj", 0),
        ("mlp.up_proj", 0),
        ("self_attn.o_proj", 1),
        ("mlp.down_proj", 1),
    ):
        found = torch.cat([layer.layer.get_submodule(path).weight.grad for layer in shards], dim)
        torch.testing.assert_close(
            found, whole.layer.get_submodule(path).weight.grad, rtol=1e-4, atol=1e-4
        )


def test_vocabulary_shards_add_up_to_the_embedding_and_the_logits(make_run):
    run = make_run(image_encoder=None, **DIVISIBLE)
    state, batch, embed = placed(run, "llm.embed")
    whole = embed(dict(state), batch)["hidden"]
    assert torch.equal(
        sum(
            shard(copy.deepcopy(embed), tp=3, rank=r)(dict(state), batch)["hidden"]
            for r in range(3)
        ),
        whole,
    )
    state, batch, head = placed(run, "llm.head")
    shards = [shard(copy.deepcopy(head), tp=3, rank=rank) for rank in range(3)]
    logits = torch.cat([layer.lm_head(layer.norm(state["hidden"])) for layer in shards], 1)
    torch.testing.assert_close(logits, head.lm_head(head.norm(state["hidden"])))


@pytest.mark.slow
@pytest.mark.parametrize("on_meta", first_fast([True, False]))
def test_shards_of_every_layer_run_forward_and_backward_at_any_tp(make_run, on_meta):
    """The matmul FLOPs of what is divided are 1/TP of the whole layer's, and labels of all ids are
    accepted."""
    run = make_run(**DIVISIBLE, audio_encoder={})
    table, inputs = layer_table(run), describe(run)
    device = "meta" if on_meta else "cpu"
    layers = build_layers(run, 0, len(table), device)
    for index, (info, layer) in enumerate(
        zip(table, build_layers(run, 0, len(table), device, tp=TP), strict=True)
    ):
        batch = probe_batch(inputs, device=device, **SIZES)
        state = state_at(table, index, inputs, batch, device)
        part = layer_flops(layer, state, batch)
        if on_meta:
            full = layer_flops(layers[index], state, batch)
            if info.kind in ("block", "head", "projector"):
                assert tuple(count * TP for count in part) == full, info.name
            elif info.kind in ("down.0", "mid", "up.1"):
                assert all(p < f for p, f in zip(part, full, strict=True))
            else:
                assert part == full
        made = layer(state, batch)
        torch.autograd.backward(
            list(made.values()), [torch.ones_like(tensor) for tensor in made.values()]
        )
        assert all(p.grad is not None for p in layer.parameters()), info.name


def test_degrees_divide_heads_widths_and_vocabulary(make_run):
    run = make_run(**DIVISIBLE, audio_encoder={})
    assert tp_degrees(run, "image_encoder", 8) == tp_degrees(run, "audio_encoder", 8) == [1, 2, 4]
    assert tp_degrees(run, "llm", 8) == [1, 2]  # 2 KV heads
    assert tp_degrees(run, "image_generator", 8) == [1, 2, 4]
    assert tp_degrees(run, "image_encoder", 6) == [1, 2]  # 4 does not divide a node of 6
    assert tp_degrees(make_run(), "llm", 8) == [1]  # 261 ids


def test_a_unet_without_a_common_divisor_of_heads_is_not_divided(make_run):
    config = {
        "block_out_channels": [10, 40],
        "attention_head_dim": [5, 20],
        "norm_num_groups": 5,
        "down_block_types": ["CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D"],
        "cross_attention_dim": 20,
    }
    run = make_run(image_generator={"config": config}, llm={"config": {"hidden_size": 40}})
    assert tp_degrees(run, "image_generator", 8) == [1]
    assert tp_degrees(run, "image_generator", 10) == [1, 5]


@pytest.mark.parametrize("name", ["llm.block.0", "llm.embed", "llm.head", "image_generator.down.0"])
def test_a_rank_has_its_parts_of_the_very_weights_of_the_whole_layer(make_run, name):
    run = make_run(**DIVISIBLE)
    index = next(i for i, info in enumerate(layer_table(run)) if info.name == name)
    (whole,) = build_layers(run, index, index + 1)
    ranks = [
        build_layers(run, index, index + 1, dtype=torch.float64, tp=TP, tp_rank=rank)[0]
        for rank in range(TP)
    ]
    assert ranks[1].first_id in (None, 132)
    divided = 0
    for path, parameter in whole.named_parameters():
        for rank, layer in enumerate(ranks):
            own = layer.get_parameter(path)
            assert own.is_contiguous() and whole_shape(own) == tuple(parameter.shape)
            assert torch.equal(own, piece(parameter, shard_of(own)).double())
            if (made := shard_of(own)) is not None:
                assert (made.tp, made.rank) == (TP, rank)
                divided += own.numel()
    once = [
        p.numel() for path, p in whole.named_parameters() if shard_of(ranks[0].get_parameter(path))
    ]
    assert 0 < divided == sum(once)


def test_gates_and_values_are_divided_alike():
    whole = torch.arange(8)
    assert piece(whole, None) is whole
    assert piece(whole, Shard(0, (1,), 4, 1)).tolist() == [2, 3]
    assert piece(whole, Shard(0, (1, 1), 2, 1)).tolist() == [2, 3, 6, 7]
    assert piece(whole.view(2, 4), Shard(1, (1,), 2, 1)).tolist() == [[2, 3], [6, 7]]


def test_rows_are_shared_out_to_the_last():
    assert [own_rows(10, 4, rank) for rank in range(4)] == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert [own_rows(1, 4, rank) for rank in range(4)] == [(0, 1), (1, 1), (1, 1), (1, 1)]
    assert own_rows(0, 2, 1) == (0, 0)

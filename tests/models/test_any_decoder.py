"""Every decoder family of transformers as pipeline layers: packed, and over a TP group."""

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from disttrain_cli.errors import SpecError
from disttrain_cli.models.architectures import architectures
from disttrain_cli.models.decoder import makers
from disttrain_cli.models.division import piece, shard_of
from disttrain_cli.models.group import Group
from disttrain_cli.models.layer import Batch, Items
from disttrain_cli.models.library_decoder import library_decoder
from disttrain_cli.models.tensor_parallel import join, pieces, shard
from disttrain_cli.spec.runfile.model import ModuleSpec
from tests.cases import first_fast, mostly_slow
from tests.models.any_decoder import (
    FAMILIES,
    LENGTHS,
    REFUSED,
    fields_of,
    library_model,
    reference,
)

TP = 2
#: Families whose test is fast enough for every run: one of each kind.
QUICK = {
    *("llama", "gemma3_text", "gemma4_text", "gpt_oss", "deepseek_v3", "qwen3_moe"),
    *("qwen3_5_text", "glm4v_text", "lfm2"),
}
CLOSE = {"rtol": 1e-4, "atol": 1e-6}


@dataclass(frozen=True)
class Threads(Group):
    """TP group whose ranks are threads."""

    shared: Any = None

    def everyones(self, tensor):
        barrier, given = self.shared
        given[self.rank] = tensor
        barrier.wait()
        made = [given[rank] for rank in range(TP)]
        barrier.wait()
        return made

    def wire(self, tensor):
        return tensor.device

    def all_gather(self, whole, local):
        whole.copy_(torch.cat(self.everyones(local.clone())))

    def reduce_scatter(self, local, partial):
        total = sum(self.everyones(partial.clone()))
        local.copy_(total.chunk(TP)[self.rank])

    def all_reduce(self, tensor, op):
        parts = torch.stack(self.everyones(tensor.clone()))
        tensor.copy_(parts.amax(0) if op == torch.distributed.ReduceOp.MAX else parts.sum(0))


def built(name, seed=0, **more):
    spec = ModuleSpec(kind="llm", architecture=name, config=fields_of(name) | more)
    config, _ = architectures()[name].read("llm", name, spec, {})
    layers = [maker.build(seed) for maker in makers("llm", config, (), (), False, 1.0)]
    draws = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in (p for layer in layers for p in layer.parameters()):
            if parameter.dtype.is_floating_point:
                parameter.add_(torch.randn(parameter.shape, generator=draws) * 0.08)
    return config, layers


def passed(layers, ids, labels):
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    batch = Batch(
        token_ids=ids[None],
        positions=positions[None],
        sample_lengths=list(LENGTHS),
        labels=labels[None],
    )
    state = {}
    for layer in layers:
        state.update(layer(state, batch))
    state["loss/text"].backward()
    return state["loss/text"].detach()


@pytest.mark.parametrize(
    "name",
    mostly_slow(FAMILIES, *QUICK),
)
def test_packed_documents_equal_the_librarys_own_model(name):
    """Loss and all gradients, in one process and over a TP group, one document at a time."""
    config, layers = built(name)
    divides = not any(count % TP for layer in layers for count in pieces(layer))
    shards = [
        [shard(layer, tp=TP, rank=rank) for layer in built(name)[1]] for rank in range(TP * divides)
    ]
    model, head = library_model(config, layers)
    draws = torch.Generator().manual_seed(2)
    ids, labels = torch.randint(3, 99, (2, sum(LENGTHS)), generator=draws)
    expected = reference(model, ids, labels, LENGTHS, head)
    of_model = {path: parameter.grad for path, parameter in model.named_parameters()}

    torch.testing.assert_close(passed(layers, ids, labels), expected, rtol=1e-5, atol=0)
    for layer in layers:
        of_layer = layer.to_published(
            {
                n: torch.zeros_like(p) if p.grad is None else p.grad
                for n, p in layer.named_parameters()
            }
        )
        for path, gradient in of_layer.items():
            path = path if path in of_model else path.removeprefix("model.")
            if of_model.get(path) is not None:
                scale = of_model[path].abs().max()
                # Either gradient of gemma4_text is up to 7e-5 from that in fp64.
                assert (gradient - of_model[path]).abs().max() <= 2e-4 * scale + 1e-7, path

    if not divides:
        return
    shared, losses = (threading.Barrier(TP, timeout=60), {}), {}

    def run(rank):
        for layer in shards[rank]:
            join(layer, Threads(None, TP, rank, shared=shared))
        losses[rank] = passed(shards[rank], ids, labels)

    ranks = [threading.Thread(target=run, args=(rank,)) for rank in range(TP)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    torch.testing.assert_close(losses[0], expected, rtol=1e-5, atol=0)
    for number, layer in enumerate(layers):
        for path, whole in layer.named_parameters():
            own = [ranks_layers[number].get_parameter(path) for ranks_layers in shards]
            if whole.grad is None:
                continue
            scale = 5e-4 * whole.grad.abs().max() + 1e-7
            if shard_of(own[0]) is None:
                total = sum(p.grad if p.grad is not None else 0 for p in own)
                assert (total - whole.grad).abs().max() <= scale, (layer.name, path)
            else:
                for parameter in own:
                    part = piece(whole.grad, shard_of(parameter))
                    assert (parameter.grad - part).abs().max() <= scale, (layer.name, path)


@pytest.mark.parametrize("name", ["gemma4_text", "granite"])
def test_what_precedes_the_layers_runs_without_values(name):
    """Costs are counted on the meta device, where the library cannot look for packed samples."""
    embed = built(name)[1][0].to("meta")
    tokens = torch.zeros(1, 4, dtype=torch.int64, device="meta")
    made = embed({}, Batch(token_ids=tokens, positions=tokens, sample_lengths=[4]))
    assert made["hidden"].is_meta and made["hidden"].shape == (4, 64)


@pytest.mark.parametrize("name", REFUSED)
def test_families_that_cannot_run_exactly_are_refused_with_the_reason(name):
    with pytest.raises(SpecError) as error:
        built(name)
    assert REFUSED[name] in str(error.value)


@pytest.mark.parametrize("name", ["mixtral", "minimax", "minimax_m2"])
def test_random_numbers_in_training_are_refused(name):
    with pytest.raises(SpecError, match="draws random numbers"):
        built(name, router_jitter_noise=0.1)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        *((one, "output_router_logits", True) for one in ("mixtral", "qwen3_moe", "gpt_oss")),
        ("bamba", "z_loss_coefficient", 0.1),
    ],
)
def test_further_losses_of_the_library_are_refused(name, field, value):
    """None is on by default: a coefficient alone (`router_aux_loss_coef`) adds no loss there."""
    with pytest.raises(SpecError, match=field):
        built(name, **{field: value})


def test_vision_tokens_of_an_image_see_each_other():
    """Gemma 3: in all layers, with windows, too; equal to the library's whole model."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    config, layers = built("gemma3_text")
    vision = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 28}
    whole = Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config=config.to_dict() | {"_attn_implementation": None},
            vision_config=vision | {"intermediate_size": 8, "patch_size": 14},
            mm_tokens_per_image=4,
            attn_implementation="eager",
        )
    ).eval()
    weights = {
        path: tensor.detach()
        for layer in layers
        for path, tensor in layer.to_published(dict(layer.named_parameters())).items()
    }
    head = weights.pop("lm_head.weight")
    text = whole.model.language_model
    text.load_state_dict({path.removeprefix("model."): one for path, one in weights.items()})
    ids = torch.randint(3, 99, (20,), generator=torch.Generator().manual_seed(2))
    at = np.array([2, 3, 4, 5, 6, 7, 10, 11, 14, 15, 16, 17, 18])  # 15: the next sample
    lengths = [8, 7, 5]
    kinds = torch.zeros(20, dtype=torch.int64)
    kinds[at] = 1
    expected = []
    for part, kind in zip(ids.split(lengths), kinds.split(lengths), strict=True):
        inputs = {"inputs_embeds": text.embed_tokens(part[None]), "token_type_ids": kind[None]}
        made = whole.model(**inputs, attention_mask=torch.ones(1, len(part)), use_cache=False)
        expected.append(made.last_hidden_state[0] @ head.T)
    batch = Batch(
        {"image": Items([], at=at)},
        token_ids=ids[None],
        positions=torch.cat([torch.arange(length) for length in lengths])[None],
        sample_lengths=lengths,
    )
    state = {}
    for layer in layers[:-1]:
        state.update(layer(state, batch))
    torch.testing.assert_close(
        layers[-1].logits(state["hidden"]), torch.cat(expected), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    "name", first_fast(["apertus", "deepseek_v3", "gemma2", "gpt_oss", "qwen3_5_text"], 2)
)
def test_all_weights_have_initial_values(name):
    """Those that a class only sets when it is constructed, too."""
    config, _ = built(name)
    for maker in makers("llm", config, (), (), False, 1.0):
        layer = maker.on_meta().to_empty(device="cpu")
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.fill_(float("nan"))
        library_decoder(config).initialise(layer)
        assert all(parameter.isfinite().all() for parameter in layer.parameters())


def test_the_factor_of_an_embedding_does_not_depend_on_its_padding():
    config, _ = built("gemma3_text", pad_token_id=7)
    assert library_decoder(config).embedding_scale == pytest.approx(config.hidden_size**0.5)

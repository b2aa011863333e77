"""What layers send in a TP group of four, as collectives of a process group tell, against what is
noted on meta."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from disttrain_cli.models.footprint import Message, Noted, footprint
from disttrain_cli.models.graph import build_layers, describe, layer_table
from disttrain_cli.models.parallel import Group
from disttrain_cli.models.probe import probe_batch, state_at
from disttrain_cli.models.tensor_parallel import join
from tests.models.test_generators import PIXART, VAE
from tests.models.test_towers import TOWERS

TP = 4
SIZES = {
    "image": {"image": [(4, 4), (8, 12)] * TP},
    "audio": {"audio": TP},
    "target": {"target": TP},
    "sequence": {"documents": [[20, 20], [41]]},
}
OPERATIONS = {
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
}
MODELS = {
    "vit, whisper, llama, unet": {},
    **{
        name: {"image_encoder": {"kind": "encoder", "architecture": name, **spec}}
        for name, spec in TOWERS.items()
        if name != "vit"
    },
    "pixart": {
        "image_generator": {
            "kind": "generator",
            "architecture": "pixart",
            "config": PIXART,
            "vae": VAE,
            "image_size": 32,
            "context_tokens": 4,
        }
    },
}


class Sent(TorchDispatchMode):
    """Collectives of any process group; of a gather and a scatter the bytes of the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[Message] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func._schema.name.removeprefix("c10d::")
        if name in OPERATIONS:
            tensors = [value for value in tree_leaves(args) if isinstance(value, torch.Tensor)]
            self.messages.append(
                Message(OPERATIONS[name], max(one.numel() * one.element_size() for one in tensors))
            )
        return func(*args, **(kwargs or {}))


@pytest.fixture
def group() -> Iterator[Group]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=TP)
    yield Group(dist.group.WORLD, TP, 0)
    dist.destroy_process_group()


@pytest.mark.parametrize("name", MODELS)
def test_messages_are_those_of_a_process_group(make_run, group, name):  # type: ignore[no-untyped-def]
    run = make_run(llm={"config": {"vocab_size": 264, "num_key_value_heads": 4}}, audio_encoder={})
    plain = run.file.model_dump(mode="json", exclude_none=True)
    if MODELS[name]:
        plain["model"]["modules"] = {"llm": plain["model"]["modules"]["llm"], **MODELS[name]}
    run = type(run)(path=run.path, file=type(run.file).model_validate(plain))
    table, inputs = layer_table(run), describe(run)
    seen = 0
    for place, info in {
        (info.module, info.kind): (place, info) for place, info in enumerate(table)
    }.values():
        for trained, recompute in ((True, False), (False, False), (True, True)):
            layers = [
                build_layers(run, place, place + 1, device, tp=TP)[0] for device in ("cpu", "meta")
            ]
            size = SIZES[inputs.item(info.module)]
            batches = [probe_batch(inputs, device=device, **size) for device in ("cpu", "meta")]
            states = [
                {
                    key: value
                    for key, value in state_at(table, place, inputs, batch, device, tp=TP).items()
                    if key in info.reads
                }
                for device, batch in zip(("cpu", "meta"), batches, strict=True)
            ]
            for layer, own in zip(layers, (group, Noted(None, TP, 0)), strict=True):
                layer.requires_grad_(trained and not info.frozen)
                join(layer, own)
            noted = footprint(layers[1], states[1], batches[1], recompute)
            with Sent() as sent:
                made = (
                    checkpoint(layers[0], states[0], batches[0], use_reentrant=False)
                    if recompute
                    else layers[0](states[0], batches[0])
                )
                forward = list(sent.messages)
                roots = [tensor for tensor in made.values() if tensor.requires_grad]
                torch.autograd.backward(roots, [torch.ones_like(tensor) for tensor in roots])
            assert (noted.forward, noted.backward) == (forward, sent.messages[len(forward) :]), (
                info.name,
                recompute,
            )
            seen += len(sent.messages)
            # it gathers rows again
            if info.kind == "block" and layers[0].by_rows and trained and not recompute:
                assert [m.operation for m in noted.forward] == ["all_gather", "reduce_scatter"] * 2
                assert (
                    sorted(m.operation for m in noted.backward)
                    == ["all_gather"] * 4 + ["reduce_scatter"] * 2
                )
    assert seen > 20

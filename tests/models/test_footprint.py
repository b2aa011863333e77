"""What layers send in a TP group of four, as collectives of a process group tell, against what is
noted on meta."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from disttrain_cli.models.footprint import Message, Noted, footprint
from disttrain_cli.models.graph import build_layers, describe, layer_table
from disttrain_cli.models.group import Group
from disttrain_cli.models.layer import Batch, Shared
from disttrain_cli.models.probe import probe_batch, probe_work, state_at
from disttrain_cli.models.tensor_parallel import join
from disttrain_cli.models.weight_parts import WeightPart, deferred, split
from disttrain_cli.profiling.rows import gathered_bytes
from tests.cases import mostly_slow
from tests.models.test_generators import GENERATORS, PIXART, VAE
from tests.models.test_qwen_models import qwen_run
from tests.models.test_towers import TOWERS

TP = 4
CP = 2
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
    "send": "pass",
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
    **{
        name: {
            "image_generator": {
                "kind": "generator",
                **GENERATORS[name],
                "image_size": 16,
                "context_tokens": 4,
            }
        }
        for name in ("sd3.5", "flux", "lumina2, pixels")
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


def first_of(batch: Batch) -> Batch:
    """What the first rank of a CP group has of a batch, on meta."""
    assert batch.token_ids is not None and batch.positions is not None
    own = batch.token_ids.numel() // CP
    images = batch.of("image")
    assert images.rows is not None
    here = (images.rows < own).numpy()
    shared = Shared(np.flatnonzero(here), len(here))
    return replace(
        batch,
        items={"image": replace(images, rows=images.rows[here].to("meta"), shared=shared)},
        token_ids=batch.token_ids.flatten()[None, :own].to("meta"),
        positions=batch.positions.flatten(-2)[..., None, :own].to("meta"),
    )


@pytest.fixture
def group() -> Iterator[Group]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=TP)
    yield Group(dist.group.WORLD, TP, 0)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_what_waits_for_weights_is_what_their_parts_hold(make_run, name):  # type: ignore[no-untyped-def]
    run = _run(make_run, name)
    table, inputs = layer_table(run), describe(run)
    places = {(info.module, info.kind): place for place, info in enumerate(table)}
    waiting = 0
    for place in places.values():
        noted, held = 0, 0
        for device in ("meta", "cpu"):
            layer = build_layers(run, place, place + 1, device)[0]
            layer.requires_grad_(not table[place].frozen)
            split(layer)
            batch = probe_batch(inputs, device=device, **SIZES[inputs.item(table[place].module)])
            state = state_at(table, place, inputs, batch, device)
            state = {key: value for key, value in state.items() if key in table[place].reads}
            if device == "meta":
                noted = footprint(layer, state, batch, deferring=True).deferred_bytes
                continue
            made, parts = layer(state, batch), list[WeightPart]()
            roots = [tensor for tensor in made.values() if tensor.requires_grad]
            if roots:
                with deferred(parts):
                    torch.autograd.backward(roots, [torch.ones_like(tensor) for tensor in roots])
            known = [*layer.parameters(), *layer.buffers(), *batch.tensors()]
            held = _storage_bytes([gradient for _, gradient in parts], known)
        assert held <= noted <= 1.06 * held + 640, table[place].name  # positions beside
        waiting += held > 0
    assert waiting > 3


def _storage_bytes(gradients: list[Any], known: list[torch.Tensor]) -> int:
    """Bytes of the storages that functions hold, without known ones."""
    cells = [cell.cell_contents for one in gradients for cell in one.__closure__]
    # of a convolution, one function inside another
    cells += [c.cell_contents for cell in cells if callable(cell) for c in cell.__closure__ or ()]
    storages = {
        cell.untyped_storage()._cdata: cell.untyped_storage().nbytes()
        for cell in cells
        if isinstance(cell, torch.Tensor)
    }
    mine = {tensor.untyped_storage()._cdata for tensor in known}
    return sum(size for address, size in storages.items() if address not in mine)


def _run(make_run, name):  # type: ignore[no-untyped-def]
    run = make_run(llm={"config": {"vocab_size": 264, "num_key_value_heads": 4}}, audio_encoder={})
    plain = run.file.model_dump(mode="json", exclude_none=True)
    if MODELS[name]:
        plain["model"]["modules"] = {"llm": plain["model"]["modules"]["llm"], **MODELS[name]}
    return type(run)(path=run.path, file=type(run.file).model_validate(plain))


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", mostly_slow(MODELS, next(iter(MODELS))))
def test_messages_are_those_of_a_process_group(make_run, group, name, overlap):  # type: ignore[no-untyped-def]
    run = _run(make_run, name)
    table, inputs = layer_table(run), describe(run)
    seen, groups = 0, (replace(group, overlap=overlap), Noted(None, TP, 0, overlap))
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
            for layer, own in zip(layers, groups, strict=True):
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
            if not (info.kind == "block" and layers[0].by_rows and trained and not recompute):
                continue
            # it gathers rows again
            if overlap:
                passes = ["pass"] * (TP - 1)
                assert [m.operation for m in noted.forward] == passes * 4
                assert [m.operation for m in noted.backward] == [*passes, "all_gather", *passes] * 2
            else:
                assert [m.operation for m in noted.forward] == ["all_gather", "reduce_scatter"] * 2
                assert (
                    sorted(m.operation for m in noted.backward)
                    == ["all_gather"] * 4 + ["reduce_scatter"] * 2
                )
    assert seen > 20


@pytest.mark.slow
def test_a_cp_group_gathers_keys_and_values_as_priced(make_run):  # type: ignore[no-untyped-def]
    """One message forward, one with their gradients, of all rows; another where it recomputes."""
    run = qwen_run(make_run, "qwen3_vl")
    table, inputs = layer_table(run), describe(run)
    sizes: dict[str, Any] = {"documents": [[30, 34], [64]], "image": [(4, 8), (8, 8), (4, 8)]}
    seen = set()
    for place, info in enumerate(table):
        layer = build_layers(run, place, place + 1, "meta")[0]
        if layer.exchanged is None:
            continue
        batch = probe_batch(inputs, **sizes)
        layer.cp = Noted(size=CP, rank=0, gathers=True)
        footprint(layer, state_at(table, place, inputs, batch, "meta", tp=CP), first_of(batch))
        _, heads, width = layer.exchanged
        rows = 128 if info.module == "llm" else 32 + 64 + 32
        whole = rows * 2 * heads * width * 4
        sent = [one for one in layer.cp.sent if one.bytes == whole]
        assert {one.operation for one in sent} == {"all_gather", "reduce_scatter"}
        seen.add(info.module)
    assert seen == {"eye", "llm"}


def test_a_cp_group_gathers_what_the_profile_says(make_run):  # type: ignore[no-untyped-def]
    run = qwen_run(make_run, "qwen3_vl")
    table, inputs = layer_table(run), describe(run)
    sizes: dict[str, Any] = {"documents": [[30, 34], [64]], "image": [(4, 8), (8, 8), (4, 8)]}
    batch = probe_batch(inputs, **sizes)
    works = {module: probe_work(inputs, module, **sizes) for module in ("eye", "llm")}
    found = []
    for place, info in enumerate(table):
        if info.module == "llm" and info.kind != "head":
            layer = build_layers(run, place, place + 1, "meta")[0]
            layer.cp = Noted(size=CP, rank=0)
            state = state_at(table, place, inputs, batch, "meta", tp=CP)
            footprint(layer, state, first_of(batch))
            said = gathered_bytes(info, table, inputs, works, 4)(works["llm"])
            expected = [Message("all_gather", said), Message("reduce_scatter", said)]
            assert layer.cp.sent[-2:] == (expected if said else [])
            found.append((info.kind, said > 0))
    deep = [("block.deepstack", True)] * 2
    assert found == [("embed", True), *deep, *[("block", False)] * 2]

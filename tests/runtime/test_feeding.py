"""Arrays become the same tensors with and without page-locked memory, and slots are taken in order,
one ahead."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from disttrain_cli.data.slots import ItemArrays, SlotBatch, flat_arrays
from disttrain_cli.models.division import Place
from disttrain_cli.models.layer import Batch
from disttrain_cli.runtime import feeding
from disttrain_cli.spec.heads import ImageInput, TargetInput
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.places import Places

CPU = torch.device("cpu")
EYES = [
    ImageInput(
        module=f"eye {n}",
        patch_px=8,
        max_pixels=4096,
        mean=(0.48 + n / 9, 0.45, 0.40),
        std=(0.26, 0.27 + n / 9, 0.28),
    )
    for n in range(2)
]
PAINTERS = [
    TargetInput(module=f"painter {n}", size_px=8 * n + 8, context_tokens=4, latent_pixels=256)
    for n in range(2)
]
INPUTS = ModelInputs(
    llm="llm",
    vocabulary=261,
    sequence_length=128,
    heads=[*EYES, *PAINTERS],
)
SLOT = SimpleNamespace(inputs=INPUTS)
ORDERS: list[Any] = [
    SimpleNamespace(step=step, slots=[SLOT] * 3, label_tokens=7, targets=2) for step in range(2)
]


def drawn(number: int, *shape: int) -> Any:
    """[N, C, H, W] bytes."""
    count, *sides = shape
    return np.random.default_rng(number).integers(0, 256, (count, 3, *sides), dtype=np.uint8)


def arrays(number: int) -> SlotBatch:
    """Every field; the numbers differ from slot to slot."""
    grid = np.array([[1, 2], [1, 2], [2, 2]])
    pixels = [drawn(number, 2, 8, 16), drawn(number + 1, 1, 16, 16)]
    rows = np.arange(6).reshape(1, 6) + number
    images = {0: pixels, 1: [drawn(number + 2, 2, 8, 16), drawn(number + 3, 1, 16, 16)]}
    targets = {0: [drawn(number + 4, 1, 8, 8)], 1: [drawn(number + 5, 1, 16, 16)]}
    return SlotBatch(
        items={
            "image": ItemArrays(grid, images, rows[0], seeds=rows[0] + 4),
            "target": ItemArrays(
                np.ones((1, 2), np.int64),
                targets,
                rows[0, :2],
                np.ones(1, np.float32),
                np.array([number]),
            ),
        },
        token_ids=rows,
        positions=rows + 1,
        documents=rows + 2,
        labels=rows + 3,
    )


class Loader:
    """Remembers which slots were asked for; the one after the last step cannot be had."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def fetch(self, step: int, slot: int) -> SlotBatch:
        self.asked.append((step, slot))
        if step == len(ORDERS):
            raise ValueError("no such step")
        return arrays(3 * step + slot)

    def prefetch(self, step: int, slot: int) -> None:
        pass


def same(left: Batch, right: Batch) -> bool:
    """Whether two batches have the same grids and tensors of the same types and values."""
    return {item: own.grids for item, own in left.items.items()} == {
        item: own.grids for item, own in right.items.items()
    } and all(
        one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
        for one, other in zip(left.tensors(), right.tensors(), strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_cpu_nothing_is_copied_but_pixels(dtype: torch.dtype) -> None:
    slot = arrays(1)
    batch = feeding.to_batch(slot, ORDERS[0], CPU, dtype)
    assert batch.token_ids is not None and slot.token_ids is not None
    assert batch.token_ids.data_ptr() == slot.token_ids.ctypes.data
    rows, had = batch.of("image").rows, slot.items["image"].rows
    assert rows is not None and had is not None and rows.data_ptr() == had.ctypes.data
    pixels = [
        one for own in batch.items.values() for blocks in own.values.values() for one in blocks
    ]
    assert len(pixels) == 6 and all(one.dtype == dtype for one in pixels)
    assert (batch.label_tokens, batch.targets) == (7.0, 2.0)


def test_bytes_are_normalised_as_each_head_asks_to_the_last_bit() -> None:
    """As NumPy does it from mean and std: one product and one difference in single precision."""
    slot = arrays(3)
    batch = feeding.to_batch(slot, ORDERS[0], CPU, torch.float32)

    def want(planes: Any, means: Any, stds: Any) -> Any:
        std = np.array(stds)
        scale, shift = (
            (1 / (255 * std)).astype(np.float32),
            (np.array(means) / std).astype(np.float32),
        )
        out = np.empty(planes.shape, np.float32)
        np.multiply(planes, scale.reshape(-1, 1, 1), out=out)
        out -= shift.reshape(-1, 1, 1)
        return out

    halves = ((0.5,) * 3,) * 2
    asked = {
        "image": [(eye.mean, eye.std) for eye in EYES],
        "target": [halves] * len(PAINTERS),
    }
    pairs = [
        (got, want(had, *affine))
        for item, affines in asked.items()
        for number, affine in enumerate(affines)
        for got, had in zip(
            batch.of(item).values[number], slot.items[item].values[number], strict=True
        )
    ]
    assert len(pairs) == 6
    assert all(got.numpy().tobytes() == expected.tobytes() for got, expected in pairs)


def test_what_a_worker_sent_is_read_only_and_no_cause_to_warn(
    recwarn: pytest.WarningsRecorder,
) -> None:
    rows = np.arange(4)
    rows.flags.writeable = False
    assert feeding.as_tensor(rows).data_ptr() == rows.ctypes.data
    assert not recwarn.list


def test_slots_are_taken_one_ahead_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, with ordinary memory in the place of page-locked."""

    def copied(array: Any, dtype: torch.dtype | None) -> torch.Tensor:
        return torch.as_tensor(array).to(dtype, copy=True)

    monkeypatch.setattr(feeding, "page_locked", copied)
    loader, device = Loader(), CPU
    ahead = feeding.PinnedAhead(loader, device, torch.bfloat16)
    for order in ORDERS:
        for slot in range(3):
            taken = ahead.fetch(order, slot)
            want = feeding.to_batch(arrays(3 * order.step + slot), order, device, torch.bfloat16)
            assert same(feeding.to_batch(taken, order, device, torch.bfloat16), want)
    with pytest.raises(ValueError, match="no such step"):
        ahead.fetch(SimpleNamespace(step=2, slots=[SLOT]), 0)  # type: ignore[arg-type]
    assert loader.asked[:7] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_through_page_locked_memory_to_a_gpu(dtype: torch.dtype) -> None:
    """Equal to the CPU's tensors although the page-locked ones are dropped before the copies are
    waited for."""
    device, loader = torch.device("cuda", 0), Loader()
    one = feeding.pinned(arrays(1), dtype)
    copies = [
        copy
        for name, value in flat_arrays(one).items()
        if name.rpartition("/")[2] not in feeding.KEPT
        for copy in (value if isinstance(value, list) else [value])
    ]
    assert len(copies) == 11 and all(copy.is_pinned() for copy in copies)
    fetch_of = feeding.fetcher(loader, device, dtype)
    batches = [fetch_of(order)(slot) for order in ORDERS for slot in range(3)]
    for number, batch in enumerate(batches):
        on_host = batch.of("target").noise_seeds
        on_device = [tensor for tensor in batch.tensors() if tensor is not on_host]
        assert all(tensor.device == device for tensor in on_device)
        assert same(batch, feeding.to_batch(arrays(number), ORDERS[number // 3], CPU, dtype))


def test_places_are_those_among_a_ranks_own_tokens():
    at = np.array([[4, 9], [-1, -1], [8, -1], [9, 8]])
    shares = np.array([[0.5, 0.25], [0, 0], [1, 0], [0.75, 1]], np.float32)
    own = feeding.in_tokens(Places(at, shares), CPU, [(8, 12)])
    assert own["rows"].tolist() == [1, 0, 1, 0]
    assert own["shares"].tolist() == [0.25, 1, 0.75, 1]
    assert own["shared"].numbers.tolist() == [0, 2, 3, 3] and own["shared"].tokens == 4
    runs = feeding.in_tokens(Places(at, shares), CPU, [(2, 5), (9, 10)])
    assert runs["rows"].tolist() == [2, 3, 3] and runs["shared"].numbers.tolist() == [0, 0, 3]
    whole = feeding.in_tokens(Places(at[2:3], shares[2:3]), CPU)
    assert whole["rows"].tolist() == [8] and "shares" not in whole
    assert whole["shared"].numbers.tolist() == [0]
    assert feeding.in_tokens(Places(at[:, 0]), CPU).keys() == {"rows", "at"}


def test_levelled_tokens_come_with_positions_labels_and_places():
    slot = arrays(1)
    length = 32
    documents = np.repeat([0, 1], [24, 8]).reshape(1, length)
    rows = np.arange(length).reshape(1, length)
    slot = replace(slot, token_ids=rows, positions=rows + 1, documents=documents, labels=rows + 2)
    found = [
        feeding.to_batch(
            slot, ORDERS[0], CPU, torch.float32, Place(cp=2, cp_rank=rank, gathers=True)
        )
        for rank in range(2)
    ]
    own = [batch.token_ids.flatten().tolist() for batch in found]
    assert sorted(own[0] + own[1]) == list(range(length)) and len(own[0]) == 16
    assert own[0] != list(range(16)), "contiguous halves are not level"
    placed = slot.items["image"].rows
    for batch, tokens in zip(found, own, strict=True):
        assert (batch.positions - 1).flatten().tolist() == tokens
        assert (batch.labels - 2).flatten().tolist() == tokens
        images = batch.of("image")
        assert [tokens[row] for row in images.rows.tolist()] == placed[
            images.shared.numbers
        ].tolist()
    assert sum(len(batch.of("image").rows) for batch in found) == len(placed)

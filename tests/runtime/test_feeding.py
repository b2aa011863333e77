"""Arrays become the same tensors with and without page-locked memory, and slots are taken in order,
one ahead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from disttrain_cli.data.slots import SlotBatch
from disttrain_cli.runtime import feeding
from disttrain_cli.spec.inputs import ImageInput, ModelInputs, TargetInput

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
    image=EYES[0],
    other_images=EYES[1:],
    target=PAINTERS[0],
    other_targets=PAINTERS[1:],
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
    return SlotBatch(
        image_grids=grid,
        pixels=pixels,
        token_ids=rows,
        positions=rows + 1,
        documents=rows + 2,
        image_rows=rows[0],
        context_rows=rows[0, :2],
        labels=rows + 3,
        other_pixels=[drawn(number + 2, 2, 8, 16), drawn(number + 3, 1, 16, 16)],
        target_pixels=drawn(number + 4, 1, 8, 8),
        other_targets=[drawn(number + 5, 1, 16, 16)],
        target_weights=np.ones(1, np.float32),
        noise_seeds=np.array([number]),
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


def tensors(batch: Any) -> Iterator[torch.Tensor]:
    for value in vars(batch).values():
        yield from (
            one
            for one in (value if isinstance(value, list) else [value])
            if isinstance(one, torch.Tensor)
        )


def same(left: Any, right: Any) -> bool:
    return left.image_grids == right.image_grids and all(
        one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
        for one, other in zip(tensors(left), tensors(right), strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_cpu_nothing_is_copied_but_pixels(dtype: torch.dtype) -> None:
    slot = arrays(1)
    batch = feeding.to_batch(slot, ORDERS[0], CPU, dtype)
    assert batch.token_ids is not None and batch.pixels is not None and slot.pixels is not None
    assert batch.token_ids.data_ptr() == slot.token_ids.ctypes.data  # type: ignore[union-attr]
    assert batch.pixels[0].dtype == dtype
    assert all(
        one.dtype == dtype
        for one in (*batch.pixels, *(batch.other_pixels or []), batch.target_pixels)
    )
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
    pairs = [
        *(
            (got, want(had, EYES[0].mean, EYES[0].std))
            for got, had in zip(batch.pixels, slot.pixels, strict=True)
        ),
        *(
            (got, want(had, EYES[1].mean, EYES[1].std))
            for got, had in zip(batch.other_pixels, slot.other_pixels, strict=True)
        ),
        (batch.target_pixels, want(slot.target_pixels, *halves)),
        (batch.other_targets[0], want(slot.other_targets[0], *halves)),
    ]
    assert all(got.numpy().tobytes() == expected.tobytes() for got, expected in pairs)


def test_pixels_of_a_head_that_is_not_asked_for_stay_empty() -> None:
    nothing = np.zeros((0, 1, 1, 1), np.uint8)
    slot = replace(arrays(1), other_pixels=[nothing, nothing], other_targets=[nothing])
    batch = feeding.to_batch(slot, ORDERS[0], CPU, torch.bfloat16)
    assert [one.shape for one in (*batch.other_pixels, *batch.other_targets)] == [(0, 1, 1, 1)] * 3


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
    assert all(tensor.is_pinned() for tensor in tensors(one)) and len(list(tensors(one))) == 13
    fetch_of = feeding.fetcher(loader, device, dtype)
    batches = [fetch_of(order)(slot) for order in ORDERS for slot in range(3)]
    for number, batch in enumerate(batches):
        on_device = [tensor for tensor in tensors(batch) if tensor is not batch.noise_seeds]
        assert all(tensor.device == device for tensor in on_device)
        assert same(batch, feeding.to_batch(arrays(number), ORDERS[number // 3], CPU, dtype))

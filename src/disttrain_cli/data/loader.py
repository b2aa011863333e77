"""What a training rank pulls its data through: the order of a step, and the prepared inputs of a slot.

One thread computes orders ahead; `preprocess.workers` threads decode and tokenize the next
`preprocess.prefetch_slots` slots. Every item is written to its own place, so the bytes do not depend on the threads.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from disttrain_cli.data.arrays import mix, ranges
from disttrain_cli.data.decoding import decode_image, decode_target
from disttrain_cli.data.index_checks import shard_label
from disttrain_cli.data.orders import Orders
from disttrain_cli.data.reading import ShardReader
from disttrain_cli.data.sequences import SequencePlan
from disttrain_cli.data.sizes import Sizes, sizes_of
from disttrain_cli.data.slots import Ints, Slot, SlotBatch, StepOrder
from disttrain_cli.data.sources import Skipped
from disttrain_cli.data.tokenizer import read_tokenizer
from disttrain_cli.errors import DataError
from disttrain_cli.spec.index import IMAGE, TARGET, TEXT
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.runfile import Run


class _Broken(NamedTuple):
    segment: int
    what: Skipped


@dataclass
class _Pending:
    """A slot in preparation: the arrays that the tasks write into."""

    fields: dict[str, Any]
    tasks: list[Future[_Broken | None]] = field(default_factory=list)


class Loader:
    """Inputs of one replica of one unit, slot by slot; use as a context manager.

    `fields` are keys of `models.layer.FIELDS`: pixels, tokens, layout, context, labels, targets. An image to read
    that cannot be decoded becomes a blank one, an image to generate gets weight 0; both are named in `skipped`, once
    each.
    """

    def __init__(
        self,
        run: Run,
        orders: Orders,
        *,
        unit: str,
        replica: int,
        fields: frozenset[str] | set[str],
        first_step: int = 0,
    ) -> None:
        self.skipped: list[Skipped] = []
        self._opened, self._run, self._layout, self._index = run, run.file, orders.layout, orders.index
        self._inputs: ModelInputs = orders.index.inputs
        self._unit, self._replica, self._fields = unit, replica, frozenset(fields)
        self._tokenizer = read_tokenizer(run)
        self._reader = ShardReader(self._index, self._tokenizer)
        self._orders = orders  # touched by the planner thread only
        self._pending: dict[int, Future[_Pending]] = {}
        self._broken: set[int] = set()
        self._bad_limit = run.file.data.max_bad_fraction * int((self._index.kinds != TEXT).sum())
        self._planner = ThreadPoolExecutor(1, "order")
        self._workers = ThreadPoolExecutor(run.file.preprocess.workers, "decode")
        self._ahead(first_step * self._layout.microbatches)

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._planner.shutdown(wait=True, cancel_futures=True)
        self._workers.shutdown(wait=True, cancel_futures=True)

    def order(self, step: int) -> StepOrder:
        """What every replica of every unit does in a step; the next step's order is begun in the background."""
        wanted = self._planner.submit(self._orders.of, step)
        self._planner.submit(self._orders.of, step + 1)
        return wanted.result()[0]

    def sizes(self, step: int) -> Sizes:
        """Sizes of the sequences of a step's global batch, in the order of the data."""
        return self._planner.submit(lambda: sizes_of(self._orders.of(step)[1])).result()

    def fetch(self, step: int, slot: int) -> SlotBatch:
        """Inputs of this replica for one slot.

        Raises:
            DataError: a shard is gone or changed, or more images are broken than `data.max_bad_fraction` allows.
        """
        at = step * self._layout.microbatches + slot
        self._ahead(at)
        pending = self._pending.pop(at).result()
        self._note([broken for task in pending.tasks if (broken := task.result()) is not None])
        return SlotBatch(**pending.fields)

    def _ahead(self, at: int) -> None:
        """Have slots `at` .. `at` + prefetch in preparation, and forget earlier ones."""
        self._pending = {number: kept for number, kept in self._pending.items() if number >= at}
        for number in range(at, at + 1 + self._run.preprocess.prefetch_slots):
            if number not in self._pending:
                self._pending[number] = self._planner.submit(self._start, number)

    def _note(self, broken: list[_Broken]) -> None:
        for segment, what in broken:
            if segment not in self._broken:
                self._broken.add(segment)
                self.skipped.append(what)
        if len(self._broken) > self._bad_limit:
            named = "\n".join(f"  {s.shard}/{s.key}: {s.reason}" for s in self.skipped[:8])
            raise DataError(
                f"{len(self._broken)} images cannot be decoded, more than data.max_bad_fraction = "
                f"{self._run.data.max_bad_fraction} allows",
                named,
                "Repair the shards, or raise data.max_bad_fraction.",
            )

    def _start(self, number: int) -> _Pending:
        """Allocate a slot's arrays and hand out the work of filling them."""
        step, place = divmod(number, self._layout.microbatches)
        order, batch = self._orders.of(step)
        slot = order.slots[place]
        own = slot.replicas[self._unit][self._replica]
        pending = _Pending({"image_grids": slot.image_grid[own.images]})
        chosen = slot.sequences - batch.ids[0]
        if "pixels" in self._fields:
            self._start_pixels(pending, slot, own.images, _members(batch.image_segment, batch.image_start, chosen))
        if "targets" in self._fields:
            segments = _members(batch.target_segment, batch.target_start, chosen)[own.targets]
            self._start_targets(pending, segments, step)
        if self._fields & {"tokens", "layout", "context", "labels"}:
            plans = [SequencePlan(batch, int(chosen[sequence])) for sequence in own.sequences]
            self._start_sequences(pending, plans, own.images, own.targets)
        return pending

    def _start_pixels(self, pending: _Pending, slot: Slot, images: Ints, segments: Ints) -> None:
        spec = self._inputs.image
        assert spec is not None
        arrays: list[Any] = []
        grids = [tuple(grid) for grid in slot.image_grid.tolist()]
        first = 0
        while first < len(images):
            rows, columns = grid = grids[images[first]]
            last = first
            while last < len(images) and grids[images[last]] == grid:
                last += 1
            block = np.zeros((last - first, spec.channels, rows * spec.patch_px, columns * spec.patch_px), np.float32)
            for out, image in zip(block, images[first:last], strict=True):
                self._decode(pending, int(segments[image]), out, partial(decode_image, grid=grid, image=spec))
            arrays.append(block)
            first = last
        pending.fields["pixels"] = arrays

    def _start_targets(self, pending: _Pending, segments: Ints, step: int) -> None:
        spec = self._inputs.target
        assert spec is not None
        pixels = np.zeros((len(segments), spec.channels, spec.size_px, spec.size_px), np.float32)
        weights = np.ones(len(segments), np.float32)
        decode = partial(decode_target, target=spec)
        for place, segment in enumerate(segments.tolist()):
            self._decode(pending, segment, pixels[place], decode, weights[place : place + 1])
        sample = self._sample_of(segments)
        seeds = mix(self._run.train.seed, step, sample, segments - self._index.segment_start[sample]) >> np.uint64(1)
        pending.fields.update(
            target_pixels=pixels, target_weights=weights, noise_seeds=seeds.astype(np.int64)[: len(segments)]
        )

    def _start_sequences(self, pending: _Pending, plans: list[SequencePlan], images: Ints, targets: Ints) -> None:
        length, fields = self._inputs.sequence_length, pending.fields
        if "layout" in self._fields:
            layouts = [plan.layout() for plan in plans]
            fields["positions"], fields["documents"] = (np.stack(part) for part in zip(*layouts, strict=True))
        if "tokens" in self._fields:
            fields["image_rows"] = _in_order(plans, IMAGE, images, length)
        if "context" in self._fields:
            fields["context_rows"] = _in_order(plans, TARGET, targets, length)
        if self._fields & {"tokens", "labels"}:
            ids, labels = np.zeros((2, len(plans), length), dtype=np.int64)
            for place, plan in enumerate(plans):
                pending.tasks.append(self._workers.submit(self._tokenize, plan, ids[place], labels[place]))
            if "tokens" in self._fields:
                fields["token_ids"] = ids
            if "labels" in self._fields:
                fields["labels"] = labels

    def _tokenize(self, plan: SequencePlan, ids: Ints, labels: Ints) -> None:
        ids[:], labels[:] = plan.token_ids(self._tokenizer, self._reader.texts)

    def _decode(
        self, pending: _Pending, segment: int, out: Any, decode: Callable[[bytes], Any], weight: Any = None
    ) -> None:
        """Queue one image; where it cannot be decoded, `out` stays blank and `weight` becomes 0."""
        sample = int(self._sample_of(segment))

        def task() -> _Broken | None:
            try:
                out[:] = decode(self._reader.image(sample, segment))
            except ValueError as error:
                if weight is not None:
                    weight[:] = 0
                place = segment - int(self._index.segment_start[sample])
                shard = shard_label(self._opened, self._index.shards[int(self._index.shard[sample])])
                return _Broken(segment, Skipped(shard, self._index.keys[sample], f"segments[{place}]: {error}"))
            return None

        pending.tasks.append(self._workers.submit(task))

    def _sample_of(self, segment: Any) -> Any:
        """Row of the sample that a segment belongs to."""
        return np.searchsorted(self._index.segment_start, segment, side="right") - 1


def _members(values: Ints, start: Ints, chosen: Ints) -> Ints:
    """Values of the chosen sequences, in canonical order."""
    return values[ranges(start[chosen], np.diff(start)[chosen])]


def _in_order(plans: list[SequencePlan], kind: int, items: Ints, length: int) -> Ints:
    """Places in M·L of the tokens of `items`, in their order; they are all the items of these sequences."""
    rows = [place + number * length for number, plan in enumerate(plans) for place in plan.rows(kind)]
    assert len(rows) == len(items)
    first = int(items.min()) if len(items) else 0
    return np.concatenate([np.zeros(0, dtype=np.int64), *(rows[int(item) - first] for item in items)])

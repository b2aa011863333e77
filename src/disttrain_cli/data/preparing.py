"""Preparing the inputs of one replica for one slot: a function of the request, wherever and
whenever it is made.

A preparer remembers nothing of earlier requests, so a training rank and any preprocessing worker
give the same bytes. Threads decode and tokenize; every item is written to its own place, so the
bytes do not depend on the threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from disttrain_cli.data.arrays import mix, ranges
from disttrain_cli.data.checking import Broken, broken_in, try_decoding
from disttrain_cli.data.decoding import decode_image, decode_target
from disttrain_cli.data.log_mel import SILENCE, decode_features
from disttrain_cli.data.ordering.shared_orders import SharedOrders
from disttrain_cli.data.reading import ShardReader
from disttrain_cli.data.sequences import NOT_TRAINED, SequencePlan
from disttrain_cli.data.slots import Ints, ReplicaItems, Slot, SlotBatch
from disttrain_cli.data.sources import printable
from disttrain_cli.data.tokenizer import read_tokenizer
from disttrain_cli.spec.index import AUDIO, IMAGE, TARGET
from disttrain_cli.spec.inputs import ImageInput, ModelInputs, number_of
from disttrain_cli.spec.plan import Layout
from disttrain_cli.spec.runfile import Run

#: Fields that are read from the data's files, those of further encoders and generators
#: ("pixels.1") too.
READ = frozenset({"pixels", "audio", "tokens", "labels", "targets", "weights"})

FIELDS = READ | {"layout", "context", "dropout"}


def reads_files(fields: Iterable[str]) -> bool:
    """Whether any of these fields is read from the data's files."""
    return any(field.partition(".")[0] in READ for field in fields)


class Request(NamedTuple):
    """What a replica of a unit needs in a slot; `fields` are keys of `models.layer.FIELDS`."""

    step: int
    slot: int
    unit: str
    replica: int
    fields: frozenset[str]


def check_request(request: Request, layout: Layout, inputs: ModelInputs) -> None:
    """ValueError where a request names what the layout or the model has not."""
    replicas = {unit.name: unit.dp for unit in layout.units}
    if request.unit not in replicas:
        raise ValueError(
            f"the plan has the units {', '.join(replicas)}, not {printable(request.unit)}"
        )
    check_number("slot", request.slot, layout.microbatches)
    check_number("replica", request.replica, replicas[request.unit])
    numbered = (("pixels", len(inputs.images)), ("targets", len(inputs.targets)))
    known = FIELDS | {f"{name}.{number}" for name, count in numbered for number in range(1, count)}
    if unknown := sorted(request.fields - known):
        raise ValueError(f"there is no field {printable(unknown[0])} in this run")


def check_number(what: str, given: int, count: int) -> None:
    """ValueError where there are fewer of something, counted from 0."""
    if not 0 <= given < count:
        raise ValueError(
            f"{what} {printable(str(given), 20)} is out of range: the job has {count}, counted"
            " from 0"
        )


class Prepared(NamedTuple):
    """The answer to a request."""

    batch: SlotBatch
    broken: list[Broken]


@dataclass
class Preparation:
    """A request at work: the arrays that the tasks write into."""

    fields: dict[str, Any]
    tasks: list[Future[list[Broken]]] = field(default_factory=list)

    def done(self, timeout_s: float | None = None) -> bool:
        """Whether everything is written, waiting for it as long."""
        return not wait(self.tasks, timeout_s).not_done

    def cancel(self) -> None:
        """Drop what is not begun yet, and wait for the rest: nothing writes into the arrays
        afterwards."""
        for task in self.tasks:
            task.cancel()
        wait(self.tasks)

    def result(self) -> Prepared:
        """The arrays, once everything is written; raises what a task raised."""
        broken = {found.segment: found for task in self.tasks for found in task.result()}
        return Prepared(SlotBatch(**self.fields), list(broken.values()))


class Preparer:
    """Answers requests with a pool of `preprocess.workers` threads; any thread may ask.

    `orders` says what every replica works on; it stays the caller's.
    """

    def __init__(self, run: Run, orders: SharedOrders) -> None:
        self.orders = orders
        self._run, self._index = run, orders.index
        self._inputs = orders.index.inputs
        self._tokenizer = read_tokenizer(run)
        self._reader = ShardReader(self._index, self._tokenizer)
        self._threads = ThreadPoolExecutor(run.file.preprocess.workers, "decode")
        # [segments] that were decoded, whoever asked
        self._whole = np.zeros(len(self._index.kinds), dtype=bool)

    def close(self) -> None:
        """End the threads; what was begun and not finished fails."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def prepare(self, request: Request) -> Prepared:
        """The answer to a request.

        Raises:
            DataError: a shard is gone or changed.
        """
        return self.begin(request).result()

    def begin(self, request: Request) -> Preparation:
        """Allocate the arrays and hand out the work of filling them."""
        order, batch = self.orders.of(request.step)
        slot = order.slots[request.slot]
        own = slot.replicas[request.unit][request.replica]
        work = Preparation({"image_grids": slot.image_grid[own.images]})
        if self._inputs.audio is not None:
            work.fields["clips"] = np.array(len(own.clips), np.int64)
        chosen = slot.sequences - batch.ids[0]
        if _asked(request.fields, "pixels"):
            self._begin_pixels(
                work,
                slot,
                own.images,
                _members(batch.image_segment, batch.image_start, chosen),
                request,
            )
        if "audio" in request.fields:
            self._begin_clips(
                work, _members(batch.clip_segment, batch.clip_start, chosen)[own.clips]
            )
        if "weights" in request.fields or _asked(request.fields, "targets"):
            segments = _members(batch.target_segment, batch.target_start, chosen)[own.targets]
            self._begin_targets(work, segments, request)
        if "dropout" in request.fields:
            for item, numbers in (
                ("image", own.images),
                ("clip", own.clips),
                ("target", own.targets),
            ):
                segments = _members(
                    getattr(batch, f"{item}_segment"), getattr(batch, f"{item}_start"), chosen
                )
                work.fields[f"{item}_seeds"] = self._seeds(request.step, segments[numbers])
        if request.fields & {"tokens", "layout", "context", "labels"}:
            plans = [SequencePlan(batch, int(chosen[sequence])) for sequence in own.sequences]
            self._begin_sequences(work, plans, own, request.fields)
        return work

    def _begin_pixels(
        self, work: Preparation, slot: Slot, images: Ints, segments: Ints, request: Request
    ) -> None:
        asked, specs = _asked(request.fields, "pixels"), self._inputs.images
        blocks = [
            self._blocks(work, slot, images, segments, spec) if number in asked else None
            for number, spec in enumerate(specs)
        ]
        if blocks[0] is not None:
            work.fields["pixels"] = blocks[0]
        if asked - {0}:
            count = len(next(block for block in blocks if block is not None))
            nothing = [np.zeros((0, 1, 1, 1), np.uint8)] * count
            work.fields["other_pixels"] = [
                array for block in blocks[1:] for array in block or nothing
            ]

    def _blocks(
        self, work: Preparation, slot: Slot, images: Ints, segments: Ints, spec: ImageInput
    ) -> list[Any]:
        """By run of equal grids, the pixels for one encoder."""
        arrays: list[Any] = []
        grids = [tuple(grid) for grid in slot.image_grid.tolist()]
        first = 0
        while first < len(images):
            rows, columns = grid = grids[images[first]]
            last = first
            while last < len(images) and grids[images[last]] == grid:
                last += 1
            block = np.zeros(
                (last - first, spec.channels, rows * spec.patch_px, columns * spec.patch_px),
                np.uint8,
            )
            for out, image in zip(block, images[first:last], strict=True):
                self._decode(
                    work, int(segments[image]), out, partial(decode_image, grid=grid, image=spec)
                )
            arrays.append(block)
            first = last
        return arrays

    def _begin_clips(self, work: Preparation, segments: Ints) -> None:
        spec = self._inputs.audio
        assert spec is not None
        features = np.full((len(segments), spec.mel_bins, spec.frames), SILENCE, np.float32)
        for place, segment in enumerate(segments.tolist()):
            self._decode(work, segment, features[place], partial(decode_features, audio=spec))
        work.fields["audio_features"] = features

    def _begin_targets(self, work: Preparation, segments: Ints, request: Request) -> None:
        """Weights need the decoding too, which says whether there is an image; its pixels are kept
        where wanted."""
        drawn, specs = _asked(request.fields, "targets"), self._inputs.targets
        weights = np.ones(len(segments), np.float32)
        pixels = {
            number: np.zeros(
                (len(segments), specs[number].channels, *[specs[number].size_px] * 2), np.uint8
            )
            for number in drawn or {0}
        }
        for number, block in pixels.items():
            decode = partial(decode_target, target=specs[number])
            for place, segment in enumerate(segments.tolist()):
                self._decode(work, segment, block[place], decode, weights[place : place + 1])
        work.fields.update(target_weights=weights, noise_seeds=self._seeds(request.step, segments))
        if 0 in drawn:
            work.fields["target_pixels"] = pixels[0]
        if drawn - {0}:
            work.fields["other_targets"] = [
                pixels[number] if number in drawn else np.zeros((0, 1, 1, 1), np.uint8)
                for number in range(1, len(specs))
            ]

    def _begin_sequences(
        self,
        work: Preparation,
        plans: list[SequencePlan],
        own: ReplicaItems,
        wanted: frozenset[str],
    ) -> None:
        length, fields = self._inputs.sequence_length, work.fields
        if "layout" in wanted:
            layouts = [plan.layout() for plan in plans]
            fields["positions"], fields["documents"] = (
                np.stack(part) for part in zip(*layouts, strict=True)
            )
        if "tokens" in wanted:
            fields["image_rows"] = _in_order(plans, IMAGE, own.images, length)
            if self._inputs.audio is not None:
                fields["audio_rows"] = _in_order(plans, AUDIO, own.clips, length)
        if "context" in wanted:
            fields["context_rows"] = _in_order(plans, TARGET, own.targets, length)
        if wanted & {"tokens", "labels"}:
            ids, labels = np.zeros((2, len(plans), length), dtype=np.int64)
            for place, plan in enumerate(plans):
                work.tasks.append(
                    self._threads.submit(
                        self._tokenize, plan, ids[place], labels[place], trained="labels" in wanted
                    )
                )
            if "tokens" in wanted:
                fields["token_ids"] = ids
            if "labels" in wanted:
                fields["labels"] = labels

    def _tokenize(self, plan: SequencePlan, ids: Ints, labels: Ints, trained: bool) -> list[Broken]:
        ids[:], labels[:] = plan.token_ids(self._tokenizer, self._reader.texts)
        broken: list[Broken] = []
        if not trained:
            return broken
        for sample, first, count in zip(
            plan.samples.tolist(), plan.sample_at, plan.sample_tokens, strict=True
        ):
            if found := self._broken_in(sample):
                labels[first : first + count] = NOT_TRAINED
                broken += found
        return broken

    def _decode(
        self,
        work: Preparation,
        segment: int,
        out: Any,
        decode: Callable[..., Any],
        weight: Any = None,
    ) -> None:
        """Queue one image or clip; where it cannot be decoded, `out` stays blank. Where anything of
        its sample cannot, `weight` becomes 0."""
        sample = int(self._sample_of(segment))

        def task() -> list[Broken]:
            broken = self._tried(sample, segment, partial(decode, out=out))
            if weight is not None and (broken := broken or self._broken_in(sample)):
                weight[:], out[:] = 0, 0
            return broken

        work.tasks.append(self._threads.submit(task))

    def _broken_in(self, sample: int) -> list[Broken]:
        """What of a sample cannot be decoded; nothing of a shard all of whose samples were
        checked."""
        if self._index.checked[self._index.shard[sample]]:
            return []
        return broken_in(
            self._index,
            sample,
            lambda segment, decode: (
                [] if self._whole[segment] else self._tried(sample, segment, decode)
            ),
        )

    def _tried(self, sample: int, segment: int, decode: Callable[[bytes], Any]) -> list[Broken]:
        broken = try_decoding(self._run, self._index, self._reader, sample, segment, decode)
        self._whole[segment] = not broken
        return broken

    def _seeds(self, step: int, segments: Ints) -> Ints:
        """A number for each segment from (seed, step, sample, place in the sample), not
        negative."""
        sample = self._sample_of(segments)
        seeds = mix(
            self._run.file.train.seed, step, sample, segments - self._index.segment_start[sample]
        )
        return (seeds >> np.uint64(1)).astype(np.int64)[: len(segments)]

    def _sample_of(self, segment: Any) -> Any:
        """Row of the sample that a segment belongs to."""
        return np.searchsorted(self._index.segment_start, segment, side="right") - 1


def _asked(fields: frozenset[str], name: str) -> set[int]:
    """Numbers of the encoders ("pixels") or generators ("targets") whose pixels are asked for."""
    return {number_of(field) for field in fields if field.partition(".")[0] == name}


def _members(values: Ints, start: Ints, chosen: Ints) -> Ints:
    """Values of the chosen sequences, in canonical order."""
    return values[ranges(start[chosen], np.diff(start)[chosen])]


def _in_order(plans: list[SequencePlan], kind: int, items: Ints, length: int) -> Ints:
    """Places in M·L of the tokens of `items`, in their order; they are all the items of these
    sequences."""
    rows = [
        place + number * length for number, plan in enumerate(plans) for place in plan.rows(kind)
    ]
    assert len(rows) == len(items)
    first = int(items.min()) if len(items) else 0
    return np.concatenate(
        [np.zeros(0, dtype=np.int64), *(rows[int(item) - first] for item in items)]
    )

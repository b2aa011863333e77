"""Preparation of the inputs of one replica for one slot: a pure function of the request.

A preparer has no state of earlier requests, so a training rank and any preprocessing worker compute
the same bytes. Threads decode and tokenize; every item is written to a separate array slice, so the
bytes do not depend on the threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from disttrain_cli.data.arrays import mix, ranges
from disttrain_cli.data.checking import Broken, Files, broken_in, try_decoding
from disttrain_cli.data.latents import LatentReader, open_latents
from disttrain_cli.data.modalities.modality import InParts, Packing
from disttrain_cli.data.modalities.registry import MODALITIES
from disttrain_cli.data.packing import Members
from disttrain_cli.data.reading import ShardReader
from disttrain_cli.data.sequences import NOT_TRAINED, SequencePlan
from disttrain_cli.data.slots import Ints, ItemArrays, ReplicaItems, SlotBatch
from disttrain_cli.data.sources import printable
from disttrain_cli.data.tokenizer import read_tokenizer
from disttrain_cli.spec.heads import Head, Item, Numbers, number_of
from disttrain_cli.spec.index import KINDS, TARGET
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.library_images import Packed
from disttrain_cli.spec.places import Places, together
from disttrain_cli.spec.plan import Layout
from disttrain_cli.spec.runfile import Run

if TYPE_CHECKING:
    from disttrain_cli.data.ordering.shared_orders import SharedOrders

#: Fields read from the data's files: inputs of an encoder or generator for an item ("image", of a
#: further one "image.1"), and those of texts.
READ = frozenset({*KINDS, "tokens", "labels", "weights"})

#: Hashed in place of an item's index for the seeds of a whole sample and of padding.
_WHOLE, _PADDING = -1, -1

FIELDS = READ | {"layout", "rows", "context", "dropout"}


def reads_files(fields: Iterable[str]) -> bool:
    """Return True if any of these fields is read from the data's files."""
    return any(field.partition(".")[0] in READ for field in fields)


class Request(NamedTuple):
    """Inputs that a replica of a unit needs in a slot.

    `fields` are names of `FIELDS`; of a further encoder or generator with its number (pixels.1).
    """

    step: int
    slot: int
    unit: str
    replica: int
    fields: frozenset[str]


def check_request(request: Request, layout: Layout, inputs: ModelInputs) -> None:
    """Raise ValueError if a request names anything that the layout or the model does not have."""
    replicas = {unit.name: unit.dp for unit in layout.units}
    if request.unit not in replicas:
        raise ValueError(
            f"the plan has the units {', '.join(replicas)}, not {printable(request.unit)}"
        )
    check_number("slot", request.slot, layout.microbatches)
    check_number("replica", request.replica, replicas[request.unit])
    known = FIELDS | {
        f"{item}.{number}" for item in KINDS for number in range(1, len(inputs.of(item)))
    }
    if unknown := sorted(request.fields - known):
        raise ValueError(f"there is no field {printable(unknown[0])} in this run")


def check_number(what: str, number: int, count: int) -> None:
    """Raise ValueError if a number is not below `count`, from 0."""
    if not 0 <= number < count:
        raise ValueError(
            f"{what} {printable(str(number), 20)} is out of range: the job has {count}, counted"
            " from 0"
        )


class Prepared(NamedTuple):
    """The answer to a request: a batch, and the files that could not be decoded."""

    batch: SlotBatch
    broken: list[Broken]


@dataclass
class Preparation:
    """A request in progress: the arrays that its tasks write to."""

    fields: dict[str, Any]
    items: dict[Item, dict[str, Any]]
    tasks: list[Future[list[Broken]]] = field(default_factory=list)

    def done(self, timeout_s: float | None = None) -> bool:
        """Return True if everything is written, after waiting for at most `timeout_s`."""
        return not wait(self.tasks, timeout_s).not_done

    def cancel(self) -> None:
        """Drop tasks that have not begun and wait for the others: nothing is written afterwards."""
        for task in self.tasks:
            task.cancel()
        wait(self.tasks)

    def result(self) -> Prepared:
        """Return the arrays, once everything is written; raise the error of a task, if any."""
        broken = {one.segment: one for task in self.tasks for one in task.result()}
        items = {item: ItemArrays(**fields) for item, fields in self.items.items()}
        return Prepared(SlotBatch(items, **self.fields), list(broken.values()))


class Preparer:
    """Answers requests with a pool of `preprocess.workers` threads; thread-safe.

    `orders` holds the work of every replica; the caller closes it.
    """

    def __init__(self, run: Run, orders: SharedOrders) -> None:
        self.orders = orders
        self._run, self._index = run, orders.index
        self._inputs = orders.index.inputs
        self._tokenizer = read_tokenizer(run)
        self._reader = ShardReader(self._index, self._tokenizer)
        self._threads = ThreadPoolExecutor(run.file.preprocess.workers, "decode")
        # [segments] True if the file has been decoded, for any request
        self._whole = np.zeros(len(self._index.kinds), dtype=bool)

    @cached_property
    def _latents(self) -> dict[str, LatentReader]:
        return open_latents(self._run, self._index)

    def close(self) -> None:
        """End the threads; unfinished requests fail."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def prepare(self, request: Request) -> Prepared:
        """Prepare the inputs of a request.

        Raises:
            DataError: a shard is gone or changed.
        """
        return self.begin(request).result()

    def begin(self, request: Request) -> Preparation:
        """Allocate the arrays and submit the tasks that fill them."""
        order, batch = self.orders.of(request.step)
        slot = order.slots[request.slot]
        numbers = slot.replicas[request.unit][request.replica]
        chosen = slot.sequences - batch.ids[0]
        work = Preparation({}, {})
        for item, members in batch.items.items():
            segments = _members(members, chosen)[numbers[item]]
            work.items[item] = {"grids": slot.items[item].grid[numbers[item]]}
            self._begin_items(work, item, segments, request)
            if "dropout" in request.fields:
                work.items[item]["seeds"] = self._seeds(request.step, segments)
        if request.fields & {"tokens", "layout", "rows", "context", "labels"}:
            plans = [SequencePlan(batch, int(chosen[number])) for number in numbers["sequence"]]
            if {"layout", "dropout"} <= request.fields:
                work.fields["sample_seeds"] = self._sample_seeds(request.step, plans)
            self._begin_sequences(work, plans, numbers, request.fields)
        return work

    def _begin_items(self, work: Preparation, item: Item, segments: Ints, request: Request) -> None:
        """Submit the preparation of the inputs of encoders or generators.

        Weights of images to generate need the decoding, too, which shows if an image is valid; its
        pixels are kept if requested.
        """
        arrays, heads, weights = work.items[item], self._inputs.of(item), None
        asked = {number_of(name) for name in request.fields if name.partition(".")[0] == item}
        if item == "target" and ("weights" in request.fields or asked):
            weights = arrays["weights"] = np.ones(len(segments), np.float32)
            arrays["noise_seeds"] = self._seeds(request.step, segments)
        packed = {number: heads[number] for number in asked if heads[number].packed}
        values = {
            number: self._packed(work, head, number, segments, arrays)
            for number, head in packed.items()
        } | {
            number: self._blocks(work, heads[number], arrays["grids"], segments, weights)
            for number in (asked or ({0} if weights is not None else set())) - packed.keys()
        }
        arrays["values"] = {number: values[number] for number in sorted(asked)}

    def _blocks(
        self, work: Preparation, head: Head, grids: Ints, segments: Ints, weights: Any
    ) -> list[Any]:
        """Return the inputs of one encoder or generator, an array for each run of equal grids."""
        modality, blocks = MODALITIES[head.item], []
        files = self._latents.get(head.module, self._reader)
        for first, last in runs_of(grids):
            rows, columns = grids[first].tolist()
            blank = modality.blank(head, (rows, columns))
            blocks.append(np.repeat(blank[None], last - first, axis=0))
        outs = [out for block in blocks for out in block]
        if head.cuts:
            self._decode_files(work, head, grids, segments, outs)
            return blocks
        for at, out in enumerate(outs):
            grid = tuple(grids[at].tolist())
            self._decode(
                work,
                int(segments[at]),
                files,
                partial(modality.decode, head=head, grid=grid, out=out),
                out,
                None if weights is None else weights[at : at + 1],
            )
        return blocks

    def _packed(
        self, work: Preparation, head: Head, number: int, segments: Ints, arrays: dict[str, Any]
    ) -> list[Any]:
        """Return the values of packed items, each a block, and add their tables to `arrays`."""
        modality = cast(Packing, MODALITIES[head.item])
        values: list[Any] = [None] * len(segments)
        tables = arrays.setdefault("tables", {}).setdefault(number, [None] * len(segments))

        def put(at: int, packed: Packed) -> None:
            values[at], tables[at] = packed.values[None], packed.table[None]

        for at, segment in enumerate(segments.tolist()):
            numbers = self._index.numbers_of(segment)

            def decode(data: Any, at: int = at) -> None:
                put(at, modality.pack(data, head))

            def blank(at: int = at, numbers: Numbers = numbers) -> None:
                put(at, modality.blank_packed(head, numbers))

            self._decode(work, segment, self._reader, decode, None, blank=blank)
        return values

    def _decode_files(
        self, work: Preparation, head: Head, grids: Ints, segments: Ints, outs: list[Any]
    ) -> None:
        """Decode each file once, for all its parts among these segments."""
        modality, index = cast(InParts, MODALITIES[head.item]), self._index
        assert index.part is not None
        of_files: dict[int, list[int]] = {}
        for at, file in enumerate(index.file[segments].tolist()):
            of_files.setdefault(file, []).append(at)
        for file, places in of_files.items():
            decode = partial(
                modality.decode_parts,
                head=head,
                grid=tuple(grids[places[0]].tolist()),
                parts=int(index.parts[file]),
                outs=[(int(index.part[segments[at]]), outs[at]) for at in places],
            )
            self._decode(work, file, self._reader, decode, None)

    def _begin_sequences(
        self,
        work: Preparation,
        plans: list[SequencePlan],
        numbers: ReplicaItems,
        wanted: frozenset[str],
    ) -> None:
        length, fields = self._inputs.sequence_length, work.fields
        if "layout" in wanted:
            layouts = [plan.layout() for plan in plans]
            fields["positions"], fields["documents"] = (
                np.stack(part, axis=-2) for part in zip(*layouts, strict=True)
            )
        for item, kind in KINDS.items():
            if wanted & ({"context"} if item == "target" else {"tokens", "rows"}):
                placed = _in_order(plans, kind, numbers[item], length)
                work.items[item] |= {"rows": placed.at, "shares": placed.shares}
        if wanted & {"tokens", "labels"}:
            ids, labels = np.zeros((2, len(plans), length), dtype=np.int64)
            for index, plan in enumerate(plans):
                work.tasks.append(
                    self._threads.submit(
                        self._tokenize, plan, ids[index], labels[index], trained="labels" in wanted
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
            if unreadable := self._broken_in(sample):
                labels[first : first + count] = NOT_TRAINED
                broken += unreadable
        return broken

    def _decode(
        self,
        work: Preparation,
        segment: int,
        files: Files,
        decode: Callable[[Any], Any],
        out: Any,
        weight: Any = None,
        blank: Callable[[], None] | None = None,
    ) -> None:
        """Submit one file for decoding; if that fails, `out` stays blank, or `blank` is called.

        If any file of its sample fails, `weight` and `out` become 0.
        """
        sample = int(self._sample_of(segment))

        def task() -> list[Broken]:
            broken = self._tried(sample, segment, files, decode)
            if broken and blank is not None:
                blank()
            if weight is not None and (broken := broken or self._broken_in(sample)):
                weight[:], out[:] = 0, 0
            return broken

        work.tasks.append(self._threads.submit(task))

    def _broken_in(self, sample: int) -> list[Broken]:
        """Return the files of a sample that cannot be decoded; none in a shard that was checked."""
        if self._index.checked[self._index.shard[sample]]:
            return []
        latents = next(iter(self._latents.values()), None)

        def tried(segment: int, decode: Callable[[Any], Any]) -> list[Broken]:
            if self._whole[segment]:
                return []
            if latents is not None and self._index.kinds[segment] == TARGET:
                return self._tried(sample, segment, latents, lambda data: None)
            return self._tried(sample, segment, self._reader, decode)

        return broken_in(self._index, sample, tried)

    def _tried(
        self, sample: int, segment: int, files: Files, decode: Callable[[Any], Any]
    ) -> list[Broken]:
        broken = try_decoding(self._run, self._index, files, sample, segment, decode)
        self._whole[segment] = not broken
        return broken

    def _seeds(self, step: int, segments: Ints) -> Ints:
        """Return a seed for each segment from (seed, step, sample, index in the sample).

        Seeds are not negative.
        """
        sample = self._sample_of(segments)
        seeds = mix(
            self._run.file.train.seed, step, sample, segments - self._index.segment_start[sample]
        )
        return (seeds >> np.uint64(1)).astype(np.int64)[: len(segments)]

    def _sample_seeds(self, step: int, plans: Sequence[SequencePlan]) -> Ints:
        """Return a seed for each sample and padding of sequences, from (seed, step, sample)."""
        samples = [
            number
            for plan in plans
            for number in (
                *plan.samples.tolist(),
                *([_PADDING] if plan.sample_tokens.sum() < plan.length else ()),
            )
        ]
        seeds = mix(self._run.file.train.seed, step, np.asarray(samples, np.int64), _WHOLE)
        return (seeds >> np.uint64(1)).astype(np.int64)[: len(samples)]

    def _sample_of(self, segment: Any) -> Any:
        """Return the index of the sample that a segment belongs to."""
        return np.searchsorted(self._index.segment_start, segment, side="right") - 1


def runs_of(grids: Ints) -> Iterator[tuple[int, int]]:
    """Yield (first, last + 1) of the runs of equal grids [N, 2]."""
    ends = np.flatnonzero(np.any(np.diff(grids, axis=0), axis=1)) + 1
    yield from pairwise([0, *ends.tolist(), len(grids)] if len(grids) else [])


def _members(members: Members, chosen: Ints) -> Ints:
    """Return the segments of the items of the chosen sequences, in canonical order."""
    return members.segment[ranges(members.start[chosen], members.counts[chosen])]


def _in_order(plans: list[SequencePlan], kind: int, items: Ints, length: int) -> Places:
    """Return the rows of `items` among the M·L rows of the sequences, in the order of `items`.

    `items` are all the items of these sequences.
    """
    rows = [
        places.moved(number * length)
        for number, plan in enumerate(plans)
        for places in plan.rows(kind)
    ]
    assert len(rows) == len(items)
    first = int(items.min()) if len(items) else 0
    return together([rows[int(item) - first] for item in items])

"""Memory and messages of one rank of a TP group per kind of layer, as polynomials of the work.

Recorded on the meta device at the sizes of training: a chunked loss and a VAE that runs groups of
images do not use more memory for more chunks or groups, which small probes would not show.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from disttrain_cli.models.experts import Deferral, mixtures
from disttrain_cli.models.footprint import Footprint, Message, Noted, Operation, footprint
from disttrain_cli.models.graph import LayerInfo, build_layers, describe, layer_table, of_model
from disttrain_cli.models.layer import Batch, PipelineLayer
from disttrain_cli.models.probe import probe_batch, probe_work, state_at
from disttrain_cli.models.tensor_parallel import join, same_at_any_tp
from disttrain_cli.models.weight_parts import split
from disttrain_cli.profiling.fitting import Floats, fit
from disttrain_cli.profiling.trial import first_of_kinds
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.layer_costs import Polynomial
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.work import Work

Sizes = dict[str, Any]
#: Rows per expert at which its bytes per row are recorded: enough that they, not the gradients of
#: weights, decide the peak.
ROWS = (1024, 2048)


@dataclass(frozen=True)
class Messages:
    """Collectives of a TP group in one pass of a layer: count and total bytes of each operation."""

    counts: Mapping[Operation, int] = field(default_factory=dict)
    bytes: Mapping[Operation, Polynomial] = field(default_factory=dict)


class ExpertRow(NamedTuple):
    """Bytes of a row that arrives at an expert."""

    kept: float  # from forward to backward
    frozen_kept: float
    working: float  # peak of either pass beyond that
    deferred: float  # for gradients of weights that are computed later (`experts.Deferral`)


@dataclass(frozen=True)
class Running:
    """Memory and messages of one rank's TP shard of a kind of layer while it runs."""

    # peak beyond the saved activations, in either pass
    transient_bytes: Polynomial = field(default_factory=Polynomial)
    # peak in a forward without a backward (forward-only layer)
    still_bytes: Polynomial = field(default_factory=Polynomial)
    # with deferred weight gradients (split backward): bytes saved for them, and the peak beyond the
    # bytes saved from the forward until then
    deferred_bytes: Polynomial = field(default_factory=Polynomial)
    split_transient_bytes: Polynomial = field(default_factory=Polynomial)
    # peak beyond these where the group's messages are overlapped with GEMMs, in any pass
    overlapping_bytes: Polynomial = field(default_factory=Polynomial)
    # and the group's symmetric memory for them, in addition
    symmetric_bytes: Polynomial = field(default_factory=Polynomial)
    # peak beyond `transient_bytes`, where it recomputes
    recomputing_bytes: Polynomial = field(default_factory=Polynomial)
    forward: Messages = field(default_factory=Messages)
    backward: Messages = field(default_factory=Messages)
    backward_input: Messages = field(default_factory=Messages)  # with frozen weights
    expert_row: ExpertRow | None = None  # of its mixtures, if it has any
    # a backward that runs the forward again first
    recomputing: Messages = field(default_factory=Messages)
    # the same where its messages are overlapped with GEMMs
    recomputing_overlapped: Messages = field(default_factory=Messages)


@dataclass(frozen=True)
class Probes:
    """A module's layers at a few sizes of training."""

    table: list[LayerInfo]
    inputs: ModelInputs
    dtype: torch.dtype
    batches: list[Batch]
    works: list[Work]  # amounts that the number of rows depends on
    layers: list[int]  # the first of each kind, by index in the table

    def state(
        self, layer: PipelineLayer, index: int, batch: Batch, *, tp: int
    ) -> dict[str, Tensor]:
        """Return the tensors that a layer reads, as the first rank of a TP group has them."""
        dtype = next((weight.dtype for weight in layer.parameters()), torch.float32)
        state = state_at(self.table, index, self.inputs, batch, "meta", dtype, tp=tp)
        return {name: tensor for name, tensor in state.items() if name in layer.reads}


def probes_of(run: Run, module: str, tps: Sequence[int]) -> Probes:
    """Create the probes of a module; raises SpecError where the model's configuration is wrong."""
    table, inputs = layer_table(run), describe(run)
    sizes = _sizes(inputs, module, math.lcm(8, *tps))
    return Probes(
        table,
        inputs,
        torch.bfloat16 if run.file.train.precision == "bf16" else torch.float32,
        [probe_batch(inputs, device="meta", **size) for size in sizes],
        [_rows_alone(inputs, module, size) for size in sizes],
        [index for first in first_of_kinds(table, module, 1) for index in range(*first)],
    )


@of_model
def running(run: Run, module: str, tps: Sequence[int]) -> dict[int, dict[str, Running]]:
    """Record memory and messages of every kind of layer, by TP size (1 among them) and kind.

    Raises:
        SpecError: the model's configuration is wrong.
    """
    probes = probes_of(run, module, tps)
    by_tp: dict[int, dict[str, Running]] = {tp: {} for tp in sorted(tps)}
    for index in probes.layers:
        whole = build_layers(run, index, index + 1, "meta", probes.dtype)[0]
        by_tp[1][whole.kind] = _running(whole, index, probes, tp=1)[0]
        for tp in list(by_tp)[1:]:
            if same_at_any_tp(whole):
                by_tp[tp][whole.kind] = by_tp[1][whole.kind]
                continue
            layer = build_layers(run, index, index + 1, "meta", probes.dtype, tp=tp)[0]
            join(layer, Noted(size=tp))
            by_tp[tp][whole.kind] = (
                _shared(layer, index, probes, run, tp=tp)
                if layer.by_rows
                else _running(layer, index, probes, tp=tp)[0]
            )
    return by_tp


class _Trained(NamedTuple):
    """Footprints of a layer with trained weights, at each size."""

    kept: list[Footprint]
    recomputed: list[Footprint]  # empty unless a TP group divides rows
    split: list[Footprint]  # deferred weight gradients

    def most(self) -> Floats:
        """Return the peak bytes of each variant at each size."""
        return np.array([[one.kept_bytes + one.transient_bytes for one in how] for how in self])


def _recorded(
    layer: PipelineLayer, index: int, probes: Probes, *, tp: int, **how: bool
) -> list[Footprint]:
    return [
        footprint(layer, probes.state(layer, index, batch, tp=tp), batch, **how)
        for batch in probes.batches
    ]


def _trained(layer: PipelineLayer, index: int, probes: Probes, *, tp: int) -> _Trained:
    layer.ask_for_gradients()
    kept = _recorded(layer, index, probes, tp=tp)
    gathers = layer.by_rows and tp > 1
    again = _recorded(layer, index, probes, recompute=True, tp=tp) if gathers else []
    split(layer)
    return _Trained(kept, again, _recorded(layer, index, probes, deferring=True, tp=tp))


def _running(
    layer: PipelineLayer, index: int, probes: Probes, *, tp: int
) -> tuple[Running, _Trained]:
    """Record a rank's TP shard as that of a layer without row sharding, and its trained footprints.

    Messages of such a layer are the same whatever is trained or recomputed.
    """
    layer.ask_for_gradients(False)
    with torch.no_grad():
        still = _recorded(layer, index, probes, tp=tp)
    trained = _trained(layer, index, probes, tp=tp)
    running = Running(
        transient_bytes=fit(probes.works, [one.transient_bytes for one in trained.kept]),
        still_bytes=fit(probes.works, [one.transient_bytes for one in still]),
        deferred_bytes=fit(probes.works, [one.deferred_bytes for one in trained.split]),
        split_transient_bytes=fit(probes.works, [one.transient_bytes for one in trained.split]),
    )
    if tp == 1:
        return replace(running, expert_row=_expert_row(layer, probes.dtype)), trained
    backward = _messages(probes.works, [one.backward for one in trained.kept])
    return replace(
        running,
        forward=_messages(probes.works, [one.forward for one in trained.kept]),
        backward=backward,
        backward_input=backward,
        recomputing=_messages(probes.works, [one.forward + one.backward for one in trained.kept]),
    ), trained


def _expert_row(layer: PipelineLayer, dtype: torch.dtype) -> ExpertRow | None:
    """Record the bytes per row of a layer's mixtures, run as on a rank of an EP group."""
    if layer.experts is None:
        return None
    total, _, width = layer.experts
    parts = [_Arrived(part) for _, part in mixtures(layer)]

    def bytes_per_row(frozen: bool) -> tuple[float, float]:
        layer.ask_for_gradients(not frozen)
        few, many = (
            [
                footprint(cast(PipelineLayer, part), {"rows": rows.requires_grad_()}, Batch())
                for part in parts
                for rows in [torch.empty(total * each, width, device="meta", dtype=dtype)]
            ]
            for each in ROWS
        )
        more = total * (ROWS[1] - ROWS[0])
        return (
            max(b.kept_bytes - a.kept_bytes for a, b in zip(few, many, strict=True)) / more,
            max(b.transient_bytes - a.transient_bytes for a, b in zip(few, many, strict=True))
            / more,
        )

    (frozen_kept, _), (kept, working) = bytes_per_row(True), bytes_per_row(False)
    return ExpertRow(
        kept,
        frozen_kept,
        working,
        max(_deferred_bytes(part, total, width, dtype) for part in parts),
    )


def _deferred_bytes(part: _Arrived, total: int, width: int, dtype: torch.dtype) -> float:
    """Return the bytes per row that a mixture holds until it computes its weights' gradients."""
    rows = torch.empty(total, width, device="meta", dtype=dtype, requires_grad=True)
    deferral = Deferral(part.experts)
    with deferral.active():
        made = part({"rows": rows}, Batch())["rows"]
    torch.autograd.grad(made, rows, torch.empty_like(made))  # of rows alone
    held = (each for one in deferral.operands for each in (one.left_SF, one.right_SD))
    return sum(each.nbytes for each in held) / total


class _Arrived(nn.Module):
    """Mixture with rows that arrived for its experts, one each."""

    group = None

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts: Any = experts

    def forward(self, state: Mapping[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        rows = state["rows"]
        index = torch.zeros(len(rows), 1, dtype=torch.int64, device=rows.device)
        return {"rows": self.experts(rows, index, rows[:, :1])}  # weights have gradients


def _shared(layer: PipelineLayer, index: int, probes: Probes, run: Run, *, tp: int) -> Running:
    """Record a rank's TP shard of a layer that shards rows (sequence parallel).

    Where the layer can overlap its messages with GEMMs, both ways are recorded: round a ring and
    through symmetric memory.
    """
    layer.ask_for_gradients(False)
    frozen = _recorded(layer, index, probes, tp=tp)
    running, trained = _running(layer, index, probes, tp=tp)
    most = trained.most()
    running = replace(
        running,
        recomputing_bytes=fit(probes.works, np.maximum(0.0, most[1] - most[0])),
        backward_input=_messages(probes.works, [one.backward for one in frozen]),
        recomputing=_messages(probes.works, [one.backward for one in trained.recomputed]),
    )
    if not layer.row_by_row:
        return running

    def overlapping(symmetric: bool) -> _Trained:
        layer = build_layers(run, index, index + 1, "meta", probes.dtype, tp=tp)[0]
        join(layer, Noted(size=tp, overlap=True, symmetric=symmetric))
        return _trained(layer, index, probes, tp=tp)

    ring, symmetric = overlapping(False), overlapping(True)
    more = np.array([ring.most(), symmetric.most()]) - most
    return replace(
        running,
        recomputing_overlapped=_messages(probes.works, [one.backward for one in ring.recomputed]),
        overlapping_bytes=fit(probes.works, more.max(axis=(0, 1), initial=0.0)),
        symmetric_bytes=fit(probes.works, [one.symmetric_bytes for one in symmetric.kept]),
    )


def _messages(works: Sequence[Work], sent: Sequence[Sequence[Message]]) -> Messages:
    """Fit the messages that were recorded at each of these works."""
    counts = Counter(message.operation for message in sent[-1])
    return Messages(
        dict(counts),
        {
            operation: fit(
                works,
                [
                    float(sum(m.bytes for m in messages if m.operation == operation))
                    for messages in sent
                ],
            )
            for operation in counts
        },
    )


def _sizes(inputs: ModelInputs, module: str, items: int) -> list[Sizes]:
    """Return one size per amount that a layer's rows depend on, in multiples of `items`."""
    head = inputs.head(module)
    if head is None:
        return [{"documents": [[inputs.sequence_length]] * sequences} for sequences in (1, 2)]
    if head.alike:
        return [{head.item: count} for count in (items, 2 * items)]
    items = 1 if head.packed else items  # of a whole tower, which runs one by one
    most, columns = head.largest
    return [
        {head.item: [head.grid_of(rows, columns)] * count}
        for rows, count in ((most, items), (head.period, items), (most, 2 * items))
    ]


def _rows_alone(inputs: ModelInputs, module: str, size: Sizes) -> Work:
    """Return the part of a size's work that the number of rows depends on.

    A sequence's padding is rows too, and document lengths do not change the number of rows.
    """
    work, head = probe_work(inputs, module, **size), inputs.head(module)
    return Work(work.items) if head is None or head.alike else Work(work.items, work.tokens)

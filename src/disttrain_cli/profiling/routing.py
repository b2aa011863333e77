"""Measured routing: which experts the data's rows choose, by layer and modality.

A few packed sequences run forward through the model's own weights, one layer on the device at a
time, up to the last mixture. Padding is a modality of its own: its rows are computed too, and
choose the same experts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from disttrain_cli.data.index.sample_index import read_index
from disttrain_cli.data.loader import Loader
from disttrain_cli.data.ordering.orders import Orders
from disttrain_cli.models.experts import mixtures
from disttrain_cli.models.graph import LayerInfo, build_layers, layer_table
from disttrain_cli.models.layer import Batch
from disttrain_cli.models.published import weight_files
from disttrain_cli.models.weights import load_into, source_of
from disttrain_cli.runtime.feeding import fields_of, to_batch
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.layer_costs import ROUTED, LayerCost, Routed
from disttrain_cli.spec.plan import Layout, UnitPlan
from disttrain_cli.spec.profile import ModuleProfile
from disttrain_cli.spec.progress import Progress
from disttrain_cli.spec.runfile import Run

Ints = NDArray[np.int64]
Kind = tuple[str, str]  # module, kind of layer
#: Packed sequences that are run.
SEQUENCES = 8


def with_routing(
    run: Run,
    inputs: ModelInputs,
    modules: Mapping[str, ModuleProfile],
    device: str,
    progress: Progress,
) -> dict[str, ModuleProfile]:
    """Return modules with the routing of their experts, if it can be measured.

    That is where the run file names weights for the LLM, and files with data.

    Args:
        device: "cpu" or "cuda".

    Raises:
        SpecError: weights are damaged or incomplete.
        DataError: more files are broken than `data.max_bad_fraction` allows.
    """
    mixed = {
        (name, kind)
        for name, module in modules.items()
        for kind, cost in module.costs.items()
        if cost.experts is not None
    }
    sources = [source_of(run, name, "module") for name in {name for name, _ in mixed}]
    if (
        not mixed
        or run.file.data.distribution is not None
        or any(source is None or not weight_files(source.folder) for source in sources)
    ):
        return dict(modules)
    progress("measure the routing of experts", 0, 0)
    routed = _routed(run, inputs, torch.device(device), mixed)

    def measured(name: str, kind: str, cost: LayerCost) -> LayerCost:
        if cost.experts is None or (name, kind) not in routed:
            return cost
        experts = cost.experts._replace(routed=routed[name, kind])
        return cost.model_copy(update={"experts": experts})

    return {
        name: module.model_copy(
            update={
                "costs": {kind: measured(name, kind, cost) for kind, cost in module.costs.items()}
            }
        )
        for name, module in modules.items()
    }


def _routed(
    run: Run, inputs: ModelInputs, device: torch.device, mixed: Collection[Kind]
) -> dict[Kind, tuple[Routed, ...]]:
    """Return the routing of these kinds of layers, by modality."""
    table = layer_table(run)
    last = max(number for number, info in enumerate(table) if (info.module, info.kind) in mixed)
    table = table[: last + 1]
    batch, items_R = _batch(run, inputs, table, device)
    counts: dict[Kind, list[dict[str, Ints]]] = {}
    state: dict[str, Tensor] = {}
    for number, info in enumerate(table):
        (layer,) = build_layers(run, number, number + 1, device, _dtype(run))
        load_into([layer], run)
        chosen: list[Ints] = []
        for _, part in mixtures(layer):
            part.register_forward_pre_hook(
                # positions of the interface's arguments
                lambda _, given, chosen=chosen: chosen.append(given[1].cpu().numpy())
            )
        with torch.no_grad():
            state |= layer(state, batch)
        kept = {name for later in table[number + 1 :] for name in later.reads}
        state = {name: tensor for name, tensor in state.items() if name in kept}
        if layer.experts is not None and all(len(index) == len(items_R) for index in chosen):
            total, index_RK = layer.experts[0], np.concatenate(chosen, axis=1)
            of_items = {
                item: by_sequence(index_RK, items_R == item, total)
                for item in np.unique(items_R).tolist()
            }
            counts.setdefault((info.module, info.kind), []).append(of_items)
    return {
        kind: tuple(
            Routed(
                item,
                float((items_R == item).mean()),
                dispersion([layer[item] for layer in layers]),
                tuple(_parts(layer[item].sum(axis=0)) for layer in layers),
            )
            for item in layers[0]
        )
        for kind, layers in counts.items()
    }


def _batch(
    run: Run, inputs: ModelInputs, table: list[LayerInfo], device: torch.device
) -> tuple[Batch, NDArray[np.str_]]:
    """Return the first packed sequences of the data, and the modality of each of their rows [R]."""
    unit = UnitPlan(
        name="all",
        modules=run.file.model.order,
        gpus=1,
        layers_per_stage=[len(layer_table(run))],
    )
    layout = Layout(
        global_batch_size=SEQUENCES,
        microbatch_size=SEQUENCES,
        microbatches=1,
        gpus_used=1,
        units=[unit],
    )
    train = run.file.train.model_copy(update={"ordering": "none"})
    orders = Orders(run.file.model_copy(update={"train": train}), layout, read_index(run, inputs))
    fields = fields_of(table, unit) | {"layout"}
    with Loader(run, orders, unit="all", replica=0, fields=fields) as loader:
        arrays = loader.fetch(0, 0)
        batch = to_batch(arrays, loader.order(0), device, _dtype(run))
    assert arrays.documents is not None
    items_R = np.where(arrays.documents.reshape(-1) < 0, "padding", "text").astype(object)
    for item, items in batch.items.items():
        if items.at is not None and item != "target":
            items_R[items.at] = item
    return batch, items_R.astype(np.str_)


def _dtype(run: Run) -> torch.dtype:
    return torch.bfloat16 if run.file.train.precision == "bf16" else torch.float32


def by_sequence(index_RK: Ints, chosen_R: NDArray[np.bool_], total: int) -> Ints:
    """Return [S, E] how often rows of each sequence that are `chosen_R` go to each expert."""
    sequence_R = np.arange(len(chosen_R)) * SEQUENCES // len(chosen_R)
    cells = sequence_R[chosen_R, None] * total + index_RK[chosen_R]
    return np.bincount(cells.ravel(), minlength=SEQUENCES * total).reshape(SEQUENCES, total)


def dispersion(layers: list[Ints]) -> float:
    """Return the variance of experts' rows [S, E] in a sequence over that of independent rows.

    It is Pearson's χ² over its degrees of freedom, mean over the layers; 1 for a single sequence.
    """
    ratios = []
    for counts in layers:
        counts = counts[counts.any(axis=1)][:, counts.any(axis=0)]
        if min(counts.shape) < 2:
            continue
        expected = counts.sum(axis=1, keepdims=True) * counts.sum(axis=0) / counts.sum()
        freedom = (counts.shape[0] - 1) * (counts.shape[1] - 1)
        ratios.append(float(((counts - expected) ** 2 / expected).sum()) / freedom)
    return float(np.mean(ratios)) if ratios else 1.0


def _parts(counts: Ints) -> str:
    """Return each expert's share of rows as `spec.layer_costs.Routed` stores it."""
    return " ".join(str(round(ROUTED * count / counts.sum())) for count in counts.tolist())

"""Plans of up to 64 ranks, and the steps that their ranks work on, drawn from a seed."""

import copy
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import yaml

from disttrain_cli.data.index.sample_index import Index
from disttrain_cli.data.ordering.assigning import order_step
from disttrain_cli.data.packing import Members, Packing
from disttrain_cli.data.slots import Assignment, Ints, ReplicaItems, Slot, StepOrder
from disttrain_cli.models.graph import describe, layer_table
from disttrain_cli.models.tying import tied_layers
from disttrain_cli.runtime.messages.hollow import record_steps
from disttrain_cli.runtime.messages.records import Record
from disttrain_cli.spec.index import KINDS
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.plan import Layout, UnitPlan
from disttrain_cli.spec.runfile import Run, read_run
from disttrain_cli.spec.stage_graph import StageGraph, stage_graph
from tests.runtime.factory import MODEL, REFINER, unit
from tests.runtime.test_audio import WHISPER
from tests.runtime.test_several_of_a_kind import SIGLIP

MOST_RANKS = 64
EYE, OTHER_EYE, EAR, LLM = "image_encoder", "other_encoder", "audio_encoder", "llm"
FIRST, SECOND = "image_generator", "refiner"
#: Modules of a model, and what of it is trained; None = all.
MODELS: list[tuple[tuple[str, ...], list[str] | None]] = [
    ((EYE, LLM, FIRST), None),
    ((EYE, LLM, FIRST), [LLM, "projectors"]),
    ((EYE, LLM, FIRST), ["projectors"]),
    ((EYE, LLM, FIRST), [FIRST]),
    ((EYE, LLM), None),
    ((LLM, FIRST), None),
    ((EYE, LLM, FIRST, SECOND), None),
    ((EYE, LLM, FIRST, SECOND), [SECOND]),
    ((EYE, OTHER_EYE, LLM, FIRST), None),
    ((EYE, EAR, LLM, FIRST), None),
    ((EYE, OTHER_EYE, LLM, FIRST, SECOND), [EYE, LLM, SECOND]),
]


@dataclass(frozen=True)
class Drawn:
    """A plan and one of its steps."""

    name: str
    run: Run
    layout: Layout
    graph: StageGraph
    order: StepOrder

    def records(self) -> list[Record]:
        """Of all ranks."""
        return list(record_steps(self.run, self.graph, self.order, overlap=self.layout.overlap))


def write_models(folder: Path) -> list[Run]:
    """A run of each of MODELS, with more layers than the tests' own; every other ties the LLM's
    head."""
    return [
        write_model(folder / str(number), modules, trained, {EYE: 6, LLM: 10}, number % 2 == 0)
        for number, (modules, trained) in enumerate(MODELS)
    ]


def write_model(
    folder: Path,
    modules: Sequence[str],
    trained: Sequence[str] | None = None,
    layers: Mapping[str, int] | None = None,
    tied: bool = False,
) -> Run:
    """A run of the tests' modules, some with other numbers of layers; there are no data."""
    known = copy.deepcopy(MODEL["modules"] | {SECOND: REFINER, OTHER_EYE: SIGLIP, EAR: WHISPER})
    for name, count in (layers or {}).items():
        known[name]["config"]["num_hidden_layers"] = count
    known[LLM]["config"]["tie_word_embeddings"] = tied
    folder.mkdir()
    path = folder / "disttrain.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "name": "drawn",
                "model": {
                    "modules": {name: known[name] for name in modules},
                    "trained": None if trained is None else list(trained),
                },
                "data": {
                    "sources": [{"path": "nowhere"}],
                    "sequence_length": 256,
                    "max_image_pixels": 4096,
                },
                "cluster": {"gpus_per_node": 8, "device": "cpu"},
                "train": {
                    "global_batch_size": 24,
                    "steps": 1,
                    "precision": "bf16",
                    "zero_stage": 1,
                    "ordering": "none",
                },
            },
            sort_keys=False,
        )
    )
    return read_run(path)


def draw(runs: list[Run], seed: int) -> Drawn:
    """A plan of one of the runs."""
    generator = random.Random(seed)
    run = generator.choice(runs)
    layers = [info.module for info in layer_table(run)]
    modules, ranks = (
        list(dict.fromkeys(layers)),
        round(MOST_RANKS / 2 ** max(0.0, generator.uniform(-0.3, 5))),
    )
    while True:
        units = [_unit(generator, group, layers) for group in _grouped(generator, modules)]
        if sum(one.gpus for one in units) == ranks:
            break
    dp = next(one.dp for one in units if LLM in one.modules)
    microbatches, size = generator.randint(1, 8), generator.choice([1, 1, 2])
    layout = Layout(
        global_batch_size=dp * microbatches * size,
        microbatch_size=size,
        microbatches=microbatches,
        gpus_used=sum(one.gpus for one in units),
        overlap=random.Random(repr(units)).random() < 0.5,
        units=units,
    )
    shapes = " ".join(f"{one.name}:tp{one.tp}dp{one.dp}pp{one.pp}" for one in units)
    return step_of(f"{seed}: {shapes}, {microbatches} slots", run, layout, generator)


def step_of(name: str, run: Run, layout: Layout, generator: random.Random) -> Drawn:
    """A step of a plan of a run, with data drawn for it."""
    inputs = describe(run)
    graph = stage_graph(layout, inputs.llm, tied_layers(layer_table(run)))
    return Drawn(name, run, layout, graph, _order(generator, inputs, layout))


def _grouped(generator: random.Random, modules: list[str]) -> list[list[str]]:
    groups = [[modules[0]]]
    for module in modules[1:]:
        if generator.random() < 0.7:
            groups.append([])
        groups[-1].append(module)
    return groups


def _unit(generator: random.Random, modules: list[str], layers: list[str]) -> UnitPlan:
    count = sum(name in modules for name in layers)
    ends = sorted(
        generator.sample(range(1, count), min(count, generator.choice([1, 1, 2, 3, 4, 6, 12])) - 1)
    )
    stages = [stop - start for start, stop in zip([0, *ends], [*ends, count], strict=True)]
    made = unit(
        "+".join(modules),
        modules,
        stages,
        generator.choice([1, 1, 2, 3, 4, 5, 6, 16]),
        generator.choice([1, 1, 2, 4, 8]),
    )
    later = random.Random(repr(made))
    if LLM in modules:
        ranks = made.tp * made.dp
        degrees = [ep for ep in range(1, ranks + 1) if ranks % ep == 0]
        made = made.model_copy(update={"ep": later.choice(degrees)})
    if later.random() < 0.5:
        return made
    changes = {
        "weight_delay": [later.randint(0, 3) for _ in stages],
        "tp_overlap": later.random() < 0.5 and made.tp > 1,
        "ep_overlap": later.random() < 0.5 and made.ep > 1,
    }
    return made.model_copy(update=changes)


def _order(generator: random.Random, inputs: ModelInputs, layout: Layout) -> StepOrder:
    """Sequences with any number of images, clips and targets; some slots have none of a kind."""
    numbers = np.random.default_rng(generator.getrandbits(32))
    n = layout.global_batch_size

    def members(item: str) -> Members:
        counts = numbers.choice([0, 0, 1, 2, 5], n) * bool(inputs.of(item))
        sides = 2 * numbers.integers(1, 5, (counts.sum(), 2))
        return Members(
            np.concatenate(([0], np.cumsum(counts))),
            np.zeros(counts.sum(), dtype=np.int64),
            sides if item == "image" else np.ones_like(sides),
        )

    batch = Packing(
        index=cast(Index, SimpleNamespace(inputs=inputs)),
        ids=np.arange(n),
        sample_start=np.arange(n + 1),
        samples=np.arange(n),
        tokens=numbers.integers(1, 257, n),
        length_sq=numbers.integers(1, 257, n) ** 2,
        label_tokens=np.ones(n, dtype=np.int64),
        items={item: members(item) for item in KINDS},
    )
    dp = layout.unit_of(inputs.llm).dp
    places = numbers.permutation(n).reshape(layout.microbatches, dp, layout.microbatch_size)
    order = order_step(batch, layout, 0, Assignment(places, carry=generator.random() < 0.3))
    if generator.random() < 0.5:
        return order
    return replace(order, slots=[_scattered(numbers, inputs, slot, layout) for slot in order.slots])


def _scattered(
    numbers: np.random.Generator, inputs: ModelInputs, slot: Slot, layout: Layout
) -> Slot:
    """The slot with the items of units without the LLM on any replica, in any order."""

    def shuffled(own: list[ReplicaItems], name: str) -> list[Ints]:
        items = numbers.permutation(np.concatenate([one[name] for one in own]))
        owners = numbers.integers(0, len(own), len(items))
        return [items[owners == replica] for replica in range(len(own))]

    replicas: dict[str, Any] = {}
    for one in layout.units:
        own = slot.replicas[one.name]
        replicas[one.name] = (
            own
            if inputs.llm in one.modules
            else [
                dict(zip(own[0], items, strict=True))
                for items in zip(*(shuffled(own, name) for name in own[0]), strict=True)
            ]
        )
    return replace(slot, replicas=replicas)

"""The engine of one rank that holds the whole model: freezing in the trace, memory, steps that are
not finite."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from disttrain_cli.costs.hardware import OPTIMIZER_BYTES
from disttrain_cli.data.index.sample_index import read_index
from disttrain_cli.data.indexing.building import build_index
from disttrain_cli.data.loader import Loader
from disttrain_cli.data.ordering.orders import Orders
from disttrain_cli.data.sample_data import write_sample_data
from disttrain_cli.models.graph import build_layers, describe, layer_table
from disttrain_cli.models.layer import Batch
from disttrain_cli.runtime.checkpoints.checkpoint import Saver
from disttrain_cli.runtime.engine.assemble import build_engine, deepspeed_config
from disttrain_cli.runtime.engine.engine import UnitEngine
from disttrain_cli.runtime.engine.faults import MOST_SKIPPED, NotFiniteError, OutOfMemoryError
from disttrain_cli.runtime.engine.partitions import own_values
from disttrain_cli.runtime.feeding import fetcher, message_dtype
from disttrain_cli.runtime.launching.process import joined
from disttrain_cli.runtime.watching.device_clock import DeviceClock
from disttrain_cli.runtime.watching.tracing import wall_clock
from disttrain_cli.spec.progress import silent
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.stage_graph import stage_graph
from tests.batches import changed
from tests.moved import Moved
from tests.runtime.factory import plan_of, unit, write_run
from tests.runtime.options_worker import CountingTracer

MODULES = ("image_encoder", "llm")
TIMEOUT_S = 77.0


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, torch.device]]:
    """The data, and the device of the only rank."""
    folder = tmp_path_factory.mktemp("engine")
    write_sample_data(folder / "data")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
            patch.setenv(name, value)
        with joined("cpu", TIMEOUT_S, store=dist.HashStore()) as device:
            yield folder, device


def test_all_groups_have_the_runs_timeout(world: tuple[Path, torch.device]) -> None:
    """Those of the grid, of checkpoints and of DeepSpeed."""
    job = Job(world, "timeouts")
    with Saver(world[0] / "timeouts" / "checkpoints", {}, job.engine, 1):
        groups = list(distributed_c10d._world.pg_map)
        assert len(groups) > 2
        assert {group._get_backend(torch.device("cpu")).options._timeout for group in groups} == {
            timedelta(seconds=TIMEOUT_S)
        }


class Job:
    """An engine with its data; step by step."""

    def __init__(
        self,
        world: tuple[Path, torch.device],
        name: str,
        trained: list[str] | None = None,
        modules: tuple[str, ...] = MODULES,
        **train: object,
    ) -> None:
        folder, device = world
        self.run: Run = write_run(
            folder / name, folder / "data", name=name, modules=modules, global_batch_size=2, **train
        )
        model = self.run.file.model.model_copy(update={"trained": trained})
        self.run = self.run.model_copy(
            update={"file": self.run.file.model_copy(update={"model": model})}
        )
        build_index(self.run, describe(self.run), silent)
        table = layer_table(self.run)
        plan = plan_of(self.run, [unit("all", list(modules), [len(table)])], 1)
        graph = stage_graph(plan.plan, "llm")
        place = graph.coords(0)
        now = wall_clock()
        self.tracer = CountingTracer(
            folder / name / "traces",
            "test",
            place,
            now,
            print,
            DeviceClock(now) if device.type == "cuda" else None,
        )
        self.engine: UnitEngine = build_engine(self.run, plan, graph, place, device, self.tracer)
        orders = Orders(self.run.file, plan.plan, read_index(self.run, describe(self.run)))
        self.loader = Loader(
            self.run,
            orders,
            unit="all",
            replica=0,
            fields={field for info in table for field in info.needs},
        )
        self.fetch_of = fetcher(self.loader, device, message_dtype(self.run.file.train))

    def step(self, number: int, spoilt: bool = False) -> None:
        order = self.loader.order(number)
        fetch = self.fetch_of(order)

        def given(slot: int) -> Batch:
            batch = fetch(slot)
            (blocks,) = batch.of("image").values.values()
            spoiled = changed(batch, "image", values={0: [p * torch.nan for p in blocks]})
            return spoiled if spoilt else batch

        self.engine.run_step(order, given)

    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.engine.module.parameters()]

    def moments(self) -> list[torch.Tensor]:
        return [
            value.clone()
            for state in self.engine.basic_optimizer.state.values()
            for value in state.values()
        ]

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: Any) -> None:
        self.loader.__exit__(*error)
        self.engine.stage.destroy()


def test_a_frozen_module_has_no_backward_in_the_trace(world: tuple[Path, torch.device]) -> None:
    with Job(world, "frozen", trained=["llm"]) as job:
        before = job.weights()
        job.step(0)
        slots = 2
        assert job.tracer.counts["forward"] == 2 * slots and job.tracer.counts["backward"] == slots
        moved = [not torch.equal(a, b) for a, b in zip(before, job.weights(), strict=True)]
        assert moved == [p.requires_grad for p in job.engine.module.parameters()]


@pytest.mark.slow
def test_skipped_steps_change_nothing_and_too_many_stop_the_run(
    world: tuple[Path, torch.device],
) -> None:
    with Job(world, "skip", on_bad_loss="skip") as job:
        job.step(0)
        before = job.weights()
        moments = job.moments()
        for _ in range(MOST_SKIPPED - 1):
            job.step(1, spoilt=True)
        assert all(torch.equal(a, b) for a, b in zip(before, job.weights(), strict=True))
        assert all(torch.equal(a, b) for a, b in zip(moments, job.moments(), strict=True))
        assert job.engine.skipped_steps == job.engine.skipped_in_a_row == MOST_SKIPPED - 1
        job.step(2)
        assert job.engine.skipped_in_a_row == 0 and job.engine.grad_norm() > 0
        for _ in range(MOST_SKIPPED - 1):
            job.step(3, spoilt=True)
        with pytest.raises(NotFiniteError, match=f"the last of {MOST_SKIPPED} such steps in a row"):
            job.step(3, spoilt=True)


def test_a_device_without_memory_is_named_with_its_unit(
    world: tuple[Path, torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Job(world, "memory") as job:
        layer = job.engine.module.layers[-1]

        def too_much(*arguments: object) -> None:
            torch.empty(1 << 58, dtype=torch.uint8)

        monkeypatch.setattr(layer, "compute", too_much)
        with pytest.raises(
            OutOfMemoryError, match=r"in the forward of slot 0: unit all, stage 0, replica 0"
        ):
            job.step(0)


def test_deepspeed_splits_states_only_where_there_are_replicas_that_train(
    world: tuple[Path, torch.device],
) -> None:
    with Job(world, "config", zero_stage=1) as job:
        layout = job.engine.layout.model_copy(update={"zero_stage": 1})
        train = job.run.file.train
        stages = {
            (dp, trains): deepspeed_config(train, layout, trains, dp=dp)["zero_optimization"][
                "stage"
            ]
            for dp in (1, 2)
            for trains in (True, False)
        }
        assert stages == {(1, True): 0, (2, True): 1, (1, False): 0, (2, False): 0}
        half = train.model_copy(update={"precision": "bf16"})
        assert deepspeed_config(half, layout, dp=1)["zero_optimization"]["stage"] == 1
        assert "bf16" not in deepspeed_config(half, layout, trains=False, dp=1)


@pytest.mark.slow
def test_bf16_masters_are_the_weights_as_they_were_loaded(
    world: tuple[Path, torch.device],
) -> None:
    """Not as they were rounded to bf16."""
    with Job(world, "masters", precision="bf16", zero_stage=1) as job:
        table = layer_table(job.run)
        loaded = build_layers(job.run, 0, len(table))
        compared = 0
        for layer, before in zip(job.engine.module.layers, loaded, strict=True):
            for path, weight in before.named_parameters():
                parameter: Any = layer.get_parameter(path)
                if not parameter.requires_grad:
                    continue
                master = parameter._hp_mapping.hp_fragment.view_as(weight)
                assert torch.equal(master, weight), (layer.name, path)
                assert torch.equal(parameter, weight.bfloat16())
                compared += not torch.equal(weight, weight.bfloat16().float())
        assert compared > 10


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_update_moves_the_bytes_that_are_priced(
    world: tuple[Path, torch.device], precision: str
) -> None:
    """Also that of `profiling.optimizer`, which is measured in its place."""
    with Job(
        world, f"moved-{precision}", precision=precision, zero_stage=1, gradient_clipping=0.0
    ) as job:
        job.step(0)
        update, moved = job.engine._update, Moved()

        def counted() -> None:
            with moved:
                update()

        job.engine._update = counted  # type: ignore[method-assign]
        job.step(1)
        numbers = sum(w.numel() for w in job.engine.module.parameters() if w.requires_grad)
        assert moved.bytes / numbers == pytest.approx(OPTIMIZER_BYTES[precision], rel=0.02)  # type: ignore[index]


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_replicas_values_are_its_share_of_the_groups(replicas: int) -> None:
    weights = [torch.nn.Parameter(torch.randn(size)) for size in ((3, 5), (7,), (2, 2, 3))]
    parts = [own_values(weights, replicas, number) for number in range(replicas)]
    assert len({len(part) for part in parts}) == 1 and len(parts[0]) % 2 == 0
    everything = torch.cat([weight.detach().flatten() for weight in weights])
    assert torch.equal(torch.cat(parts)[: len(everything)], everything)
    assert not torch.cat(parts)[len(everything) :].any()


def test_the_device_is_where_the_weights_are(
    world: tuple[Path, torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trap 36: not the one whose number is LOCAL_RANK, which a rank may not even see."""
    asked: list[int] = []
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(deepspeed.accelerator.get_accelerator(), "set_device", asked.append)
    with Job(world, "device"):
        assert asked == [0]

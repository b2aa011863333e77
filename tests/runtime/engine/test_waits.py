"""Steps on a GPU in which every wait of the host for its device is an error but the one that a step
has."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist

from disttrain_cli.data.sample_data import write_sample_data
from disttrain_cli.models.host import read, waiting
from disttrain_cli.runtime.launching.process import joined
from tests.runtime.engine.test_engine import Job

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MODULES = ("image_encoder", "llm", "image_generator")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, torch.device]]:
    """The data, and the device of the only rank."""
    folder = tmp_path_factory.mktemp("waits")
    write_sample_data(folder / "data")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
            patch.setenv(name, value)
        with joined(torch.device("cuda", 0), 60.0, store=dist.HashStore()) as device:
            yield folder, device


@pytest.fixture
def strict() -> Iterator[None]:
    """Waits are errors when the test asks for it, and no longer after it."""
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_only_what_may_wait_does(world: tuple[Path, torch.device], strict: None) -> None:
    numbers = torch.ones(3, device=world[1])
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="synchroniz"):
        numbers.tolist()
    assert read(numbers) == [1.0] * 3
    with waiting(world[1]):
        assert bool(numbers.all())
    assert torch.cuda.get_sync_debug_mode() == 2


@pytest.mark.parametrize(
    ("name", "train"),
    [
        ("fp32", {}),
        ("bf16", {"precision": "bf16", "zero_stage": 1}),
        ("skipping", {"on_bad_loss": "skip"}),
    ],
)
def test_a_step_waits_once(
    world: tuple[Path, torch.device], strict: None, name: str, train: dict[str, object]
) -> None:
    with Job(world, name, modules=MODULES, **train) as job:
        job.step(0)  # libraries load
        torch.cuda.set_sync_debug_mode("error")
        for step in range(1, 4):
            job.tracer.step = step
            job.step(step)
            job.tracer.end_step()
            assert (
                all(loss > 0 for loss in job.engine.step_losses.values())
                and job.engine.grad_norm() > 0
            )
        order = job.loader.order(4)
        assert job.engine.evaluate(order, job.fetch_of(order))["text"] > 0
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        job.tracer.anchor()
        torch.cuda.synchronize()
        job.tracer.close()
        rows = pq.read_table(world[0] / name / "traces" / "rank-00000").to_pylist()
    assert [row["step"] for row in rows if row["operation"] == "step"] == [0, 1, 2, 3]
    assert all(
        row["start_ns"] < row["end_ns"]
        for row in rows
        if row["operation"] in ("forward", "backward", "step")
    )
    assert all(before["end_ns"] <= after["start_ns"] for before, after in pairwise(rows))

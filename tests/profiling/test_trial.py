"""A module on a device: gradients summed as in training, and on a GPU passes without pauses."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import yaml

from disttrain_cli.profiling import trial
from disttrain_cli.profiling.compute import Stopwatch
from disttrain_cli.profiling.trial import Bench
from disttrain_cli.runtime.engine.partitions import add_at_once
from disttrain_cli.spec.runfile import Run, read_run
from tests.moved import Moved
from tests.profiling.test_measure import MODULES
from tests.runtime.dryrun.on_fake_cuda import on_fake_cuda

SIZES = {"documents": [[128], [100]]}


def run_in(folder: Path) -> Run:
    path = folder / "disttrain.yaml"
    run = {
        "name": "small",
        "model": {"modules": {"llm": MODULES["llm"]}},
        "data": {"sources": [{"path": "data"}], "sequence_length": 128},
        "train": {"global_batch_size": 4, "steps": 1, "precision": "bf16"},
    }
    path.write_text(yaml.safe_dump(run))
    return read_run(path)


@pytest.mark.parametrize("frozen", [True, False])
def test_gradients_are_summed_in_fp32_and_freed(tmp_path: Path, frozen: bool) -> None:
    device = torch.device("cpu")
    bench = Bench(run_in(tmp_path), "llm", device, Stopwatch(device), tp=1)
    with patch.object(trial, "settle") as settle:
        times = bench.times(SIZES, frozen)
    assert times is not None and min(times["block"]) > 0.0
    assert (times["embed"][1] == 0.0) == frozen  # no input of the first layer carries a gradient
    weights = [weight for layer in bench._layers for weight in layer.parameters()]
    assert all(weight.grad is None and weight.dtype == torch.bfloat16 for weight in weights)
    settle.assert_not_called()


def test_summing_moves_ten_bytes_per_weight() -> None:
    moved = []
    for summed in (False, True):
        weight = torch.nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
        total = torch.zeros(1000)
        if summed:
            add_at_once([(weight, total)])
        loss = weight.sum()
        with Moved() as counted:
            loss.backward()
        moved.append(counted.bytes)
        assert torch.equal(total, torch.full((1000,), float(summed)))
    assert moved[1] - moved[0] == 10 * 1000


def waits(path: str) -> dict[str, Any]:
    """Waits of the host and passes of two sizes on a fake device, whose passes take 20 ms each."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    from disttrain_cli.models.probe import probe_batch
    from tests.models.executed import _on_device

    def batch_of(inputs: Any, device: Any, **sizes: Any) -> Any:
        with unset_fake_temporarily():  # which rows hold tokens is read from their values
            batch = probe_batch(inputs, **sizes)
        return _on_device(batch)

    device, runs, settled = torch.device("cuda"), list[int](), list[int]()
    whole = trial.time_module

    def counted(layers: Any, entry: Any, batch: Any, stopwatch: Any, passes: int = 1) -> Any:
        runs.append(passes)
        return whole(layers, entry, batch, stopwatch, passes)

    with (
        patch.object(torch.cuda.Event, "elapsed_time", lambda *_: 20.0),
        patch.object(trial, "probe_batch", batch_of),
        patch.object(trial, "time_module", counted),
        patch.object(trial, "settle", lambda run, readings: settled.append(len(runs))),
        patch.object(trial, "passes_for", lambda seconds, pass_s: 3 if pass_s > 0 else 0),
    ):
        bench = Bench(read_run(Path(path)), "llm", device, Stopwatch(device), tp=1)
        times = [bench.times(SIZES, frozen) for frozen in (False, True)]
    return {"runs": runs, "settled": settled, "times": times}


@pytest.mark.slow
def test_on_a_gpu_passes_are_queued_without_a_wait(tmp_path: Path) -> None:
    run_in(tmp_path)
    found = on_fake_cuda(waits, str(tmp_path / "disttrain.yaml"))
    assert found["runs"] == [1, 1, 3] * 2  # one to load kernels, one to estimate
    assert found["settled"] == [2]  # before the first size is measured
    trained, frozen = found["times"]
    assert trained["block"] == frozen["block"] == [20.0, 20.0]
    assert (trained["embed"], frozen["embed"]) == ([20.0, 20.0], [20.0, 0.0])

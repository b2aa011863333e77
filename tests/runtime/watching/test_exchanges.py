"""What of a forward or backward went into exchanges with the rank's group."""

from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from disttrain_cli.analysis.analyze import analyze
from disttrain_cli.data.sample_data import write_sample_data
from disttrain_cli.models.graph import layer_table
from disttrain_cli.runtime import train as training
from disttrain_cli.runtime.watching.device_clock import DeviceClock
from disttrain_cli.runtime.watching.tracing import Tracer
from disttrain_cli.spec.stage_graph import RankCoords
from tests.runtime.factory import make_job, plan_of, unit
from tests.runtime.watching.simulated_gpu import Gpu
from tests.runtime.watching.test_hang import graph_of

MS = 10**6


@pytest.mark.parametrize("device", [True, False])
@pytest.mark.parametrize("cp", [1, 2])
def test_exchanges_of_a_pass_are_summed(gpu: Gpu, tmp_path: Path, device: bool, cp: int) -> None:
    stage = graph_of().stages[0]
    stage = replace(stage, unit=stage.unit.model_copy(update={"cp": cp}))
    clock = DeviceClock(gpu.now) if device else None
    tracer = Tracer(tmp_path, "s", RankCoords(0, stage, 0), gpu.now, pytest.fail, clock)

    def work(ms: int) -> None:
        gpu.work(ms * MS)
        if not device:
            gpu.synchronize()

    for operation in ("forward", "reduce", "backward"):
        tracer.begin(operation, 0, "llm")
        start = tracer.mark()
        for ms in (2, 3):
            work(7)
            with tracer.exchanging():
                work(ms)
        tracer.record(operation, start)
    gpu.synchronize()
    tracer.anchor()
    gpu.host_ns += MS
    tracer.end_step()
    tracer.close()
    rows = pq.read_table(tmp_path / "rank-00000").to_pylist()
    exchanged = [row["exchange_ns"] for row in rows]
    if cp == 1:
        assert exchanged == [None] * 3
    else:
        five = pytest.approx(5 * MS, rel=0.02)
        assert exchanged == [five, None, five]


@pytest.mark.slow
def test_a_rank_that_computes_longer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_sample_data(tmp_path / "data")
    run, _, profile = make_job(tmp_path / "run", tmp_path / "data", modules=("llm",))
    whole = unit("llm", ["llm"], [len(layer_table(run))])
    plan = plan_of(run, [whole.model_copy(update={"cp": 2, "gpus": 2})], 3)
    monkeypatch.setattr(training, "TRAIN", "tests.runtime.slow_worker:main")
    result = training.train(run, plan, profile, steps=4)
    named = [one for one in analyze([Path(result.run_dir)]).causes if one.cause == "worker"]
    assert [(one.place.rank, one.place.cp_rank) for one in named] == [(1, 1)]

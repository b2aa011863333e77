"""What a job gains without a slow host, beside the job that the plan would make."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.analysis import simulated, synthetic
from tests.analysis.job.remedies.test_replanning import STEPS, played_s
from tests.planning import synthetic as planning

UNITS = {
    "image_encoder": {"dp": 4, "layers_per_stage": [4]},
    "llm": {"dp": 8, "layers_per_stage": [6]},
    "image_generator": {"dp": 4, "layers_per_stage": [4]},
}


@pytest.fixture(scope="module")
def job():
    profile = planning.tiny(planning.run_file(batch=48, gpus=16), kind="cuda")
    return profile, simulated.layout_of(profile, 48, 6, **UNITS)


def found(folder, job, factor, hosts):
    """The analysis of a job with a slow rank, whose ranks are spread over some hosts."""
    profile, layout = job
    fault = simulated.FaultSpec(slow="rank", unit="llm", stage=0, replica=1, factor=factor)
    simulated.write(folder, profile, layout, STEPS, faults=[fault])
    for rank, path in enumerate(sorted(folder.glob("rank-*/*.parquet"))):
        table = pq.read_table(path)
        names = pa.array([f"node-{rank * hosts // 16}"] * len(table))
        place = table.schema.get_field_index("host")
        pq.write_table(table.set_column(place, "host", names), path)
    return synthetic.judged(folder)


def test_a_slow_host_left_out_gains_what_its_job_would(tmp_path, job):
    analysis = found(tmp_path, job, 6.0, hosts=4)
    (host,) = [one for one in analysis.remedies if "without host" in one.change]
    assert (analysis.verdict.cause, host.cause, host.gpus) == ("worker", "worker", -4)
    assert "12 devices, without host node-1" in host.change and host.gain_s > 0
    assert host.command.endswith("--gpus 12") and host.basis == "plan"
    assert "without host node-1" in analysis.verdict.advice
    calm_s = played_s(*job)
    assert calm_s < host.step_s < analysis.job.iteration_s
    mended = analysis.remedies[0]
    assert "rank 5" in mended.change and mended.step_s < host.step_s


@pytest.mark.slow
def test_a_host_that_is_worth_its_rank_stays(tmp_path, job):
    """A rank a little slow costs less than its host brings."""
    analysis = found(tmp_path, job, 1.3, hosts=2)
    (host,) = [one for one in analysis.remedies if "without host" in one.change]
    assert host.gain_s < 0 and not host.worth
    assert "without host" not in analysis.verdict.advice


@pytest.mark.slow
def test_one_host_is_not_left_out(tmp_path, job):
    analysis = found(tmp_path, job, 6.0, hosts=1)
    assert not [one for one in analysis.remedies if "without host" in one.change]

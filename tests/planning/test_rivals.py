"""A plan is never slower, as shown, than a baseline."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain_cli.costs.memory import layout_memory
from disttrain_cli.errors import InfeasibleError
from disttrain_cli.planning.layouts import baseline_layout
from disttrain_cli.planning.predict import predict
from disttrain_cli.planning.ranges import TIE
from disttrain_cli.planning.solve import cluster_of, solve
from disttrain_cli.planning.units import units_of
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.runfile import RunFile
from tests import profiles
from tests.planning import synthetic


@st.composite
def jobs(draw: st.DrawFn) -> tuple[RunFile, Profile]:
    """A small model on a CPU or on GPUs with slow links, its images skewed, sound and a second
    generator or neither."""
    nodes, per_node = draw(st.sampled_from([(1, 3), (1, 6), (2, 4), (3, 4), (6, 2)]))
    run = synthetic.run_file(
        batch=draw(st.sampled_from([4, 6, 12, 24])),
        gpus=nodes * per_node,
        nodes=nodes,
        zero_stage=draw(st.sampled_from([0, 1])),
    )
    kind = draw(st.sampled_from(["cpu", "cuda"]))
    memory_gib = draw(st.sampled_from([4.0, 0.05]))
    profile = synthetic.tiny(
        run, kind=kind, memory_gib=memory_gib, tps=draw(st.sampled_from([(1,), (1, 2)]))
    )
    sample, spread = profile.data.sample, draw(st.sampled_from([1, 2, 4]))
    skewed = sample.model_copy(
        update={
            "images": [
                images * spread if place % spread == 0 else []
                for place, images in enumerate(sample.images)
            ]
        }
    )
    profile = profile.model_copy(
        update={"data": profile.data.model_copy(update={"sample": skewed})}
    )
    if kind == "cuda":
        links = profiles.links(8, 50, 4, 100, between_nodes=draw(st.sampled_from([1.0, 0.02])))
        profile = profile.model_copy(update={"links": links})
    more = draw(st.sampled_from([None, synthetic.with_audio, synthetic.with_refiner]))
    return run, profile if more is None else more(profile)


def check_rivals(job: tuple[RunFile, Profile]) -> int:
    """Compare a plan with its baselines; how many fit, run as it is."""
    run, profile = job
    cluster, rivals = cluster_of(run, profile), 0
    try:
        plan = solve(run, profile, top=2)
    except InfeasibleError:
        return 0
    for baseline in plan.baselines.values():
        if baseline is None or baseline.plan is None:
            continue
        layout = baseline_layout(baseline.plan, units_of(profile, cluster, baseline.plan), "auto")
        if any(
            stage.peak_gib > stage.limit_gib
            for stage in layout_memory(profile, layout, cluster.memory_gib)
        ):
            continue
        shown_s = predict(units_of(profile, cluster, layout), layout, cluster).iteration_s
        assert shown_s <= baseline.iteration_s * (1 + 1e-9)
        tie = 1e-9 if profile.device.kind == "cpu" else TIE
        assert plan.predicted.iteration_s <= shown_s * (1 + tie)
        rivals += 1
    assert np.isfinite(plan.predicted.iteration_s) and plan.plan not in [
        one.plan for one in plan.alternatives
    ]
    return rivals


@pytest.mark.parametrize(
    ("kind", "gpus", "nodes", "batch"),
    [("cpu", 6, 1, 8), pytest.param("cuda", 16, 4, 16, marks=pytest.mark.slow)],
)
def test_no_baseline_in_reach_is_faster(kind: str, gpus: int, nodes: int, batch: int) -> None:
    """Shared cores, and slow links between nodes: the formula's best layouts lose to a
    baseline's."""
    run = synthetic.run_file(batch=batch, gpus=gpus, nodes=nodes)
    profile = synthetic.tiny(run, kind=kind, tps=(1, 2))
    if kind == "cuda":
        profile = profile.model_copy(
            update={"links": profiles.links(8, 50, 4, 100, between_nodes=0.02)}
        )
    assert check_rivals((run, profile)) >= 1


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(jobs())
def test_no_baseline_in_reach_is_faster_in_any_job(job: tuple[RunFile, Profile]) -> None:
    check_rivals(job)

"""What is said where nothing fits, and that it is true."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from disttrain_cli.costs.memory import layout_memory
from disttrain_cli.planning.infeasible import infeasible, layout_that_fits
from disttrain_cli.planning.search import search
from disttrain_cli.planning.units import Cluster, groupings
from disttrain_cli.spec.profile import Profile
from tests.planning import synthetic
from tests.planning.test_search import small_profiles


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(small_profiles())
def test_something_fits_where_the_search_finds_something(case: tuple[Profile, Cluster]) -> None:
    profile, cluster = case
    found = search(groupings(profile, cluster, "disaggregated")[0], cluster).best
    layout = layout_that_fits(profile, cluster, "disaggregated")
    assert (layout is None) == (not found)
    if layout is not None:
        assert layout.gpus_used <= min(cluster.gpus, found[0].gpus)
        assert all(
            stage.peak_gib <= stage.limit_gib * (1 + 1e-9)
            for stage in layout_memory(profile, layout, cluster.memory_gib)
        )


@pytest.mark.slow
def test_each_remedy_is_true_and_about_the_smallest() -> None:
    run = synthetic.run_file(batch=240, gpus=32, nodes=4, precision="bf16")
    profile, cluster = synthetic.paper_72b(run), Cluster(32, 8, 80.0, 1, 240)
    error = infeasible(profile, cluster, "disaggregated")
    words = error.next_step.split()
    memory_gib, gpus = float(words[2]), int(words[words.index("GPUs") - 1])
    assert error.exit_code == 3 and "memory is short: stage " in error.why
    assert "activation_checkpointing" in error.next_step

    def fits(**changes: object) -> bool:
        changed = replace(cluster, **changes)
        return bool(search(groupings(profile, changed, "disaggregated")[0], changed).best)

    assert fits(memory_gib=memory_gib * 1.01) and not fits(memory_gib=memory_gib * 0.97)
    assert fits(gpus=gpus) and not fits(gpus=gpus - 8)
    assert fits(checkpointing="auto") and not fits()


def test_other_strategies_name_memory_too() -> None:
    run = synthetic.run_file(batch=12, gpus=6)
    profile, cluster = synthetic.tiny(run), Cluster(6, 6, 0.01, 1, 12)
    error = infeasible(profile, cluster, "megatron")
    needed = float(error.next_step.split()[2])
    assert needed > 0.01
    enough = layout_that_fits(profile, replace(cluster, memory_gib=needed * 1.01), "megatron")
    assert enough is not None and np.isclose(
        max(stage.peak_gib for stage in layout_memory(profile, enough, 1.0)), needed, rtol=0.05
    )

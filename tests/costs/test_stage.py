"""Stage times are the profile's polynomials, summed."""

import numpy as np
import pytest

from disttrain_cli.costs.stage import (
    backward_parts,
    forward_parts,
    overlap_helps,
    tp_degrees,
    unit_times,
)
from disttrain_cli.errors import SpecError
from disttrain_cli.spec.layer_costs import Polynomial
from disttrain_cli.spec.profile import ModuleProfile
from disttrain_cli.spec.shape import ParallelShape
from disttrain_cli.spec.work import Work
from tests.planning import synthetic


def layer_times_ms(module: ModuleProfile, tp: int, work: Work) -> tuple[np.ndarray, np.ndarray]:
    """Forward and backward time of every layer, straight from the polynomials."""
    times = [module.costs[kind].tp[str(tp)] for kind in module.layers]
    return np.array([time.forward_ms(work) for time in times]), np.array(
        [time.backward_ms(work) for time in times]
    )


def test_a_module_without_work_takes_no_time() -> None:
    profile = synthetic.tiny(synthetic.run_file())
    idle = profile.modules["image_generator"].model_copy(update={"work_per_sequence": Work()})
    profile = profile.model_copy(update={"modules": profile.modules | {"image_generator": idle}})
    times = unit_times(profile, ["image_generator"], ParallelShape())
    assert not np.any(times.forward_base) and not np.any(times.backward_slope)


def test_linear_times_agree_with_the_polynomials() -> None:
    profile = synthetic.paper_9b(synthetic.run_file())
    for tp in tp_degrees(profile, list(profile.modules)):
        times = unit_times(profile, list(profile.modules), ParallelShape(tp=tp))
        direct = [
            layer_times_ms(m, tp, m.work_per_sequence.scaled(5)) for m in profile.modules.values()
        ]
        np.testing.assert_allclose(
            times.forward_base + 5 * times.forward_slope, np.concatenate([f for f, _ in direct])
        )
        np.testing.assert_allclose(
            times.backward_base + 5 * times.backward_slope, np.concatenate([b for _, b in direct])
        )


def test_unprofiled_tp_is_named() -> None:
    profile = synthetic.tiny(synthetic.run_file())
    assert tp_degrees(profile, ["llm"]) == [1]
    with pytest.raises(SpecError, match="TP 2"):
        unit_times(profile, ["llm"], ParallelShape(tp=2))


def test_overlap_takes_off_each_pass_what_it_hides() -> None:
    cost = synthetic.layer(0.5, 1.0, 10**6, 1e5, (1, 2), 1e6, hidden=0.25)
    work = Work(1, 100, 0)

    def ms(parts: list[Polynomial]) -> float:
        return sum(part(work) for part in parts)

    for tp, takes in (("1", 1.0), ("2", 0.75)):
        shard = cost.tp[tp]
        whole = shard.forward_ms(work)
        assert ms(forward_parts(shard, True)) == pytest.approx(takes * whole)
        assert ms(forward_parts(shard)) == whole
        for args, plain in (
            (("trained", False), 2 * whole),
            (("trained", True), 3 * whole),
            (("passes", False), whole),
            (("passes", True), 2 * whole),
            (("still", True), 0.0),
        ):
            assert ms(backward_parts(shard, *args)) == pytest.approx(plain)
            assert ms(backward_parts(shard, *args, True)) == pytest.approx(takes * plain)
        later = 2 - 1.5 * (1 - takes)  # with the weights' part apart less is hidden
        assert ms(backward_parts(shard, "trained", False, True, True)) == pytest.approx(
            later * whole
        )


def test_a_profile_that_knows_of_no_overlap_hides_nothing() -> None:
    profile = synthetic.paper_9b(synthetic.run_file())
    names = list(profile.modules)
    plain, overlapped = (
        unit_times(profile, names, ParallelShape(tp=2), overlap=one) for one in (False, True)
    )
    for mine, theirs in zip(vars(plain).values(), vars(overlapped).values(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert not overlap_helps(profile, names, ParallelShape(tp=2), "tp")

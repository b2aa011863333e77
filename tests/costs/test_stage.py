"""Stage times are the profile's polynomials, summed."""

from __future__ import annotations

import numpy as np
import pytest

from disttrain_cli.costs.stage import tp_degrees, unit_times
from disttrain_cli.errors import SpecError
from disttrain_cli.spec.profile import ModuleProfile
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
    times = unit_times(profile, ["image_generator"], 1)
    assert not np.any(times.forward_base) and not np.any(times.backward_slope)


def test_linear_times_agree_with_the_polynomials() -> None:
    profile = synthetic.paper_9b(synthetic.run_file())
    for tp in tp_degrees(profile, list(profile.modules)):
        times = unit_times(profile, list(profile.modules), tp)
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
        unit_times(profile, ["llm"], 2)

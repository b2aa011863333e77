"""Stage times are the profile's polynomials, summed."""

from __future__ import annotations

import numpy as np
import pytest

from disttrain_cli.costs.stage import (
    layer_times_ms,
    module_time_ms,
    stage_time_ms,
    tp_degrees,
    unit_times,
)
from disttrain_cli.errors import SpecError
from disttrain_cli.spec.work import Work
from tests.planning import synthetic


def test_stage_sums_its_layers_over_modules() -> None:
    profile = synthetic.tiny(synthetic.run_file())
    names = list(profile.modules)
    works = {name: module.work_per_sequence.scaled(3) for name, module in profile.modules.items()}
    by_module = [layer_times_ms(profile.modules[name], 1, works[name]) for name in names]
    forward = np.concatenate([times[0] for times in by_module])
    backward = np.concatenate([times[1] for times in by_module])
    assert stage_time_ms(profile, names, 1, 3, 7, works) == pytest.approx((forward[3:7].sum(), backward[3:7].sum()))
    block = profile.modules["llm"].costs["block"].tp["1"].forward_ms
    assert forward[5] == block.base + block.per_token * works["llm"].tokens


def test_no_work_takes_no_time() -> None:
    module = synthetic.tiny(synthetic.run_file()).modules["image_generator"]
    assert module_time_ms(module, 1, Work()) == (0.0, 0.0)
    assert module_time_ms(module, 1, Work(1, 64, 4096))[0] > 0


def test_linear_times_agree_with_the_polynomials() -> None:
    profile = synthetic.paper_9b(synthetic.run_file())
    for tp in tp_degrees(profile, list(profile.modules)):
        times = unit_times(profile, list(profile.modules), tp)
        direct = [layer_times_ms(m, tp, m.work_per_sequence.scaled(5)) for m in profile.modules.values()]
        np.testing.assert_allclose(times.forward_base + 5 * times.forward_slope, np.concatenate([f for f, _ in direct]))
        np.testing.assert_allclose(times.backward_base + 5 * times.backward_slope,
                                   np.concatenate([b for _, b in direct]))


def test_unprofiled_tp_is_named() -> None:
    profile = synthetic.tiny(synthetic.run_file())
    assert tp_degrees(profile, ["llm"]) == [1]
    with pytest.raises(SpecError, match="TP 2"):
        unit_times(profile, ["llm"], 2)

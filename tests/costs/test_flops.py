"""FLOPs and MFU."""

import pytest

from disttrain_cli.costs.flops import mfu, module_flops
from disttrain_cli.errors import SpecError
from disttrain_cli.spec.work import Work
from tests.planning import synthetic


def test_flops_are_forward_plus_backward_of_every_layer() -> None:
    profile = synthetic.tiny(synthetic.run_file())
    work = Work(1, 64, 4096)
    per_token = 4e4 + 2e5 + 2 * 4e5
    assert module_flops(profile, "image_generator", work) == pytest.approx(3 * 64 * per_token)
    assert module_flops(profile, "llm", Work()) == 0.0


def test_cpu_peak_counts_once() -> None:
    run = synthetic.run_file()
    cpu, cuda = synthetic.tiny(run).device, synthetic.tiny(run, kind="cuda").device
    assert (
        mfu(1e11, 1.0, cpu, 4) == pytest.approx(4 * mfu(1e11, 1.0, cuda, 4)) == pytest.approx(0.2)
    )


def test_more_than_everything_is_an_error() -> None:
    with pytest.raises(SpecError, match="impossible"):
        mfu(1e15, 1.0, synthetic.tiny(synthetic.run_file()).device, 1)

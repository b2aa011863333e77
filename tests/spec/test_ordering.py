"""Which ordering `auto` stands for."""

import pytest

from tests.planning import synthetic


@pytest.mark.parametrize(
    "device, meant", [("cuda", "best"), ("analytic", "best"), ("cpu", "paper"), (None, "paper")]
)
def test_auto_searches_where_ranks_have_devices_of_their_own(device, meant):
    train = synthetic.run_file(batch=24, gpus=6).train
    assert train.model_copy(update={"ordering": "auto"}).ordering_on(device) == meant
    for name in ("none", "paper", "best"):
        assert train.model_copy(update={"ordering": name}).ordering_on(device) == name

"""How many descriptors a rank needs: the arithmetic, against ranks that count theirs, and a limit
that is too low."""

import json
import resource
from pathlib import Path

import pytest

from disttrain_cli.errors import DisttrainError
from disttrain_cli.runtime.launching import descriptors
from disttrain_cli.runtime.launching.descriptors import (
    checkpoint_peers,
    gloo_group,
    needed,
    raise_limit,
    rendezvous_server,
)
from disttrain_cli.runtime.launching.launch import launch


@pytest.mark.slow
def test_48_ranks_hold_as_many_descriptors_as_are_counted_for_them(tmp_path: Path) -> None:
    ranks = 48
    launch(
        ranks,
        "tests.runtime.launching.descriptors_worker:main",
        {"folder": str(tmp_path)},
        tmp_path / "logs",
        timeout_s=300,
    )
    for rank in range(ranks):
        told, first = json.loads((tmp_path / f"{rank}.json").read_text()), rank == 0
        assert told["connected"] - told["before"] == (rendezvous_server(ranks) if first else 0) + 1
        assert told["whole"] - told["connected"] == gloo_group(ranks)
        assert told["lazy"] - told["whole"] <= gloo_group(
            ranks, lazy=True, talks_to=checkpoint_peers(ranks, first)
        )


def test_1296_ranks_over_nccl_fit_a_usual_hard_limit_and_rank_0_no_usual_soft_one() -> None:
    def of(gloo: bool, first: bool) -> int:
        return needed(1296, (18, 4), gloo=gloo, first=first, serves=first)

    assert (
        of(gloo=False, first=False)
        < 1024
        < of(gloo=False, first=True)
        == 512 + 1299 + 2 + 2601
        < 65536
    )
    assert of(gloo=True, first=False) == 512 + 2 * 1299 + 21 + 7 + 2


def test_the_soft_limit_is_raised_and_a_hard_one_that_is_too_low_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = [(1024, 4096)]
    monkeypatch.setattr(descriptors.resource, "getrlimit", lambda what: limits[-1])
    monkeypatch.setattr(
        descriptors.resource, "setrlimit", lambda what, wanted: limits.append(wanted)
    )
    raise_limit(2000)
    assert limits == [(1024, 4096), (4096, 4096)]
    with pytest.raises(DisttrainError, match="Too few open files") as caught:
        raise_limit(4500)
    assert "needs up to 4,500, the hard limit is 4,096" in caught.value.why
    assert caught.value.next_step.endswith("ulimit -n 4500") and len(limits) == 2
    limits.append((1024, resource.RLIM_INFINITY))
    raise_limit(4500)
    assert limits[-1] == (4500, resource.RLIM_INFINITY)
    raise_limit(2000)
    assert limits[-1] == (4500, resource.RLIM_INFINITY)

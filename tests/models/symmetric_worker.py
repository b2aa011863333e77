"""The two ranks of the tests of symmetric memory: whether they agree to use it, and a few ways to
run a layer over it."""

import json
import os
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from disttrain_cli.models import symmetric
from disttrain_cli.models.group import Group
from disttrain_cli.runtime.launching.process import joined
from tests.models import overlapped_worker
from tests.models.overlapped_worker import toy_checks
from tests.models.parallel_worker import found
from tests.models.shared_memory import shared_in

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
HOW = [
    f"{rows} rows, {how}, with bias, torch.float32"
    for rows, how in ((12, "trained"), (12, "recomputed"), (12, "later"), (5, "trained"))
]


def ranks(payload: dict[str, Any]) -> None:
    """Write, by name of a check, what differs ("" where nothing does)."""
    with joined("cpu", 60.0):
        group = Group(dist.group.WORLD, 2, int(os.environ["RANK"]), overlap=True)
        checks = {"without": partial(_without, group)}
        with shared_in(Path(payload["out"])):
            checks |= {name: partial(check, group) for name, check in VOTES.items()}
            toys = toy_checks(Group(group.ranks, 2, group.rank, overlap=True, symmetric=True))
            checks |= {name: toys[name] for name in HOW}
            said = found(checks)
    Path(payload["out"], f"{group.rank}.json").write_text(json.dumps(said))


def before_fork(payload: dict[str, Any]) -> None:
    """Import the models' classes once."""
    overlapped_worker.before_fork(payload)


def _without(group: Group) -> None:
    """Where there is no such memory every rank knows, and whose error is told."""
    with patch.object(symmetric, "_exchange", side_effect=RuntimeError(f"no {group.rank}\nmore")):
        assert symmetric.refusal(group, CPU) == "symmetric memory: no 0"


def _everywhere(group: Group) -> None:
    assert symmetric.refusal(group, CPU) == ""


def _fails_on_one(group: Group) -> None:
    """Also after the memory was exchanged: a rank that cannot says so, and none goes ahead."""
    fails = RuntimeError("no peer access") if group.rank else None
    for step in ("_exchange", "_try_out"):
        with patch.object(symmetric, step, side_effect=fails):
            assert symmetric.refusal(group, CPU) == "symmetric memory: no peer access"


def _wrong_on_one(group: Group) -> None:
    """A rank whose memory holds other numbers than its peers wrote."""
    real = symmetric.scattered
    twice: Any = lambda *given: real(*given) * (1 + group.rank)  # noqa: E731
    with patch.object(symmetric, "scattered", twice):
        assert symmetric.refusal(group, CPU) == "symmetric memory: a GEMM gave a wrong result"


def _on_several_hosts(group: Group) -> None:
    with patch("socket.gethostname", lambda: f"host{group.rank}"):
        assert symmetric.refusal(group, CPU) == "the group is on the hosts host0, host1"


def _agreed(group: Group) -> None:
    """Only over NCCL, and the first rank says why not."""
    for refusal, backend, sends, said in (
        ("", "nccl", True, ""),
        ("no", "nccl", False, "no"),
        ("", "gloo", False, "messages go over gloo"),
        ("no", "fake", True, ""),
    ):
        with (
            patch.object(symmetric, "refusal", lambda *_, why=refusal: why),
            patch.object(dist, "get_backend", lambda _, name=backend: name),
            redirect_stdout(StringIO()) as printed,
        ):
            made = symmetric.agreed(group, CUDA)
        assert made is not None and made.symmetric == sends and made.overlap
        told = f"TP messages overlapped with GEMMs use a ring: {said}\n"
        assert printed.getvalue() == (told if said and not group.rank else "")
    waiting = Group(group.ranks, 2, group.rank)
    assert symmetric.agreed(waiting, CUDA) is waiting and symmetric.agreed(group, CPU) is group
    assert symmetric.agreed(None, CUDA) is None


VOTES: dict[str, Callable[[Group], None]] = {
    "everywhere": _everywhere,
    "fails on one": _fails_on_one,
    "wrong on one": _wrong_on_one,
    "on several hosts": _on_several_hosts,
    "agreed": _agreed,
}

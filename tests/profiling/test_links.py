"""Links: the fit of latency and bandwidth, and a real measurement between two processes."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from disttrain_cli.profiling.links import SIZES_BYTES, fit_link
from disttrain_cli.runtime.launching.launch import launch
from disttrain_cli.spec.profile import LinkProfile


def test_latency_and_bandwidth_are_found() -> None:
    gbps, latency_us = fit_link(SIZES_BYTES, [20e-6 + 8 * size / 10e9 for size in SIZES_BYTES])
    assert gbps == pytest.approx(10.0)
    assert latency_us == pytest.approx(20.0)


def test_a_link_whose_times_do_not_grow_has_a_finite_bandwidth() -> None:
    gbps, latency_us = fit_link(SIZES_BYTES, [50e-6] * len(SIZES_BYTES))
    assert 0.0 < gbps < float("inf")
    assert latency_us == pytest.approx(50.0)


def measure_in_rank(payload: dict[str, Any]) -> None:
    """Target of the test's processes."""
    from disttrain_cli.profiling.links import measure_links
    from disttrain_cli.runtime.launching.process import joined

    with joined("cpu", 60.0) as device:
        found = measure_links(device)
        Path(payload["folder"], f"{os.environ['RANK']}.json").write_text(found.model_dump_json())


def measure_as_hosts(payload: dict[str, Any]) -> None:
    """The same as if ranks 0 and 1 ran on one host and rank 2 on another."""
    import socket

    host = "one" if int(os.environ["RANK"]) < 2 else "two"
    socket.gethostname = lambda: host
    measure_in_rank(payload)


@pytest.mark.slow
def test_real_processes_agree_on_what_they_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    launch(
        2, "test_links:measure_in_rank", {"folder": str(tmp_path)}, tmp_path / "logs", timeout_s=120
    )
    found = [
        LinkProfile.model_validate(json.loads((tmp_path / f"{rank}.json").read_text()))
        for rank in (0, 1)
    ]
    assert found[0] == found[1]
    assert found[0].p2p_gbps > 0.0 and found[0].all_reduce_gbps > 0.0
    assert found[0].all_gather_gbps > 0.0 and found[0].reduce_scatter_gbps > 0.0
    assert found[0].p2p_us >= 0.0
    assert found[0].inter_node is None  # both run on this host


@pytest.mark.slow
def test_hosts_are_measured_inside_and_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    launch(
        3,
        "test_links:measure_as_hosts",
        {"folder": str(tmp_path)},
        tmp_path / "logs",
        timeout_s=120,
    )
    found = [
        LinkProfile.model_validate(json.loads((tmp_path / f"{rank}.json").read_text()))
        for rank in range(3)
    ]
    assert found[0] == found[1] == found[2]
    assert found[0].inter_node is not None and found[0].inter_node.all_reduce_gbps > 0.0
    assert found[0].of(False) != found[0].of(True)

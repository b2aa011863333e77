"""Profiles at other sizes of the cluster."""

from typing import Any

import pytest

from disttrain_cli.costs.hardware import analytic_device, link_profile
from disttrain_cli.errors import MismatchError
from disttrain_cli.planning.resize import resized
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.runfile import RunFile
from tests.planning import synthetic


def with_cluster(run: RunFile, **fields: Any) -> RunFile:
    value = run.model_dump(mode="json")
    links = fields.pop("links", {})
    value["cluster"] |= fields
    value["cluster"]["links"] |= links
    return RunFile.model_validate(value)


def profiled(kind: str, name: str, **provenance: str) -> tuple[RunFile, Profile]:
    """Two nodes of four, and their profile."""
    stated = f"analytic:{name}" if kind == "analytic" else "auto"
    run = with_cluster(synthetic.run_file(), nodes=2, gpus_per_node=4, device=stated)
    profile = synthetic.tiny(run, kind="cpu")
    device = profile.device.model_copy(update={"kind": kind, "name": name, "count": 8})
    links = link_profile(analytic_device("A800", run.cluster, profile.precision), run.cluster)
    return run, profile.model_copy(
        update={"device": device, "links": links, "provenance": provenance}
    )


def test_an_unchanged_cluster_has_the_same_profile() -> None:
    run, profile = profiled("analytic", "A800")
    assert resized(with_cluster(run, port=29501, interface="eth0"), profile) is profile


@pytest.mark.parametrize(
    "change",
    [
        {"nodes": 3},
        {"gpus_per_node": 8},
        {"nodes": 1, "gpus_per_node": 2},
        {"links": {"inter_node_gbps": 400.0}},
        {"memory_gib": 40.0},
    ],
)
def test_a_computed_profile_is_priced_at_any_size(change: dict[str, Any]) -> None:
    run, profile = profiled("analytic", "A800")
    now = with_cluster(run, **change)
    got = resized(now, profile)
    device = analytic_device("A800", now.cluster, profile.precision)
    assert got.modules == profile.modules
    assert got.device.count == now.cluster.gpus and got.device.memory_gib == device.memory_gib
    assert got.links == link_profile(device, now.cluster)
    assert got.fingerprints.cluster == now.cluster_fingerprint() and got.cluster == now.cluster


@pytest.mark.parametrize(
    ("kind", "name", "change", "named"),
    [
        ("analytic", "A800", {"peak_tflops": 300.0}, "cluster.peak_tflops: None"),
        ("analytic", "A800", {"links": {"intra_node_gbps": 10.0}}, "links.intra_node_gbps"),
        ("cuda", "A800", {"gpus_per_node": 8}, "cluster.gpus_per_node: 4 when"),
        ("cpu", "EPYC", {"gpus_per_node": 2}, "gpus_per_node"),
    ],
)
def test_what_costs_depend_on_asks_for_another_profile(
    kind: str, name: str, change: dict[str, Any], named: str
) -> None:
    run, profile = profiled(kind, name)
    with pytest.raises(MismatchError, match="another cluster") as caught:
        resized(with_cluster(run, **change), profile)
    assert named in caught.value.why and "disttrain_cli.profile" in str(caught.value.next_step)


def test_links_fitted_to_traces_stay_those_of_their_cluster() -> None:
    run, profile = profiled("analytic", "A800", calibrated="by runs/demo")
    with pytest.raises(MismatchError, match="another cluster"):
        resized(with_cluster(run, nodes=4), profile)

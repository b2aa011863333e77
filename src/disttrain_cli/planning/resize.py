"""Profile for another number of nodes or of GPUs per node, without measuring layers again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from disttrain_cli.calls import call
from disttrain_cli.costs.hardware import analytic_device, link_profile
from disttrain_cli.errors import MismatchError
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.runfile import RunFile

#: Fields of `cluster` on which no layer's cost depends. Measured layers come with the measured
#: links of the nodes, and on a CPU the ranks of a node share its cores. The device is compared by
#: `check.check_device`.
MEASURED = frozenset({"device", "cpu_node_cores", "memory_margin_gib"})
COMPUTED = MEASURED | {"nodes", "gpus_per_node", "memory_gib", "links.inter_node_gbps"}


def resized(run: RunFile, profile: Profile) -> Profile:
    """Return the profile for the run file's cluster; itself if the cluster is as profiled.

    Raises:
        MismatchError: something changed that the profile's costs depend on; the fields are named.
    """
    changed = dict(_changed(profile.cluster.figures(), run.cluster.figures()))
    if not changed:
        return profile
    free = set(COMPUTED if computed(profile) else MEASURED)
    update: dict[str, Any] = {
        "cluster": run.cluster,
        "fingerprints": profile.fingerprints.model_copy(
            update={"cluster": run.cluster_fingerprint()}
        ),
    }
    if computed(profile):
        device = analytic_device(profile.device.name, run.cluster, profile.precision)
        figures = {"count": run.cluster.gpus, "memory_gib": device.memory_gib}
        update["device"] = profile.device.model_copy(update=figures)
        update["links"] = link_profile(device, run.cluster)
        before = analytic_device(profile.device.name, profile.cluster, profile.precision)
        if device.link_gbytes_s != before.link_gbytes_s:  # affects the overlap of TP messages
            free.discard("links.inter_node_gbps")
    if refused := [name for name in changed if name not in free]:
        raise MismatchError(
            "The profile was made for another cluster",
            "\n".join(
                "cluster.{}: {} when it was profiled, {} now".format(name, *changed[name])
                for name in refused
            ),
            f"Profile again: {call('profile')}",
        )
    return profile.model_copy(update=update)


def computed(profile: Profile) -> bool:
    """Return True if no cost of the profile was measured, so it can be computed for other nodes."""
    return profile.device.kind == "analytic" and "calibrated" not in profile.provenance


def _changed(
    before: Mapping[str, Any], now: Mapping[str, Any], path: str = ""
) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield (path, (value before, value now)) of all fields that differ."""
    for name in {**before, **now}:
        old, new = before.get(name), now.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _changed(old, new, f"{path}{name}.")
        elif new != old:
            yield f"{path}{name}", (old, new)

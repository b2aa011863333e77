"""Hosts of the ranks that a cause blames; in a rehearsal, the nodes that processes represent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from disttrain_cli.analysis.result.verdicts import Place
from disttrain_cli.analysis.verdict import OF_HOSTS
from disttrain_cli.spec.trace import Job


def host_of(job: Job | None, rank: int, recorded: str | None) -> str | None:
    """Return the host of a rank in its trace, or in a rehearsal the node of its device."""
    if job is None or job.rehearsed is None or rank >= job.layout.gpus_used:
        return recorded
    return f"node {job.layout.devices[rank] // job.gpus_per_node}"


def blamed(
    job: Job | None, cause: str, places: Iterable[Place], where: Mapping[int, Place]
) -> list[int]:
    """Return the recorded ranks whose devices or hosts are slow, by a cause at some locations.

    A stage that is slow as a whole counts if its unit has others, whose layers are not: then its
    devices differ, not its layers.

    Args:
        job: the recorded job.
        cause: name of the cause.
        places: locations of the cause.
        where: location by rank.
    """
    if job is None:
        return []
    alone = {unit.name for unit in job.layout.units if unit.pp == 1}
    ranks = set[int]()
    for place in places:
        if cause in OF_HOSTS and place.rank is not None:
            ranks.add(place.rank)
        elif cause == "stage" and place.stage is not None and place.unit not in alone:
            ranks |= {
                rank
                for rank, one in where.items()
                if (one.unit, one.stage) == (place.unit, place.stage)
            }
    return sorted(ranks)

"""What each thing that hides waiting gains: alone, last, and all together, on the frozen costs.

Every row is a plan of its own, the best one that the planner finds with what the row names and
nothing else: `waiting.py` has the costs and the last but one row. "Nothing" is whole backwards,
reductions and gathers after the step, plain TP messages, the ordering `paper`, and layouts as the
search and the simulator rank them. A gain is the step without over the step with. Cached latents
are no part of "everything": they need a pass over the data ahead of training. Simulated; nothing
here was measured on a GPU. Deterministic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks.common import Tables, main
from benchmarks.waiting import CASES, costs
from disttrain_cli.planning.solve import cluster_of, solve_for
from disttrain_cli.planning.units import Cluster
from disttrain_cli.spec.profile import Profile

#: What of `Cluster` each of them is.
GAINS: dict[str, dict[str, Any]] = {
    "backwards in two parts": {"splits": True},
    "reductions and gathers overlapped with passes": {"overlaps": True},
    "TP messages overlapped with GEMMs": {"hides": True},
    "ordering best": {"ordering": "best"},
    "climbing to better neighbours": {"climbs": True},
}
NOTHING = {
    "splits": False,
    "overlaps": False,
    "hides": False,
    "ordering": "paper",
    "climbs": False,
}
VAE = "vae_encoder"
SMALL = ("mllm-9b", 96)
SMALL_BATCH = 96


def combinations() -> Iterator[tuple[str, list[str]]]:
    """Rows, and what each has."""
    yield "nothing", []
    yield from ((f"only {name}", [name]) for name in GAINS)
    yield from ((f"without {name}", [other for other in GAINS if other != name]) for name in GAINS)
    yield "everything", [*GAINS]


def step_s(profile: Profile, cluster: Cluster, names: list[str]) -> float:
    """The step planned with these of `GAINS`."""
    chosen = NOTHING | {key: value for name in names for key, value in GAINS[name].items()}
    return solve_for(profile, replace(cluster, **chosen)).predicted.iteration_s


def with_latents(profile: Profile) -> Profile:
    """The profile of training that reads latents: generators begin behind their VAE's encoder."""
    modules = dict(profile.modules)
    for name, module in modules.items():
        if module.layers[0] == VAE:
            modules[name] = module.model_copy(
                update={
                    "layers": module.layers[1:],
                    "cut_bytes_per_sequence": module.cut_bytes_per_sequence[1:],
                    "projector": [layer - 1 for layer in module.projector],
                    "frozen": [layer - 1 for layer in module.frozen if layer],
                }
            )
    return profile.model_copy(update={"modules": modules})


def steps_s(name: str, gpus: int, batch: int | None = None) -> dict[str, float]:
    """By row, the step of a model on so many devices; of its own batch if None."""
    run, profile = costs(name)
    cluster = cluster_of(run, profile, gpus)
    cluster = replace(cluster, batch=batch or cluster.batch)
    rows = {row: step_s(profile, cluster, names) for row, names in combinations()}
    cached_s = step_s(with_latents(profile), cluster, [*GAINS])
    return rows | {"everything and cached latents": cached_s}


def measure(small: bool = False) -> Tables:
    """The steps, and what each of `GAINS` gains."""
    cases, batch = ((SMALL,), SMALL_BATCH) if small else (CASES, None)
    found = {f"{name}, {gpus}": steps_s(name, gpus, batch) for name, gpus in cases}
    return {
        "Steps, s": [
            {"planned with": row, **{case: steps[row] for case, steps in found.items()}}
            for row in next(iter(found.values()))
        ],
        "Gains, alone and last": [
            {
                "": name,
                **{
                    f"{case}, {how}": steps[without] / steps[has]
                    for case, steps in found.items()
                    for how, without, has in (
                        ("alone", "nothing", f"only {name}"),
                        ("last", f"without {name}", "everything"),
                    )
                },
            }
            for name in GAINS
        ],
    }


if __name__ == "__main__":
    main(__doc__, measure)

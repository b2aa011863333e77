"""How much of a planned step is waiting: the paper's models on frozen costs, at 1,296 and 1,172
A800.

`benchmarks/costs/` holds run file and profile of each model as `disttrain init --preset` and
`disttrain profile` wrote them on 2026-11-23, and `weights.json.gz` what a profile of 2026-11-24, of
the same costs, says of backwards in two parts, and `hidden.json.gz` one of 2026-11-25 of TP
messages overlapped with GEMMs. They stay as they are, so that every change of this table is one of
planner and schedule. "No waiting" is the step that the plan's own kernels would take if no device
ever waited: compute time of all devices over their number, of messages what is not hidden. Beside
it the same time of the plans of 2026-11-23, whose messages all waited (`FROZEN_S`). Simulated;
nothing here was measured on a GPU. Deterministic but for the seconds of planning.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from benchmarks.common import Tables, main
from disttrain_cli.costs.hardware import RULES
from disttrain_cli.planning.solve import solve
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.runfile import RunFile

COSTS = Path(__file__).parent / "costs"
#: Seconds of a step without waiting on 1,296 devices, as planned when the costs were frozen.
FROZEN_S = {"mllm-9b": 4.07, "mllm-15b": 6.70, "mllm-72b": 35.9}
CASES = (("mllm-9b", 1296), ("mllm-15b", 1296), ("mllm-72b", 1296), ("mllm-72b", 1172))


def costs(name: str) -> tuple[RunFile, Profile]:
    """Run file and profile of a model as they were frozen."""
    frozen = _read(name)
    for module, kinds in _read("weights")[name].items():
        for kind, parts in kinds.items():
            cost = frozen["profile"]["modules"][module]["costs"][kind]
            cost["weight_flops"] = parts["weight_flops"]
            for tp, shard in parts["tp"].items():
                cost["tp"][tp] |= shard
    for module, kinds in _read("hidden")[name].items():
        for kind, by_tp in kinds.items():
            for tp, shard in by_tp.items():
                frozen["profile"]["modules"][module]["costs"][kind]["tp"][tp] |= shard
    frozen["profile"] |= {"cluster": frozen["run"]["cluster"]}
    return read(frozen)


def read(frozen: dict[str, Any]) -> tuple[RunFile, Profile]:
    """Run file and profile of a frozen document, with fingerprints and rules of now.

    Its costs stay those of the rules by which they were computed.
    """
    run, profile = (
        RunFile.model_validate(frozen["run"]),
        Profile.model_validate(frozen["profile"]),
    )
    provenance = profile.provenance | {"rules": RULES}
    prints = {"model": run.model_fingerprint(), "cluster": run.cluster_fingerprint()}
    return run, profile.model_copy(
        update={
            "fingerprints": profile.fingerprints.model_copy(update=prints),
            "provenance": provenance,
        }
    )


def _read(name: str) -> Any:
    return json.loads(gzip.decompress((COSTS / f"{name}.json.gz").read_bytes()))


def planned(name: str, gpus: int) -> dict[str, Any]:
    """The plan of a model on so many devices, and what of its step is waiting."""
    run, profile = costs(name)
    plan = solve(run, profile, gpus=gpus, top=0)
    predicted, megatron = plan.predicted, plan.baselines["megatron"]
    efficiency = predicted.orchestration_efficiency * plan.plan.gpus_used / gpus
    return {
        "model": name,
        "devices": gpus,
        "layout": plan.plan.describe(),
        "s per step": predicted.iteration_s,
        "no waiting, s": predicted.iteration_s * efficiency,
        "no waiting over step": efficiency,
        "frozen over step": FROZEN_S[name] * CASES[0][1] / gpus / predicted.iteration_s,
        "MFU %": 100 * predicted.mfu,
        "reduction after, s": predicted.exposed_reduce_s,
        "optimizer before, s": predicted.exposed_optimizer_s,
        "over the best megatron": megatron.iteration_s / predicted.iteration_s
        if megatron
        else None,
        "planned in s": plan.search.solve_s,
    }


def measure(small: bool = False) -> Tables:
    """One table."""
    return {"Waiting": [planned(*case) for case in (CASES[:1] if small else CASES)]}


if __name__ == "__main__":
    main(__doc__, measure)

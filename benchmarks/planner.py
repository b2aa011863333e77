"""The planner on synthetic costs: search time, gap to brute force, and how long saying that nothing
fits takes; and what `disttrain plan` takes as a whole, on frozen costs (`grouping`).

Costs: `tiny` (three small modules), and the shapes of the paper's 9B and 72B models with a batch of
1,920 sequences (tests/planning/synthetic.py: plausible, not measured). In the 72B cases memory
binds; `with CP` the LLM has heads, 32 or 64 (8 of keys and values), the encoder 16, and groups may
lie on several nodes. The paper reports 922 ms at
1,296 GPUs for its relaxed search, on its authors' machine, not ours: that ratio is a scale, not a
comparison. The ratios to brute force are measured in this run. One core; CPU time. Run from the
repository with the `dev` extra installed.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, get_args

import yaml

from benchmarks.common import Tables, alternate, main, paired_ratio
from benchmarks.grouping import frozen
from benchmarks.rules import Rule, by_rule
from disttrain_cli.planning.infeasible import infeasible
from disttrain_cli.planning.search import search
from disttrain_cli.planning.units import Cluster, Unit, groupings
from disttrain_cli.spec.layer_costs import Heads
from disttrain_cli.spec.plan import Strategy
from disttrain_cli.spec.profile import Profile
from tests.planning import synthetic
from tests.planning.test_search import brute_force

PAPER_MS, PAPER_GPUS, BATCH = 922.0, 1296, 1920
Case = tuple[Profile, Cluster]


def tiny(gpus: int, memory_gib: float = 4.0) -> Case:
    """Three small modules, batch 24."""
    return synthetic.tiny(synthetic.run_file(batch=24, gpus=gpus)), Cluster(
        gpus, gpus, memory_gib, 1, 24
    )


def paper(name: str, gpus: int, memory_gib: float = 80.0) -> Case:
    """The paper's 9B or 72B model on nodes of 8 GPUs, bf16."""
    run = synthetic.run_file(batch=BATCH, gpus=gpus, nodes=gpus // 8, precision="bf16")
    profile = {"9B": synthetic.paper_9b, "72B": synthetic.paper_72b}[name](run)
    return profile, Cluster(gpus, 8, memory_gib, 1, BATCH)


def sharing(case: Case) -> Case:
    """The case with an LLM that may share its sequences of 8,192 tokens, and an encoder that may
    share its patches (CP), inside nodes of the cluster or over several."""
    profile, cluster = case
    heads = Heads(64, 8, 128) if profile.modules["llm"].parameters > 3e10 else Heads(32, 32, 128)
    shared = synthetic.attending(profile, heads, 8192, Heads(16, 16, 80))
    several = cluster.gpus > cluster.gpus_per_node
    return synthetic.on_nodes(shared, cluster.gpus_per_node) if several else shared, cluster


def units_of(case: Case) -> list[Unit]:
    """Fresh units: they keep what was computed from them."""
    return groupings(*case, "disaggregated")[0]


def searched(name: str, case: Case, rounds: int) -> dict[str, Any]:
    """Search for the best plan, with activations kept or recomputed, whichever is faster, too."""
    either = case[0], replace(case[1], checkpointing="auto")
    seconds = alternate(
        {
            "kept": lambda: search(units_of(case), case[1]),
            "either": lambda: search(units_of(either), either[1]),
        },
        rounds,
    )
    ms = {what: 1e3 * median(values) for what, values in seconds.items()}
    ratio = f"{PAPER_MS / ms['kept']:.1f}" if case[1].gpus == PAPER_GPUS else "–"
    return {
        "costs": name,
        "GPUs": case[1].gpus,
        "search ms": ms["kept"],
        "with checkpointing auto, ms": ms["either"],
        "paper's 922 ms (their machine) over it": ratio,
    }


def compared(name: str, case: Case, rounds: int) -> dict[str, Any]:
    """The best plan of every strategy and rule by the formula."""
    strategies: tuple[Strategy, ...] = get_args(Strategy)
    rules: tuple[Rule, ...] = get_args(Rule)
    seconds = alternate(
        {
            each: lambda each=each: [  # type: ignore[misc]
                search(units, case[1]) for units in groupings(*case, each)
            ]
            for each in strategies
        }
        | {each: lambda each=each: by_rule(*case, each) for each in rules},  # type: ignore[misc]
        rounds,
    )
    return {
        "costs": name,
        "GPUs": case[1].gpus,
        **{f"{each} ms": 1e3 * median(values) for each, values in seconds.items()},
    }


def nothing_fits(name: str, case: Case, rounds: int) -> dict[str, Any]:
    """A search that finds nothing, and the explanation with its remedies."""
    assert not search(units_of(case), case[1]).best
    seconds = alternate(
        {
            "search": lambda: search(units_of(case), case[1]),
            "explanation": lambda: infeasible(*case, "disaggregated"),
        },
        rounds,
    )
    error = infeasible(*case, "disaggregated")
    return {
        "costs": name,
        "GPUs": case[1].gpus,
        "memory GiB": case[1].memory_gib,
        **{f"{what} ms": 1e3 * median(values) for what, values in seconds.items()},
        "remedies": error.next_step,
    }


def gap(name: str, case: Case, rounds: int) -> dict[str, Any]:
    """Search against trying every layout and every split of layers."""
    units, cluster = units_of(case), case[1]
    best_ms, least_ms = search(units, cluster).best[0].total_ms, brute_force(units, cluster)
    seconds = alternate(
        {
            "search": lambda: search(units_of(case), cluster),
            "brute force": lambda: brute_force(units_of(case), cluster),
        },
        rounds,
    )
    return {
        "costs": name,
        "GPUs": cluster.gpus,
        "memory GiB": cluster.memory_gib,
        "gap": f"{best_ms / least_ms - 1:.1e}",
        "brute force time over search": paired_ratio(seconds["brute force"], seconds["search"]),
    }


def whole_command(model: str, device: str, gpus: int) -> dict[str, Any]:
    """CPU seconds of one `disttrain plan`, with starting Python and everything that it prints."""
    run, profile = frozen(model, device)
    with TemporaryDirectory() as folder:
        run_file, costs = Path(folder) / "disttrain.yaml", Path(folder) / "profile.json"
        run_file.write_text(yaml.safe_dump(run.model_dump(mode="json", exclude_unset=True)))
        costs.write_text(profile.model_dump_json())
        command = [sys.executable, "-m", "disttrain_cli", "plan", str(run_file), "--json"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [*command, "--profile", str(costs), "--gpus", str(gpus)],
            check=True,
            capture_output=True,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"model": model, "device": device, "GPUs": gpus, "CPU s": cpu_s}


def measure(small: bool = False) -> Tables:
    """Five tables."""
    rounds = 1 if small else 5
    cases = [("tiny", tiny(6))]
    if not small:
        cases += [
            (name, paper(name, gpus)) for name in ("9B", "72B") for gpus in (96, PAPER_GPUS, 16384)
        ]
        cases += [(f"{name}, with CP", sharing(paper(name, PAPER_GPUS))) for name in ("9B", "72B")]
    full = [("tiny", tiny(3, memory_gib=0.01))]
    if not small:
        full += [
            ("72B", paper("72B", 32)),
            ("72B", paper("72B", PAPER_GPUS, memory_gib=10.0)),
            ("9B", paper("9B", PAPER_GPUS, memory_gib=1.0)),
        ]
    commands = [("qwen2.5-vl-7b", "H100", 2)]
    if not small:
        commands += [("qwen2.5-vl-7b", "H100", gpus) for gpus in (8, 64, 512, 16384)]
        commands += [("mllm-9b", "A800", gpus) for gpus in (20, PAPER_GPUS, 16384)]
        commands += [("mllm-72b", "A800", PAPER_GPUS)]
    # 0.02 GiB binds
    gaps = [tiny(3)] if small else [tiny(5), tiny(6), tiny(6, memory_gib=0.02), tiny(8)]
    return {
        "Exact search, best plan only": [searched(name, case, rounds) for name, case in cases],
        "Every strategy": [
            compared(name, case, rounds) for name, case in cases if case[1].gpus < 16384
        ],
        "Nothing fits": [nothing_fits(name, case, rounds) for name, case in full],
        "Gap to brute force, batch 24": [
            *(gap("tiny", case, rounds) for case in gaps),
            gap("tiny, with CP", sharing(gaps[-1]), rounds),
        ],
        "The whole command": [whole_command(*case) for case in commands],
    }


if __name__ == "__main__":
    main(__doc__, measure)

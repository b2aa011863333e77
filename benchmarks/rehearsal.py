"""Rehearsals measured: each part is one command, run as a user runs it (`disttrain init`,
`profile`, `plan`, `train`).

    python -m benchmarks.rehearsal accuracy   simulator's iteration time against the rehearsed one
    python -m benchmarks.rehearsal grouped    the same for units of several modules
    python -m benchmarks.rehearsal gain       disaggregated over monolithic, rehearsed and
                                              simulated, alternating
    python -m benchmarks.rehearsal ordering   the policy best over none on the same plan,
                                              alternating
    python -m benchmarks.rehearsal faults     rehearsed slowdown beside the simulator's
    python -m benchmarks.rehearsal overhead   processes at once, lateness, CPU time per operation,
                                              memory

Costs are those of an A800 in the hardware catalogue, data the distribution `laion-like`; processes,
messages and schedules are real. Simulated is the very steps that were rehearsed: their orderings,
processes and faults. Every rehearsal's first step is left out. With --out FILE every rehearsal's
row is appended to FILE as it comes, and rows that are there already are not rehearsed again.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any, cast, get_args

import yaml

from benchmarks.common import Tables, table
from benchmarks.paper import LLM_PP, megatron_lm, one_unit, shapes
from benchmarks.rules import Rule, planned_by
from benchmarks.strategies import disttrain
from disttrain_cli.planning.solve import cluster_of
from disttrain_cli.spec.files import fingerprint
from disttrain_cli.spec.plan import Plan, Search, read_plan, write_plan
from disttrain_cli.spec.profile import read_profile
from disttrain_cli.spec.runfile import read_run

Row = dict[str, Any]
#: Gives the row of a key, which is made, and kept, where there is none yet.
Keep = Callable[[Row, Callable[[], Row]], Row]


@dataclass(frozen=True)
class Case:
    """A layout that is planned: of a preset on so many devices, with `merge` times the microbatch
    that the plan has."""

    preset: str
    gpus: int
    batch: int
    strategy: str = "disaggregated"
    merge: int = 1


RUN_FILE = "disttrain.yaml"
SMALL, SMALL_STEPS = Case("mllm-9b", 8, 16), 2
CASES = (
    Case("mllm-9b", 24, 48),
    Case("mllm-9b", 24, 24, "paper"),
    Case("mllm-9b", 48, 96, "megatron"),
    Case("mllm-9b", 96, 192, "distmm"),
    Case("mllm-9b", 192, 288),
    Case("mllm-15b", 24, 40, "megatron"),
    Case("mllm-15b", 48, 64, "distmm"),
    Case("mllm-15b", 96, 144, merge=2),
    Case("mllm-15b", 192, 288, "paper"),
    Case("mllm-72b", 48, 40),
    Case("mllm-72b", 96, 64, "megatron"),
    Case("mllm-72b", 192, 144),
)
#: Plans that put several modules into a unit, of the default strategy or of the best co-located
#: layout.
GROUPED = (
    Case("qwen2.5-vl-7b", 16, 64, "auto"),
    Case("internvl3-8b", 32, 128, "megatron"),
    Case("qwen3-vl-8b", 24, 96, "auto"),
    Case("qwen3-vl-32b", 32, 64, "auto"),
    Case("mllm-9b", 32, 64, "auto"),
    Case("mllm-15b", 48, 96, "megatron"),
)
GROUPED_STEP_S = 40.0  # that a step takes here, so that a busy host keeps up
DATA = {
    "few images": (2, 2),
    "many images": (16, 16),
    "images generated only": (0, 4),
}  # read, generated per sequence
ACCURACY_STEPS, GAIN_STEPS, FAULT_STEPS = 3, 2, 3  # the first of each is left out
GAIN_GPUS, GAIN_BATCH, PAIRS, PAIRS_OVER_BEST = (
    192,
    288,
    5,
    1,
)  # 1,920 sequences on 1,296 devices are 284 on 192
#: The same for all plans of a pair: what the host adds to a step then weighs the same in all of
#: them.
GAIN_TIME_SCALE = 0.6
OURS, PUBLISHED, ONE_UNIT = "disaggregated", "Megatron-LM of the paper", "one unit"
PAPER_GAIN = {
    "mllm-9b": "1.7-2.2",
    "mllm-15b": "1.7-2.2",
    "mllm-72b": "1.3",
}  # over Megatron-LM of the paper
ORDERED, ORDERING_PAIRS = {"mllm-9b": (OURS, ONE_UNIT), "mllm-72b": (OURS, PUBLISHED)}, 5
FAULT_ROUNDS = 2
FAULTS: dict[str, Row | None] = {
    "none": None,
    "rank": {"slow": "rank", "unit": "llm", "stage": 0, "replica": 0, "factor": 1.5},
    "link": {"slow": "link", "unit": "llm", "stage": 0, "factor": 30.0},
    "stage": {"slow": "stage", "unit": "llm", "stage": 0, "factor": 1.2},
    "worker": {"slow": "worker", "unit": "image_encoder", "replica": 0, "factor": 50.0},
}
OVERHEAD_STEPS = (2, 6)  # the difference of two rehearsals is what steps cost, without their start
SAMPLED_EVERY_S = 1.0


class Prepared:
    """A profiled run of a case; made when its first plan is asked for, so not where all rows are
    kept already."""

    def __init__(self, folder: Path, case: Case) -> None:
        self.folder, self.case = folder, case

    def plan(self, name: str) -> Path:
        """The plan of a strategy, the one that is like the paper's Megatron-LM, or the best in one
        unit."""
        path = self.folder / f"{name.replace(' ', '-')}.yaml"
        if not (self.folder / RUN_FILE).is_file():
            disttrain(self.folder, "init", ".", "--preset", self.case.preset)
            edit(
                self.folder,
                cluster={"nodes": -(-self.case.gpus // 8)},
                train={"global_batch_size": self.case.batch},
            )
            disttrain(self.folder, "profile")
        if name in (PUBLISHED, ONE_UNIT, *get_args(Rule)) and not path.is_file():
            write_plan(path, written(self.folder, self.case.preset, name))
        elif not path.is_file():
            disttrain(self.folder, "plan", "--strategy", name, "--top", 0, "--out", path)
            write_plan(path, merged(read_plan(path), self.case.merge))
        return path


@contextmanager
def opened(case: Case) -> Iterator[Prepared]:
    """A case in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        yield Prepared(Path(folder), case)


def merged(plan: Plan, times: int) -> Plan:
    """A plan with microbatches of so many times the sequences."""
    layout = plan.plan.model_copy(
        update={
            "microbatch_size": plan.plan.microbatch_size * times,
            "microbatches": plan.plan.microbatches // times,
        }
    )
    layout.check_slots("llm")
    return plan.model_copy(update={"plan": layout})


def written(folder: Path, preset: str, name: str) -> Plan:
    """A plan of a profiled run that no command makes: like the paper's Megatron-LM, in one unit,
    or by a rule."""
    run = read_run(folder / RUN_FILE)
    profile = read_profile(run.dir.profile)
    cluster = cluster_of(run.file, profile)
    if name == PUBLISHED:
        found = megatron_lm(profile, cluster, LLM_PP[preset])
    elif name == ONE_UNIT:
        found = one_unit(profile, cluster)
    else:
        plain = replace(cluster, splits=False, overlaps=False, hides=False)
        found = planned_by(profile, plain, cast(Rule, name))
    if found is None:
        raise SystemExit(f"{name} does not fit {preset} on this cluster.")
    prints = profile.fingerprints.model_copy(update={"profile": fingerprint(profile)})
    return Plan(
        fingerprints=prints,
        plan=found[0],
        predicted=found[1],
        search=Search(solve_s=0.0, candidates=1, exact=False),
    )


def edit(folder: Path, **sections: Row) -> None:
    """Change fields of sections of the run file in `folder`."""
    path = folder / RUN_FILE
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    for name, fields in sections.items():
        document[name] = document.get(name, {}) | fields
    path.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")


def rehearsed(
    run: Prepared,
    name: str,
    steps: int,
    *,
    seed: int = 0,
    fault: Row | None = None,
    images: tuple[float, float] | None = None,
    time_scale: float | str = "auto",
    ordering: str | None = None,
    step_s: float | None = None,
) -> Row:
    """Rehearse a plan: mean iteration times without the first step, and how the rehearsal went.

    Args:
        name: of the plan (`Prepared.plan`).
        ordering: None = `paper`, but samples come unordered to the paper's Megatron-LM.
        images: mean images read and generated per sequence, instead of those of the data it was
            planned for.
        step_s: seconds that a step takes here, in the place of a time scale.
    """
    path = run.plan(name)
    plan = read_plan(path)
    layout, predicted = plan.plan, plan.predicted
    own, other = read_run(run.folder / RUN_FILE).file.data.distribution, None
    if images is not None and own is not None:
        counts = {"images_per_sequence": images[0], "generated_per_sequence": images[1]}
        other = own.model_copy(update=counts).model_dump()
    edit(
        run.folder,
        train={"seed": seed, "ordering": ordering or ("none" if name == PUBLISHED else "paper")},
        rehearse={
            "faults": [fault] if fault else [],
            "distribution": other,
            "time_scale": step_s / predicted.iteration_s if step_s else time_scale,
        },
    )
    document = disttrain(run.folder, "train", "--rehearse", "--plan", path, "--steps", steps)
    return {
        "layout": shapes(layout),
        "M": layout.microbatch_size,
        "slots": layout.microbatches,
        "devices": layout.gpus_used,
        "rehearsed_s": _mean_s(document["steps"]),
        "simulated_s": _mean_s(document["simulated"]),
        "planned_s": predicted.iteration_s,
        "mfu": predicted.mfu,
        "efficiency": predicted.orchestration_efficiency,
        "operations": document["operations_emulated"],
        **{name: document[name] for name in ("processes", "time_scale", "gpus_per_process")},
        **{f"late_{name}_ms": document["late_ms"][name] for name in ("mean", "p99", "max")},
    }


def _mean_s(steps: list[Row]) -> float:
    return mean(step["iteration_s"] for step in steps[1:])


def accuracy(small: bool, keep: Keep) -> Tables:
    rows: list[Row] = []
    data = dict([*DATA.items()][:1]) if small else DATA
    steps = SMALL_STEPS if small else ACCURACY_STEPS
    for case in (SMALL,) if small else CASES:
        with opened(case) as run:
            for name, images in data.items():
                rows.append(
                    keep(
                        {"part": "accuracy", **asdict(case), "data": name},
                        partial(rehearsed, run, case.strategy, steps, images=images),
                    )
                )
    return _apart(rows, [*data])


def grouped(small: bool, keep: Keep) -> Tables:
    rows: list[Row] = []
    for case in (replace(SMALL, strategy="megatron"),) if small else GROUPED:
        with opened(case) as run:
            rows.append(
                keep(
                    {"part": "grouped", **asdict(case), "data": "as planned for"},
                    partial(
                        rehearsed,
                        run,
                        case.strategy,
                        SMALL_STEPS if small else ACCURACY_STEPS,
                        ordering="best",
                        step_s=GROUPED_STEP_S,
                    ),
                )
            )
    return _apart(rows, [])


def _apart(rows: list[Row], data: list[str]) -> Tables:
    """Rows of rehearsals, and how far simulator and rehearsal are apart by kind of `data`."""
    return {
        "Iteration time, simulated beside rehearsed": [
            {
                "model": row["preset"],
                "strategy": row["strategy"],
                "layout": row["layout"],
                "M": row["M"],
                "batch": row["batch"],
                "devices": row["devices"],
                "data": row["data"],
                "processes": row["processes"],
                "rehearsed s": row["rehearsed_s"],
                "simulated s": row["simulated_s"],
                "off %": _off_pct(row),
                "late ms, mean": row["late_mean_ms"],
            }
            for row in rows
        ],
        "How far the simulator is off, first step excluded": [
            {"data": name, "rehearsals": len(own), "median %": median(own), "worst %": max(own)}
            for name, own in [
                (name, [abs(_off_pct(row)) for row in rows if name in ("all", row["data"])])
                for name in [*data, "all"]
            ]
        ],
    }


def _off_pct(row: Row) -> float:
    return 100 * (row["simulated_s"] / row["rehearsed_s"] - 1)


def gain(small: bool, keep: Keep) -> Tables:
    results, parts = [], []
    for preset in [*LLM_PP][: 1 if small else None]:
        case = Case(preset, 24 if small else GAIN_GPUS, 24 if small else GAIN_BATCH)
        rows: dict[str, list[Row]] = {name: [] for name in (OURS, "megatron", PUBLISHED)}
        with opened(case) as run:
            for pair in range(1 if small else PAIRS):
                for name, own in rows.items():
                    if name == "megatron" and pair >= PAIRS_OVER_BEST:
                        continue
                    own.append(
                        keep(
                            {"part": "gain", **asdict(case), "plan": name, "pair": pair},
                            partial(
                                rehearsed,
                                run,
                                name,
                                GAIN_STEPS,
                                seed=pair,
                                time_scale=GAIN_TIME_SCALE,
                            ),
                        )
                    )
        for name in ("megatron", PUBLISHED):
            results.append(_gain(preset, name, rows[OURS], rows[name]))
            parts.append(_arithmetic(preset, name, rows[OURS][0], rows[name][0]))
    return {
        "Throughput of disaggregated over monolithic, same devices, data and batch": results,
        "What the planned gain is made of, disaggregated over monolithic": parts,
    }


def ordering(small: bool, keep: Keep) -> Tables:
    results = []
    for preset in [*ORDERED][: 1 if small else None]:
        case = Case(preset, 24 if small else GAIN_GPUS, 24 if small else GAIN_BATCH)
        with opened(case) as run:
            for name in ORDERED[preset][: 1 if small else None]:
                rows: dict[str, list[Row]] = {"none": [], "best": []}
                for pair in range(1 if small else ORDERING_PAIRS):
                    for policy, own in rows.items():
                        own.append(
                            keep(
                                {
                                    "part": "ordering",
                                    **asdict(case),
                                    "plan": name,
                                    "ordering": policy,
                                    "pair": pair,
                                },
                                partial(
                                    rehearsed,
                                    run,
                                    name,
                                    GAIN_STEPS,
                                    seed=pair,
                                    ordering=policy,
                                    time_scale=GAIN_TIME_SCALE,
                                ),
                            )
                        )
                results.append(_over_none(preset, name, rows["none"], rows["best"]))
    return {"Throughput of the ordering best over none, same plan, data and batch": results}


def _over_none(preset: str, name: str, none: list[Row], best: list[Row]) -> Row:
    over = {
        what: [other[what] / own[what] for own, other in zip(best, none, strict=True)]
        for what in ("rehearsed_s", "simulated_s")
    }
    return {
        "model": preset,
        "plan": name,
        "layout": none[0]["layout"],
        "slots": none[0]["slots"],
        "processes": none[0]["processes"],
        "pairs": len(none),
        "gain rehearsed": median(over["rehearsed_s"]),
        "each": " ".join(f"{value:.3f}" for value in over["rehearsed_s"]),
        "gain simulated": median(over["simulated_s"]),
        "paper's": "1.03-1.11",
    }


def _gain(preset: str, name: str, ours: list[Row], theirs: list[Row]) -> Row:
    over = {
        what: [other[what] / own[what] for own, other in zip(ours, theirs, strict=False)]
        for what in ("rehearsed_s", "simulated_s")
    }
    off = [
        100 * (seen / told - 1)
        for seen, told in zip(over["rehearsed_s"], over["simulated_s"], strict=True)
    ]
    return {
        "model": preset,
        "layout": ours[0]["layout"],
        "over": name,
        "its layout": theirs[0]["layout"],
        "pairs": len(theirs),
        "gain rehearsed": median(over["rehearsed_s"]),
        "each": " ".join(f"{value:.3f}" for value in over["rehearsed_s"]),
        "gain simulated": median(over["simulated_s"]),
        "off %, median": median(off),
        "off %, worst": max(off, key=abs),
        "gain planned": theirs[0]["planned_s"] / ours[0]["planned_s"],
        "paper's": PAPER_GAIN[preset] if name == PUBLISHED else "",
    }


def _arithmetic(preset: str, name: str, ours: Row, theirs: Row) -> Row:
    """Gain = devices used × share of their time in which they compute × MFU while they do, each
    ours over theirs."""
    used, computing = (ours[what] / theirs[what] for what in ("devices", "efficiency"))
    kernels = ours["mfu"] / ours["efficiency"] / (theirs["mfu"] / theirs["efficiency"])
    return {
        "model": preset,
        "over": name,
        "devices used": used,
        "time computing": computing,
        "MFU computing": kernels,
        "product": used * computing * kernels,
        "gain planned": theirs["planned_s"] / ours["planned_s"],
        "MFU %": 100 * ours["mfu"],
        "its MFU %": 100 * theirs["mfu"],
    }


def faults(small: bool, keep: Keep) -> Tables:
    case, rounds, steps = (
        (SMALL, 1, SMALL_STEPS) if small else (Case("mllm-9b", 24, 48), FAULT_ROUNDS, FAULT_STEPS)
    )
    chosen = {name: FAULTS[name] for name in ("none", "stage")} if small else FAULTS
    rows: dict[str, list[Row]] = {name: [] for name in chosen}
    with opened(case) as run:
        for number in range(rounds):
            for name, fault in chosen.items():
                rows[name].append(
                    keep(
                        {"part": "faults", **asdict(case), "fault": fault, "round": number},
                        partial(rehearsed, run, case.strategy, steps, seed=number, fault=fault),
                    )
                )
    return {
        f"Slowdown by a fault, {case.preset} on {case.gpus} devices, {rows['none'][0]['layout']}": [
            _slowdown(name, fault, rows["none"], rows[name])
            for name, fault in chosen.items()
            if fault is not None
        ]
    }


def _slowdown(name: str, fault: Row, without: list[Row], own: list[Row]) -> Row:
    times = {
        what: [row[what] / other[what] for row, other in zip(own, without, strict=True)]
        for what in ("rehearsed_s", "simulated_s")
    }
    seen, told = (median(values) for values in times.values())
    where = f"{fault['unit']} stage {fault.get('stage', 0)}" + (
        f" replica {fault['replica']}" if "replica" in fault else ""
    )
    return {
        "slow": name,
        "where": where,
        "factor": fault["factor"],
        "slowdown rehearsed": seen,
        "each": " ".join(f"{value:.3f}" for value in times["rehearsed_s"]),
        "slowdown simulated": told,
        "off %": 100 * (seen / told - 1),
    }


def overhead(small: bool, keep: Keep) -> Tables:
    case, both = (
        (SMALL, (2, 3)) if small else (Case("mllm-9b", GAIN_GPUS, GAIN_BATCH), OVERHEAD_STEPS)
    )
    with opened(case) as run:
        few, many = (
            keep(
                {"part": "overhead", **asdict(case), "steps": steps},
                partial(watched, run, case.strategy, steps),
            )
            for steps in both
        )
    operations = many["operations"] - few["operations"]
    return {
        "What a rehearsal costs": [
            {
                "layout": many["layout"],
                "devices": many["devices"],
                "processes": many["processes"],
                "devices per process": many["gpus_per_process"],
                "time scale": many["time_scale"],
                "operations": operations,
                "late ms, mean": many["late_mean_ms"],
                "p99": many["late_p99_ms"],
                "max": many["late_max_ms"],
                "CPU ms per operation": 1e3 * (many["cpu_s"] - few["cpu_s"]) / operations,
                "CPU s to start": few["cpu_s"],
                "peak GiB of all processes": many["peak_gib"],
            }
        ]
    }


def watched(run: Prepared, name: str, steps: int) -> Row:
    """`rehearsed`, with the CPU seconds and the peak memory (each shared page once) of all
    processes it starts."""
    import psutil

    done, peak = threading.Event(), [0.0]

    def sample() -> None:
        while not done.wait(SAMPLED_EVERY_S):
            total = 0
            for process in psutil.Process().children(recursive=True):
                try:
                    total += process.memory_full_info().pss
                except psutil.Error:  # it has ended
                    continue
            peak[0] = max(peak[0], total / 2**30)

    def cpu_s() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    run.plan(name)
    thread, before = threading.Thread(target=sample, daemon=True), cpu_s()
    thread.start()
    try:
        row = rehearsed(run, name, steps)
    finally:
        done.set()
        thread.join()
    return row | {"cpu_s": cpu_s() - before, "peak_gib": peak[0]}


def keeper(path: Path | None) -> Keep:
    """Rows by key, from and to a file of JSON lines; without a file, made anew."""
    kept: list[Row] = []
    if path is not None and path.is_file():
        kept = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    def keep(key: Row, make: Callable[[], Row]) -> Row:
        for row in kept:
            if all(name in row and row[name] == value for name, value in key.items()):
                return row
        row = key | make()
        print(
            ", ".join(f"{name} {value}" for name, value in key.items())
            + f": rehearsed {row['rehearsed_s']:.3f} s, simulated {row['simulated_s']:.3f} s",
            file=sys.stderr,
            flush=True,
        )
        if path is not None:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        return row

    return keep


PARTS: dict[str, Callable[[bool, Keep], Tables]] = {
    "accuracy": accuracy,
    "grouped": grouped,
    "gain": gain,
    "ordering": ordering,
    "faults": faults,
    "overhead": overhead,
}


def command(doc: str | None, parts: dict[str, Callable[[bool, Keep], Tables]]) -> None:
    """Command line of benchmarks that rehearse: one part, its rows kept if wanted."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=[*parts])
    parser.add_argument(
        "--small", action="store_true", help="smallest form: shows that it runs, measures little"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="keep every rehearsal's row here (JSON lines)"
    )
    options = parser.parse_args()
    print(
        "\n\n".join(
            table(title, rows)
            for title, rows in parts[options.part](options.small, keeper(options.out)).items()
        )
    )


if __name__ == "__main__":
    command(__doc__, PARTS)

"""Bytes that ranks of units with several modules send in a step on a fake CUDA device, against
those that a plan counts for the same work."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml

from disttrain_cli.costs.layout import crossings, stages_of
from disttrain_cli.costs.links import ring_bytes
from disttrain_cli.costs.memory import GIB
from disttrain_cli.planning.traffic import _context_parallel, _over_replicas, _tensor_parallel
from disttrain_cli.profiling.analytic import analytic_profile
from disttrain_cli.runtime.dryrun.stages import StageSeen, slots_seen
from disttrain_cli.runtime.dryrun.worst import worst_slot
from disttrain_cli.spec.layer_costs import combine
from disttrain_cli.spec.plan import Layout, Plan, UnitPlan
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.runfile import read_run
from disttrain_cli.spec.stage_graph import stage_graph
from tests.runtime.dryrun.on_fake_cuda import on_fake_cuda
from tests.runtime.dryrun.test_stage_peaks import MODULES, run_file
from tests.runtime.factory import plan_of

TWO, THREE = ("eye", "llm"), ("eye", "llm", "brush")
MICROBATCH, SLOTS = 2, 4
#: By name, the modules of the one unit, its layers per stage, and what else it has.
CASES: dict[str, tuple[tuple[str, ...], list[int], dict[str, Any]]] = {
    "TP": (TWO, [10], {"tp": 2}),
    "TP overlapped, recomputed": (
        TWO,
        [4, 6],
        {"tp": 2, "tp_overlap": True, "checkpointing": True},
    ),
    "TP, encoder whole": (TWO, [6, 4], {"tp": 2, "tp_overlap": True, "module_tp": {"eye": 1}}),
    "CP": (TWO, [7, 3], {"cp": 2}),
    "TP, CP with gathered keys": (TWO, [10], {"tp": 2, "cp": 2, "cp_comm_type": "all_gather"}),
    "TP, encoder and generator whole": (
        THREE,
        [23],
        {"tp": 4, "tp_overlap": True, "module_tp": {"eye": 1, "brush": 1}},
    ),
}
#: By dispatched name of a collective: in a ring, and by beginnings of communicators' names.
COLLECTIVES = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
}
GROUPS = {"TP group": "tensor_parallel", "CP group": "context_parallel"}


def executed(cases: list[list[str]]) -> list[list[dict[str, float]]]:
    """By case (paths of run, plan and profile) and stage, bytes that its first rank sends in a
    step, by kind."""
    return [_executed(*map(Path, case)) for case in cases]


def _executed(run_path: Path, plan_path: Path, profile_path: Path) -> list[dict[str, float]]:
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    from disttrain_cli.models import symmetric
    from disttrain_cli.runtime.dryrun import worker
    from disttrain_cli.runtime.dryrun.storages import tensors_in
    from disttrain_cli.runtime.messages.recorder import EXCHANGE, GIVES, _group

    sent: Counter[str] = Counter()

    class Counting(worker.Observer):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = super().__torch_dispatch__(func, types, args, kwargs)
            if whole := symmetric.whole_bytes(func, args, result):
                sent["tensor_parallel"] += ring_bytes("all_gather", whole, args[3])
            return result

        def _count_message(self, name: str, args: Any) -> None:
            group = next(one for value in args if (one := _group(value)) is not None)
            tensors = list(tensors_in(args))
            most = max(tensor.nbytes for tensor in tensors)
            what = next((k for g, k in GROUPS.items() if group.group_desc.startswith(g)), "")
            if name == "send":
                sent["crossing"] += most
            elif name == EXCHANGE and args[GIVES]:  # unequal parts: all but the first rank's
                sent[what] += tensors[1][args[GIVES][0] :].nbytes
            elif name in COLLECTIVES and group.group_desc != "default_pg":
                gathers = name == "_allgather_base_"
                what = what or ("weights" if gathers else "gradients")
                sent[what] += ring_bytes(COLLECTIVES[name], most, group.size())

    watched, rows = worker.watched, list[dict[str, float]]()

    @contextmanager
    def afresh(*args: Any, **named: Any) -> Iterator[None]:
        sent.clear()
        with watched(*args, **named):
            yield

    with unset_fake_temporarily():
        run, plan = read_run(run_path), Plan.model_validate_json(plan_path.read_text())
        profile = Profile.model_validate_json(profile_path.read_text())
        graph = stage_graph(plan.plan, profile.inputs.llm)
        worker.before_fork({"run": [run_path], "at_once": 1})
    for stage in graph.stages:
        seen = StageSeen(stages=[], rank=0, slots_in_flight=0, slots=slots_seen(stage, SLOTS))
        coords = graph.coords(stage.rank(0))
        with (
            patch.object(worker, "Observer", Counting),
            patch.object(worker, "watched", afresh),
            worker.alone(coords.rank, graph.world_size),
        ):
            worker.deepspeed.init_distributed(dist_backend="fake", verbose=False)
            worker._take_steps(run, plan, profile, graph, coords, seen, lambda _: None)
        rows.append(dict(sent))
    return rows


def at_work(profile: Profile, layout: Layout) -> Profile:
    """The profile as if every sequence brought the work that those of the first replica have in a
    worst slot."""
    slot, modules = worst_slot(profile, layout), dict(profile.modules)
    for name in layout.units[0].modules:
        module = modules[name]
        work = slot.work(name, slot.replicas["model"][0]).scaled(1 / MICROBATCH)
        more = work.tokens / module.work_per_sequence.tokens
        cuts = [size * more for size in module.cut_bytes_per_sequence]
        modules[name] = module.model_copy(
            update={
                "work_per_sequence": work,
                "cut_bytes_per_sequence": cuts,
                "output_bytes_per_sequence": module.output_bytes_per_sequence * more,
            }
        )
    llm = modules["llm"]
    more = (
        modules["eye"].cut_bytes_per_sequence[-1]
        / profile.modules["eye"].cut_bytes_per_sequence[-1]
    )
    costs = {
        kind: cost.model_copy(update={"gathered_bytes": combine((more, cost.gathered_bytes))})
        for kind, cost in llm.costs.items()
    }
    modules["llm"] = llm.model_copy(update={"costs": costs})
    return profile.model_copy(update={"modules": modules})


def counted(profile: Profile, layout: Layout) -> list[dict[str, float]]:
    """By stage, bytes over the link of one rank in as many slots as the dry run has, by kind."""
    profile, rows = at_work(profile, layout), list[dict[str, float]]()
    for stage in stages_of(profile, layout):
        slots = slots_seen(stage, SLOTS)
        sequences = MICROBATCH * stage.unit.dp * slots
        short = layout.model_copy(update={"global_batch_size": sequences, "microbatches": slots})
        traffic = [
            *_over_replicas(profile, short, [stage], 8),
            *_tensor_parallel(profile, short, [stage]),
            *_context_parallel(profile, short, [stage]),
        ]
        crossing = sum(
            before.cut_bytes * sequences / len(stage.ranks)
            for before, after in crossings(stages_of(profile, layout))
            if stage.number in (before.number, after.number)
        )
        row = {one.kind: one.rank_gib * GIB for one in traffic} | {"crossing": crossing}
        rows.append({kind: size for kind, size in row.items() if size})
    return rows


@pytest.mark.slow
def test_ranks_send_what_the_plan_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LOCAL_RANK": "0", "DS_ACCELERATOR": "cuda"}.items():
        monkeypatch.setenv(name, value)
    paths, expected = list[list[str]](), list[list[dict[str, float]]]()
    profiles = dict[tuple[str, ...], Profile]()
    for number, (modules, layers, more) in enumerate(CASES.values()):
        folder = tmp_path / str(number)
        folder.mkdir()
        file = run_file({name: MODULES[name] for name in modules})
        content = file.model_dump(mode="json", exclude_unset=True)
        content["train"]["global_batch_size"] = 2 * MICROBATCH * SLOTS
        (folder / "disttrain.yaml").write_text(yaml.safe_dump(content))
        run = read_run(folder / "disttrain.yaml")
        if modules not in profiles:
            profiles[modules] = analytic_profile(run, "A800")
        degrees = more.get("tp", 1) * more.get("cp", 1)
        unit = UnitPlan(
            name="model",
            modules=[*modules],
            dp=2,
            pp=len(layers),
            gpus=2 * degrees * len(layers),
            layers_per_stage=layers,
            **more,
        )
        plan = plan_of(run, [unit], MICROBATCH)
        (folder / "plan.json").write_text(plan.model_dump_json())
        (folder / "profile.json").write_text(profiles[modules].model_dump_json())
        paths.append([str(folder / n) for n in ("disttrain.yaml", "plan.json", "profile.json")])
        expected.append(counted(profiles[modules], plan.plan))
    for name, seen, said in zip(CASES, on_fake_cuda(executed, paths), expected, strict=True):
        assert said == [pytest.approx(one, rel=0.03) for one in seen], name

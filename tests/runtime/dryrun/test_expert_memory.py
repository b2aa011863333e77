"""What the fullest rank of an EP group holds on a fake CUDA device, against its price."""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from disttrain_cli.models.graph import describe
from disttrain_cli.profiling.analytic import analytic_profile
from disttrain_cli.runtime.dryrun.dryrun import problems, reports
from disttrain_cli.runtime.dryrun.stages import StageSeen
from disttrain_cli.spec.plan import UnitPlan
from disttrain_cli.spec.runfile import Run, read_run
from disttrain_cli.spec.stage_graph import stage_graph
from tests.runtime.dryrun.on_fake_cuda import on_fake_cuda
from tests.runtime.factory import plan_of

RANKS, DEVICE_GIB = 4, 80.0
#: Of a slot's positions and documents, which are not priced: 3 % of what a recomputed slot keeps.
POSITIONS_GIB = 2**-9
#: Degrees on four ranks in two nodes, and whether the unit recomputes. EP 4 has two hops.
CASES: list[dict[str, Any]] = [
    {"dp": 4, "ep": 4},
    {"dp": 4, "ep": 4, "ep_overlap": True},
    {"dp": 2, "tp": 2},
    {"dp": 2, "tp": 2, "ep": 4},
    {"dp": 2, "cp": 2, "ep": 2, "checkpointing": True},
]
#: Two stages on each of two ranks.
INTERLEAVED = {"dp": 2, "ep": 2, "pp": 2, "chunks": 2, "layers_per_stage": [2, 1, 1, 1]}


def _write(folder: Path) -> Run:
    config = {
        "hidden_size": 2048,
        "num_hidden_layers": 3,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "intermediate_size": 4096,
        "vocab_size": 1024,
        "max_position_embeddings": 4096,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    }
    content = {
        "name": "t",
        "model": {
            "modules": {"llm": {"kind": "llm", "architecture": "qwen3_moe", "config": config}}
        },
        "data": {
            "distribution": {"images_per_sequence": 0, "sequences": 50},
            "sequence_length": 4096,
        },
        "cluster": {"nodes": 2, "gpus_per_node": RANKS // 2, "device": "analytic:H100"},
        "train": {"global_batch_size": 8, "steps": 1, "precision": "bf16", "zero_stage": 1},
    }
    (folder / "disttrain.yaml").write_text(yaml.safe_dump(content))
    return read_run(folder / "disttrain.yaml")


def _unit(case: dict[str, Any]) -> UnitPlan:
    known = {"layers_per_stage": [5]} | case
    return UnitPlan(name="llm", modules=["llm"], gpus=RANKS, **known)


def executed(
    source: list[Any], profile: dict[str, Any], plans: list[Any], rank: int = 0
) -> list[Any]:
    """Observations of a rank, in a process with a fake CUDA device."""
    import deepspeed
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    from disttrain_cli.models.graph import layer_table
    from disttrain_cli.runtime.dryrun.stages import slots_seen
    from disttrain_cli.runtime.dryrun.worker import _take_steps
    from disttrain_cli.runtime.launching.process import import_muon
    from disttrain_cli.runtime.messages.hollow import alone
    from disttrain_cli.spec.plan import Plan
    from disttrain_cli.spec.profile import Profile

    deepspeed.ops.__dict__["__compatible_ops__"] = {}
    os.environ["LOCAL_RANK"] = "0"
    with unset_fake_temporarily():
        import_muon()
        run = read_run(*source)
        layer_table(run)
    known, found = Profile.model_validate(profile), []
    with alone(rank, RANKS):
        deepspeed.init_distributed(dist_backend="fake", verbose=False)
        for given in plans:
            plan = Plan.model_validate(given)
            graph = stage_graph(plan.plan, "llm")
            coords = graph.coords(rank)
            slots = slots_seen(coords.stage, plan.plan.microbatches)
            number = coords.stage.number
            seen = StageSeen(stages=[number], rank=rank, slots_in_flight=1, slots=slots)
            _take_steps(run, plan, known, graph, coords, seen, lambda share: None)
            found.append(seen.model_dump(mode="json"))
    return found


@pytest.mark.slow
def test_fullest_ranks_hold_what_the_plan_says(tmp_path: Path) -> None:
    run = _write(tmp_path)
    profile = analytic_profile(run, "H100")
    plans = [plan_of(run, [_unit(case)], 1) for case in CASES]
    documents = [one.model_dump(mode="json") for one in plans]
    known = run.source, profile.model_dump(mode="json")
    observed = on_fake_cuda(executed, *known, documents)
    cases, together = list(CASES), plan_of(run, [_unit(INTERLEAVED)], 1)
    for rank in (0, 2):
        cases.append(INTERLEAVED)
        plans.append(together)
        observed += on_fake_cuda(executed, *known, [together.model_dump(mode="json")], rank)
    for case, plan, seen in zip(cases, plans, observed, strict=True):
        graph = stage_graph(plan.plan, describe(run).llm)
        (stage,) = reports(profile, plan.plan, graph, [StageSeen.model_validate(seen)], DEVICE_GIB)
        kept = pytest.approx(stage.seen.kept_gib, rel=0.03, abs=POSITIONS_GIB)
        assert stage.priced_kept_gib == kept, case
        assert stage.priced_gib == pytest.approx(stage.seen.peak_gib, rel=0.03), case
        assert problems(stage) == [], case
        reads = {wait.what for wait in stage.seen.waits if wait.instruction}
        assert bool(reads) == (case.get("ep", 1) > 1), case  # an EP group's counts

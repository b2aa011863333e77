"""Calibrating: a run recorded with known costs gives them back, whatever else its traces hold."""

from dataclasses import replace

import numpy as np
import pytest

from disttrain_cli.costs.layout import reduce_s, stages_of, transfers_s
from disttrain_cli.errors import DataError, MismatchError
from disttrain_cli.profiling.calibrate import calibrate
from disttrain_cli.spec.layer_costs import Heads, combine
from disttrain_cli.spec.plan import Layout, UnitPlan
from disttrain_cli.spec.runfile import Run
from tests import profiles
from tests.cases import first_fast
from tests.planning.synthetic import run_file, tiny
from tests.profiling.recorded import Recording, layout, retimed, varied

FACTORS = {"image_encoder": 1.3, "llm": 0.8, "image_generator": 1.1}
WORKS = np.array([[1.0, 1, 100, 8000], [1, 3, 400, 60000], [1, 2, 150, 9000]])


@pytest.fixture
def run(tmp_path):
    return Run(path=tmp_path / "disttrain.yaml", file=run_file())


@pytest.fixture
def recording(run):
    """Three units; the LLM over two stages of two replicas; nothing differs from the plan yet."""
    planned = tiny(run.file, kind="cuda", tps=(1, 2, 4))
    return Recording(planned, planned, layout((1, 2, [4]), (1, 3, [3, 3]), (1, 2, [4])), varied())


def calibrated(recording, run, tmp_path):
    return calibrate([recording.write(tmp_path / "run" / "traces")], run)


def worst_error(profile, true, plan, works=WORKS):
    """Largest relative error of a stage's times at some works."""
    errors = [
        abs(getattr(mine, time) @ work / (getattr(theirs, time) @ work) - 1.0)
        for stage, right in zip(stages_of(profile, plan), stages_of(true, plan), strict=True)
        for mine, theirs in zip(stage.costs, right.costs, strict=True)
        for time in ("forward_ms", "backward_ms", "weight_ms")
        for work in works
        if getattr(theirs, time).any()
    ]
    return max(errors)


def with_weights(profile, share):
    """The profile with a part of every backward that may be computed later."""
    modules = {}
    for name, module in profile.modules.items():
        costs = {
            kind: cost.model_copy(
                update={
                    "tp": {
                        tp: shard.model_copy(
                            update={"weight_ms": combine((share, shard.backward_ms))}
                        )
                        for tp, shard in cost.tp.items()
                    }
                }
            )
            for kind, cost in module.costs.items()
        }
        modules[name] = module.model_copy(update={"costs": costs})
    return profile.model_copy(update={"modules": modules})


def by_module(module, kind, tp, time, term):
    return FACTORS[module] * (1.2 if time.startswith("backward") else 1.0)


def test_true_costs_come_back(recording, run, tmp_path):
    true = retimed(
        recording.planned,
        lambda module, kind, tp, time, term: (
            by_module(module, kind, tp, time, term)
            * {"base": 1.5, "per_token": 0.9}.get(term, 1.0)
            * (1.3 if kind == "head" else 1.0)
        ),
    )
    found = calibrated(replace(recording, true=true, noise=0.01, steps=12), run, tmp_path)
    assert worst_error(recording.planned, true, recording.layout) > 0.2
    assert worst_error(found.profile, true, recording.layout) < 0.03
    rows = {(row.where, row.what): row for row in found.changes}
    for module in FACTORS:
        for direction in ("forward", "backward"):
            row = rows[module, direction]
            assert row.error_after_pct < 1.5 < row.error_before_pct and row.rows >= 60
            assert row.change_pct == pytest.approx(100 * (row.after / row.before - 1))


def test_a_right_profile_stays_as_it_is(recording, run, tmp_path):
    found = calibrated(recording, run, tmp_path)
    assert worst_error(found.profile, recording.planned, recording.layout) < 1e-4
    assert all(abs(row.change_pct) < 0.1 for row in found.changes if row.change_pct is not None), (
        found.changes
    )
    assert found.profile.data == recording.planned.data and not found.notes


def test_what_the_run_does_not_use_follows_its_direction(recording, run, tmp_path):
    true = retimed(recording.planned, by_module)
    found = calibrated(replace(recording, true=true), run, tmp_path)
    for name, module in found.profile.modules.items():
        for kind, cost in module.costs.items():
            planned, right = (
                recording.planned.modules[name].costs[kind],
                true.modules[name].costs[kind],
            )
            for tp, shard in cost.tp.items():
                for time in ("forward_ms", "backward_ms", "backward_input_ms"):
                    mine, theirs = (getattr(one, time).per_token for one in (shard, right.tp[tp]))
                    assert mine == pytest.approx(theirs, rel=0.01), (name, kind, tp, time)
            assert cost.tp["1"].parameters == planned.tp["1"].parameters


def test_forwards_of_steps_with_one_slot_count_though_they_may_wait_for_weights(
    recording, run, tmp_path
):
    layout = recording.layout
    one = layout.model_copy(
        update={
            "microbatches": 1,
            "microbatch_size": layout.microbatch_size * layout.microbatches,
            "overlap": True,
        }
    )
    true = retimed(recording.planned, by_module)
    found = calibrated(replace(recording, true=true, layout=one, steps=24), run, tmp_path)
    assert {(module, "forward") for module in FACTORS} <= {
        (row.where, row.what) for row in found.changes
    }


def test_directions_that_look_alike_keep_the_profile_s_proportions(recording, run, tmp_path):
    """All sequences are alike: the run shows one number per stage."""
    sample = profiles.data(images=3, targets=1).sample
    sample = sample.model_copy(update={"images": [[40] * 3] * 16, "targets": [1] * 16})
    true = retimed(recording.planned, lambda *place: 1.25)
    plan = layout((1, 1, [4]), (1, 3, [6]), (1, 1, [4]))
    found = calibrated(replace(recording, true=true, sample=sample, layout=plan), run, tmp_path)
    assert worst_error(found.profile, true, plan) < 0.01  # at other works too


@pytest.mark.parametrize(
    "disturbed",
    first_fast(
        [
            {"slow_ranks": {2: 1.5}},
            {"slow_ranks": {0: 1.2, 6: 3.0}},
            {"stalls": 0.05, "noise": 0.02},
            {"slow_ranks": {3: 1.08}, "noise": 0.01},
        ],
        2,
    ),
)
def test_slow_ranks_and_stalls_do_not_bend_the_model(recording, run, tmp_path, disturbed):
    true = retimed(recording.planned, by_module)
    found = calibrated(replace(recording, true=true, steps=10, **disturbed), run, tmp_path)
    assert worst_error(found.profile, true, recording.layout) < 0.04
    slow = [rank for rank, factor in disturbed.get("slow_ranks", {}).items() if factor > 1.1]
    assert all(any(note.endswith(f"rank {rank}") for note in found.notes) for rank in slow)


@pytest.mark.parametrize(
    ("trained", "checkpointing", "tp"),
    first_fast(
        [
            (["image_generator"], False, 1),
            (["llm"], True, 1),
            (None, True, 2),
            (["image_encoder"], False, 4),
        ],
        2,
    ),
)
def test_frozen_recomputed_and_divided_layers(recording, run, tmp_path, trained, checkpointing, tp):
    plan = layout(
        (1, 2, [2, 2]), (tp, 3, [3, 3]), (1, 2, [4]), trained=trained, checkpointing=checkpointing
    )
    factor = {"forward_ms": 1.2, "backward_ms": 0.9, "backward_input_ms": 1.4}
    true = retimed(recording.planned, lambda module, kind, tp, time, term: factor[time])
    found = calibrated(
        replace(recording, true=true, layout=plan, noise=0.005, steps=8), run, tmp_path
    )
    assert worst_error(found.profile, true, plan) < 0.03
    backwards = {row.where for row in found.changes if row.what == "backward"}
    after_trained = {None: 3, "image_encoder": 3, "llm": 2, "image_generator": 1}[
        trained and trained[0]
    ]
    assert len(backwards) == after_trained  # frozen layers before all that trains have none


@pytest.mark.parametrize("checkpointing", first_fast([False, True]))
def test_what_cp_groups_exchange_is_no_part_of_a_layer_s_time(
    recording, run, tmp_path, checkpointing
):
    planned = exchanging(recording.planned)
    plan = layout((1, 2, [4]), (1, 3, [3, 3]), (1, 2, [4]), checkpointing=checkpointing)
    units = [
        unit.model_copy(update={"cp": 4, "gpus": 4 * unit.gpus})
        if unit.modules == ["llm"]
        else unit
        for unit in plan.units
    ]
    used = sum(unit.gpus for unit in units)
    plan = plan.model_copy(update={"units": units, "gpus_used": used})
    true = retimed(planned, by_module)
    recording = replace(recording, planned=planned, true=true, layout=plan, noise=0.005, steps=8)
    alone, exchanged = (
        stages_of(profile, plan)[1].costs[0].forward_ms @ WORKS[0]
        for profile in (tiny(run.file, kind="cuda", tps=(1, 2, 4)), planned)
    )
    assert exchanged > 1.1 * alone
    found = calibrated(recording, run, tmp_path)
    assert worst_error(planned, true, plan) > 0.1
    assert worst_error(found.profile, true, plan) < 0.03


def exchanging(profile):
    """The profile with attention in the LLM's blocks, whose exchanges take a good part of them."""
    llm = profile.modules["llm"]
    costs = {
        kind: cost.model_copy(
            update={"heads": Heads(query=8, key=8, width=4096) if kind == "block" else None}
        )
        for kind, cost in llm.costs.items()
    }
    modules = profile.modules | {"llm": llm.model_copy(update={"costs": costs})}
    return profile.model_copy(update={"modules": modules})


def test_a_slow_stage_is_named(recording, run, tmp_path):
    """Alike layers on three stages, one of which is slower: no layer's cost can say so."""
    plan = layout((1, 1, [4]), (1, 2, [2, 2, 2]), (1, 1, [4]))
    slow = dict.fromkeys((3, 4), 1.3)
    found = calibrated(replace(recording, layout=plan, slow_ranks=slow), run, tmp_path)
    notes = [note for note in found.notes if "llm stage 1" in note]
    assert len(notes) == 2 and len(found.notes) == 2


def test_one_unit_with_every_module(recording, run, tmp_path):
    stages = UnitPlan(
        name="all", modules=list(FACTORS), dp=2, pp=3, gpus=6, layers_per_stage=[5, 4, 5]
    )
    plan = Layout(
        strategy="megatron",
        global_batch_size=12,
        microbatch_size=1,
        microbatches=6,
        gpus_used=6,
        units=[stages],
    )
    true = retimed(recording.planned, by_module)
    found = calibrated(replace(recording, true=true, layout=plan, noise=0.01), run, tmp_path)
    assert worst_error(found.profile, true, plan) < 0.03


def test_a_shared_cpu_is_not_taken_for_slow_layers(recording, run, tmp_path):
    planned = tiny(run.file, kind="cpu", tps=(1,))
    shared = replace(recording, planned=planned, true=planned, sharing=1.5)
    assert worst_error(calibrated(shared, run, tmp_path).profile, planned, shared.layout) < 1e-3
    # had devices of its own
    alone = calibrated(replace(shared, rehearsed=True), run, tmp_path / "rehearsal")
    slower = retimed(planned, lambda *place: 1.5)
    assert worst_error(alone.profile, slower, shared.layout) < 1e-3


def test_links_come_back(recording, run, tmp_path):
    """Neighbours share a node of four; the replicas of the LLM's stages too, whose gradients are
    reduced."""
    near, far = profiles.links(8, 50, 4, 100), profiles.links(2, 80, 1, 200)
    two = near.model_copy(update={"inter_node": profiles.links(2, 80, 1, 200)})
    planned = recording.planned.model_copy(update={"links": two})
    links = near.model_copy(
        update={
            "p2p_gbps": 4.0,
            "reduce_scatter_gbps": 6.0,
            "inter_node": two.inter_node.model_copy(update={"p2p_gbps": 3.0}),
        }
    )
    true = planned.model_copy(update={"links": links})
    plan = layout((1, 1, [2, 2]), (1, 3, [3, 3]), (1, 2, [4]))
    found = calibrated(
        replace(recording, planned=planned, true=true, layout=plan, gpus_per_node=4), run, tmp_path
    )
    stages = stages_of(true, plan)
    mine, theirs = (transfers_s(profile, plan, stages, 4) for profile in (found.profile, true))
    assert mine == pytest.approx(theirs, rel=0.02)
    for stage in stages:
        assert reduce_s(found.profile, plan, stage, 4) == pytest.approx(
            reduce_s(true, plan, stage, 4), rel=0.02
        )
    # of the replicas that two nodes share: it was right
    assert found.profile.links.inter_node.reduce_scatter_gbps == pytest.approx(
        far.reduce_scatter_gbps
    )
    assert found.profile.links.all_reduce_gbps == near.all_reduce_gbps
    rows = {(row.what, row.where): row for row in found.changes}
    assert rows["p2p_gbps", "inside a node"].measure == "Gbit/s"
    assert (
        rows["p2p_gbps", "between nodes"].error_after_pct
        < rows["p2p_gbps", "between nodes"].error_before_pct
    )


def test_links_that_contradict_themselves_stay(recording, run, tmp_path, monkeypatch):
    def late(database, operation):
        """Two of three reductions came an age late, because the host was busy."""
        return [
            (stage, reduce_s(recording.planned, recording.layout, stage, 8) * factor)
            for stage, factor in zip(database.stages, (1.0, 30.0, 1.0, 40.0), strict=True)
        ]

    monkeypatch.setattr("disttrain_cli.profiling.link_factors._updates", late)
    found = calibrated(recording, run, tmp_path)
    row = next(row for row in found.changes if row.what == "reduce_scatter_gbps")
    assert row.before == row.after and row.error_before_pct == row.error_after_pct > 40


@pytest.mark.parametrize("before", first_fast([0.0, 20.0]))
def test_the_optimizer_s_time_comes_back(recording, run, tmp_path, before):
    def with_ns(ns):
        device = recording.planned.device.model_copy(update={"optimizer_ns_per_parameter": ns})
        return recording.planned.model_copy(update={"device": device})

    found = calibrated(
        replace(recording, planned=with_ns(before), true=with_ns(50.0)), run, tmp_path
    )
    assert found.profile.device.optimizer_ns_per_parameter == pytest.approx(50.0, rel=0.02)
    row = next(row for row in found.changes if row.what == "optimizer_ns_per_parameter")
    assert (row.change_pct is None) == (before == 0.0)


def test_traces_of_something_else_are_refused(recording, run, tmp_path):
    folder = recording.write(tmp_path / "run" / "traces")
    other = run.model_copy(update={"file": run_file(precision="bf16")})
    with pytest.raises(MismatchError, match=run.file.model_fingerprint()):
        calibrate([folder.parent], other)
    (folder / "job.json").unlink()
    with pytest.raises(DataError, match="does not describe its run"):
        calibrate([folder.parent], run)
    with pytest.raises(DataError):
        calibrate([tmp_path / "none"], run)


def test_a_run_with_later_weights_gives_both_parts_of_its_backwards_back(recording, run, tmp_path):
    planned = with_weights(recording.planned, 0.4)
    units = [
        unit.model_copy(update={"weight_delay": [0] * unit.pp}) for unit in recording.layout.units
    ]
    later = recording.layout.model_copy(update={"units": units})
    # the weights' part takes a fifth longer, the rest of the backward as long as planned
    slower = retimed(
        planned, lambda module, kind, tp, time, term: 1.08 if time == "backward_ms" else 1.0
    )
    true = with_weights(slower, 0.48 / 1.08)
    found = calibrated(
        replace(recording, planned=planned, true=true, layout=later), run, tmp_path
    ).profile
    for where in (later, recording.layout):
        assert worst_error(planned, true, where) > 0.07
        assert worst_error(found, true, where) < 0.01


def test_what_is_hidden_scales_with_its_pass(recording, run, tmp_path):
    planned = profiles.hiding(recording.planned, 0.2)
    units = [
        unit.model_copy(update={"tp": 2, "gpus": 2 * unit.gpus, "tp_overlap": True})
        for unit in recording.layout.units
    ]
    used = sum(unit.gpus for unit in units)
    overlapped = recording.layout.model_copy(update={"units": units, "gpus_used": used})
    factor = {"forward_ms": 1.3, "backward_ms": 0.8, "backward_input_ms": 1.0, "weight_ms": 0.8}
    true = profiles.hiding(
        retimed(planned, lambda module, kind, tp, time, term: factor[time]), 0.2
    )  # of backwards as a share of forwards
    shares = {"backward": 2 * 0.8 / 1.3, "split": 1.5 * 0.8 / 1.3}
    for module in true.modules.values():
        for cost in module.costs.values():
            for shard in cost.tp.values():
                for name, share in shares.items():
                    if name in shard.hidden_ms:
                        shard.hidden_ms[name] = combine((0.2 * share, shard.forward_ms))
    found = calibrated(
        replace(recording, planned=planned, true=true, layout=overlapped), run, tmp_path
    ).profile
    assert worst_error(planned, true, overlapped) > 0.2
    for where in (overlapped, recording.layout):
        assert worst_error(found, true, where) < 0.01

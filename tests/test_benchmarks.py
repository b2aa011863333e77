"""The benchmarks run in their smallest form and print what they measured; no figure of time is
judged."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks import (
    best,
    calibration,
    checkpoints,
    colocation,
    common,
    context,
    data_wait,
    decode,
    efficiency,
    epoch_order,
    gains,
    grouping,
    hiding,
    index,
    kineto,
    known,
    levelling,
    memory,
    neighbours,
    ordering,
    paper,
    peers,
    planner,
    published,
    recipes,
    rehearsal,
    simulation,
    sizes,
    stock_pipeline,
    tp_overlap,
    verdicts,
    video,
    waiting,
    watching,
)
from benchmarks.list_schedule import Batch, Group, Rules, ends_s
from benchmarks.placements import Knobs, Shape, case_of
from disttrain_cli.analysis.result.verdicts import Place, Verdict
from disttrain_cli.costs.hardware import Curve, Efficiency, lookup
from disttrain_cli.planning.solve import cluster_of
from disttrain_cli.spec.plan import Layout, UnitPlan
from tests.analysis import synthetic
from tests.analysis.kineto import traces

ROOT = Path(__file__).parent.parent


def only(tables):
    """The rows of the only table."""
    (rows,) = tables.values()
    return rows


def test_calls_alternate_and_the_first_round_is_not_counted():
    order, now = [], iter(range(100))
    seconds = common.alternate(
        {name: lambda name=name: order.append(name) for name in "AB"}, 2, lambda: next(now)
    )
    assert "".join(order) == "ABABAB" and {name: len(own) for name, own in seconds.items()} == {
        "A": 2,
        "B": 2,
    }
    assert common.paired_ratio([2.0, 9.0, 8.0], [1.0, 3.0, 2.0]) == 3.0


def test_published_recipes_are_layouts():
    """Every recipe names a source and a layout of its devices, batch and layers."""
    llm_blocks = {"qwen2.5-vl-7b": 28, "internvl3-8b": 28, "qwen3-vl-8b": 36, "qwen3-vl-32b": 64}
    published = recipes.recipes()
    assert len({recipe.name for recipe in published}) == len(published) >= 10
    for recipe in published:
        blocks = llm_blocks[recipe.preset]
        modules = {"image_encoder": 30, "llm": blocks + 2}
        profile = SimpleNamespace(
            modules={name: SimpleNamespace(layers=["block"] * n) for name, n in modules.items()}
        )
        layout = recipes.layout_of(recipe, profile)
        layout.check_slots("llm")
        (unit,) = layout.units
        assert sum(unit.layers_per_stage) == blocks + 32 and unit.layers_per_stage[0] > 30
        assert recipe.source.startswith("https://github.com/") and recipe.zero in (1, 3)
        assert recipe.tp * recipe.pp == 1 or recipe.zero == 1
    (row,) = only(recipes.measure(small=True))
    assert row["GiB"] > 79 and row["s"].startswith("(")  # sequences twice as long as its own
    assert row["best FSDP, s"] < row["ours, s"]  # two devices, which recompute everything


@pytest.mark.slow
def test_published_layouts_are_slower_with_uneven_routing():
    even, stated = only(published.measure(small=True))
    assert (even["routing"], stated["routing"]) == ("even", "stated")
    assert 0.5 * even["published"] < even["ours"] < even["published"]
    assert stated["ours"] < even["ours"] and stated["step, s"] > even["step, s"]


@pytest.mark.slow
def test_decode():
    *aimed_at, files, closeness = decode.measure(small=True).values()
    for rows in aimed_at:
        assert [row["way"] for row in rows][:3] == ["disttrain", "bare loop", "Pillow, bilinear"]
        assert all(row["ms per image"] > 0 for row in rows)
    assert files[0]["ms per image"] > 0
    assert all(row["disttrain"] > row["OpenCV, area"] - 1 > 30 for row in closeness)


@pytest.mark.slow
def test_video():
    rows = only(video.measure(small=True))
    assert {row["codec"] for row in rows} == set(video.CODECS)
    assert all(row["disttrain, ms"] > 0 and row["plain loop, ms"] > 0 for row in rows)


def test_pillow_and_disttrain_prepare_the_same_image():
    data = decode.picture(quality=90)
    ours, theirs = (
        decode.prepared(data, (32, 32), decode.IMAGE),
        decode.transform(data, "BICUBIC").numpy(),
    )
    assert ours.shape == theirs.shape and abs(ours - theirs).mean() < 0.05


@pytest.mark.benchmark
def test_index():
    rows, beside = index.measure(small=True).values()
    assert [row["dataset"] for row in rows[::2]] == list(index.FORMS) and {
        row["samples"] for row in rows
    } == {20}
    assert all(row["µs to index one"] > 0 and row["speed of the index over it"] > 0 for row in rows)
    assert all(row["samples"] == 200 and row["speed by CPU"] > 0 for row in beside)


@pytest.mark.slow
def test_levelling_by_images_is_never_worse_than_by_sequences():
    rows = only(levelling.measure(small=True))
    assert [row["DP"] for row in rows[:3]] == [2, 4, 8] and rows == only(
        levelling.measure(small=True)
    )
    for row in rows:
        assert (
            1 <= row["images (disttrain)"] <= row["sequences levelled"] <= row["sequences in order"]
        )


@pytest.mark.benchmark
def test_ranks_of_a_cp_group_work_and_keep_their_share():
    load, kept = context.measure(small=True).values()
    assert {row["CP"] for row in load} == {2, 4, 8}
    for row in load:
        assert (row["at worst"] == 1.0) is (row["way"] == "a2a")
        assert 1 <= row["block"] <= row["attention"] <= row["at worst"]
    by_way = {(row["CP"], row["way"]): row["attention"] for row in load}
    for cp in (2, 4, 8):
        others = (by_way[cp, way] for way in ("contiguous runs", "head and tail chunks"))
        assert by_way[cp, "all_gather, levelled"] < min(others)
    alone, eight, less = kept
    assert (alone["CP"], eight["CP"]) == (1, 8) and less["kept GiB"] >= 7
    for row in (alone, eight):
        assert row["kept GiB"] == pytest.approx(row["planned"], rel=0.03)


@pytest.mark.slow
def test_ordering_levels_what_shares_a_unit():
    times, loads = ordering.measure(small=True).values()
    assert all(
        row["assign ms"] > 0 and row["loads ms"] > 0 and row["order_step ms"] > 0 for row in times
    )
    for row in loads:
        assert min(row["encoder, none"], row["generator, paper"]) >= 1
        if "+" in row["DP"]:
            assert row["generator, paper"] < row["generator, none"]


@pytest.mark.benchmark
def test_best_is_level_and_near_the_best_order():
    costs, busiest, loads, orders = best.measure(small=True).values()
    assert {row["plan"] for row in costs} >= {"units", "one unit"} and all(
        row["evaluations"] > 0 for row in costs
    )
    assert all(1 <= row["best"] <= 1.005 and row["best"] <= row["paper"] + 1e-3 for row in busiest)
    assert all(row["best, over the step"] >= 1 for row in loads)
    assert all(1 <= row["best, worst"] <= 1.01 for row in orders)


@pytest.mark.benchmark
def test_planner_has_no_gap_to_brute_force():
    search, strategies_, nothing_fits, gaps, commands = planner.measure(small=True).values()
    assert search[0]["GPUs"] == 6 and strategies_[0]["megatron ms"] > 0
    assert "GiB" in nothing_fits[0]["remedies"]
    assert all(abs(float(row["gap"])) < 1e-9 for row in gaps)
    assert commands[0]["CPU s"] > 0


@pytest.mark.benchmark
def test_simulated_plans_are_never_slower_than_the_papers():
    iterations, plans = simulation.measure(small=True).values()
    assert iterations[0]["stages"] == 13 and iterations[0]["event by event over simulation"] > 0
    assert plans[0]["finalists"] >= 3 and plans[0]["paper's plan over it"] >= 1


@pytest.mark.benchmark
def test_frozen_costs_are_planned_and_their_waiting_is_counted():
    published = {f"{model}-{device}" for model in grouping.MODELS for device in grouping.DEVICES}
    assert {case[0] for case in waiting.CASES} | {"weights", "hidden", "before_s"} | published == {
        path.name.removesuffix(".gz").removesuffix(".json") for path in waiting.COSTS.iterdir()
    }
    (row,) = waiting.measure(small=True)["Waiting"]
    assert row["no waiting, s"] == pytest.approx(row["no waiting over step"] * row["s per step"])
    assert 0.5 < row["no waiting over step"] < 1 <= row["over the best megatron"]


@pytest.mark.benchmark
def test_a_model_of_the_paper_is_faster_than_its_layouts_and_planners():
    (row,) = only(paper.end_to_end(small=True))
    others = row["over the best megatron"], row["over the paper's planner"]
    assert float(row["gain per device given"]) > 1 and min(others) > 1


@pytest.mark.slow
def test_published_models_gain_by_grouping():
    (row,) = next(iter(grouping.measure(small=True).values()))
    assert row["devices"] == 8 and row["more sequences/s, %"] > 16


@pytest.mark.slow
def test_no_neighbour_of_a_plan_is_faster():
    (row,) = only(neighbours.measure(small=True))
    assert row["neighbours"] > 50 and row["faster as trained, %"] < 100 * neighbours.LEAST


def test_the_switches_of_gains_are_those_of_a_cluster():
    run, profile = waiting.costs("mllm-9b")
    cluster = cluster_of(run, profile)
    everything = {key: value for one in gains.GAINS.values() for key, value in one.items()}
    assert replace(cluster, **everything) == cluster
    assert everything.keys() == gains.NOTHING.keys()
    assert all(gains.NOTHING[key] != value for key, value in everything.items())
    cached = gains.with_latents(profile).modules["image_generator"]
    assert cached.layers == profile.modules["image_generator"].layers[1:]
    assert cached.layers[cached.projector[0]] == "projector" and not cached.frozen


@pytest.mark.benchmark
def test_gains_are_planned_alone_last_and_together():
    steps, shown = gains.measure(small=True).values()
    (case,) = [column for column in steps[0] if column != "planned with"]
    step_s = {row["planned with"]: row[case] for row in steps}
    assert step_s["everything"] < 0.95 * step_s["nothing"]
    assert step_s["everything and cached latents"] < step_s["everything"]
    for row in shown:
        alone, last = row[f"{case}, alone"], row[f"{case}, last"]
        assert alone == step_s["nothing"] / step_s[f"only {row['']}"]
        assert last == step_s[f"without {row['']}"] / step_s["everything"]


def group(slots, stages, encoded=(), generated=0, hold=9, anywhere=True):
    """Stages of 1 s forward, 1 s backward and 1 s for the gradients of weights, at once."""
    times_s = [[1.0] * stages] * slots
    return Group(
        times_s,
        times_s,
        times_s,
        list(encoded),
        [[0.5] * generated] * slots,
        [*range(stages)],
        [*range(stages)],
        [stages - stage + 1 for stage in range(stages)],
        [0] * stages,
        [hold] * stages,
        anywhere,
        [0.0] * (stages - 1),
        0.0,
        0.0,
    )


def test_a_list_schedule_without_images_is_a_zero_bubble_pipeline():
    # each stage begins a forward after the one before, and ends with gradients of weights
    assert ends_s(group(1, 3), Rules()) == [7.0, 6.0, 5.0]
    # 3 s a slot, 1 s until the second stage begins and 1 s until the first one is done after it
    assert ends_s(group(6, 2), Rules()) == [3 * 6 + 2, 3 * 6 + 1]
    assert ends_s(group(6, 1), Rules()) == [3 * 6]


@pytest.mark.parametrize("anywhere", [True, False])
def test_images_fill_the_gaps_of_a_pipeline(anywhere):
    slots, stages = 6, 3
    images = [Batch(slot, slot, 0.2, 0.3) for slot in range(slots) for _ in range(stages)]
    full = group(slots, stages, images, generated=2, anywhere=anywhere)
    work_s = 3 * slots * stages + 0.5 * len(images) + 0.5 * 2 * slots
    for rules in colocation.RULES:
        assert work_s / stages <= max(ends_s(full, rules)) < 1.25 * work_s / stages
    assert ends_s(group(slots, stages, images, hold=0), Rules()) is None


def test_colocated_steps_are_above_perfect_packing():
    shape, knobs = Shape(2, 320, 2, 0, 0, 1), Knobs(recompute=True)
    search = colocation.Search(case_of("mllm-9b", 1296), colocation.VARIANTS["both"])
    step_s = search.timed(shape, knobs, Rules())
    assert 3 < search.lowest_s <= step_s < 10
    # two stages do not hold the LLM of 72B
    larger = colocation.Search(case_of("mllm-72b", 1296), colocation.VARIANTS["both"])
    assert larger.timed(shape, knobs, Rules()) == np.inf


@pytest.mark.benchmark
def test_colocation():
    waits, steps = colocation.measure(small=True).values()
    shares = [waits[0][f"{where} %"] for where in ("LLM idle", "encoder idle", "generator idle")]
    assert all(0 < share < 50 for share in shares)
    assert waits[0]["step if that were filled, s"] < waits[0]["s per step"]
    assert steps[0]["perfect packing, s"] <= steps[0]["s per step"]


@pytest.mark.benchmark
def test_messages_behind_products_are_priced_and_rehearsed():
    (row,) = only(tp_overlap.measure(small=True))
    assert 1 < row["gain"] < 2
    for how in ("plain ms", "overlapped ms"):
        assert row[f"rehearsed {how}"] > 0.999 * row[how]  # a device is never ahead of its clock


@pytest.mark.benchmark
def test_whole_plans_are_timed_and_more_devices_compared():
    plans, more = sizes.measure(small=True).values()
    assert (
        plans[0]["peak MiB"] > 50 and min(plans[0][f"{what} s"] for what in ("search", "plan")) > 0
    )
    assert more[0]["sizes planned"] == 2 and more[0]["worst dip %"] == 0


@pytest.mark.benchmark
def test_the_command_prints_tables_or_one_document():
    command = [sys.executable, "-m", "benchmarks.planner", "--small"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    document = json.loads(
        subprocess.run([*command, "--json"], cwd=ROOT, capture_output=True, check=True).stdout
    )
    assert all(title in shown for title in document) and "| costs" in shown


@pytest.mark.benchmark
def test_ranks_that_join_hold_as_many_descriptors_as_are_counted_for_them():
    command = [sys.executable, "-m", "benchmarks.joining", "--small", "--json"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (row,) = only(json.loads(shown[shown.index("{") :]))
    assert row["ranks"] == 16 and row["descriptors of the server"] == row["counted ahead"] == 43
    assert row["connected after s"] <= row["met after s"] <= row["groups after s"]


def test_efficiency_times_the_attention_that_models_run(monkeypatch):
    """Not the one that torch would choose on the device."""
    allowed = []

    def attend(query, key, value, is_causal):
        allowed.append(
            (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.cudnn_sdp_enabled())
        )
        return query

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    efficiency._attention(torch.device("cpu"), 1, 2, 8, 16, True).forward()
    assert allowed == [(True, False)] and torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.benchmark
def test_efficiency_measures_every_figure_of_a_curve():
    import yaml

    found = efficiency.measure(torch.device("cpu"), lookup("A800"), small=True)
    sustained = found.pop("sustained")
    assert all(value > 0 for value in [*found.values(), *sustained.values()])
    found["sustained"] = sustained
    (curve,) = yaml.safe_load(efficiency.entry("here", found)).values()
    assert curve.keys() == Curve.model_fields.keys() and "calibrated" in curve["source"]
    assert curve["sustained"].keys() == Efficiency.model_fields.keys()


def test_a_wait_is_a_share_of_its_own_step():
    row = data_wait.row(1, "service", [(0.01, 1.0), (0.01, 2.0), (0.08, 1.0)])
    assert row["share %"] == pytest.approx(1) and row["worst %"] == pytest.approx(8)
    assert row["all waits over all steps %"] == pytest.approx(2.5) and row[
        "wait ms"
    ] == pytest.approx(10)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Copies into a folder the run of one device that `data_wait.prepared` leaves there."""
    of_one = tmp_path_factory.mktemp("one")
    data_wait.prepared(of_one, 1)

    def copied(folder, devices):
        assert devices == 1
        shutil.copytree(of_one, folder, dirs_exist_ok=True)

    return copied


@pytest.mark.benchmark
def test_memory_of_ranks(prepared, monkeypatch):
    monkeypatch.setattr(memory, "prepared", prepared)
    [rows] = memory.measure(small=True).values()
    assert rows[-1]["step"] == 4 and 50 < rows[-1]["rank 0"] < 2_000


@pytest.mark.benchmark
def test_data_wait(prepared, monkeypatch):
    monkeypatch.setattr(data_wait, "prepared", prepared)
    shares, *places = data_wait.measure(small=True).values()
    assert [row["data"] for row in shares] == ["in the ranks", "service"]
    assert all(0 < row["wait ms"] < 1e3 * row["step s"] for row in shares)
    assert all(
        row["loads"] > 0 and row["longest ms"] >= row["median ms"] > 0
        for rows in places
        for row in rows
    )


@pytest.mark.benchmark
def test_checkpoints():
    rows, stands = checkpoints.measure(small=True).values()
    assert [(row["does"], row["way"]) for row in rows] == [
        (does, way) for does in ("save", "load") for way in checkpoints.WAYS
    ]
    assert all(row["s per GiB"] > 0 for row in rows) and 0 < stands[0]["share of saving"] < 1


def test_rehearsals_that_are_kept_are_not_made_again(tmp_path, monkeypatch):
    made = []

    def rehearsed(run, name, steps, *, fault=None, ordering=None, **_):
        made.append(name)
        slower = (
            1.1
            if ordering == "none" or (ordering is None and name != "disaggregated") or fault
            else 1.0
        )
        return {
            "layout": "1×1×1",
            "M": 1,
            "slots": 4,
            "devices": 8,
            "rehearsed_s": 2.0 * slower,
            "simulated_s": 1.9 * slower,
            "planned_s": slower,
            "mfu": 0.4 / slower,
            "efficiency": 0.8,
            "processes": 4,
            "time_scale": 1.0,
            "gpus_per_process": 2,
            "operations": 10,
            "late_mean_ms": 1.0,
        }

    monkeypatch.setattr(rehearsal, "rehearsed", rehearsed)
    rows = {}
    for part, calls in {
        "accuracy": 36,
        "grouped": 6,
        "gain": 33,
        "ordering": 40,
        "faults": 10,
    }.items():
        for _ in range(2):
            rows[part] = rehearsal.PARTS[part](False, rehearsal.keeper(tmp_path / "rows.jsonl"))
        assert len(made) == calls
        made.clear()
    layouts, off = rows["accuracy"].values()
    assert len(layouts) == 36 and off[-1]["data"] == "all" and off[-1]["rehearsals"] == 36
    assert off[-1]["median %"] == pytest.approx(5)
    assert [row["rehearsals"] for row in [*rows["grouped"].values()][1]] == [6]
    gains, why = rows["gain"].values()
    assert all(row["gain rehearsed"] == pytest.approx(1.1) for row in gains)
    assert {row["pairs"] for row in gains if row["over"] == rehearsal.PUBLISHED} == {5}
    assert all(row["product"] == pytest.approx(row["gain planned"]) for row in why)
    assert [row["gain rehearsed"] for row in only(rows["ordering"])] == pytest.approx([1.1] * 4)
    assert [row["slow"] for row in only(rows["faults"])] == ["rank", "link", "stage", "worker"]
    assert all(row["slowdown rehearsed"] == pytest.approx(1.1) for row in only(rows["faults"]))


def test_a_layout_without_anything_hidden_has_the_same_devices():
    unit = UnitPlan(
        name="llm",
        modules=["llm"],
        tp=2,
        pp=2,
        gpus=4,
        layers_per_stage=[1, 1],
        weight_delay=[2, 0],
        tp_overlap=True,
    )
    layout = Layout(
        global_batch_size=4,
        microbatch_size=1,
        microbatches=4,
        gpus_used=4,
        overlap=True,
        units=[unit],
    )
    without = hiding.plain(layout)
    assert hiding.hidden(layout) == "llm: weights after [2, 0], llm: TP messages, reductions"
    assert hiding.hidden(without) == "" and without.describe() == layout.describe()


@pytest.mark.benchmark
def test_a_small_rehearsal_is_measured(tmp_path):
    tables = rehearsal.PARTS["overhead"](True, rehearsal.keeper(tmp_path / "rows.jsonl"))
    assert all(common.table(title, rows) for title, rows in tables.items())
    kept = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert kept and all(
        row["rehearsed_s"] > 0 and row["simulated_s"] > 0 and row["operations"] > 0 for row in kept
    )


@pytest.mark.slow
def test_verdicts_are_judged_by_cause_and_place(monkeypatch, tmp_path):
    assert sum(case.cause == "none" for case in verdicts.CASES) == 5 and len(verdicts.CASES) == 25
    written = []

    def rehearse(folder, case, seed, traces):
        written.append(case.name)
        synthetic.write(traces, synthetic.Synthetic(slow_stage={1: 2.0}))

    monkeypatch.setattr(verdicts, "prepare", lambda folder: (folder / verdicts.RUN_FILE).touch())
    monkeypatch.setattr(verdicts, "rehearse", rehearse)
    for _ in range(2):
        ((title, rows),) = verdicts.measure(tmp_path, only="stage 1 of the LLM").items()
        (right,) = rows
        assert title == "Verdicts: 1 of 1 right"
        assert (right["case"], right["right"], right["verdict"]) == (
            "stage 1 of the LLM",
            True,
            "stage",
        )
    assert written == ["stage 1 of the LLM"]


@pytest.mark.benchmark
def test_a_clean_rehearsal_has_no_straggler(monkeypatch):
    """Where this host was too busy to rehearse (the verdict `unknown`), it is rehearsed again, and
    more slowly."""
    for seed in range(3):
        monkeypatch.setattr(verdicts, "STEP_S", 4.0 * 2**seed)
        verdict = only(verdicts.measure(only="clean 1", seed=seed))[0]["verdict"]
        if verdict != "unknown":
            break
    assert verdict == "none"


@pytest.mark.benchmark
def test_stock_pipeline():
    for row in only(stock_pipeline.measure(small=True)):
        assert row["CPU ratio"] > 0 and row["wall ratio"] > 0
        assert row["first loss, disttrain"] == pytest.approx(row["first loss, DeepSpeed"], rel=1e-5)


def peer(way, number, rate, *losses):
    """A run of `benchmarks.peers` on a CPU."""
    return {
        "way": way,
        "round": number,
        "cpu_s_per_1000_tokens": rate,
        "host_gib": 2.0,
        "first_step_s": 4.0,
        "first_step_cpu_s": 3.0,
        "losses": losses,
    }


def test_peers_are_compared_within_their_rounds():
    """Losses after the first are those of other sums; a round without disttrain has no ratio."""
    runs = [
        peer("disttrain", 0, 1.0, 6.0, 5.0, 4.0, 3.0),
        peer("Trainer", 0, 2.0, 6.0, 5.0, 4.0, 2.0),
        peer("disttrain", 1, 2.0, 6.0, 5.0, 4.0),
        peer("Trainer", 1, 2.0, 6.0, 5.0, 4.00002),
        peer("Trainer", 2, 9.0, 6.0, 5.0, 4.0),
        {"way": "Trainer, compiled", "round": 0, "error": "not finished"},
    ]
    ours, row = peers.table_of("cpu", runs)
    assert ours["same work"] and ours["cpu_s_per_1000_tokens, over disttrain"] == 1.0
    assert row["rounds"] == 3 and row["cpu_s_per_1000_tokens"] == 2.0
    assert row["cpu_s_per_1000_tokens, over disttrain"] == 1.5 and row["same work"]
    assert not peers.table_of("cpu", [runs[0], peer("Trainer", 0, 1.0, 6.0, 5.1, 4.0)])[1][
        "same work"
    ]


def test_a_peer_takes_smaller_microbatches_until_they_fit(tmp_path, monkeypatch):
    def prepared(command, limit_s):
        Path(command[-1], "work.json").write_text('{"microbatch": 8, "tokens": [9]}')
        return 0, ""

    def run(way, device, folder, microbatch, limit_s, tokens):
        fits = way == peers.OURS or microbatch <= 2
        return {"seconds": 1.0, "microbatch": microbatch} | (
            {} if fits else {"error": "CUDA out of memory"}
        )

    monkeypatch.setattr(peers, "_finish", prepared)
    monkeypatch.setattr(peers, "_run", run)
    result = {}
    assert len(list(peers.measure_part("llm", "cpu", 60.0, result))) == len(result["runs"]) + 1
    trainers = [run["microbatch"] for run in result["runs"] if run["way"] != peers.OURS]
    assert trainers == [2] * len(trainers) and len(trainers) > 2


@pytest.mark.benchmark
def test_peers_do_the_same_work(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "ROUNDS", {"cpu": 1})
    monkeypatch.setattr(peers, "ways", lambda device: {"Trainer": ("sdpa", "eager")})
    out = tmp_path / "peers.json"
    assert peers.measure(["vlm"], "cpu", 600.0, out)
    ours, trainer = json.loads(out.read_text())["vlm"]["table"]
    assert trainer["same work"] and ours["way"] == "disttrain"
    assert min(ours["host_gib"], trainer["cpu_s_per_1000_tokens"], ours["first_step_s"]) > 0


@pytest.mark.benchmark
def test_kineto(tmp_path, monkeypatch):
    trace = traces.write(tmp_path / "rank0.json", traces.document(traces.events([400] * 10)))
    monkeypatch.setenv(kineto.TRACE, str(trace))
    monkeypatch.delenv(kineto.VENV, raising=False)
    sizes, both = kineto.measure(small=True).values()
    assert [row["MB"] for row in sizes] == pytest.approx(kineto.SMALL_MB, rel=0.1)
    assert [row["program"] for row in both] == ["disttrain, empty cache"]
    assert all(row["peak MiB"] > 20 and row["again s"] > 0 for row in sizes)


def test_a_repeated_trace_holds_every_event_again_later(tmp_path):
    document = traces.document(traces.events([400, 450]), world_size=8)
    path = kineto.repeat(document, 0.01, tmp_path / "many.json")
    events, first = json.loads(path.read_text())["traceEvents"], document["traceEvents"]
    copies = len(events) // len(first)
    assert len(events) == copies * len(first) and copies > 1 and path.stat().st_size > 10_000
    assert (
        len({event["args"]["correlation"] for event in events if event["name"] == traces.GEMM})
        == 2 * copies
    )
    assert events[len(first)]["ts"] > max(event["ts"] for event in first)


def test_a_verdict_is_right_that_names_what_gains_most():
    def verdict(cause, **place):
        return Verdict(
            cause=cause,
            headline="",
            place=Place(**place),
            lost_s=0.0,
            confidence=1.0,
            evidence=[],
            advice="",
            next_command="",
        )

    rank, other = (
        known.Truth("worker", {"rank": 3}, 0.2, 0.3),
        known.Truth("stage", {"stage": 1}, 0.08, 0.3),
    )
    assert calibration.right(verdict("worker", rank=3, unit="llm"), [rank, other])
    assert not calibration.right(verdict("stage", stage=1), [rank, other])  # gains less
    assert not calibration.right(verdict("worker", rank=2), [rank, other])
    assert calibration.right(verdict("none"), [known.Truth("worker", {"rank": 3}, 0.04, 0.04)])
    assert not calibration.right(verdict("none"), [rank]) and calibration.right(verdict("none"), [])
    hidden = [known.Truth("worker", {"rank": rank}, 0.0, 0.3) for rank in (1, 2)]
    assert calibration.right(verdict("worker", rank=2), hidden) and not calibration.right(
        verdict("none"), hidden
    )


@pytest.mark.slow
def test_calibration_analyses_each_case_once_and_keeps_what_is_held_out(monkeypatch, tmp_path):
    spec = synthetic.Synthetic(steps=3, slow_rank={3: 1.6})

    def write(folder, family, kind, seed, traces):
        synthetic.write(traces, spec)
        return [known.Truth("worker", {"rank": 3}, 0.3, 0.3)]

    monkeypatch.setattr(calibration, "_write", write)
    case = f"simulated host {calibration.FIRST_HELD_OUT}"
    rows = calibration.measure(tmp_path / "rows", held_out=True, only=case)
    assert [row["right"] for row in rows] == [True] and calibration.is_held_out(rows[0])
    monkeypatch.setattr(calibration, "analyze", None)  # nothing is analysed again
    assert calibration.measure(tmp_path / "rows", held_out=True, only=case) == rows
    assert set(calibration.tables(rows)) == {"Held out", "Held out, by kind"}


def test_a_watched_fault_is_named_soon_and_first():
    def look(cause, changed=True, **place):
        said = Verdict(
            cause=cause,
            headline="",
            place=Place(**place),
            lost_s=0.1,
            confidence=0.9,
            evidence=[],
            advice="",
            next_command="",
        )
        return SimpleNamespace(changed=changed, analysis=SimpleNamespace(verdict=said))

    truth = [known.Truth("worker", {"rank": 3}, 0.2)]
    calm, busy, named = look("none"), look("unknown"), look("worker", rank=3)
    found = watching.judged("rank", truth, [(0, calm), (1, busy), (2, named), (3, calm)])
    assert (found["right"], found["after steps"], found["false alarms"]) == (True, 2, "-")
    assert not watching.judged("rank", truth, [(0, calm), (6, named)])["right"]
    assert not watching.judged("rank", truth, [(2, look("data")), (3, named)])["right"]
    assert not watching.judged("rank", truth, [(2, look("worker", rank=3, changed=False))])["right"]
    assert watching.judged("clean", [], [(0, calm), (3, busy)])["right"]
    alarm = watching.judged("clean", [], [(0, calm), (3, named)])
    assert (alarm["right"], alarm["false alarms"]) == (False, "worker")
    kinds = {kind for kind, _ in watching.cases(held_out=False, each=2, clean=1)}
    assert kinds == {*watching.DEVELOPED, "clean"}
    assert len(watching.cases(held_out=True, each=2, clean=3)) == 17


def test_more_evidence_is_fitted_to_be_no_less_sure():
    def row(number, raw, right):
        return {
            "case": f"simulated rank {number}",
            "family": "simulated",
            "kind": "rank",
            "format": "disttrain",
            "said": "worker",
            "raw": raw,
            "right": right,
        }

    rows = [row(n, 0.2, n % 2 == 0) for n in range(8)] + [row(n, 0.6, False) for n in range(8)]
    rows += [row(n, 0.99, True) for n in range(18)] + [row(calibration.FIRST_HELD_OUT, 0.99, False)]
    assert calibration.fit(rows)["disttrain"] == [(0.0, 0.0), (0.4, 0.278), (0.99, 0.95)]


@pytest.mark.benchmark
def test_orders_of_epochs_are_made_opened_and_mixed():
    packed, mixed, processes = epoch_order.measure(small=True).values()
    assert packed[0]["filled %"] > 99
    for row in mixed:
        for name in ("samples", "images", "Σ length²"):
            assert 0.7 < row[f"spread of steps, {name}"] < 1.3
            assert abs(row[f"next to it, {name}"]) < 0.1
    assert [row["process"].split()[0] for row in processes] == [
        "makes",
        "opens",
        "makes",
        "resumes",
        "makes",
    ]
    assert all(0 < row["own MiB"] < 100 for row in processes)

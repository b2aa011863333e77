"""What-if answers: each equals a search of its own, and their words follow from the numbers."""

import dataclasses

import pytest

from disttrain_cli.planning.search import search
from disttrain_cli.planning.sensitivity import Sensitivity, scale_images, sensitivity
from disttrain_cli.planning.solve import cluster_of
from disttrain_cli.planning.units import Cluster, groupings
from disttrain_cli.spec.plan import Layout, UnitPlan
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.work import Work
from tests.cases import first_fast
from tests.planning import synthetic


def plan_of(cluster: Cluster, llm_replicas: int = 1 << 15) -> Layout:
    """A plan of so many replicas of the LLM: sensitivity reads no more of it, and its strategy."""
    units = [
        UnitPlan(
            name=name,
            modules=[name],
            dp=llm_replicas if name == "llm" else 1,
            gpus=llm_replicas if name == "llm" else 1,
            layers_per_stage=[1],
        )
        for name in synthetic.MODULES
    ]
    return Layout(
        strategy="disaggregated",
        global_batch_size=cluster.batch,
        microbatch_size=1,
        microbatches=1,
        gpus_used=llm_replicas + 2,
        units=units,
    )


def silent(what: str, done: int, total: int) -> None:
    assert 0 <= done <= total


def given(gpus: int = 6, batch: int = 24, **profile: object) -> tuple[Profile, Cluster]:
    run = synthetic.run_file(batch=batch, gpus=gpus)
    made = synthetic.tiny(run, kind="cuda", **profile)
    return made, cluster_of(run, made)


def best_ms(profile: Profile, cluster: Cluster) -> float:
    return min(
        search(units, cluster).best[0].total_ms
        for units in groupings(profile, cluster, "disaggregated")
    )


@pytest.fixture(scope="module")
def answered() -> tuple[Profile, Cluster, Sensitivity]:
    profile, cluster = given()
    found = sensitivity(profile, cluster, plan_of(cluster), silent)
    assert found is not None
    return profile, cluster, found


def test_every_change_is_a_search_of_its_own(
    answered: tuple[Profile, Cluster, Sensitivity],
) -> None:
    profile, cluster, found = answered
    again = {
        "images doubled": (scale_images(profile, 2), cluster),
        "images halved": (scale_images(profile, 0.5), cluster),
        "text only": (scale_images(profile, 0), cluster),
        "batch doubled": (profile, dataclasses.replace(cluster, batch=48)),
        "batch halved": (profile, dataclasses.replace(cluster, batch=12)),
    }
    now_ms = best_ms(profile, cluster)
    changes = {change.what: change for change in found.changes}
    for name, (data, machines) in again.items():
        expected_ms = best_ms(data, machines)
        assert changes[name].iteration_s == pytest.approx(expected_ms / 1e3)
        assert changes[name].speedup == pytest.approx(
            now_ms / expected_ms * machines.batch / cluster.batch
        )
    assert changes["images doubled"].speedup < 1 < changes["text only"].speedup
    assert found.now.speedup == 1.0


def test_moves_start_from_the_best_layout_and_fit_the_gpus(
    answered: tuple[Profile, Cluster, Sensitivity],
) -> None:
    _, cluster, found = answered
    now = {move.unit: move.gpus for move in found.now.units}
    for change in (found.one_more_gpu, found.one_more_node, *found.changes):
        assert {move.unit: move.gpus for move in change.units} == now
        assert sum(move.gpus_then for move in change.units) <= change.gpus
        for move in change.units:
            tp, dp, pp = move.shape_then
            assert tp * dp * pp == move.gpus_then
    text_only = next(change for change in found.changes if change.what == "text only")
    then = {move.unit: move.gpus_then for move in text_only.units}
    assert then["llm"] >= now["llm"] and then["image_encoder"] == then["image_generator"] == 1
    assert (
        found.one_more_gpu.gpus == cluster.gpus + 1 and found.one_more_node.gpus == 2 * cluster.gpus
    )


@pytest.mark.parametrize(
    ("gpus", "batch"), first_fast([(3, 4), (4, 4), (6, 6), (7, 3), (12, 2)], 2)
)
def test_gpus_until_faster_is_the_fewest(gpus: int, batch: int) -> None:
    profile, cluster = given(gpus, batch)
    found = sensitivity(profile, cluster, plan_of(cluster), silent)
    assert found is not None
    now_ms = best_ms(profile, cluster)
    faster = [
        more
        for more in range(1, gpus + 1)
        if best_ms(profile, dataclasses.replace(cluster, gpus=gpus + more)) < now_ms * (1 - 1e-9)
    ]
    if found.gpus_until_faster is None:
        assert not faster
    else:
        assert found.gpus_until_faster == faster[0]
        assert (found.one_more_gpu.speedup > 1 + 1e-9) == (faster[0] == 1)


def test_no_answer_has_more_replicas_of_the_llm_than_the_simulator_chose() -> None:
    profile, cluster = given(gpus=12, batch=12)
    free = sensitivity(profile, cluster, plan_of(cluster), silent)
    held = sensitivity(profile, cluster, plan_of(cluster, llm_replicas=1), silent)
    assert free is not None and held is not None
    assert free.most_llm_replicas is None and held.most_llm_replicas == 1
    assert held.now.iteration_s > free.now.iteration_s
    for change in (held.now, held.one_more_gpu, held.one_more_node, *held.changes):
        dp = next(move.shape_then[1] for move in change.units if move.unit == "llm")
        assert dp <= (2 if change.what == "batch doubled" else 1)


def test_images_are_scaled_and_sequences_are_not() -> None:
    profile, _ = given()
    twice = scale_images(profile, 2.0)
    for name, module in profile.modules.items():
        factor = 1.0 if name == "llm" else 2.0
        assert twice.modules[name].work_per_sequence == module.work_per_sequence.scaled(factor)
        assert twice.modules[name].max_work_per_sequence == module.max_work_per_sequence.scaled(
            factor
        )
    assert (
        twice.modules["llm"].cut_bytes_per_sequence[-1]
        == 2 * profile.modules["llm"].cut_bytes_per_sequence[-1]
    )
    assert (
        twice.modules["llm"].cut_bytes_per_sequence[0]
        == profile.modules["llm"].cut_bytes_per_sequence[0]
    )
    assert scale_images(profile, 0.0).modules["image_encoder"].work_per_sequence == Work()


@pytest.mark.slow
def test_sound_stays_where_images_change() -> None:
    profile, cluster = given(gpus=8)
    profile = synthetic.with_audio(profile)
    twice = scale_images(profile, 2.0)
    assert twice.modules["audio_encoder"] == profile.modules["audio_encoder"]
    seen, then = (data.modules["image_encoder"].work_per_sequence for data in (profile, twice))
    assert then == seen.scaled(2)
    assert list(twice.modules) == list(profile.modules)
    heard = profile.data.clips * profile.inputs.of("audio")[0].tokens
    room = profile.data.sequences * profile.inputs.sequence_length - heard
    for images, note in ((room // 2, ""), (room // 2 + 1, "exceeds the sequence length")):
        full = profile.model_copy(
            update={"data": profile.data.model_copy(update={"image_tokens": images})}
        )
        found = sensitivity(full, cluster, plan_of(cluster), silent)
        assert (
            next(change.note for change in found.changes if change.what == "images doubled") == note
        )
        assert {"images halved", "text only"} <= {change.what for change in found.changes}


def test_more_image_tokens_than_a_sequence_holds_is_said() -> None:
    profile, cluster = given()
    full = profile.model_copy(
        update={
            "data": profile.data.model_copy(
                update={
                    "image_tokens": int(
                        0.6 * profile.data.sequences * profile.inputs.sequence_length
                    )
                }
            )
        }
    )
    found = sensitivity(full, cluster, plan_of(cluster), silent)
    assert found is not None
    doubled = next(change for change in found.changes if change.what == "images doubled")
    assert doubled.iteration_s is None and doubled.note == "exceeds the sequence length"


def test_an_odd_batch_is_not_halved_and_text_has_no_images_to_change() -> None:
    profile, cluster = given(batch=9)
    found = sensitivity(scale_images(profile, 0.0), cluster, plan_of(cluster), silent)
    assert found is not None
    assert [change.what for change in found.changes] == ["batch doubled"]


@pytest.mark.slow
def test_what_no_longer_fits_is_said() -> None:
    profile, cluster = given()
    profile = scale_images(profile, 20.0)  # the encoder's activations take most memory
    tight = cluster
    while any(search(units, tight).best for units in groupings(profile, tight, "disaggregated")):
        fitting, tight = tight, dataclasses.replace(tight, memory_gib=tight.memory_gib * 0.8)
    answer = sensitivity(profile, fitting, plan_of(cluster), silent)
    assert answer is not None
    doubled = next(change for change in answer.changes if change.what == "images doubled")
    assert doubled.note == "no layout fits" and doubled.units == []
    assert sensitivity(profile, tight, plan_of(cluster), silent) is None


def test_tensor_parallelism_and_recomputing_are_taken_away_where_used() -> None:
    run = synthetic.run_file(batch=8, gpus=16, nodes=2, precision="bf16")
    profile = synthetic.paper_9b(run)
    cluster = cluster_of(run, profile)
    found = sensitivity(profile, cluster, plan_of(cluster), silent)
    assert found is not None
    uses = any(move.shape_then[0] > 1 for move in found.now.units)
    without = [change for change in found.changes if change.what == "TP 1 everywhere"]
    assert bool(without) == uses
    assert all(move.shape_then[0] == 1 for change in without for move in change.units)


def test_on_a_cpu_the_answer_has_what_training_does_not_run() -> None:
    run = synthetic.run_file(batch=8, gpus=4)
    for tps, expected in (((1, 2), 1), ((1,), 0)):
        profile = synthetic.tiny(run, tps=tps)
        cluster = cluster_of(run, profile)
        found = sensitivity(profile, cluster, plan_of(cluster), silent)
        assert found is not None
        allowed = [change for change in found.changes if change.what == "with TP, recomputing"]
        assert len(allowed) == expected
        assert all(change.speedup >= 1 - 1e-9 for change in allowed)

"""A job that hangs is found, and so is the rank that the others wait for."""

from pathlib import Path

import psutil
import pytest

from disttrain_cli.errors import RankLostError
from disttrain_cli.runtime.launching.launch import launch
from disttrain_cli.runtime.watching.hang import HangWatch, diagnose
from disttrain_cli.runtime.watching.pulse import Pulse, State, read_state
from disttrain_cli.spec.plan import Layout, UnitPlan
from disttrain_cli.spec.stage_graph import StageGraph, stage_graph


def layout_of(dp: int = 1, tp: int = 1) -> Layout:
    """Three stages: an encoder, and an LLM of two, whose first one has `dp` replicas over `tp`
    ranks."""
    units = [
        UnitPlan(name="encoder", modules=["e"], gpus=1, layers_per_stage=[1]),
        UnitPlan(
            name="llm", modules=["l"], dp=dp, tp=tp, pp=2, gpus=2 * dp * tp, layers_per_stage=[1, 1]
        ),
    ]
    return Layout(
        global_batch_size=4,
        microbatch_size=1,
        microbatches=4,
        gpus_used=1 + 2 * dp * tp,
        units=units,
    )


def graph_of(dp: int = 1, tp: int = 1, tied: tuple[int, int] | None = None) -> StageGraph:
    """The graph of such a layout."""
    return stage_graph(layout_of(dp, tp), "l", tied)


def state(rank: int, operation: str, slot: int = 0, step: int = 3) -> State:
    return State(
        rank=rank,
        host="here",
        process=1,
        beat=9,
        moves=9,
        step=step,
        operation=operation,
        slot=slot,
        module="",
    )


def states(*operations: str) -> dict[int, State]:
    return {rank: state(rank, operation) for rank, operation in enumerate(operations)}


def test_a_rank_that_computes_while_its_neighbours_wait_is_the_cause() -> None:
    found = diagnose(
        states("receive_gradient", "forward", "receive_activation"), graph_of().stages, set()
    )
    assert found.causes == [1] and not found.circle
    assert found.waits == {0: [1], 1: [], 2: [1]}


def test_a_chain_of_waits_ends_at_its_cause() -> None:
    found = diagnose(
        states("load", "receive_activation", "receive_activation"), graph_of().stages, set()
    )
    assert found.causes == [0] and found.waits[2] == [1]


def test_the_end_of_sends_waits_for_the_stages_on_both_sides() -> None:
    found = diagnose(states("wait", "wait", "forward"), graph_of().stages, set())
    assert found.causes == [2] and not found.circle
    assert found.waits == {0: [1], 1: [0, 2], 2: []}


def test_a_silent_rank_is_the_cause_also_where_others_compute() -> None:
    found = diagnose(
        states("forward", "receive_gradient", "receive_activation"), graph_of().stages, {1}
    )
    assert found.causes == [1] and found.waits[1] == []


def test_ranks_that_wait_for_each_other_form_a_circle() -> None:
    found = diagnose(
        states("receive_gradient", "receive_gradient", "receive_activation"),
        graph_of().stages,
        set(),
    )
    assert found.circle and set(found.causes) == {1, 2}


def test_a_reduction_waits_for_the_replica_that_is_not_in_it() -> None:
    stages = graph_of(dp=2).stages
    first, second = stages[1].ranks
    told = {rank: state(rank, "losses") for stage in stages for rank in stage.ranks}
    told |= {first: state(first, "reduce"), second: state(second, "backward")}
    found = diagnose(told, stages, set())
    assert found.causes == [second] and found.waits[first] == [second]


def test_a_reduction_waits_for_the_other_copy_of_a_tied_weight() -> None:
    stages = graph_of(dp=2, tied=(1, 2)).stages
    (one, two), (third, fourth) = stages[1].ranks, stages[2].ranks
    assert (stages[0].twin, stages[1].twin, stages[2].twin) == (None, 2, 1)
    told = {rank: state(rank, "reduce") for rank in (one, two, third)}
    told |= {0: state(0, "reduce"), fourth: state(fourth, "backward")}
    found = diagnose(told, stages, set())
    assert found.causes == [fourth]
    assert found.waits[two] == [fourth] and found.waits[one] == []
    assert diagnose(told, graph_of(dp=2).stages, set()).waits[two] == []


def test_a_forward_waits_for_the_ranks_that_share_its_layers() -> None:
    stages = graph_of(tp=2).stages
    first, second = stages[1].ranks
    told = {rank: state(rank, "receive_activation") for stage in stages[2:] for rank in stage.ranks}
    told |= {
        stages[0].ranks[0]: state(stages[0].ranks[0], "receive_gradient"),
        first: state(first, "forward"),
        second: state(second, "load"),
    }
    found = diagnose(told, stages, set())
    assert found.causes == [second] and found.waits[first] == [second]


def test_a_transfer_of_one_of_several_stages_waits_for_its_neighbour() -> None:
    """On three ranks of two stages each: rank 0 is in its second stage, stage 3."""
    unit = UnitPlan(
        name="llm", modules=["l"], pp=3, chunks=2, gpus=3, layers_per_stage=[1, 1, 1, 1, 1, 1]
    )
    layout = layout_of().model_copy(update={"units": [unit], "gpus_used": 3})
    stages = stage_graph(layout, "l").stages
    told = states("receive_activation", "forward", "forward")
    for stage, waits in ((3, [2]), (0, [])):
        told[0] = told[0].model_copy(update={"stage": stage})
        assert diagnose(told, stages, set()).waits[0] == waits
    told[0] = told[0].model_copy(update={"operation": "wait"})
    assert set(diagnose(told, stages, set()).waits[0]) == {1, 2}


def test_a_pulse_tells_what_the_rank_turned_to(tmp_path: Path) -> None:
    pulse = Pulse(tmp_path, 7, 1.0)
    pulse.begin("forward", 4, 2, "llm")
    with pulse.beating():
        pass
    told = read_state(tmp_path, 7)
    assert (
        told is not None
        and (told.rank, told.operation) == (7, "ended")
        and told.moves == 2
        and told.beat == 2
    )
    (tmp_path / "rank-00007.json").write_text("half a rec")
    assert read_state(tmp_path, 7) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("stopped", "rank 1 (llm, stage 0, host"),
        ("computes", "rank 1 (llm, stage 0, host"),
        ("circle", "ranks 1, 2 wait for each other"),
    ],
)
def test_a_hanging_job_ends_and_names_its_cause(tmp_path: Path, how: str, named: str) -> None:
    watch = HangWatch(tmp_path / "pulses", tmp_path, graph_of().stages, 3.0)
    with pytest.raises(RankLostError) as caught:
        launch(
            3,
            "tests.runtime.launching.launch_worker:hanging",
            {"how": how, "pulses": str(tmp_path / "pulses"), "hang_s": 3.0},
            tmp_path,
            on_poll=watch.poll,
        )
    assert (
        caught.value.exit_code == 4 and "hangs" in caught.value.what and named in caught.value.what
    )
    assert "rank 2 is in receive activation (slot 3, step 5)" in caught.value.why
    if how == "stopped":
        assert "rank 1 is stopped (SIGSTOP), in forward (slot 3, step 5, llm)" in caught.value.why
    else:
        assert "launch_worker.py" in (tmp_path / "rank-00001.log").read_text()  # its stacks
    assert not psutil.Process().children(recursive=True)

"""Peak memory: bytes per parameter, slots in flight, reserves."""

import pytest

from disttrain_cli.costs.memory import GIB, bytes_per_parameter, layout_memory
from disttrain_cli.spec.plan import Layout, UnitPlan
from tests.planning import synthetic


@pytest.mark.parametrize(
    ("precision", "zero", "dp", "expected"),
    [("bf16", 1, 4, 2 + 4 + 12 / 4), ("fp32", 0, 4, 4 + 4 + 8), ("fp32", 1, 4, 4 + 4 + 12 / 4)],
)
def test_bytes_per_parameter(precision: str, zero: int, dp: int, expected: float) -> None:
    kept, shared = bytes_per_parameter(precision, zero)
    assert kept + shared / dp == expected


def replicated(replicating: bool = True, tp: int = 2, **changes: object) -> Layout:
    """Encoder and LLM in one unit of TP 2 × DP 2, whose encoder is whole on every rank."""
    unit = UnitPlan(
        name="some",
        modules=["image_encoder", "llm"],
        tp=tp,
        dp=2,
        gpus=2 * tp,
        layers_per_stage=[10],
    )
    other = UnitPlan(name="g", modules=["image_generator"], gpus=1, layers_per_stage=[4])
    whole = {"image_encoder": 1} if replicating else {}
    return Layout(
        global_batch_size=16,
        microbatch_size=2,
        microbatches=4,
        gpus_used=2 * tp + 1,
        units=[unit.model_copy(update={"module_tp": whole, **changes}), other],
    )


def test_a_module_that_tp_does_not_divide_by_hand() -> None:
    profile = synthetic.tiny(synthetic.run_file(), tps=(1, 2))
    (divided, _), (whole, _) = (
        layout_memory(profile, replicated(one), 4.0) for one in (False, True)
    )
    encoder = 10_000 + 2 * 50_000 + 20_000
    assert (whole.weights_gib - divided.weights_gib) * GIB == pytest.approx(encoder / 2 * 4)
    # half the images of two worst sequences, as divided, and one mean image more on the busiest
    # rank; of two slots in flight
    more = 2 * (120 / 3) * (500 + 2 * 4e3 + 1e3)
    assert (whole.activations_gib - divided.activations_gib) * GIB == pytest.approx(more)


def layout(microbatches: int) -> Layout:
    units = [
        UnitPlan(name="e", modules=["image_encoder"], dp=3, gpus=3, layers_per_stage=[4]),
        UnitPlan(name="l", modules=["llm"], dp=2, pp=2, gpus=4, layers_per_stage=[3, 3]),
        UnitPlan(name="g", modules=["image_generator"], gpus=1, layers_per_stage=[4]),
    ]
    return Layout(
        global_batch_size=4 * microbatches,
        microbatch_size=2,
        microbatches=microbatches,
        gpus_used=8,
        units=units,
    )


def test_llm_stage_by_hand() -> None:
    profile = synthetic.tiny(synthetic.run_file())
    memory = layout_memory(profile, layout(8), 4.0)
    assert [(m.unit, m.stage, m.limit_gib) for m in memory] == [
        ("e", 0, 4.0),
        ("l", 0, 4.0),
        ("l", 1, 4.0),
        ("g", 0, 4.0),
    ]
    first = 40_000 + 2 * 200_000  # parameters of embed and two blocks
    activations = 2 * 256 * (500 + 2 * 8e3)  # two sequences of 256 tokens at worst
    working = 0.4 * 8e3 * 2 * 256  # a block's beside what it keeps
    # of two slots: gradients to the encoder, rows to the next stage
    messages = 2 * (30_000 + 8_000) * 4 / 2
    assert memory[1].peak_gib * GIB == pytest.approx(
        first * (4 + 4 + 12 / 2) + 3 * activations + working + messages
    )
    assert memory[1].activations_gib * GIB == pytest.approx(3 * activations)
    assert (memory[1].transient_gib * GIB, memory[1].messages_gib * GIB) == pytest.approx(
        (working, messages)
    )
    few = layout_memory(profile, layout(2), 4.0)
    absent = 4 * (40_000 + 200_000)  # while the last block's first backward runs, nobody else's
    assert few[1].peak_gib * GIB == pytest.approx(
        first * 14 - absent + 2 * activations + working + messages
    )


@pytest.mark.parametrize(("slots", "waiting_slots"), [(8, 2), (4, 1), (3, 0)])
def test_weights_that_wait_by_hand(slots: int, waiting_slots: int) -> None:
    """An LLM stage of an embedding and two blocks, three slots in flight, two of which wait for
    their weights: fewer where no forward takes the place of a slot whose backward is done."""
    profile, given = synthetic.tiny(synthetic.run_file()), layout(slots)
    units = [
        unit.model_copy(update={"weight_delay": [2, 0]}) if unit.name == "l" else unit
        for unit in given.units
    ]
    whole, split = (
        layout_memory(profile, one, 4.0)
        for one in (given, given.model_copy(update={"units": units}))
    )
    tokens = 2 * 256
    activations, deferred = tokens * (500 + 2 * 8e3), 0.9 * tokens * (500 + 2 * 8e3)
    embed, block = 500 * tokens, 8e3 * tokens
    moments = [  # of the slot in its backward, by the layer that runs
        embed + block + 1.95 * block,
        embed + 1.95 * block + 0.9 * block,
        1.95 * embed + 2 * 0.9 * block,
    ]
    assert (split[1].activations_gib + split[1].transient_gib) * GIB == pytest.approx(
        2 * activations + waiting_slots * deferred + max(moments)
    )
    assert split[1].weights_gib == whole[1].weights_gib
    assert [split[n].peak_gib for n in (0, 3)] == [whole[n].peak_gib for n in (0, 3)]


def test_encoder_replica_meets_its_share_of_a_worst_slot() -> None:
    profile = synthetic.tiny(synthetic.run_file())
    module = profile.modules["image_encoder"]
    mean, worst = module.work_per_sequence, module.max_work_per_sequence
    # a slot has 4 sequences
    busiest = worst.scaled(1 / 3) + mean.scaled(3 / 3) + mean.scaled(1 / mean.items)
    kept = [module.costs[kind].tp["1"].activation_bytes(busiest) for kind in module.layers]
    states, messages = module.parameters * (8 + 12 / 3), 2 * 30_000 * 4 / 3
    # the last block runs; the projector, of a quarter of its size, is done
    fullest = sum(kept[:3]) + 0.4 * kept[2]
    assert layout_memory(profile, layout(8), 4.0)[0].peak_gib * GIB == pytest.approx(
        states + 3 * sum(kept) + fullest + messages
    )


def test_rows_on_their_way_are_those_of_the_cuts_that_a_stage_has() -> None:
    profile = synthetic.tiny(synthetic.run_file())
    cuts = {
        "image_encoder": [9e3, 9e3, 9e3, 3e4],
        "llm": [5e3, 7e3, 6e3, 6e3, 6e3, 8e3],
        "image_generator": [9e6, 9e6, 9e6, 0.0],
    }
    modules = {
        name: module.model_copy(update={"cut_bytes_per_sequence": cuts[name]})
        for name, module in profile.modules.items()
    }
    memory = layout_memory(profile.model_copy(update={"modules": modules}), layout(8), 4.0)
    of_slots = 2 * 4  # sequences of two slots
    assert [stage.messages_gib * GIB for stage in memory] == pytest.approx(
        [of_slots * 3e4 / 3, of_slots * (3e4 + 7e3) / 2, of_slots * (7e3 + 8e3) / 2, of_slots * 8e3]
    )  # the generator is one stage: nothing crosses its wide cuts


def test_one_replica_runs_without_zero_and_its_copy_of_weights() -> None:
    profile = synthetic.tiny(synthetic.run_file())
    alone = layout_memory(profile, layout(8), 4.0)[3]
    assert alone.unit == "g" and alone.optimizer_gib * GIB == pytest.approx(
        8 * profile.modules["image_generator"].parameters
    )


def test_reserves_are_stated_and_take_their_share() -> None:
    profile = synthetic.tiny(synthetic.run_file())
    device = profile.device.model_copy(
        update={
            "context_gib": 0.5,
            "workspace_mib": 64.0,
            "communicator_mib": 32.0,
            "fragmentation": 0.1,
        }
    )
    before = layout_memory(profile, layout(8), 4.0)
    after = layout_memory(profile.model_copy(update={"device": device}), layout(8), 4.0)
    cuts = (1, 2, 2, 1)
    for plain, stage, cut, replicated in zip(before, after, cuts, (1, 1, 1, 0), strict=True):
        count = 1 + replicated + 2 * cut  # the world, replicas, both ways over each cut
        assert stage.reserve_gib == pytest.approx(0.5 + (64 + count * 32) / 1024)
        assert stage.fragmentation_gib == pytest.approx(
            0.1 * (plain.activations_gib + plain.transient_gib + plain.messages_gib)
        )
        assert stage.peak_gib == pytest.approx(sum(stage.parts.values()))
        assert stage.peak_gib - plain.peak_gib == pytest.approx(
            stage.reserve_gib + stage.fragmentation_gib
        )

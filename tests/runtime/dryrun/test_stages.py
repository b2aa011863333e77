"""Which stages of a plan count as alike."""

from pathlib import Path

from disttrain_cli.models.graph import describe, layer_table
from disttrain_cli.runtime.dryrun.stages import distinct, slots_seen
from disttrain_cli.spec.stage_graph import stage_graph
from tests.runtime.factory import plan_of, unit, write_run


def test_stages_with_other_tensors_over_their_cuts_differ(tmp_path: Path) -> None:
    """The last block of a diffusion transformer does not hand on what all blocks read."""
    run = write_run(tmp_path, tmp_path, modules=("llm", "refiner"))
    table = layer_table(run)
    kinds = {
        module: [info.kind for info in table if info.module == module]
        for module in ("llm", "refiner")
    }
    units = [
        unit("llm", ["llm"], [len(kinds["llm"])]),
        unit("refiner", ["refiner"], [1] * len(kinds["refiner"])),
    ]
    layout = plan_of(run, units, 6).plan
    assert layout.microbatches == 1  # so that all have as many slots in flight
    groups = distinct(stage_graph(layout, describe(run).llm), table, 1)
    blocks = [place for place, kind in enumerate(kinds["refiner"]) if kind == "block"]
    of_blocks = [
        [stage.index for stage in group]
        for group in groups
        if group[0].unit.name == "refiner" and group[0].index in blocks
    ]
    assert len(blocks) == 2 and of_blocks == [[blocks[0]], [blocks[1]]]


def test_steps_are_long_enough_for_what_waits(tmp_path: Path) -> None:
    run = write_run(tmp_path, tmp_path, modules=("llm",))
    table = layer_table(run)
    blocks = len(table) - 2
    llm = unit("llm", ["llm"], [1, *[1] * blocks, 1]).model_copy(
        update={"weight_delay": [None, *range(blocks), 1]}
    )
    graph = stage_graph(plan_of(run, [llm], 1).plan, describe(run).llm)
    flights = range(blocks + 2, 0, -1)
    most = blocks + 3
    assert [slots_seen(stage, most) for stage in graph.stages] == [
        min(most, flight + 1 + delay)
        for flight, delay in zip(flights, [0, *range(blocks), 1], strict=True)
    ]
    assert len(distinct(graph, table, 1)) == blocks + 2  # alike but for their delays

"""What the traces say of the samples in a slot is what the slot's replicas work on."""

import pytest

from disttrain_cli.data.contents import contents
from tests.data.dataset import DISAGGREGATED
from tests.data.ordering.test_assigning import GENERATOR_WITH_LLM, order_step, random_batch


@pytest.mark.parametrize("layout", [DISAGGREGATED, GENERATOR_WITH_LLM])
def test_every_sequence_is_where_its_replica_works_on_it(layout):
    llm = layout.unit_of("llm")
    batch = random_batch(3, llm.dp * layout.microbatch_size * layout.microbatches)
    order = order_step(batch, layout, 7, "paper")
    rows = list(contents(order, batch, layout))
    assert sorted(row["sequence"] for row in rows) == batch.ids.tolist()
    assert sorted(sample for row in rows for sample in row["samples"]) == sorted(
        batch.samples.tolist()
    )
    for row in rows:
        slot = order.slots[row["slot"]]
        own = slot.sequences[slot.replicas[llm.name][row["replica"]]["sequence"]].tolist()
        assert row["unit"] == llm.name and row["sequence"] in own
        at = row["sequence"] - int(batch.ids[0])
        first, last = batch.sample_start[at : at + 2]
        assert (
            row["samples"] == batch.samples[first:last].tolist()
            and row["tokens"] == batch.tokens[at]
        )
        assert row["tokens"] == sum(batch.index.lengths[sample] for sample in row["samples"])
        assert [name.rsplit("/", 1)[-1] for name in row["names"]] == [
            batch.index.keys[s] for s in row["samples"]
        ]

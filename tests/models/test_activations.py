import torch
from torch import nn

from disttrain_cli.models.activations import saved_bytes
from disttrain_cli.models.graph import build_layers, describe, layer_table
from disttrain_cli.models.layer import Batch, PipelineLayer
from disttrain_cli.models.probe import probe_batch, state_at


class Twice(PipelineLayer):
    """Saves its input once (for two products) and one product of its own."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def is_empty(self, state, batch):
        return False

    def compute(self, state, batch):
        x = state["x"]
        return {"y": self.linear(x) * x}


def test_each_storage_counts_once_and_weights_do_not():
    x = torch.randn(10, 8, requires_grad=True)
    assert saved_bytes(Twice(), {"x": x}, Batch()) == 2 * 10 * 8 * 4


def test_a_block_keeps_several_times_its_input_in_proportion_to_the_rows(make_run):
    run = make_run()
    table, inputs = layer_table(run), describe(run)
    block = build_layers(run, 5, 6)[0]
    sizes = []
    for sequences in (1, 2):
        batch = probe_batch(inputs, documents=[[48]] * sequences)
        state = state_at(table, 5, inputs, batch)
        sizes.append(saved_bytes(block, state, batch))
    assert sizes[0] > 5 * 48 * 48 * 4 and sizes[1] == 2 * sizes[0]


def test_no_work_keeps_nothing(make_run):
    run = make_run()
    table, inputs = layer_table(run), describe(run)
    batch = probe_batch(inputs, target=0)
    layer = build_layers(run, 12, 13)[0]
    assert saved_bytes(layer, state_at(table, 12, inputs, batch), batch) == 0


def test_frozen_weights_keep_less_and_a_frozen_stage_keeps_nothing(make_run):
    run = make_run()
    table, inputs = layer_table(run), describe(run)
    block = build_layers(run, 5, 6)[0]
    batch = probe_batch(inputs, documents=[[48]])
    state = state_at(table, 5, inputs, batch)
    trained = saved_bytes(block, state, batch)
    block.requires_grad_(False)
    assert 0 < saved_bytes(block, state, batch) < trained
    assert saved_bytes(block, {name: tensor.detach() for name, tensor in state.items()}, batch) == 0

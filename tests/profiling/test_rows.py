"""Bytes of inputs and cuts of a real model's table, against the tensors themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from disttrain_cli.models.graph import describe, layer_table
from disttrain_cli.models.probe import probe_batch, probe_work, state_at
from disttrain_cli.profiling.rows import cut_bytes, input_bytes
from disttrain_cli.spec.runfile import Run
from tests.profiling.test_measure import MODULES, run_file

SIZES = {"grids": [(4, 6), (8, 8)], "documents": [[60, 40], [200]], "targets": 3}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return run_file(tmp_path, tmp_path, list(MODULES), processes=1)


def test_bytes_equal_those_of_the_tensors(run: Run) -> None:
    table, inputs = layer_table(run), describe(run)
    batch = probe_batch(inputs, device="meta", **SIZES)
    sequences = len(SIZES["documents"])
    work = {"image_encoder": probe_work(inputs, "image", grids=SIZES["grids"]),
            "llm": probe_work(inputs, "sequence", documents=SIZES["documents"]),
            "image_generator": probe_work(inputs, "target", targets=SIZES["targets"])}
    mean = {name: amount.scaled(1.0 / sequences) for name, amount in work.items()}
    crossing = []
    for place, layer in enumerate(table):
        state = state_at(table, place, inputs, batch, "meta")
        expected = sum(state[name].nbytes for name in layer.reads)
        assert input_bytes(layer, table, inputs, mean, 4)(work[layer.module]) == pytest.approx(expected)
        after = state_at(table, place + 1, inputs, batch, "meta").values()
        crossing.append(sum(tensor.nbytes for tensor in after) / sequences)
    found = [value for name in work for value in cut_bytes(name, table, inputs, mean, 4)]
    assert found == pytest.approx(crossing)
    assert found[-1] == 0.0

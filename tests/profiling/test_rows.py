"""Bytes of inputs and cuts of a real model's table, against the tensors themselves."""

from pathlib import Path

import pytest

from disttrain_cli.models.graph import describe, layer_table, parallel_layers
from disttrain_cli.models.probe import probe_batch, probe_work, state_at
from disttrain_cli.profiling.rows import batch_bytes, cut_bytes, input_bytes
from disttrain_cli.spec.runfile import Run
from tests.profiling.test_measure import MODULES, run_file

SIZES = {"image": [(4, 6), (8, 8)], "documents": [[60, 40], [200]], "target": 3}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return run_file(tmp_path, tmp_path, list(MODULES), processes=1)


def test_bytes_equal_those_of_the_tensors(run: Run) -> None:
    table, inputs = layer_table(run), describe(run)
    batch = probe_batch(inputs, device="meta", **SIZES)
    sequences = len(SIZES["documents"])
    work = {
        "image_encoder": probe_work(inputs, "image_encoder", image=SIZES["image"]),
        "llm": probe_work(inputs, "llm", documents=SIZES["documents"]),
        "image_generator": probe_work(inputs, "image_generator", target=SIZES["target"]),
    }
    mean = {name: amount.scaled(1.0 / sequences) for name, amount in work.items()}
    crossing = []
    for place, layer in enumerate(table):
        state = state_at(table, place, inputs, batch, "meta")
        expected = sum(state[name].nbytes for name in layer.reads)
        assert input_bytes(layer, table, inputs, mean, 4)(work[layer.module]) == pytest.approx(
            expected
        )
        after = state_at(table, place + 1, inputs, batch, "meta").values()
        crossing.append(sum(tensor.nbytes for tensor in after) / sequences)
    found = [value for name in work for value in cut_bytes(name, table, inputs, mean, 4)]
    assert found == pytest.approx(crossing)
    assert found[-1] == 0.0


def test_inputs_of_a_slot_count_once_in_a_module(run: Run) -> None:
    table, inputs = layer_table(run), describe(run)
    batch = probe_batch(inputs, device="meta", **SIZES)
    assert batch.token_ids is not None and batch.labels is not None
    tensors = {
        "image_encoder": batch.of("image").values[0],
        "llm": [batch.token_ids, batch.labels],
        "image_generator": [batch.of("target").values[0][0]],
    }
    work = {
        "image_encoder": probe_work(inputs, "image_encoder", image=SIZES["image"]),
        "llm": probe_work(inputs, "llm", documents=SIZES["documents"]),
        "image_generator": probe_work(inputs, "image_generator", target=SIZES["target"]),
    }
    for module, read in tensors.items():
        found = [
            batch_bytes(layer, table, inputs, 4)(work[module])
            for layer in table
            if layer.module == module
        ]
        assert sum(found) == sum(tensor.nbytes for tensor in read)


def test_bytes_of_generators_and_encoders_side_by_side_equal_those_of_the_tensors(run: Run) -> None:
    """Of a second image encoder without class tokens, and a second generator of twice the size."""
    plain = run.file.model_dump(mode="json", exclude_none=True)
    modules = plain["model"]["modules"]
    first, size = modules["image_generator"], 2 * modules["image_generator"]["image_size"]
    modules["second"] = first | {
        "image_size": size,
        "config": first["config"] | {"sample_size": size},
    }
    modules["other_eye"] = modules["image_encoder"] | {"architecture": "siglip_vision_model"}
    run = Run(path=run.path, file=type(run.file).model_validate(plain))
    table, inputs = layer_table(run), describe(run)
    batch = probe_batch(inputs, device="meta", **SIZES)
    mean = {
        name: probe_work(
            inputs,
            name,
            **{key: SIZES[key] for key in ("documents", inputs.item(name)) if key in SIZES},
        ).scaled(0.5)
        for name in run.file.model.order
    }
    for module in mean:
        apart, crossing = parallel_layers(table, inputs.llm, module), []
        line = [layer for index, layer in enumerate(table) if index not in apart]
        for place, layer in enumerate(line):
            if layer.module == module:
                read = state_at(line, place, inputs, batch, "meta")
                expected = sum(read[name].nbytes for name in layer.reads)
                assert input_bytes(layer, table, inputs, mean, 4)(
                    mean[module].scaled(2)
                ) == pytest.approx(expected)
                after = state_at(line, place + 1, inputs, batch, "meta")
                crossing.append(sum(tensor.nbytes for tensor in after.values()) / 2)
        assert cut_bytes(module, table, inputs, mean, 4) == pytest.approx(crossing)
    assert cut_bytes("llm", table, inputs, mean, 4)[-1] > 0.0

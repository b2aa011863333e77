"""Measured routing is that of transformers' own model, by modality."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from disttrain_cli.costs.routing import fullest, measured_shares
from disttrain_cli.data.indexing.building import build_index
from disttrain_cli.models.experts import mixtures
from disttrain_cli.models.graph import describe
from disttrain_cli.models.weights import module_layers
from disttrain_cli.profiling.routing import SEQUENCES, by_sequence, dispersion, with_routing
from disttrain_cli.spec.layer_costs import Experts
from disttrain_cli.spec.library_processor import OF_TEXT
from disttrain_cli.spec.progress import silent
from tests.data.test_parts import SIZES, told, write_json
from tests.library_models import FAMILIES, write
from tests.planning import synthetic
from tests.whole_models import run_of

EXPERTS = 4


def write_mixture(folder: Path) -> tuple[Any, Any]:
    """A folder of a vision-language model whose LLM is Mixtral; its model and its processor."""
    tiny = FAMILIES["vipllava"]
    experts = {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "sliding_window": None}
    text = tiny.text | {"model_type": "mixtral"} | experts
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(FAMILIES, "mixture", tiny._replace(text=text))
        return write(folder, "mixture")


def chosen_by_library(model: Any, processor: Any) -> list[dict[str, Counter[int]]]:
    """By mixture and modality, how often the rows of all conversations choose each expert."""
    chosen: dict[str, list[np.ndarray]] = {}
    for path, part in mixtures(model):
        part.register_forward_pre_hook(
            lambda _, given, path=path: chosen.setdefault(path, []).append(given[1].numpy())
        )
    seen = []
    for sizes in SIZES:
        made = told(processor if sizes else processor.tokenizer, sizes)
        made.pop("assistant_masks")
        given = {
            key: torch.as_tensor(np.atleast_2d(value) if key in OF_TEXT else np.array(value))
            for key, value in made.items()
        }
        with torch.no_grad():
            model(**given)
        seen.append((given["input_ids"][0] == model.config.image_token_id).numpy())
    image = np.concatenate(seen)
    return [
        {
            item: Counter(np.concatenate(indices)[image == (item == "image")].ravel().tolist())
            for item in ("image", "text")
        }
        for indices in chosen.values()
    ]


@pytest.mark.slow
def test_rows_choose_as_in_the_librarys_own_model(tmp_path: Path) -> None:
    model, processor = write_mixture(tmp_path / "whole")
    write_json(tmp_path / "data")
    run = run_of(tmp_path / "whole", data={"sequence_length": 1024}, global_batch_size=1)
    inputs = describe(run)
    build_index(run, inputs)
    (kind,) = {layer.kind for layer in module_layers(run, inputs.llm) if layer.experts}
    profile = synthetic.tiny(synthetic.run_file())
    block = profile.modules["llm"].costs["block"]
    unmeasured = Experts(EXPERTS, 2, 48, 1, 1)
    costs = {kind: block.model_copy(update={"experts": unmeasured}), "head": block}
    llm = profile.modules["llm"].model_copy(update={"costs": costs})
    measured = with_routing(run, inputs, {inputs.llm: llm}, "cpu", silent)[inputs.llm]
    assert measured.costs["head"] == block
    experts = measured.costs[kind].experts
    assert experts is not None
    of_items = experts.routed
    expected = chosen_by_library(model, processor)
    assert {one.item for one in of_items} == {"image", "padding", "text"}
    assert sum(one.share for one in of_items) == pytest.approx(1.0)
    for one in of_items:
        if one.item == "padding":
            continue
        assert len(one.layers) == len(expected)
        for layer, counts in zip(one.layers, expected, strict=True):
            rows = counts[one.item]
            assert [int(part) / 1e5 for part in layer.split()] == pytest.approx(
                [rows[expert] / rows.total() for expert in range(EXPERTS)], abs=1e-3
            )
    assert measured_shares(experts).sum(axis=1) == pytest.approx(np.ones(len(expected)))
    assert 1.0 < fullest(experts, ep=2, rows=1e6) <= 2.0
    for weights in (tmp_path / "whole").glob("*.safetensors*"):
        weights.unlink()
    assert with_routing(run, inputs, {inputs.llm: llm}, "cpu", silent)[inputs.llm] == llm


def test_dispersion_is_1_for_independent_rows_and_more_where_sequences_differ() -> None:
    random = np.random.default_rng(0)
    shares = np.array([0.1, 0.2, 0.3, 0.4])
    independent = [random.multinomial(500, shares, SEQUENCES) for _ in range(40)]
    assert dispersion(independent) == pytest.approx(1.0, abs=0.15)
    together = [random.multinomial(50, shares, SEQUENCES) * 10 for _ in range(40)]
    assert dispersion(together) == pytest.approx(10.0, rel=0.2)
    assert dispersion([np.array([[3, 4]])]) == 1.0


def test_choices_are_counted_by_sequence() -> None:
    index = np.arange(SEQUENCES * 2)[:, None] % 3  # two rows of a sequence
    every = by_sequence(index, np.ones(SEQUENCES * 2, dtype=bool), 3)
    assert (every.sum(axis=1) == 2).all() and every[0].tolist() == [1, 1, 0]
    second = by_sequence(index, np.arange(SEQUENCES * 2) % 2 == 1, 3)
    assert second[0].tolist() == [0, 1, 0] and second[1].tolist() == [1, 0, 0]

"""Folders whose embedding has one row for each token of their tokenizer, such as SmolVLM:
indexed, prepared and exported with their own shape."""

import json
from functools import partial

import numpy as np
import pytest
from safetensors.torch import load_file

from disttrain_cli.data.epochs.mixture import Mixture
from disttrain_cli.data.index.index_checks import checked_tokenizer
from disttrain_cli.data.indexing.building import build_index
from disttrain_cli.data.packing import pack
from disttrain_cli.data.reading import ShardReader
from disttrain_cli.data.sequences import SequencePlan
from disttrain_cli.data.tokenizer import read_tokenizer
from disttrain_cli.errors import SpecError
from disttrain_cli.models.graph import describe
from disttrain_cli.runtime.outputs.export import export
from tests.cases import mostly_slow
from tests.data.test_parts import write_json
from tests.runtime.outputs.test_whole_export import saved
from tests.whole_models import (
    TILED,
    rewritten,
    run_of,
    tiled_processor,
    tokenizer,
    write_llava,
    write_qwen,
    write_tiled,
)

WRITE = {
    "llava": write_llava,
    "qwen2_5_vl": partial(write_qwen, family="qwen2_5_vl", flat=True),
    "qwen3_vl": partial(write_qwen, family="qwen3_vl", tie_word_embeddings=True),
    **{family: partial(write_tiled, family=family) for family in TILED},
}


def write(folder, family, less=0):
    """A folder of the family with as many rows as its tokenizer has ids, or `less`."""
    own = tiled_processor(family).tokenizer if family in TILED else tokenizer()
    rows = len(own) - less
    assert rows == max(own.get_vocab().values()) + 1 - less
    WRITE[family](folder, text={"vocab_size": rows})
    return rows


def sequences(run, inputs):
    """Ids of all packed sequences of the run's data."""
    index, tokens = build_index(run, inputs), read_tokenizer(run)
    assert len(index) and not index.skipped
    packing, reader = pack(Mixture(index, 0), 0), ShardReader(index, tokens)
    plans = [SequencePlan(packing, number) for number in range(len(packing))]
    return np.stack([plan.token_ids(tokens, reader.texts)[0] for plan in plans])


@pytest.mark.parametrize("family", mostly_slow(WRITE, "llava"))
def test_a_vocabulary_without_slack_goes_in_and_out_as_it_is(tmp_path, family):
    rows = write(tmp_path / "given", family)
    write_json(tmp_path / "data")
    (tmp_path / "data" / "b.jsonl").write_text(json.dumps({"text": "No template writes this."}))
    run = run_of(tmp_path / "given", data={"sequence_length": 1024})
    inputs = describe(run)
    ids = sequences(run, inputs)
    assert inputs.vocabulary == rows == read_tokenizer(run).vocabulary
    assert ids.min() >= 0 and ids.max() < rows
    saved(run)
    export(run, tmp_path / "out")
    given, found = (load_file(tmp_path / name / "model.safetensors") for name in ("given", "out"))
    assert {name: tensor.shape for name, tensor in found.items()} == {
        name: tensor.shape for name, tensor in given.items()
    }
    assert rows in {tensor.shape[0] for name, tensor in found.items() if "embed_tokens" in name}
    described = [
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("given", "out")
    ]
    assert described[0] == described[1]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llava", "internvl", "smolvlm", "qwen3_vl"])
def test_a_token_without_a_row_is_named(tmp_path, family):
    write(tmp_path / "given", family)
    rewritten(tmp_path / "given", "tokenizer_config.json", point_token="<|point|>")
    run = run_of(tmp_path / "given")
    (tmp_path / "data").mkdir()
    with pytest.raises(SpecError, match="does not fit the model") as caught:
        build_index(run, describe(run))
    assert (
        "<|point|> is " in caught.value.why and "resize_token_embeddings" in caught.value.next_step
    )


def test_an_id_is_reserved_where_there_is_a_generator(tmp_path):
    write(tmp_path / "given", "llava")
    inputs = describe(run_of(tmp_path / "given"))
    generator = {"kind": "generator", "architecture": "unet2d_condition", "image_size": 32}
    run = run_of(tmp_path / "given", {"modules": {"generator": generator}})
    with pytest.raises(SpecError, match="does not fit the model") as caught:
        checked_tokenizer(run, inputs)
    assert "1 reserved" in caught.value.why

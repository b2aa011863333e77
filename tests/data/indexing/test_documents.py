"""Documents longer than a sequence are trained in pieces, whole and once, by any tokenizer."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain_cli.data.epochs.mixture import Mixture
from disttrain_cli.data.index.sample_index import Index
from disttrain_cli.data.indexing.building import build_index
from disttrain_cli.data.indexing.documents import pieces
from disttrain_cli.data.packing import pack
from disttrain_cli.data.reading import ShardReader
from disttrain_cli.data.sequences import NOT_TRAINED, SequencePlan
from disttrain_cli.data.tokenizer import ByteTokenizer, FolderTokenizer, Tokenizer
from tests.data.dataset import INPUTS, PROPERTY, make_run

ROOM = INPUTS.sequence_length - 2
LONG = " ".join(f"wörd{n} 字" for n in range(200))


@pytest.fixture(scope="module", params=["bytes", "byte level", "metaspace"])
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    from tokenizers import Tokenizer as Rules
    from tokenizers import models, pre_tokenizers, trainers

    if request.param == "bytes":
        return ByteTokenizer()
    rules = Rules(models.BPE(byte_fallback=request.param == "metaspace"))
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)] if request.param == "metaspace" else []
    rules.pre_tokenizer = (
        pre_tokenizers.Metaspace() if bytes_ else pre_tokenizers.ByteLevel(add_prefix_space=False)
    )
    alphabet = [] if bytes_ else pre_tokenizers.ByteLevel.alphabet()
    rules.train_from_iterator(
        [LONG],
        trainers.BpeTrainer(
            vocab_size=400, special_tokens=bytes_, initial_alphabet=alphabet, show_progress=False
        ),
    )
    folder = tmp_path_factory.mktemp("tokenizer")
    rules.save(str(folder / "tokenizer.json"))
    return FolderTokenizer(folder)


@given(text=st.text(st.sampled_from("abc  \n ü字😀\ud800"), max_size=400), most=st.integers(14, 60))
@PROPERTY
def test_pieces_make_up_the_text_and_fit(tokenizer: Tokenizer, text: str, most: int) -> None:
    text = text.encode("utf-8", "replace").decode()
    found = pieces(text, most, tokenizer)
    assert "".join(text[one.first : one.first + one.characters] for one in found) == text
    assert [one.tokens for one in found] == tokenizer.count([text[a : a + n] for a, n, _ in found])
    assert all(one.tokens <= most for one in found)


def test_pieces_are_nearly_full_and_end_between_words(tokenizer: Tokenizer) -> None:
    text = LONG * 5
    found = pieces(text, 1000, tokenizer)
    assert all(one.tokens > 950 for one in found[:-1]) and len(found) > 2
    assert all(text[one.first] == " " for one in found[1:])


def labels_by_key(index: Index) -> dict[str, list[bytes]]:
    """What is trained of every sample in one epoch, in the order of the index; EOS is a dot."""
    tokens = ByteTokenizer()
    packing, reader = pack(Mixture(index, 0), 0), ShardReader(index, ByteTokenizer())
    trained: dict[int, bytes] = {}
    for number in range(len(packing)):
        plan = SequencePlan(packing, number)
        labels = plan.token_ids(tokens, reader.texts)[1]
        assert (labels != NOT_TRAINED).sum() == packing.label_tokens[number]
        for sample, first, count in zip(
            plan.samples.tolist(), plan.sample_at, plan.sample_tokens, strict=True
        ):
            own = labels[first : first + count - 1]
            trained[sample] = bytes(
                ord(".") if token == tokens.eos else token for token in own[own != NOT_TRAINED]
            )
    found: dict[str, list[bytes]] = {}
    for sample in sorted(trained):
        found.setdefault(index.keys[sample], []).append(trained[sample])
    return found


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_all_of_a_long_document_is_trained_once_and_its_end_alone_as_an_end(
    tmp_path: Path, form: str
) -> None:
    texts = ["short", LONG, "x" * ROOM, "y" * (ROOM + 1), "字" * ROOM]
    (tmp_path / "d").mkdir()
    if form == "jsonl":
        (tmp_path / "d/a.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in texts)
        )
    else:
        pq.write_table(pa.table({"text": texts}), tmp_path / "d/a.parquet")
    index = build_index(make_run(tmp_path, [{"path": "d"}], max_bad_fraction=0), INPUTS)
    found = list(labels_by_key(index).values())
    assert [b"".join(own) for own in found] == [f"{text}.".encode() for text in texts]
    assert [len(own) for own in found] == [1, len(found[1]), 1, 2, len(found[4])] and len(
        found[1]
    ) > 15
    assert not index.skipped and int(index.lengths.max()) <= INPUTS.sequence_length


def test_a_document_is_held_out_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/a.jsonl").write_text(
        "".join(json.dumps({"text": LONG}) + "\n" for _ in range(20))
    )
    index = build_index(make_run(tmp_path, [{"path": "d"}], held_out=0.5), INPUTS)
    assert index.drawn is not None and 0 < index.drawn.sum() < len(index)
    for key in set(index.keys):
        assert len(set(index.drawn[np.array([own == key for own in index.keys])].tolist())) == 1


def test_texts_that_are_no_documents_are_not_cut(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    turns = [{"from": "human", "value": "Q"}, {"from": "gpt", "value": LONG}]
    records = [{"text": "short"}, {"conversations": turns}]
    (tmp_path / "d/a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    index = build_index(make_run(tmp_path, [{"path": "d"}], max_bad_fraction=0.5), INPUTS)
    assert len(index) == 1 and "too long" in index.skipped[0].reason

"""Conversations of a chat template through index, packing and reading, from every form of
dataset."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from disttrain_cli.data.epochs.mixture import Mixture
from disttrain_cli.data.index.sample_index import Index, read_index
from disttrain_cli.data.indexing.building import build_index
from disttrain_cli.data.packing import pack
from disttrain_cli.data.reading import ShardReader
from disttrain_cli.data.sequences import NOT_TRAINED, SequencePlan
from disttrain_cli.data.tokenizer import ByteTokenizer, Tokenizer, doubtful_template, read_tokenizer
from disttrain_cli.errors import MismatchError
from disttrain_cli.spec.index import IMAGE
from disttrain_cli.spec.runfile import Run
from tests.cases import first_fast
from tests.data.chat_folders import write_folder
from tests.data.dataset import INPUTS, encoded, make_run, write_tar
from tests.whole_models import run_of, write_llava

PICTURES = [encoded(20 + 4 * number, 30, shade=40 * number) for number in range(3)]
ANSWERS = ["A cat.", "A mat, and on it a cat."]
WIDE = INPUTS.model_copy(update={"vocabulary": 640, "sequence_length": 256})


def conversation(number: int, names: list[str] | None) -> dict[str, Any]:
    """Two turns of a user, with as many images in the second; named `names`, or not."""
    pictures = [
        {"type": "image"} | ({} if names is None else {"image": name})
        for name in (names or [""] * number)
    ]
    return {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": f"Number {number}."}]},
            {"role": "assistant", "content": [{"type": "text", "text": ANSWERS[0]}]},
            {"role": "user", "content": [*pictures, {"type": "text", "text": "What is it?"}]},
            {"role": "assistant", "content": [{"type": "text", "text": ANSWERS[1]}]},
        ]
    }


def names_of(number: int) -> list[str]:
    return [f"pictures/{at}.jpg" for at in range(number)]


def write_json(folder: Path, lines: bool = False, held: bool = False) -> None:
    (folder / "pictures").mkdir(parents=True)
    for number, picture in enumerate(PICTURES):
        (folder / "pictures" / f"{number}.jpg").write_bytes(picture)
    records = [
        conversation(
            number,
            [
                "data:image/jpeg;base64," + base64.b64encode(picture).decode()
                for picture in PICTURES[:number]
            ]
            if held
            else names_of(number),
        )
        for number in range(3)
    ]
    if lines:
        (folder / "chat.jsonl").write_text("\n".join(map(json.dumps, records)))
    else:
        (folder / "chat.json").write_text(json.dumps(records))


def write_tars(folder: Path) -> None:
    files = [(f"pictures/{number}.jpg", picture) for number, picture in enumerate(PICTURES)]
    records = [
        (f"{number}.json", json.dumps(conversation(number, names_of(number))).encode())
        for number in (0, 2)
    ]
    beside = [("1.json", json.dumps(conversation(1, None)).encode()), ("1.jpg", PICTURES[0])]
    write_tar(folder / "a.tar", [*files, records[0], *beside, records[1]])


def table() -> pa.Table:
    return pa.table(
        {
            "messages": [conversation(number, None)["messages"] for number in range(3)],
            "images": [
                [{"bytes": picture, "path": None} for picture in PICTURES[:number]]
                for number in range(3)
            ],
            "origin": ["here"] * 3,
        }
    )


def write_parquet(folder: Path) -> None:
    folder.mkdir(parents=True)
    pq.write_table(table(), folder / "a.parquet", row_group_size=2)


def write_arrow(folder: Path) -> None:
    folder.mkdir(parents=True)
    with (
        pa.OSFile(str(folder / "a.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table().schema) as stream,
    ):
        stream.write_table(table(), max_chunksize=2)


FORMS: dict[str, Callable[[Path], None]] = {
    "json": write_json,
    "jsonl": lambda folder: write_json(folder, lines=True),
    "data URIs": lambda folder: write_json(folder, held=True),
    "tar": write_tars,
    "parquet": write_parquet,
    "arrow": write_arrow,
}


def made(tmp_path: Path, form: str, template: bool = True) -> tuple[Run, Index, Tokenizer]:
    """Conversations in a form beside a document."""
    FORMS[form](tmp_path / "chats")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.jsonl").write_text(json.dumps({"text": "All of it."}))
    tokenizer = str(write_folder(tmp_path / "tokens", "vision")) if template else "bytes"
    run = make_run(tmp_path, [{"path": "chats"}, {"path": "texts"}], tokenizer=tokenizer)
    return run, build_index(run, WIDE), read_tokenizer(run)


@pytest.mark.parametrize("form", first_fast(FORMS, 2))
def test_every_form_gives_the_tokens_of_transformers(tmp_path: Path, form: str) -> None:
    from transformers import PreTrainedTokenizerFast

    run, index, tokens = made(tmp_path, form)
    assert not index.skipped and len(index) == 4
    assert read_index(run, WIDE).fingerprint == index.fingerprint
    assert index.specials().tolist() == [0, 0, 0, 2]
    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path / "tokens")
    packing, reader = pack(Mixture(index, 0), 0), ShardReader(index, tokens)
    seen = set()
    for number in range(len(packing)):
        plan = SequencePlan(packing, number)
        ids, labels = plan.token_ids(tokens, reader.texts)
        positions, documents = plan.layout()
        assert (labels != NOT_TRAINED).sum() == packing.label_tokens[number]
        for place, sample in enumerate(plan.samples.tolist()):
            own = documents == place
            trained = labels[own][:-1]
            seen.add(sample)
            assert positions[own].tolist() == list(range(index.lengths[sample]))
            if sample == 3:
                content = tokens.encode("All of it.")
                assert ids[own].tolist() == [tokens.bos, *content, tokens.eos]
                assert trained.tolist() == [*content, tokens.eos]
                continue
            messages = conversation(sample, None)["messages"]
            whole = reference.apply_chat_template(messages)["input_ids"]
            expected = []
            rows = iter(index.tokens[index.segment_start[sample] : index.segment_start[sample + 1]])
            kinds = index.kinds[index.segment_start[sample] : index.segment_start[sample + 1]]
            areas = [int(row) for row, kind in zip(rows, kinds, strict=True) if kind == IMAGE]
            for id_ in whole:
                expected += [id_] * (areas.pop(0) if id_ == tokens.image else 1)
            assert ids[own].tolist() == expected and not areas
            answers = [tokens.encode(one + "<|im_end|>") for one in ANSWERS]
            assert trained[trained != NOT_TRAINED].tolist() == answers[0] + answers[1]
            assert labels[own][-1] == NOT_TRAINED
            first, last = index.segment_start[sample : sample + 2].tolist()
            files = [
                reader.file(sample, at) for at in range(first, last) if index.kinds[at] == IMAGE
            ]
            assert files == PICTURES[:sample]
    assert seen == {0, 1, 2, 3}


@pytest.mark.parametrize("form", FORMS)
def test_without_a_template_every_form_is_written_as_before(tmp_path: Path, form: str) -> None:
    _, index, tokens = made(tmp_path, form, template=False)
    reader = ShardReader(index, ByteTokenizer())
    assert not index.skipped and index.templated is None
    ids = [one for text in reader.texts(1) for one in text]
    assert bytes(256 % 256 if one == tokens.eos else one for one in ids) == (
        b"USER: Number 1. ASSISTANT: A cat.\0USER: What is it? ASSISTANT: A mat, and on it a cat."
    )


@pytest.mark.slow
def test_an_index_of_another_template_is_not_used(tmp_path: Path) -> None:
    run, index, _ = made(tmp_path, "json")
    path = tmp_path / "tokens" / "chat_template.jinja"
    path.write_text(path.read_text().replace("You help.", "You are of use."))
    with pytest.raises(MismatchError, match="a different run file"):
        read_index(run, WIDE)
    assert build_index(run, WIDE).fingerprint != index.fingerprint


@pytest.mark.slow
def test_templates_that_end_no_answer_are_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tokens", "vision")
    run = make_run(tmp_path, [{"path": "chats"}], tokenizer=str(folder))
    assert doubtful_template(run) == []
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role | upper + ': ' + m.content + ' ' }}{% endfor %}"
    )
    assert "does not end answers with a special token" in doubtful_template(run)[0]


@pytest.mark.slow
def test_a_whole_model_without_a_template_is_named(tmp_path: Path) -> None:
    write_llava(tmp_path / "llava")
    (tmp_path / "llava" / "chat_template.jinja").unlink(missing_ok=True)
    assert "has no chat template" in doubtful_template(run_of(tmp_path / "llava"))[0]


def test_what_cannot_be_written_is_skipped_and_named(tmp_path: Path) -> None:
    (tmp_path / "chats").mkdir()
    told = pa.table(
        {
            "messages": [*(conversation(number, None)["messages"] for number in (0, 1, 1)), []],
            "images": pa.array([[], PICTURES[:2], [], []], pa.list_(pa.binary())),
        }
    )
    pq.write_table(told, tmp_path / "chats" / "a.parquet")
    folder = write_folder(tmp_path / "tokens", "vision")
    run = make_run(tmp_path, [{"path": "chats"}], tokenizer=str(folder), max_bad_fraction=0.9)
    index = build_index(run, WIDE)
    assert len(index) == 1
    assert {one.key: one.reason for one in index.skipped} == {
        "row 1": "1 occurrences of <image> for 2 images",
        "row 2": "1 occurrences of <image> for 0 images",
        "row 3": "`messages` must be a list with at least one turn",
    }


def test_documents_with_the_models_placeholder_are_skipped(tmp_path: Path) -> None:
    texts = ["a <|image_pad|>", "b", "an <image> and a <video> tag"]
    (tmp_path / "chats").mkdir()
    (tmp_path / "texts").mkdir()
    pq.write_table(pa.table({"text": texts}), tmp_path / "chats" / "a.parquet")
    lines = "\n".join(json.dumps({"text": text}) for text in texts)
    (tmp_path / "texts" / "a.jsonl").write_text(lines)
    folder = write_folder(tmp_path / "tokens", "vision")
    sources = [{"path": "chats"}, {"path": "texts"}]
    run = make_run(tmp_path, sources, tokenizer=str(folder), max_bad_fraction=0.9)
    index, tokenizer = build_index(run, WIDE), read_tokenizer(run)
    reader = ShardReader(index, tokenizer)
    assert [tokenizer.decode(reader.texts(at)[0]) for at in range(len(index))] == texts[1:] * 2
    reason = "a text contains <|image_pad|>, the placeholder of an image or a video"
    assert [one[1:3] for one in index.skipped] == [("row 0", reason), ("line 1", reason)]

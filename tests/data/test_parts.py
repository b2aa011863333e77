"""Files in parts: what transformers' own processors make of the same conversations, and what a rank
is given."""

import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from disttrain_cli.data.checking import find_broken, try_decoding
from disttrain_cli.data.epochs.mixture import Mixture
from disttrain_cli.data.index.index_file import read_stored
from disttrain_cli.data.index.sample_index import Index, read_index
from disttrain_cli.data.indexing.building import build_index
from disttrain_cli.data.packing import SequenceStream, pack
from disttrain_cli.data.reading import ShardReader
from disttrain_cli.data.sequences import NOT_TRAINED, SequencePlan
from disttrain_cli.data.tokenizer import read_tokenizer
from disttrain_cli.spec.index import AROUND, IMAGE, OPTIONAL, TEXT
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.progress import silent
from disttrain_cli.spec.runfile import Run
from tests.cases import first_fast
from tests.data.dataset import (
    DISAGGREGATED,
    INPUTS,
    MONOLITHIC,
    damaged,
    encoded,
    image,
    interleaved,
    make_run,
    text,
    write_tar,
)
from tests.data.test_loader import fetch_step, loader
from tests.data.tiled import FAMILIES, head_of, written

#: Widths and heights of the images of each conversation.
SIZES = ([], [(50, 30)], [(16, 16), (9, 70), (200, 41)], [(33, 33)], [(12, 90), (31, 100)])
ANSWERS = ("A cat.", "A mat.")


def picture(width: int, height: int, suffix: str = "PNG") -> bytes:
    noise = np.random.default_rng(width * 1000 + height).integers(0, 256, (height, width, 3))
    file = io.BytesIO()
    Image.fromarray(noise.astype(np.uint8)).save(file, suffix)
    return file.getvalue()


def messages(sizes: list[tuple[int, int]], named: bool = True) -> list[dict[str, Any]]:
    """An image in the second question, all others in the first."""
    parts = [
        {"type": "image"} | ({"image": f"{width}x{height}.png"} if named else {})
        for width, height in sizes
    ]
    said = [[*parts[1:], {"type": "text", "text": " Is it?\n"}], [*parts[:1], words("What is it?")]]
    turns = []
    for question, answer in zip(said, ANSWERS, strict=True):
        turns.append({"role": "user", "content": question})
        turns.append({"role": "assistant", "content": [words(answer)]})
    return turns


def words(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def in_order(sizes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """As the conversation has them."""
    return [*sizes[1:], *sizes[:1]]


def write_json(folder: Path) -> None:
    folder.mkdir()
    for size in {size for sizes in SIZES for size in sizes}:
        (folder / f"{size[0]}x{size[1]}.png").write_bytes(picture(*size))
    records = [{"id": number, "messages": messages(sizes)} for number, sizes in enumerate(SIZES)]
    (folder / "a.json").write_text(json.dumps(records))


def write_tars(folder: Path) -> None:
    pictures = sorted({size for sizes in SIZES for size in sizes})
    files = [(f"{width}x{height}.png", picture(width, height)) for width, height in pictures]
    records = [
        (f"{number}.json", json.dumps({"messages": messages(sizes)}).encode())
        for number, sizes in enumerate(SIZES)
    ]
    write_tar(folder / "a.tar", [*files, *records])


def write_parquet(folder: Path) -> None:
    folder.mkdir()
    images = [[{"bytes": picture(*size)} for size in in_order(sizes)] for sizes in SIZES]
    turns = [messages(sizes, named=False) for sizes in SIZES]
    pq.write_table(pa.table({"messages": turns, "images": images}), folder / "a.parquet")


FORMS = {"json": write_json, "tars": write_tars, "parquet": write_parquet}


def inputs_of(folder: Path, family: str) -> ModelInputs:
    heads = [head_of(folder, family), *INPUTS.heads[1:]]
    update = {"vocabulary": 640, "sequence_length": 512, "heads": heads}
    return INPUTS.model_copy(update=update)


def made(folder: Path, family: str, form: str) -> tuple[Any, Run, ModelInputs, Index]:
    processor = FAMILIES[family][0]()
    written(folder / "words", processor)
    FORMS[form](folder / "data")
    run = make_run(folder, [{"path": "data"}], tokenizer=str(folder / "words"))
    inputs = inputs_of(folder / "words", family)
    return processor, run, inputs, build_index(run, inputs)


def expected(
    processor: Any, sizes: list[tuple[int, int]]
) -> tuple[list[int], list[int], list[Any]]:
    """(ids, which of them an assistant writes, tiles as bytes), of transformers."""
    given = told(processor, sizes)
    pictures = [Image.open(io.BytesIO(picture(*size))) for size in in_order(sizes)]
    raw = {"do_rescale": False, "do_normalize": False, "return_tensors": "np"}
    crops = {"crop_to_patches": True} if "InternVL" in type(processor).__name__ else {}
    tiles = []
    several = "Onevision" in type(processor).__name__ and len(pictures) > 1
    for one in [pictures] if several else pictures:
        values = processor.image_processor([one], **raw, **crops)["pixel_values"]
        tiles += list(values.reshape(-1, *values.shape[-3:]))
    return given["input_ids"][0], given["assistant_masks"][0], tiles


def told(processor: Any, sizes: list[tuple[int, int]]) -> dict[str, Any]:
    """What a processor makes of a conversation about images of these sizes."""
    pictures = (Image.open(io.BytesIO(picture(*size))) for size in in_order(sizes))
    turns = messages(sizes)
    for turn in turns:
        for part in turn["content"]:
            if part["type"] == "image":
                part["image"] = next(pictures)
    made = processor.apply_chat_template(
        turns, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return dict(made)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "form"),
    first_fast(
        [*((family, "json") for family in FAMILIES), ("internvl", "tars"), ("idefics3", "parquet")]
    ),
)
def test_ids_masks_and_tiles_are_those_of_the_processor(
    tmp_path: Path, family: str, form: str
) -> None:
    processor, run, inputs, index = made(tmp_path, family, form)
    assert not index.skipped and len(index) == len(SIZES)
    assert read_index(run, inputs).fingerprint == index.fingerprint
    tokens, packing = read_tokenizer(run), pack(Mixture(index, 0), 0)
    reader, seen = ShardReader(index, tokens), 0
    for number in range(len(packing)):
        plan = SequencePlan(packing, number)
        ids, labels = plan.token_ids(tokens, reader.texts)
        _, documents = plan.layout()
        assert (labels != NOT_TRAINED).sum() == packing.label_tokens[number]
        for place, sample in enumerate(plan.samples.tolist()):
            own = documents == place
            theirs, written_by, _ = expected(processor, SIZES[sample])
            assert ids[own].tolist() == theirs
            trained = np.flatnonzero(written_by)
            assert np.flatnonzero(labels[own] != NOT_TRAINED).tolist() == (trained - 1).tolist()
            assert labels[own][trained - 1].tolist() == ids[own][trained].tolist()
            seen += 1
    assert seen == len(SIZES)


@pytest.mark.slow
@pytest.mark.parametrize("family", first_fast(FAMILIES))
def test_every_layout_is_given_the_processors_tiles(tmp_path: Path, family: str) -> None:
    """Those of one file may go to several replicas; rows hold the placeholder."""
    processor, run, _, index = made(tmp_path, family, "json")
    tokens = read_tokenizer(run)
    tiles = [expected(processor, sizes)[2] for sizes in SIZES]
    drawn = SequenceStream(Mixture(index, run.file.train.seed)).batch(0, 12).samples.tolist()
    wanted = Counter(tile.tobytes() for sample in drawn for tile in tiles[sample])
    for layout, unit in ((MONOLITHIC, "all"), (DISAGGREGATED, "encoder")):
        found = Counter[bytes]()
        for replica in range(next(one.dp for one in layout.units if one.name == unit)):
            fields = {"image", "tokens"} if unit == "all" else {"image"}
            for batch in fetch_step(run, index, layout, unit, replica, fields=fields):
                items = batch.items["image"]
                found.update(one.tobytes() for block in items.values[0] for one in block)
                if unit == "all":
                    flat = batch.token_ids.reshape(-1)
                    seen = sorted(items.rows[items.rows >= 0])
                    assert seen == np.flatnonzero(flat == tokens.image).tolist()
                    head = index.inputs.image
                    assert len(items.rows) == sum(
                        head.rows("tokens").of(head.size(int(grid.prod()))) for grid in items.grids
                    )
        assert found == wanted


def plain(tmp_path: Path, family: str) -> tuple[Run, ModelInputs, Index]:
    """Interleaved samples and captions, which no template writes."""
    written(tmp_path / "words", FAMILIES[family][0]())
    files = [
        interleaved("a", image("1.png"), text("of one"), text(" more"), image("2.png")),
        interleaved("b", text("draw "), image("1.png", generate=True)),
        ("1.png", picture(50, 30)),
        ("2.png", picture(16, 16)),
        interleaved("c", image("2.png")),
    ]
    write_tar(tmp_path / "mixed" / "a.tar", files)
    write_tar(
        tmp_path / "captions" / "a.tar", [("k.png", picture(9, 70)), ("k.txt", b"What is it?")]
    )
    run = make_run(tmp_path, tokenizer=str(tmp_path / "words"))
    inputs = inputs_of(tmp_path / "words", family)
    return run, inputs, build_index(run, inputs)


@pytest.mark.parametrize("family", first_fast(FAMILIES))
def test_outside_of_templates_the_texts_around_parts_are_segments(
    tmp_path: Path, family: str
) -> None:
    run, inputs, index = plain(tmp_path, family)
    assert not index.skipped and inputs.image is not None
    tokens = read_tokenizer(run)
    reader = ShardReader(index, tokens)
    rows = dict(zip(index.keys, range(len(index)), strict=True))

    def whole(size: tuple[int, int], alone: bool = True) -> list[int]:
        assert inputs.image is not None
        texts, *_ = inputs.image.written([size] if alone else [size, size])
        first, *others = (tokens.encode(one) for one in texts)
        parts = np.full(len(others), len(others))
        rows = inputs.image.tokens_of(np.array([size] * len(others)), np.arange(len(others)), parts)
        tiles = [[tokens.image] * count for count in rows]
        pairs = zip(tiles, others, strict=True)
        return first + [one for pair in pairs for own in pair for one in own]

    first, second = (whole(size, alone=False) for size in ((50, 30), (16, 16)))
    expected_of = {
        "a": first + tokens.encode("of one") + tokens.encode(" more") + second,
        "b": tokens.encode("draw ") + [tokens.context] * 4,
        "c": whole((16, 16)),
        "k": whole((9, 70)) + tokens.encode("What is it?"),
    }
    packing = pack(Mixture(index, 0), 0)
    for number in range(len(packing)):
        plan = SequencePlan(packing, number)
        ids, labels = plan.token_ids(tokens, reader.texts)
        _, documents = plan.layout()
        for place, sample in enumerate(plan.samples.tolist()):
            own = documents == place
            content = expected_of[index.keys[sample]]
            assert ids[own].tolist() == [tokens.bos, *content, tokens.eos]
            assert (labels[own] != NOT_TRAINED).sum() == index.label_tokens[sample]
    # the last text of a sample says whether its end is trained, whatever stands around images
    assert index.end_trained[[rows[key] for key in "abck"]].tolist() == [True] * 4
    around = (index.kinds == TEXT) & (index.part == AROUND)
    assert around.any() != ("llava" in family) and not index.trained[around].any()


@pytest.mark.slow
def test_a_file_is_decoded_once_for_all_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, run, _, index = made(tmp_path, "internvl", "json")
    decoded = list[int]()

    def counted(run: Run, index: Index, files: Any, sample: int, segment: int, decode: Any) -> Any:
        decoded.append(segment)
        return try_decoding(run, index, files, sample, segment, decode)

    monkeypatch.setattr("disttrain_cli.data.preparing.try_decoding", counted)
    batches = fetch_step(run, index, MONOLITHIC, "all", 0, fields={"image", "labels"})
    tiles = sum(len(batch.items["image"].grids) for batch in batches)
    drawn = SequenceStream(Mixture(index, run.file.train.seed)).batch(0, 12)
    files = int((index.files[drawn.items["image"].segment]).sum())
    assert 0 < len(decoded) <= files < tiles
    assert (index.part[decoded] == 0).all() and (index.kinds[decoded] == IMAGE).all()


@pytest.mark.slow
def test_a_broken_file_is_blank_in_all_its_parts_and_mutes_its_sample(tmp_path: Path) -> None:
    written(tmp_path / "words", FAMILIES["idefics3"][0]())
    broken, whole = damaged(encoded(60, 40)), encoded(60, 40)
    turns = [{"role": "user", "content": [{"type": "image", "image": "NAME"}, words("What?")]}]
    turns.append({"role": "assistant", "content": [words("A cat.")]})
    records = [
        (f"{n}.json", json.dumps({"messages": turns}).replace("NAME", f"{n}.jpg").encode())
        for n in range(8)
    ]
    pictures = [(f"{n}.jpg", broken if n == 3 else whole) for n in range(8)]
    write_tar(tmp_path / "data" / "a.tar", [*records, *pictures])
    data = {"tokenizer": str(tmp_path / "words"), "max_bad_fraction": 0.2}
    run = make_run(tmp_path, [{"path": "data"}], **data)
    index = build_index(run, inputs_of(tmp_path / "words", "idefics3"))
    blanks = skipped = labels = 0
    for replica in range(2):
        with loader(run, index, MONOLITHIC, "all", replica, {"image", "labels"}) as source:
            order = source.order(0)
            for slot in range(MONOLITHIC.microbatches):
                batch = source.fetch(0, slot)
                values = [one for block in batch.items["image"].values[0] for one in block]
                blanks += sum(not one.any() for one in values)
                labels += int((batch.labels != NOT_TRAINED).sum())
            skipped += sum(one.key == "3" for one in source.skipped)
    drawn = SequenceStream(Mixture(index, run.file.train.seed)).batch(0, 12)
    parts = int(index.parts[np.flatnonzero(index.kinds == IMAGE)[0]])
    times = drawn.samples.tolist().count(3)
    assert parts > 1 and times and blanks == parts * times and skipped
    assert labels == order.label_tokens - times * index.label_tokens[3]
    assert find_broken(run, index, silent).keys() == {3}


def test_an_index_without_parts_is_read_and_its_fingerprint_stays(
    tmp_path: Path, run: Run, index: Index
) -> None:
    """As it was written before there were any."""
    stored = read_stored(run.dir.index)
    assert index.part is None and (index.file == np.arange(len(index.kinds))).all()
    rows = stored.file.read()
    assert "parts" in rows.column_names
    before = rows.drop_columns([*OPTIONAL]).replace_schema_metadata(stored.file.metadata.metadata)
    path = tmp_path / "index.parquet"
    groups = [stored.file.read_row_group(at) for at in range(stored.file.num_row_groups)]
    with pq.ParquetWriter(path, before.schema) as writer:
        for group in groups:
            table = group.drop_columns([*OPTIONAL]).cast(before.schema)
            writer.write_table(table, row_group_size=len(table))
    old = read_stored(path)
    for (_, ours, _), (_, theirs, _) in zip(old.by_shard(), stored.by_shard(), strict=True):
        assert ours.equals(theirs)
    assert old.fingerprint == index.fingerprint
    for (_, one, _), (_, other, _) in zip(old.by_shard(), stored.by_shard(), strict=True):
        assert one.equals(other)

"""Videos from files to slots: items, ids, labels and positions are those of transformers' own
processors and models."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from disttrain_cli.data.checking import find_broken
from disttrain_cli.data.epochs.mixture import Mixture
from disttrain_cli.data.films import decode_patches, film_of, resized
from disttrain_cli.data.index.sample_index import read_index
from disttrain_cli.data.indexing.building import build_index
from disttrain_cli.data.ordering.orders import Orders
from disttrain_cli.data.ordering.shared_orders import SharedOrders
from disttrain_cli.data.packing import pack
from disttrain_cli.data.preparing import Preparer, Request
from disttrain_cli.data.reading import ShardReader
from disttrain_cli.data.sequences import SequencePlan
from disttrain_cli.data.sources.chats import FILM, MARK
from disttrain_cli.data.sources.samples import Turn
from disttrain_cli.data.tokenizer import read_tokenizer
from disttrain_cli.models.graph import describe
from disttrain_cli.runtime.outputs.conversations import held_out_questions
from disttrain_cli.runtime.outputs.prompts import batch_of
from disttrain_cli.runtime.outputs.trained import Trained
from disttrain_cli.spec.plan import Layout
from disttrain_cli.spec.runfile import Run
from tests.cases import first_fast, mostly_slow
from tests.data.dataset import make_layout, unit, write_tar
from tests.data.films import MATRICES, all_frames, film, sound_only, turned
from tests.video_models import RULES, VIDEO, Film, Talk, write_folder
from tests.whole_models import run_of

FILMS = {"a.mp4": film(30, 64, 48, fps=10), "b.mp4": film(25, 40, 72, fps=8, every=5)}


def messages(first: str, *more: str) -> list[dict[str, Any]]:
    """A question about films, and another one."""
    parts = [{"type": "video", "video": name} for name in (first, *more)]
    return [
        {"role": "user", "content": [*parts, {"type": "text", "text": "What is seen?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Noise, in a corner."}]},
        {"role": "user", "content": [{"type": "text", "text": "Sure?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]},
    ]


def layout(replicas: int = 1) -> Layout:
    """Everything in one unit; two sequences in a step of one slot."""
    made = make_layout([unit("all", ["vision", "llm"], replicas, 1)])
    return made.model_copy(
        update={"global_batch_size": 2, "microbatches": 1, "microbatch_size": 2 // replicas}
    )


TALKS = {"one": messages("a.mp4"), "two": messages("b.mp4", "a.mp4")}


def video_run(tmp_path: Path, family: str, **data: Any) -> Run:
    """A run of a folder on conversations with these films."""
    (tmp_path / "data").mkdir()
    for name, content in FILMS.items():
        (tmp_path / "data" / name).write_bytes(content)
    lines = [json.dumps({"id": name, "messages": talk}) for name, talk in TALKS.items()]
    (tmp_path / "data" / "talks.jsonl").write_text("\n".join(lines))
    fields = {"sequence_length": 512, "video": {}, "max_bad_fraction": 0.0, **data}
    return run_of(tmp_path / "given", data=fields)


@pytest.mark.parametrize("family", mostly_slow(RULES, "qwen3_vl"))
def test_ids_labels_and_positions_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    model = write_folder(tmp_path / "given", family)
    run = video_run(tmp_path, family)
    inputs = describe(run)
    index = build_index(run, inputs)
    assert not index.skipped and list(index.keys) == [*TALKS]
    again = read_index(run, inputs)
    assert np.array_equal(again.grids, index.grids) and np.array_equal(again.frames, index.frames)
    tokenizer = read_tokenizer(run)
    reader = ShardReader(again, tokenizer)
    packing = pack(Mixture(again, 0), 0)
    seen = 0
    for number in range(len(packing)):
        plan = SequencePlan(packing, number)
        ids, labels = plan.token_ids(tokenizer, reader.texts)
        positions, _ = plan.layout()
        for at, count, row in zip(plan.sample_at, plan.sample_tokens, plan.samples, strict=True):
            talk_of = TALKS[index.keys[int(row)]]
            names = [part["video"] for part in talk_of[0]["content"] if part["type"] == "video"]
            talk = Talk(family, talk_of, [FILMS[name] for name in names])
            own = slice(int(at), int(at + count))
            assert ids[own].tolist() == talk.ids.tolist()
            assert labels[own][:-1].tolist() == talk.labels[1:].tolist()
            given = {
                name: value
                for name, value in talk.given([0.5] * 3, [0.5] * 3).items()
                if name != "pixel_values_videos"
            }
            expected, _ = model.model.get_rope_index(**given)
            assert torch.equal(torch.from_numpy(positions[:, own]), expected[:, 0])
            seen += int((talk.ids == VIDEO).sum())
    assert seen == index.tokens[index.frames > 0].sum() > 0


@pytest.mark.slow
def test_a_template_that_writes_images_before_videos_is_not_taken_for_another(
    tmp_path: Path,
) -> None:
    write_folder(tmp_path / "given", "qwen3_vl")
    template = tmp_path / "given" / "chat_template.jinja"
    kinds = [
        f"{{% for part in message.content if part.type == '{kind}' %}}{mark}{{% endfor %}}"
        for kind, mark in (("image", "<|image_pad|>"), ("video", "<|video_pad|>"))
    ]
    texts = "{% for part in message.content if part.type == 'text' %}{{ part.text }}{% endfor %}"
    template.write_text(
        "{% for message in messages %}{{ message.role }}: "
        + "".join([*kinds, texts])
        + "</s>{% endfor %}"
    )
    tokenizer = read_tokenizer(video_run(tmp_path, "qwen3_vl"))
    assert tokenizer.chat is not None
    answer = Turn("assistant", ["Noise."], [])
    tokenizer.chat.written([Turn("user", [f"{MARK}{FILM}What?"], []), answer])
    with pytest.raises(ValueError, match="files in a different order"):
        tokenizer.chat.written([Turn("user", [f"{FILM}{MARK}What?"], []), answer])


@pytest.mark.slow
@pytest.mark.parametrize("orientation", first_fast([3, 5, 6]))
def test_turned_films_are_upright_in_index_and_items(tmp_path: Path, orientation: int) -> None:
    write_folder(tmp_path / "given", "qwen2_5_vl")
    run, data = video_run(tmp_path, "qwen2_5_vl"), turned(FILMS["b.mp4"], *MATRICES[orientation])
    (tmp_path / "data" / "a.mp4").write_bytes(data)
    index = build_index(run, describe(run))
    head = index.inputs.image
    assert head is not None and index.numbers is not None and index.part is not None
    first, last = index.segment_start[:2].tolist()
    items = [at for at in range(first, last) if index.kinds[at]]
    width, height = (40, 72) if orientation == 3 else (72, 40)
    assert index.numbers[items[0], :2].tolist() == [width, height]
    rows, columns = index.grids[items[0]].tolist()
    assert (rows > columns) == (height > width)
    upright = {3: (2, False), 5: (0, True), 6: (-1, False)}
    quarters, crossed = upright[orientation]
    stored = [frame.transpose(1, 0, 2) if crossed else frame for frame in all_frames(data)]
    assert head.video is not None
    numbers = head.video.numbers(film_of(data))
    size = rows * head.patch_px, columns * head.patch_px
    outs = [(part, np.zeros((6, *size), np.uint8)) for part in range(len(items))]
    decode_patches(data, head, len(items), outs)
    for part, out in outs:
        for place, number in enumerate(numbers[2 * part : 2 * part + 2]):
            frame = np.ascontiguousarray(np.rot90(stored[number], quarters))
            expected = resized(frame, *size, head.video.resample)
            assert np.array_equal(out[3 * place : 3 * place + 3].transpose(1, 2, 0), expected)


@pytest.mark.parametrize("family", RULES)
def test_a_question_has_the_patches_and_positions_that_were_trained(
    tmp_path: Path, family: str
) -> None:
    write_folder(tmp_path / "given", family)
    run = video_run(tmp_path, family)
    inputs = describe(run)
    index = build_index(run, inputs)
    tokenizer = read_tokenizer(run)
    model = Trained(run, inputs, torch.device("cpu"), [], {})
    packing, reader = pack(Mixture(index, 0), 0), ShardReader(index, tokenizer)
    trained = {}
    for number in range(len(packing)):
        plan = SequencePlan(packing, number)
        ids, _ = plan.token_ids(tokenizer, reader.texts)
        positions, _ = plan.layout()
        for sample, first, count in zip(
            plan.samples.tolist(), plan.sample_at, plan.sample_tokens, strict=True
        ):
            own = slice(first, first + count)
            trained[sample] = ids[own], positions[:, own]
    for sample, question in enumerate(held_out_questions(run, inputs)):
        given = batch_of(model, tokenizer, [question.prompt])
        (length,) = given.lengths
        assert given.batch.token_ids is not None and given.batch.positions is not None
        ids, positions = trained[sample]
        assert given.batch.token_ids[0, :length].tolist() == ids[:length].tolist()
        assert given.batch.positions[:, 0, :length].tolist() == positions[:, :length].tolist()
        names = [part["video"] for part in TALKS[index.keys[sample]][0]["content"][:-1]]
        mean, std = torch.tensor(inputs.image.mean), torch.tensor(inputs.image.std)
        frames = [Film(family, FILMS[name]).pixels / 255 for name in names]
        expected = [
            pair.flatten(0, 1)
            for film_ in frames
            for pair in ((film_ - mean[:, None, None]) / std[:, None, None]).unflatten(0, (-1, 2))
        ]
        items = [one for block in given.batch.of("image").values[0] for one in block]
        grids = given.batch.of("image").grids
        order = sorted(
            range(len(expected)), key=lambda at: (*(s // 4 for s in expected[at].shape[1:]), at)
        )
        assert len(items) == len(grids) == len(expected)
        for one, at in zip(items, order, strict=True):
            torch.testing.assert_close(one, expected[at], rtol=0, atol=1e-5)


def test_forms_of_data_with_videos(tmp_path: Path) -> None:
    """LLaVA's marks, tars of conversations, captions and segments, and tables."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    write_folder(tmp_path / "given", "qwen3_vl")
    turns = [{"from": "human", "value": "<video>\nWhat?"}, {"from": "gpt", "value": "Noise."}]
    for name in ("llava", "tars", "tables"):
        (tmp_path / name).mkdir()
    (tmp_path / "llava" / "a.mp4").write_bytes(FILMS["a.mp4"])
    record = {"id": "l", "video": "a.mp4", "conversations": turns}
    plain = {"id": "p", "conversations": [{"from": "human", "value": "<video>?"}, turns[1]]}
    (tmp_path / "llava" / "a.json").write_text(json.dumps([record, plain]))
    said = [{"type": "video", "file": "c.mp4"}, {"type": "text", "value": "seen"}]
    talk = {"conversations": turns}
    write_tar(
        tmp_path / "tars" / "a.tar",
        [
            ("t.json", json.dumps(talk).encode()),
            ("t.mp4", FILMS["a.mp4"]),
            ("c.mp4", FILMS["b.mp4"]),
            ("c.txt", b"A caption."),
            ("s.json", json.dumps({"segments": said}).encode()),
        ],
    )
    films = [[FILMS["a.mp4"]], [FILMS["b.mp4"]]]
    table = pa.table({"videos": films, "conversations": [turns, turns]})
    pq.write_table(table, tmp_path / "tables" / "a.parquet")
    sources = [{"path": name} for name in ("llava", "tars", "tables")]
    fields = {"sequence_length": 512, "video": {}, "max_bad_fraction": 0.0, "sources": sources}
    run = run_of(tmp_path / "given", data=fields)
    inputs = describe(run)
    index = build_index(run, inputs)
    assert not index.skipped and not index.unread
    seen = index.per_sample((index.files & (index.frames > 0)).astype(int))
    assert dict(zip(index.keys, seen.tolist(), strict=True)) == {
        "l": 1,
        "p": 0,
        "t": 1,
        "c": 1,
        "s": 1,
        "row 0": 1,
        "row 1": 1,
    }
    reader = ShardReader(index, read_tokenizer(run))
    for sample in range(len(index)):
        first, last = index.segment_start[sample : sample + 2].tolist()
        assert [len(ids) for ids in reader.texts(sample)] == [
            int(index.tokens[at]) for at in range(first, last) if index.kinds[at] == 0
        ]
        for at in range(first, last):
            if index.files[at]:
                assert reader.file(sample, at) in FILMS.values()


def test_videos_that_nothing_reads_are_left_out_and_counted(tmp_path: Path) -> None:
    write_folder(tmp_path / "given", "qwen3_vl")
    (tmp_path / "data").mkdir()
    said = [{"type": "video", "file": "c.mp4"}, {"type": "text", "value": "seen"}]
    content = [("c.mp4", FILMS["b.mp4"]), ("s.json", json.dumps({"segments": said}).encode())]
    write_tar(tmp_path / "data" / "a.tar", content)
    run = run_of(tmp_path / "given", data={"sequence_length": 512})
    index = build_index(run, describe(run))
    assert index.unread == {"videos (data.video reads them)": 1} and list(index.kinds) == [0]


def test_broken_videos_are_left_out_or_muted_by_name(tmp_path: Path) -> None:
    write_folder(tmp_path / "given", "qwen2_5_vl")
    run = video_run(tmp_path, "qwen2_5_vl", max_bad_fraction=1.0)
    broken = bytearray(film(30, 64, 48, fps=10, every=30))
    begin = broken.index(b"mdat") + 900
    broken[begin : begin + 1500] = bytes(1500)
    contents = {
        "sound": sound_only(),
        "cut": FILMS["a.mp4"][:-9],
        "one": film(1),
        "inside": bytes(broken),
    }
    lines = []
    for name, content in contents.items():
        (tmp_path / "data" / f"{name}.mp4").write_bytes(content)
        lines.append(json.dumps({"id": name, "messages": messages(f"{name}.mp4")}))
    lines.append(json.dumps({"id": "fine", "messages": messages("a.mp4")}))
    (tmp_path / "data" / "talks.jsonl").write_text("\n".join(lines))
    index = build_index(run, describe(run))
    reasons = {one.key: one.reason for one in index.skipped}
    assert set(reasons) == {"sound", "cut", "one"}
    assert "only sound" in reasons["sound"] and "truncated MP4" in reasons["cut"]
    assert "a video of 1 frame" in reasons["one"]
    found = find_broken(run, index, lambda *_: None)
    assert [one.key for one in found.values()] == ["inside"]
    assert "video" in next(iter(found.values())).reason
    preparer = Preparer(run, SharedOrders(Orders(run.file, layout(), index)))
    slot = preparer.prepare(Request(0, 0, "all", 0, frozenset({"image", "tokens", "labels"})))
    preparer.close()
    assert [one.what.key for one in slot.broken] == ["inside"]
    values, grids = slot.batch.items["image"].values[0], slot.batch.items["image"].grids
    shown = [one.any() for block in values for one in block]
    assert len(shown) == len(grids) == 12 and sum(shown) == 6  # the broken film's are blank
    ids, labels = slot.batch.token_ids, slot.batch.labels
    assert ids is not None and labels is not None and (ids == VIDEO).any()
    trained = len("Noise, in a corner.Yes.") + 2  # of the sample that is whole, in two epochs
    assert (labels != -100).sum() == 2 * trained


@pytest.mark.parametrize("size", [(24, 32), (40, 24), (96, 128)])
def test_frames_are_resized_as_by_the_operator_of_the_published_class(
    size: tuple[int, int],
) -> None:
    """torchvision's `resize` of a tensor of bytes is this operator of torch's, antialiased."""
    for pixels in all_frames(FILMS["a.mp4"])[:4]:
        tensor = torch.from_numpy(pixels).permute(2, 0, 1)[None]
        expected = torch.nn.functional.interpolate(
            tensor, size, mode="bicubic", align_corners=False, antialias=True
        )[0]
        made = torch.from_numpy(resized(pixels, *size, "bicubic").copy()).permute(2, 0, 1)
        assert (made.int() - expected.int()).abs().max() <= 1


def test_pixels_of_a_slot_are_those_of_the_processor_whoever_asks(tmp_path: Path) -> None:
    """All patches at once, or those of one replica after the other."""
    write_folder(tmp_path / "given", "qwen2_5_vl")
    run = video_run(tmp_path, "qwen2_5_vl")
    index = build_index(run, describe(run))
    made = []
    for replicas in (1, 2):
        orders = SharedOrders(Orders(run.file, layout(replicas), index))
        preparer, own = Preparer(run, orders), []
        for replica in range(replicas):
            slot = preparer.prepare(Request(0, 0, "all", replica, frozenset({"image"})))
            own += [one for block in slot.batch.items["image"].values[0] for one in block]
        preparer.close()
        made.append(sorted(one.tobytes() for one in own))
    assert made[0] == made[1]
    films = [Film("qwen2_5_vl", FILMS[name]).pixels for name in ("a.mp4", "b.mp4", "a.mp4")]
    expected = [pair.flatten(0, 1).numpy() for one in films for pair in one.unflatten(0, (-1, 2))]
    assert made[0] == sorted(one.tobytes() for one in 2 * expected)  # of two epochs

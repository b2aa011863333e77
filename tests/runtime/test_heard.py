"""Whole published models that hear, and see images and videos, in one conversation: loss and
gradients are the library's own, by its own processor."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from disttrain_cli.data.clips import decode_clip, in_whole_ms
from disttrain_cli.data.indexing.building import build_index
from disttrain_cli.data.sample_audio import tones
from disttrain_cli.data.tokenizer import read_tokenizer
from disttrain_cli.models.graph import describe
from disttrain_cli.runtime.outputs.prompts import Prompt
from disttrain_cli.runtime.outputs.sampling import write_after
from disttrain_cli.runtime.outputs.trained import Trained
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.runfile.published import is_all
from tests.data.films import all_frames, film
from tests.data.test_parts import picture
from tests.library_models import write
from tests.models.test_whole import loaded
from tests.runtime.factory import unit
from tests.runtime.layouts import Case, Models
from tests.runtime.test_whole_conversations import loaded_batch
from tests.whole_models import run_of

pytestmark = pytest.mark.slow

RANDOM = np.random.default_rng(0)
FILES = {
    "a.wav": tones(["low"], 16_000, RANDOM),
    "b.wav": tones(["high", "middle", "low", "low", "high"], 22_050, RANDOM),
    "a.png": picture(50, 30),
    "a.mp4": film(30, 64, 48, fps=10),
    "b.mp4": film(25, 40, 72, fps=8, every=5),
}
RATES = {"a.mp4": 10, "b.mp4": 8}
ANSWERS = ("A cat.", "A mat.")
MEDIA = {"wav": "audio", "png": "image", "mp4": "video"}
#: Files of each conversation, by what the family reads.
TALKS = {
    "all": (["b.wav"], ["a.png", "a.wav", "a.mp4"], ["b.mp4", "b.wav", "a.png", "a.wav"], []),
    "audio": (["b.wav"], ["a.wav", "b.wav"], []),
    "image": (["b.wav"], ["a.png", "a.wav", "a.png"], ["a.png"], []),
}
FAMILIES = {
    "qwen2_5_omni_thinker": "all",
    "qwen3_omni_moe_thinker": "all",
    "gemma4, heard": "image",
}
SEEN, HEARD, LLM = "vision", "audio", "llm"  # names of a folder's modules
#: On four ranks. Each tower is one layer, the LLM embed, two blocks and head.
LAYOUTS = {
    "pp2 dp2": [unit("all", [SEEN, HEARD, LLM], [3, 3], 2)],
    "1-1-pp2": [unit("v", [SEEN], [1]), unit("a", [HEARD], [1]), unit("l", [LLM], [2, 2])],
}


def media_of(name: str) -> str:
    return MEDIA[name.rpartition(".")[2]]


def messages(names: list[str]) -> list[dict[str, Any]]:
    """The first file in the second question, all others in the first."""
    parts = [{"type": media_of(name), media_of(name): name} for name in names]
    said = [[*parts[1:], {"type": "text", "text": " Is it?\n"}], [*parts[:1], words("What?")]]
    turns = []
    for question, answer in zip(said, ANSWERS, strict=True):
        turns.append({"role": "user", "content": question})
        turns.append({"role": "assistant", "content": [words(answer)]})
    return turns


def words(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def given(processor: Any, names: list[str]) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the library's inputs for a conversation, and which tokens are trained."""
    text = processor.apply_chat_template(messages(names), tokenize=False)
    in_order = [*names[1:], *names[:1]]
    made = processor(text=[text], return_tensors="pt", **files_of(in_order))
    ids = made["input_ids"][0].tolist()
    trained = torch.zeros(len(ids), dtype=torch.bool)
    for answer in ANSWERS:
        wanted = processor.tokenizer(f"{answer}<|im_end|>", add_special_tokens=False)["input_ids"]
        (first,) = [at for at in range(len(ids)) if ids[at : at + len(wanted)] == wanted]
        trained[first : first + len(wanted)] = True
    return dict(made), trained


def write_data(folder: Path, talks: Any) -> None:
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    lines = [json.dumps({"id": at, "messages": messages(names)}) for at, names in enumerate(talks)]
    (folder / "talks.jsonl").write_text("\n".join(lines))


def files_of(names: list[str]) -> dict[str, Any]:
    """Return a processor's arguments for these files."""
    from transformers.video_utils import VideoMetadata

    own: dict[str, list[Any]] = {"images": [], "videos": [], "audio": [], "video_metadata": []}
    for name in names:
        if media_of(name) == "audio":
            own["audio"].append(in_whole_ms(decode_clip(FILES[name], 10**6)))
        elif media_of(name) == "image":
            own["images"].append(Image.open(io.BytesIO(FILES[name])).convert("RGB"))
        else:
            frames = np.stack(all_frames(FILES[name]))
            own["videos"].append(frames)
            metadata = VideoMetadata(total_num_frames=len(frames), fps=RATES[name])
            own["video_metadata"].append(metadata)
    sampling = {"do_sample_frames": True, "fps": 2.0} if own["videos"] else {}
    return {name: values for name, values in own.items() if values} | sampling


def write_run(folder: Path, case: Case) -> Run:
    write(folder / "whole", case.model)
    write_data(folder / "data", TALKS["all"])
    optimizer = {"eps": 1e-5, "weight_decay": 0.0}
    run = run_of(
        folder / "whole",
        data={"sequence_length": 1024, "video": {}},
        zero_stage=case.zero_stage,
        optimizer=optimizer,
        gradient_clipping=1e6,
    )
    assert not build_index(run, describe(run)).skipped
    return run


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("layouts")
    cases = {name: Case("qwen2_5_omni_thinker", units, 1, None) for name, units in LAYOUTS.items()}
    return Models(cases, write_run, 1, folder)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_equals_single_process(layouts: Models, name: str) -> None:
    layouts.check(name)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_to_files_are_the_librarys_own(tmp_path: Path, family: str) -> None:
    """As `disttrain sample` and `samples.answers` ask for them."""
    model, processor = write(tmp_path / "whole", family)
    kind = FAMILIES[family]
    data = {"sequence_length": 2048} | ({"video": {}} if kind == "all" else {})
    run = run_of(tmp_path / "whole", data=data, global_batch_size=1)
    inputs = describe(run)
    trained = Trained(run, inputs, torch.device("cpu"), loaded(run), {})
    tokenizer = read_tokenizer(run)
    seen = [id_ for head in inputs.heads for id_ in head.row_ids]
    for names in TALKS[kind][:3]:
        prompt = Prompt("What?", tuple(FILES[name] for name in names))
        (own,) = write_after(trained, [prompt], 4)
        parts = [{"type": media_of(name)} for name in names]
        turn = {"role": "user", "content": [*parts, words("What?")]}
        text = processor.apply_chat_template([turn], tokenize=False, add_generation_prompt=True)
        given = processor(text=[text], return_tensors="pt", **files_of(names))
        unwanted = [tokenizer.pad, tokenizer.bos, tokenizer.image, *seen]
        unwanted += range(tokenizer.vocabulary, inputs.vocabulary)
        ids = model.generate(
            **given,
            max_new_tokens=4,
            do_sample=False,
            eos_token_id=tokenizer.eos,
            suppress_tokens=[id_ for id_ in unwanted if id_ != tokenizer.eos],
        )[0, given["input_ids"].shape[1] :]
        assert own == tokenizer.decode(ids.tolist())


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_the_librarys_own(tmp_path: Path, family: str) -> None:
    model, processor = write(tmp_path / "whole", family)
    talks = TALKS[FAMILIES[family]]
    write_data(tmp_path / "data", talks)
    data = {"sequence_length": 2048, "video": {}} if FAMILIES[family] == "all" else {}
    run = run_of(tmp_path / "whole", data={"sequence_length": 2048} | data, global_batch_size=1)
    assert is_all(run.published, run.file.model)
    layers, index = loaded(run), build_index(run, describe(run))
    assert not index.skipped and len(index) == len(talks)
    batch = loaded_batch(run, index, layers)
    total, count = torch.zeros(()), 0
    for names in talks:
        inputs, trained = given(processor, names)
        labels = torch.where(trained, inputs["input_ids"][0], -100)[1:]
        logits = model(**inputs).logits[0]
        total = total + torch.nn.functional.cross_entropy(logits[:-1], labels, reduction="sum")
        count += int((labels >= 0).sum())
    assert int((batch.labels >= 0).sum()) == count == batch.label_tokens
    state: dict[str, Any] = {}
    for layer in layers:
        state.update(layer(state, batch))
    torch.testing.assert_close(state["loss/text"], total / count, atol=1e-4, rtol=0)
    state["loss/text"].backward()
    (total / count).backward()
    theirs = {name: one.grad for name, one in model.named_parameters()}
    seen = 0
    for layer in layers:
        part = run.published.family.modules[layer.module]
        own = {path: one.grad for path, one in layer.named_parameters() if one.grad is not None}
        for name, grad in layer.to_published(own).items():
            expected = theirs[part.name_in_whole(name)]
            torch.testing.assert_close(grad, expected, atol=5e-5, rtol=1e-3)
            seen += 1
    assert seen == sum(grad is not None for grad in theirs.values())

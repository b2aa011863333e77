"""`disttrain init --folder --data`: a run file for one's own model and data, or a refusal."""

import json
import shutil
import sys

import pytest
import torch
from safetensors.torch import save_file

from disttrain_cli.api.presets import write_model_files
from disttrain_cli.api.starting import SCHEMA
from disttrain_cli.app import main
from disttrain_cli.models.graph import describe
from disttrain_cli.spec.runfile import read_run
from tests import library_models
from tests.cases import first_fast
from tests.commands.test_init import init
from tests.data.dataset import encoded, write_tar

QUESTION, ANSWER = "Which digit is this?", "It is a seven."


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A LLaVA's folder, the LLM of one alone, and 120 samples in three forms."""
    root = tmp_path_factory.mktemp("own")
    write_model_files("tiny-llava", root / "llava")
    shutil.copytree(root / "llava", root / "llm")
    text = json.loads((root / "llava" / "config.json").read_text())["text_config"]
    (root / "llm" / "config.json").write_text(json.dumps(text))
    shutil.copytree(root / "llm", root / "pulled not")
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{0:064}\nsize 1\n"
    (root / "pulled not" / "model.safetensors").write_text(pointer)
    shutil.copytree(root / "llm", root / "cut")
    (root / "cut" / "model.safetensors").write_bytes(b"cut")
    shutil.copytree(root / "llm", root / "quantised")
    (root / "quantised" / "config.json").write_text(json.dumps(text | {"quantization_config": {}}))
    save_file({"x": torch.zeros(1, dtype=torch.uint8)}, root / "quantised" / "model.safetensors")
    (root / "vit").mkdir()
    (root / "vit" / "config.json").write_text('{"model_type": "vit"}')
    picture, records, chats, pairs = encoded(28, 28), [], [], {}
    (root / "img").mkdir()
    for number in range(120):
        (root / "img" / f"{number}.jpg").write_bytes(picture)
        path = f"img/{number}.jpg"
        asked = [{"type": "image", "image": path}, {"type": "text", "text": QUESTION}]
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": ANSWER}]
        records.append({"messages": turns})
        turns = [
            {"from": "human", "value": f"<image>\n{QUESTION}"},
            {"from": "gpt", "value": ANSWER},
        ]
        chats.append({"id": str(number), "image": path, "conversations": turns})
        pairs |= {f"{number:03d}.jpg": picture, f"{number:03d}.txt": ANSWER.encode()}
    lines = [json.dumps(record) for record in records]
    (root / "talks.jsonl").write_text("\n".join(lines) + "\n")
    (root / "sharegpt.json").write_text(json.dumps(chats))
    write_tar(root / "pairs.tar", pairs.items())
    texts = [json.dumps({"text": f"It is written {number} times."}) for number in range(120)]
    (root / "texts.jsonl").write_text("\n".join(texts) + "\n")
    return root


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "data"),
    first_fast(
        [
            ("llava", "talks.jsonl"),
            ("llava", "sharegpt.json"),
            ("llava", "pairs.tar"),
            ("llm", "texts.jsonl"),
        ]
    ),
)
def test_a_run_file_for_what_is_there(made, tmp_path, capsys, monkeypatch, model, data):
    monkeypatch.chdir(made)
    monkeypatch.setattr("disttrain_cli.api.environment.cuda_devices", lambda: 0)
    to = tmp_path / f"run {model}"
    code, out, err = init([str(to), "--folder", model, "--data", data, "--json"], capsys)
    assert code == 0, out + err
    said = json.loads(out)
    assert said["samples"] == 120 and said["skipped"] == 0 and (to / SCHEMA).is_file()
    opened = read_run(to / "disttrain.yaml")
    file = opened.file
    assert file.name == f"run-{model}" and opened.resolve(file.data.sources[0].path) == made / data
    assert file.train.precision == "fp32" and file.data.held_out == 0.05
    assert file.data.sequence_length == 256 and file.train.global_batch_size <= 8
    assert file.train.epochs == 3 and 1e-4 < file.train.optimizer.lr < 1e-2
    assert opened.resolve(file.data.tokenizer) == made / model
    assert file.samples.answers == (20 if data in ("talks.jsonl", "sharegpt.json") else 0)
    code, _, err = init([str(to), "--folder", model, "--data", data], capsys)
    assert code == 1 and "disttrain.yaml exists" in err


@pytest.mark.slow
def test_a_family_of_the_library_answers_about_images(made, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(made)
    library_models.write(tmp_path / "model", "deepseek_vl")
    words = [str(tmp_path / "run"), "--folder", str(tmp_path / "model"), "--data", "talks.jsonl"]
    code, _, err = init(words, capsys)
    assert code == 0, err
    run = read_run(tmp_path / "run" / "disttrain.yaml")
    assert run.file.samples.answers == 20 and describe(run).of("image")


def test_paths_in_the_working_folder_stay_relative(made, tmp_path, capsys, monkeypatch):
    shutil.copytree(made / "llava", tmp_path / "my model")
    shutil.copy(made / "pairs.tar", tmp_path)
    monkeypatch.chdir(tmp_path)
    code, _, err = init(["--folder", "my model", "--data", "pairs.tar"], capsys)
    assert code == 0 and err.endswith("Next: disttrain profile\n")
    file = read_run(tmp_path / "disttrain.yaml").file
    assert file.model.folder == "my model" and file.data.sources[0].path == "pairs.tar"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", first_fast(["no", "2026-11-27", "new\nline \x85", 'a, {b}: #c \'s "日本"'])
)
def test_any_name_of_a_file_is_read_back(made, tmp_path, capsys, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    data, model, run = (tmp_path / f"{name}{end}" for end in (".jsonl", " model", ""))
    shutil.copy(made / "texts.jsonl", data)
    shutil.copytree(made / "llm", model)
    code, _, err = init([name, "--folder", f"./{model.name}", "--data", data.name], capsys)
    assert code == 0, err
    opened = read_run(run / "disttrain.yaml")
    assert opened.resolve(opened.file.data.sources[0].path) == data
    assert opened.resolve(opened.file.model.modules["llm"].folder) == model


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--folder", "llava"], 2, "--folder and --data go together"),
        (["--data", "pairs.tar"], 2, "--folder and --data go together"),
        (["--folder", "llava", "--data", "pairs.tar", "--sample-data"], 2, "go without --preset"),
        (["--folder", "vit", "--data", "pairs.tar"], 1, "Name one that disttrain models lists"),
        (["--folder", "nothing", "--data", "pairs.tar"], 1, "no model configuration"),
        (["--folder", "llava", "--data", "nothing"], 1, "no data at nothing"),
        (["--folder", "llm", "--data", "pairs.tar"], 1, "llm has no module for 120 images"),
        (["--folder", "pulled not", "--data", "texts.jsonl"], 1, "a Git LFS pointer"),
        (["--folder", "cut", "--data", "texts.jsonl"], 1, "is damaged"),
        (["--folder", "quantised", "--data", "texts.jsonl"], 1, "x: U8; read are BF16"),
        (["--folder", "llava", "--data", ""], 2, "--data is empty"),
        (["--folder", "", "--data", "pairs.tar"], 2, "--folder is empty"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    made, tmp_path, capsys, monkeypatch, words, code, said
):
    monkeypatch.chdir(made)
    ended, _, err = init([str(tmp_path / "run"), *words], capsys)
    assert ended == code and said in err and not (tmp_path / "run").exists()


def test_sample_data_is_not_begun_without_its_package(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    code, _, err = init([str(tmp_path / "run"), "--preset", "tiny-llava", "--sample-data"], capsys)
    assert code == 1 and "pip install 'scikit-learn" in err and not (tmp_path / "run").exists()


def test_presets_complete(capsys, monkeypatch):
    monkeypatch.setenv("_DISTTRAIN_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "disttrain init run --preset tiny-l")
    monkeypatch.setenv("COMP_CWORD", "4")
    with pytest.raises(SystemExit):
        main([])
    assert capsys.readouterr().out.split() == ["tiny-llava"]

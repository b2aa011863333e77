"""Files beside exported weights: those of the tokenizer that was trained with."""

import json
from pathlib import Path
from typing import Any

import pytest

from disttrain_cli.data.tokenizer import read_tokenizer
from disttrain_cli.runtime.outputs.companions import write_companions
from tests.data.chat_folders import write_folder
from tests.data.dataset import make_run


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """The model's folder, and that of the run's tokenizer: another template, other tokens."""
    model = write_folder(tmp_path / "model", "turns")
    (model / "added_tokens.json").write_text(json.dumps({"<old>": 900}))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, "top_k": 5}))
    fields = {"image_processor_type": "X", "chat_template": "another"}
    (model / "processor_config.json").write_text(json.dumps(fields))
    (model / "preprocessor_config.json").write_text("{}")
    return model, write_folder(tmp_path / "tokens", "headers")


def exported(tmp_path: Path, tokenizer: str, model: Path | None, llm: bool = True) -> Path:
    run = make_run(tmp_path, [{"path": "data"}], tokenizer=tokenizer)
    out = tmp_path / "out"
    out.mkdir()
    write_companions(run, model, out, llm)
    return out


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_the_runs_tokenizer_goes_with_the_model(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    model, tokens = folders
    out = exported(tmp_path, str(tokens), model)
    for path in tokens.iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes()
    assert not (out / "added_tokens.json").exists()  # of the model's own tokenizer
    assert read(out / "processor_config.json") == {"image_processor_type": "X"}
    assert (out / "preprocessor_config.json").exists()


def test_generate_stops_where_training_did(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    model, tokens = folders
    out = exported(tmp_path, str(tokens), model)
    tokenizer = read_tokenizer(make_run(tmp_path, [{"path": "data"}], tokenizer=str(tokens)))
    assert tokenizer.chat is not None and tokenizer.chat.end is not None
    stated = read(out / "generation_config.json")
    assert stated["top_k"] == 5 and stated["eos_token_id"][0] == 0
    assert {tokenizer.eos, tokenizer.chat.end} <= set(stated["eos_token_id"])


@pytest.mark.slow
def test_a_models_own_tokenizer_is_written_as_it_is(
    tmp_path: Path, folders: tuple[Path, Path]
) -> None:
    model, _ = folders
    out = exported(tmp_path, str(model), model)
    for path in model.iterdir():
        if path.name != "generation_config.json":
            assert (out / path.name).read_bytes() == path.read_bytes()


def test_modules_without_the_llm_have_no_tokenizer(
    tmp_path: Path, folders: tuple[Path, Path]
) -> None:
    out = exported(tmp_path, str(folders[1]), folders[0], llm=False)
    assert not (out / "tokenizer.json").exists() and (out / "preprocessor_config.json").exists()

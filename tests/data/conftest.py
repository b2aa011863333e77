"""A tiny dataset of both tar forms, its run and its index."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from disttrain_cli.data import tokenizer_folder
from disttrain_cli.data.index.sample_index import Index
from disttrain_cli.data.indexing.building import build_index
from disttrain_cli.spec.runfile import Run
from tests.data.dataset import INPUTS, make_run, write_dataset, write_tar


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("tiny")
    write_dataset(folder)
    return make_run(folder)


@pytest.fixture(scope="session")
def index(run: Run) -> Index:
    return build_index(run, INPUTS)


@pytest.fixture
def own_run(tmp_path: Path) -> Callable[..., Run]:
    """A run on files of the test's own: `own_run({"a.tar": files}, **data fields)`."""

    def make(shards: dict[str, Iterable[tuple[str, bytes]]], **data: Any) -> Run:
        for name, files in shards.items():
            write_tar(tmp_path / "own" / name, files)
        return make_run(tmp_path, [{"path": "own"}], **data)

    return make


@pytest.fixture
def loaded_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenizers are loaded in this process, which has imported transformers anyway."""
    monkeypatch.setattr(tokenizer_folder, "_loaded", tokenizer_folder.load)

"""Fixtures of the analysis tests: a clean run, written once."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "synthetic", Path(__file__).parent / "synthetic.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["synthetic"] = module
    spec.loader.exec_module(module)
    return module


synthetic = _load()


@pytest.fixture(scope="session")
def clean(tmp_path_factory: pytest.TempPathFactory):
    """(traces folder, spec, truth) of a run without faults."""
    folder = tmp_path_factory.mktemp("clean") / "traces"
    spec = synthetic.Synthetic()
    return folder, spec, synthetic.write(folder, spec)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's folder; nothing was kept before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    synthetic.write(tmp_path / "run" / "traces", synthetic.Synthetic(steps=3))
    return tmp_path / "run"

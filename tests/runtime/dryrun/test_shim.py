"""The library of fake CUDA devices: kept where users keep such things, and what is said where it
cannot be used."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from disttrain_cli.errors import DisttrainError
from disttrain_cli.runtime.dryrun import shim
from tests.cases import first_fast


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a cache"))
    return tmp_path / "a cache" / "disttrain"


def compiler(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    (folder / "c++").write_text(text)
    (folder / "c++").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")


@pytest.mark.slow
def test_the_library_is_loaded_from_a_path_with_spaces(cache: Path) -> None:
    variables = shim.environment()
    maps = "print([line for line in open('/proc/self/maps') if 'fake_cuda-' in line])"
    done = subprocess.run(
        [sys.executable, "-S", "-c", maps],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(cache) in done.stdout and done.stderr == ""


@pytest.mark.slow
def test_a_damaged_library_is_refused(cache: Path) -> None:
    shim.environment()
    [library] = cache.iterdir()
    library.write_bytes(library.read_bytes()[:100])
    with pytest.raises(DisttrainError, match="cannot be loaded") as refused:
        shim.environment()
    assert "ld.so" in refused.value.why and f"rm '{library}'" in refused.value.next_step


@pytest.mark.parametrize(
    ("limit", "given", "program", "why"),
    first_fast(
        [
            (
                "_WALL_S",
                0.2,
                "exec sleep 60",
                r"given 0\.2 s; load of this machine: [\d.]+ on \d+ cores",
            ),
            ("_CPU_S", 1, "while :; do :; done", "given 1 s of CPU time"),
            ("_CPU_S", 1, f"echo c++: {shim.SPENT} signal >&2; exit 4", "given 1 s of CPU time"),
        ]
    ),
)
def test_a_compiler_that_does_not_end(
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
    given: float,
    program: str,
    why: str,
) -> None:
    monkeypatch.setattr(shim, limit, given)
    compiler(tmp_path / "bin", f"#!/bin/sh\n{program}\n", monkeypatch)
    with pytest.raises(DisttrainError, match="did not end") as refused:
        shim.environment()
    assert re.search(why, refused.value.why)
    assert not list(cache.iterdir())


def test_a_compiler_that_does_not_start(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(tmp_path / "bin", "no program\n", monkeypatch)
    with pytest.raises(DisttrainError, match="cannot be started"):
        shim.environment()


def test_nobody_has_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(shim.Path, "home", home)
    with pytest.raises(DisttrainError, match="no home folder") as refused:
        shim.environment()
    assert "XDG_CACHE_HOME" in refused.value.next_step

"""What a path holds is told by its files."""

from __future__ import annotations

from pathlib import Path

import pytest

from disttrain_cli.analysis.formats import find_format
from disttrain_cli.errors import DataError


def touch(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def test_every_format_has_its_files(tmp_path: Path) -> None:
    own = touch(tmp_path / "run" / "traces" / "rank-00000" / "segment-0.parquet")
    profiles = [touch(tmp_path / "profiles" / "deep" / name) for name in ("rank1.json.gz", "rank2.json")]
    touch(tmp_path / "study" / "result.json")
    study = touch(tmp_path / "study" / "trace.parquet")
    assert find_format([tmp_path / "run"]) == ("disttrain", [tmp_path / "run"])
    assert find_format([own.parents[1]]) == ("disttrain", [own.parents[1]])
    assert find_format([tmp_path / "profiles"]) == ("kineto", profiles)
    assert find_format([profiles[0]]) == ("kineto", profiles[:1])
    assert find_format([tmp_path / "study"]) == find_format([study]) == ("operations", [study])
    with pytest.raises(DataError, match="different formats"):
        find_format([study, profiles[0]])
    with pytest.raises(DataError, match="no trace folder or file"):
        find_format([tmp_path / "missing"])

"""Measurements of an interrupted profile are taken over only where they belong."""

from pathlib import Path

import pytest

from disttrain_cli.profiling.records import Record, load, record_name, save

CLUSTER = {"nodes": 1, "gpus_per_node": 8}


def test_records_come_back_with_their_key_and_not_with_another(tmp_path: Path) -> None:
    path = tmp_path / "layers.json"
    records = {
        record_name("llm", True, 7, tp=2): Record(
            times={"block": [[1.0, 2.0]]}, kept_bytes={"block": 3.0}
        )
    }
    save(path, "key", 0.2, records)
    assert load(path, "key", 0.2, CLUSTER) == records
    assert load(path, "other", 0.2, CLUSTER) == {}
    assert load(path, "key", 0.22, CLUSTER) == records
    assert load(path, "key", 0.05, CLUSTER) == load(path, "key", 0.8, CLUSTER) == {}  # of a load
    save(path, "key", 0.2, records, completed_for=CLUSTER)
    assert load(path, "key", 0.2, CLUSTER) == {}  # profiling again measures again
    assert load(path, "key", 0.2, CLUSTER | {"nodes": 2}) == records


@pytest.mark.parametrize(
    "content", [None, "", "{", "[]", "{}", '{"key": "key"}', '{"key": "key", "records": 5}']
)
def test_a_file_that_is_none_is_passed_over(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "layers.json"
    if content is not None:
        path.write_text(content)
    assert load(path, "key", 0.2, CLUSTER) == {}

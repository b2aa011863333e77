"""What a path holds is told by its files."""

import gzip
import json
import os
import pickle
from pathlib import Path
from typing import Any

import duckdb
import pytest

from disttrain_cli.analysis.formats import find_format
from disttrain_cli.errors import DataError


def touch(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def parquet(path: Path, columns: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    duckdb.sql(f"COPY (SELECT {columns}) TO '{path}' (FORMAT parquet)")
    return path


OPERATIONS = "0 AS dp_rank, 0 AS stage, 'gc' AS optype, 1.0 AS duration"


def test_of_several_formats_in_a_folder_one_is_taken_and_the_others_are_said(
    tmp_path: Path,
) -> None:
    trace = tmp_path / "a" / "rank0.json"
    table = parquet(tmp_path / "a" / "trace.parquet", OPERATIONS)
    trace.write_text('{"traceEvents": []}')
    (tmp_path / "a" / "settings.json").write_text("{}")
    kind, files, said = find_format([tmp_path / "a"])
    assert (
        (kind, files) == ("operations", [table])
        and len(said) == 1
        and "rank0.json in the same folder" in said[0]
    )
    parquet(table, "'a dog' AS caption")
    kind, files, said = find_format([tmp_path / "a"])
    assert (kind, files) == ("kineto", [trace, trace.with_name("settings.json")])
    assert "trace.parquet in the same folder left out (they contain no operations" in said[0]
    table.write_bytes(b"half-written")
    assert find_format([tmp_path / "a"])[:2] == ("kineto", files)
    trace.write_text('{"displayTimeUnit": "ms", "disttrain": {}, "traceEvents": []}')
    assert find_format([tmp_path / "a"])[:2] == find_format([trace])[:2] == ("disttrain", [trace])


def test_files_and_folders_that_cannot_be_read_are_said_and_the_others_taken(
    tmp_path: Path, monkeypatch
) -> None:
    trace = touch(tmp_path / "deep" / "rank0.json")
    trace.write_text('{"traceEvents": []}')
    (tmp_path / "gone.json").symlink_to(tmp_path / "nowhere")
    locked = touch(tmp_path / "locked" / "rank1.json").parent
    listed = os.scandir
    monkeypatch.setattr(
        os, "scandir", lambda path: listed(path) if Path(path) != locked else listed("/proc/1/none")
    )
    kind, files, said = find_format([tmp_path])
    assert (kind, files) == ("kineto", [trace])
    assert len(said) == 2 and any("gone.json cannot be read (No such file" in text for text in said)
    assert any("cannot be listed" in text for text in said)
    with pytest.raises(DataError, match="No readable trace here") as failed:
        trace.unlink()
        find_format([tmp_path])
    assert "gone.json cannot be read" in failed.value.why


def test_one_ranks_part_of_own_traces_leads_to_the_run(tmp_path: Path) -> None:
    segment = parquet(
        tmp_path / "a run" / "traces" / "rank-00003" / "segment-start-000-00000.parquet",
        "1 AS step",
    )
    for path in (segment, segment.parent):
        with pytest.raises(DataError, match="one rank's part") as raised:
            find_format([path])
        assert f"disttrain_cli.analyze('{tmp_path}/a run/traces')" in raised.value.next_step


def test_every_format_has_its_files(tmp_path: Path) -> None:
    own = touch(tmp_path / "run" / "traces" / "rank-00000" / "segment-0.parquet")
    profiles = [
        touch(tmp_path / "profiles" / "deep" / name) for name in ("rank1.json.gz", "rank2.json")
    ]
    touch(tmp_path / "study" / "result.json")
    study = touch(tmp_path / "study" / "trace.parquet")
    assert find_format([tmp_path / "run"])[:2] == ("disttrain", [tmp_path / "run"])
    assert find_format([own.parents[1]])[:2] == ("disttrain", [own.parents[1]])
    assert find_format([tmp_path / "profiles"])[:2] == ("kineto", profiles)
    assert find_format([profiles[0]])[:2] == ("kineto", profiles[:1])
    assert (
        find_format([tmp_path / "study"])[:2] == find_format([study])[:2] == ("operations", [study])
    )
    with pytest.raises(DataError, match="different formats"):
        find_format([study, profiles[0]])
    with pytest.raises(DataError, match="no trace folder or file"):
        find_format([tmp_path / "missing"])


GROUPS = [{"pg_name": "0", "pg_desc": "default_pg", "pg_size": 2, "ranks": [0, 1]}]
INFO = {"backend": "nccl", "rank": 0, "world_size": 2, "pg_config": GROUPS, "nccl_version": "2.27"}
LONG = "x" * 2**21
ENTRIES = [{"record_id": 0, "collective_seq_id": 1, "frames": [{"name": LONG}]}]
#: What real ones have at their top, in several orders.
CONTENTS: dict[str, tuple[str, Any]] = {
    "groups in the header": ("kineto", {"distributedInfo": INFO, "traceEvents": []}),
    "schema first": ("kineto", {"schemaVersion": 1, "distributedInfo": INFO, "traceEvents": []}),
    "events first": ("kineto", {"traceEvents": [], "distributedInfo": INFO, "pg_config": 1}),
    "user's metadata first": (
        "kineto",
        {"nccl_version": "2.27", "pg_config": GROUPS, "displayTimeUnit": "ms", "traceEvents": []},
    ),
    "a long header": ("kineto", {"host_name": LONG, "pg_config": GROUPS, "traceEvents": []}),
    "a bare array": ("kineto", [{"ph": "X", "name": "pg_config", "args": {"nccl_version": 1}}]),
    "a dump inside": ("kineto", {"trace": {"version": "2.10", "entries": [], "pg_config": {}}}),
    "a dump": ("flight recorder", {"version": "2.10", "pg_config": {}, "entries": ENTRIES}),
    "a sorted dump": ("flight recorder", {"entries": ENTRIES, "pg_config": {}, "version": "2.10"}),
    "a dump without operations": ("flight recorder", {"pg_status": {}, "version": "2.10"}),
    "a dump of traceEvents": (
        "flight recorder",
        {"version": "2.10", "entries": [{"profiling_name": "traceEvents"}]},
    ),
    "a trace with keys of dumps": ("kineto", {"version": 1, "entries": [], "traceEvents": []}),
    "an own trace": ("disttrain", {"displayTimeUnit": "ms", "disttrain": {}, "traceEvents": []}),
    "other entries": ("kineto", {"entries": [1]}),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("content", CONTENTS)
def test_files_are_known_by_their_top_level_keys(
    tmp_path: Path, content: str, packed: bool
) -> None:
    expected, document = CONTENTS[content]
    text = json.dumps(document, indent=packed or None).encode()
    file = tmp_path / f"rank0.json{'.gz' * packed}"
    file.write_bytes(gzip.compress(text) if packed else text)
    for path in (file, tmp_path):
        assert find_format([path])[:2] == (expected, [file])


def test_pickles_and_damaged_dumps_are_dumps(tmp_path: Path) -> None:
    document = {"entries": ENTRIES, "pg_config": {}, "version": "2.10"}
    text = json.dumps(document)[: 2**20]
    contents = {
        "nccl_trace_rank_0": pickle.dumps({"frames": "x" * 10**5} | document, protocol=2),
        "nccl_trace_rank_1.gz": gzip.compress(pickle.dumps(document, protocol=2)),
        "nccl_trace_rank_2": text.encode(),
        "rank3.pkl": pickle.dumps(document, protocol=2),
        "model_3": pickle.dumps({"weights": [1.0]}),
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    files = [tmp_path / name for name in contents]
    assert find_format([tmp_path])[:2] == ("flight recorder", files[:4])
    (tmp_path / "rank4.json").write_text('{"traceEvents": []}')
    assert "rank4.json in the same folder left out" in find_format([tmp_path]).said[0]

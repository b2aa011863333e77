"""Dumps are read as plain values, whoever wrote them; nothing in them runs."""

import contextlib
import os
import pickle
import resource
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain_cli.analysis.flight import dumps as reading
from disttrain_cli.analysis.flight.dumps import rank_of, read_dumps
from disttrain_cli.analysis.formats import find_format
from disttrain_cli.errors import DataError
from tests.analysis.flight.recorded import dump, entry, write

GOOD = dump([entry(0)], {"0": ("default_pg", [0])})


@pytest.mark.parametrize("form", ["pickle", "json"])
def test_a_dump_is_read_in_both_forms(tmp_path: Path, form: str) -> None:
    files = write(tmp_path, [[entry(0), entry(1, "broadcast", state="started")], []], form=form)
    assert find_format(files).format == "flight recorder"
    dumps, said = read_dumps(files)
    assert [*dumps] == [0, 1] and not said and dumps[0].version == "2.10"
    first, second = dumps[0].entries
    assert (first.operation, first.pending, second.operation) == ("all_reduce", False, "broadcast")
    assert second.pending and second.frames[1].line == 41


def test_the_rank_is_the_last_number_of_a_name() -> None:
    names = {"nccl_trace_rank_12": 12, "rank_00003": 3, "a1b2.json": 2, "x": None, "x.pkl": None}
    names |= {"host1_rank2.pkl": 2, "dump.3.pickle": 3, "rank4.bin.gz": 4, "rank5.pt.trace.json": 5}
    names |= {"rank6_20261126": None, "123456789.json": None}
    assert {name: rank_of(Path(name)) for name in names} == names


class Runs:
    """A value whose pickle runs a command where it is loaded."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._mark}",)


def nested(levels: int) -> bytes:
    return b"\x80\x02" + b"]" * levels + b"a" * (levels - 1) + b"."


def hostile(mark: Path) -> dict[str, bytes]:
    proto = b"\x80\x02"
    return {
        "a command": pickle.dumps(GOOD | {"entries": [Runs(mark)]}, protocol=2),
        "a command by its name": b"\x80\x02cos\nsystem\n(X\x02\x00\x00\x00idtR.",
        "a class of our own": pickle.dumps(Path("/"), protocol=4),
        "a name from the stack": b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
        "an extension": proto + b"\x82\x01.",
        "a persistent name": proto + b"X\x01\x00\x00\x00aQ.",
        "a call of a list": proto + b"])R.",
        "a state for a list": proto + b"]}X\x01\x00\x00\x00aX\x01\x00\x00\x00bsb.",
        "deep lists": nested(100_000),
        "deep lists in a dump": pickle.dumps(GOOD, protocol=2)[:-1]
        + b"X\x07\x00\x00\x00entries"
        + nested(200_000)[2:-1]
        + b"s.",
        "a long text that is not there": proto + b"X" + struct.pack("<I", 2**32 - 1) + b"a",
        "a huge text that is not there": b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"a",
        "a huge number": proto + b"\x8b" + struct.pack("<i", 2**31 - 1) + b"a",
        "a number of many digits": proto + b"L" + b"9" * 5000 + b"L\n.",
        "a huge place in the memo": proto + b"Nr\xff\xff\xff\x7f.",
        "a list of itself": proto + b"]q\x00h\x00a.",
        "nothing on the stack": proto + b"u.",
        "no dump": pickle.dumps([1, 2], protocol=2),
        "no end": pickle.dumps(GOOD, protocol=2)[:-40],
        "text for a number": pickle.dumps(GOOD | {"entries": [{"record_id": "0"}]}, protocol=2),
        "JSON of something else": b'{"pg_config": 3, "version": "2.10"}',
        "JSON cut": b'{"version": "2.10", "entries": [{"record_id',
        "deep JSON": b'{"version": "2.10", "entries": ' + b"[" * 200_000,
    }


@pytest.mark.parametrize("what", hostile(Path()))
def test_a_hostile_file_is_refused_and_runs_nothing(tmp_path: Path, what: str) -> None:
    mark, file = tmp_path / "owned", tmp_path / "rank_0"
    file.write_bytes(hostile(mark)[what])
    with pytest.raises(DataError, match="No readable flight recorder dump") as caught:
        read_dumps([file])
    assert "rank_0 left out" in caught.value.why and len(caught.value.why) < 400
    assert not mark.exists()


@settings(max_examples=60)
@given(st.data())
def test_damaged_bytes_are_refused_or_read(data: st.DataObject) -> None:
    """No other error than ours, whatever bytes change."""
    content = bytearray(pickle.dumps(GOOD, protocol=2))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ValueError):
        reading._checked(reading._unpickled(bytes(content)))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_a_few_bytes_cannot_ask_for_gigabytes(tmp_path: Path) -> None:
    (tmp_path / "rank_0").write_bytes(b"\x80\x02Nr\x00\x00\x00\x10.")  # 2**28 places, 4 GiB
    code = (
        "import resource, sys; from pathlib import Path;"
        " from disttrain_cli.analysis.flight import dumps;"
        " from disttrain_cli.errors import DataError\n"
        "try: dumps.read_dumps([Path(sys.argv[1])])\n"
        "except DataError as error: assert 'more memory' in error.why, error.why\n"
        # ru_maxrss would be this process's, where that is larger
        "status = Path('/proc/self/status').read_text()\n"
        "print(status.split('VmHWM:')[1].split()[0], resource.getrlimit(9)[0])"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "rank_0")]
    peak_kib, limit = map(
        int, subprocess.run(command, capture_output=True, check=True).stdout.split()
    )
    assert peak_kib < 1 << 20 and limit == resource.getrlimit(resource.RLIMIT_AS)[0]


def test_a_file_that_is_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file,) = write(tmp_path, [[entry(0)]])
    monkeypatch.setattr(reading, "MOST_BYTES", 100)
    with pytest.raises(DataError) as caught:
        read_dumps([file])
    assert "more than any dump" in caught.value.why


def test_bad_files_are_left_out_and_two_of_a_rank_refused(tmp_path: Path) -> None:
    files = write(tmp_path, [[entry(0)], [entry(0)]])
    files[1].write_bytes(b"\x80\x02.")
    (tmp_path / "other").write_bytes(files[0].read_bytes())
    dumps, said = read_dumps([*files, tmp_path / "other"])
    assert [*dumps] == [0] and len(said) == 2 and "contains no number" in said[1]
    (tmp_path / "again_0").write_bytes(files[0].read_bytes())
    with pytest.raises(DataError, match="Two dumps belong to rank 0"):
        read_dumps([files[0], tmp_path / "again_0"])

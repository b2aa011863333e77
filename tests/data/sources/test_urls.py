"""Sources behind URLs: read from end to end once, then by ranges; what cannot be reached is no
damage."""

import http.server
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest

from disttrain_cli.data.index.sample_index import read_index
from disttrain_cli.data.indexing.building import build_index, open_index
from disttrain_cli.data.reading import ShardReader
from disttrain_cli.data.sources import files
from disttrain_cli.data.tokenizer import ByteTokenizer
from disttrain_cli.errors import DataError, MismatchError
from tests.data.dataset import INPUTS, encoded, make_run, write_tar
from tests.data.sources.forms import write_form
from tests.data.test_reading import contents

REMOTE = ["tars", "interleaved", "llava", "parquet", "parquet lists"]


@pytest.fixture
def memory() -> Iterator[Any]:
    """An empty file system in memory."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield system
    system.store.clear()


def upload(folder: Path, system: Any) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            system.pipe_file("/" + path.relative_to(folder).as_posix(), path.read_bytes())


@pytest.mark.parametrize("form", REMOTE)
def test_every_form_is_read_from_a_url(tmp_path: Path, memory: Any, form: str) -> None:
    written = write_form(tmp_path / "data", form)
    upload(tmp_path / "data", memory)
    local = build_index(make_run(tmp_path / "data", [written.source]), INPUTS)
    run = make_run(tmp_path, [{"path": f"memory://{written.source['path']}"}])
    index = build_index(run, INPUTS)
    assert (
        index.fingerprint == local.fingerprint == read_index(run, INPUTS).fingerprint
        and not index.skipped
    )
    reader = ShardReader(index, ByteTokenizer())
    assert [contents(index, reader, sample) for sample in range(len(index))] == written.samples


def test_a_changed_and_a_lost_file_are_noticed(tmp_path: Path, memory: Any) -> None:
    write_form(tmp_path / "data", "tars")
    upload(tmp_path / "data", memory)
    run = make_run(tmp_path, [{"path": "memory://tars"}])
    index = build_index(run, INPUTS)
    memory.pipe_file("/tars/0.tar", memory.cat_file("/tars/0.tar"))
    with pytest.raises(
        MismatchError, match=r"0\.tar: was .* bytes, version .*, is .* bytes, version"
    ):
        open_index(run, INPUTS)
    memory.rm("/tars/0.tar")
    memory.pipe_file("/tars/1.tar", b"")
    with pytest.raises(MismatchError, match=r"0\.tar: gone"):
        open_index(run, INPUTS)
    with pytest.raises(DataError, match=r"memory://.*0\.tar"):
        ShardReader(index, ByteTokenizer()).texts(0)


def test_arrow_over_a_url_is_refused(tmp_path: Path, memory: Any) -> None:
    write_form(tmp_path / "data", "arrow")
    upload(tmp_path / "data", memory)
    with pytest.raises(DataError, match="Arrow files are not read over a URL"):
        build_index(make_run(tmp_path, [{"path": "memory://arrow"}]), INPUTS)


@pytest.mark.parametrize(
    "url", ["nosuch://bucket/a", "memory://nothing/here", "http://127.0.0.1:1/a.tar"]
)
def test_what_cannot_be_opened_is_named(tmp_path: Path, url: str) -> None:
    with pytest.raises(DataError) as caught:
        build_index(make_run(tmp_path, [{"path": url}]), INPUTS)
    assert url in str(caught.value) and caught.value.next_step


class Handler(http.server.SimpleHTTPRequestHandler):
    """Files with ranges; every request is counted in bytes."""

    sent: list[int]
    broken = False
    ranges = True

    def do_HEAD(self) -> None:
        self.answer(send=False)

    def do_GET(self) -> None:
        self.answer(send=True)

    def answer(self, send: bool) -> None:
        path = Path(self.directory, self.path.lstrip("/"))
        if type(self).broken or not path.is_file():
            self.send_error(500 if type(self).broken else 404)
            return
        data = path.read_bytes()
        wanted = self.headers.get("Range", "").removeprefix("bytes=") if type(self).ranges else ""
        first, last = (int(end) for end in wanted.split("-")) if wanted else (0, len(data) - 1)
        part = data[first : last + 1]
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(data)}")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{hash(data)}"')
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        if send:
            self.sent.append(len(part))
            self.wfile.write(part)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, type[Handler]]]:
    """(URL, handler class) of a server of the folder `www`."""
    (tmp_path / "www").mkdir()
    counted = type("Counted", (Handler,), {"sent": []})
    handler = partial(counted, directory=str(tmp_path / "www"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever, args=[0.01])
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}", counted
        running.shutdown()
        thread.join()


def test_a_tar_is_streamed_once_then_read_by_ranges(
    tmp_path: Path, server: tuple[str, type[Handler]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, handler = server
    monkeypatch.setattr(files, "READ_AHEAD_BYTES", 100_000)
    pictures = [encoded(300, 200, ".png", shade=number) for number in range(40)]
    shard = write_tar(
        tmp_path / "www" / "a.tar",
        [
            (f"{n}{end}", data)
            for n, picture in enumerate(pictures)
            for end, data in ((".png", picture), (".txt", b"w"))
        ],
    )
    run = make_run(tmp_path, [{"path": f"{url}/a.tar"}])
    index = build_index(run, INPUTS)
    size = shard.stat().st_size
    assert len(index) == 40 and not index.skipped and size > 4 * 100_000
    assert sum(handler.sent) < 1.2 * size
    handler.sent.clear()
    reader = ShardReader(index, ByteTokenizer())
    assert reader.file(7, 14) == pictures[7] and reader.texts(7) == [[ord("w")]]
    assert handler.sent == [len(pictures[7]), 1]


def test_a_server_that_fails_stops_the_index(
    tmp_path: Path, server: tuple[str, type[Handler]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is unreachable today is no bad sample: it would be left out for good."""
    url, handler = server
    monkeypatch.setattr(files, "PAUSE_S", 0.0)
    write_tar(tmp_path / "www" / "a.tar", [("1.txt", b"w"), ("1.jpg", encoded(20, 20))])
    run = make_run(tmp_path, [{"path": f"{url}/a.tar"}])
    index = build_index(run, INPUTS)
    handler.broken = True
    with pytest.raises(DataError, match=r"a\.tar"):
        build_index(run, INPUTS)
    with pytest.raises(DataError, match=r"a\.tar"):
        ShardReader(index, ByteTokenizer()).texts(0)


def test_a_server_without_ranges_is_no_damage(
    tmp_path: Path, server: tuple[str, type[Handler]]
) -> None:
    url, handler = server
    handler.ranges = False
    write_tar(tmp_path / "www" / "a.tar", [("1.txt", b"w"), ("1.jpg", encoded(20, 20))])
    index = build_index(make_run(tmp_path, [{"path": f"{url}/a.tar"}]), INPUTS)
    reader = ShardReader(index, ByteTokenizer())
    for read in (lambda: reader.texts(0), lambda: reader.file(0, 0)):
        with pytest.raises(DataError, match="range requests with the whole file"):
            read()

"""An order is made once for all processes, found again, and made anew where what is there cannot be
used; the stream is the same all the while."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from disttrain_cli.data.columns import HEADER, alone
from disttrain_cli.data.epochs import making, streams
from disttrain_cli.data.epochs.making import Epochs, folder_of
from disttrain_cli.data.epochs.mixture import Mixture, Phase
from disttrain_cli.data.index.sample_index import Index
from disttrain_cli.data.packing import Packing, SequenceStream
from disttrain_cli.errors import SpecError
from disttrain_cli.spec.index import IMAGE, TEXT
from disttrain_cli.spec.progress import silent
from tests.data.test_packing import make_index

SEQUENCES = 14  # of an epoch, about


def made(folder: Path | None, texts: int = 60) -> Index:
    index = make_index([[TEXT, IMAGE]] * texts, [[5 + n % 40, 2] for n in range(texts)])
    return replace(index, fingerprint=f"{texts} samples", orders=folder)


def same(one: Packing, other: Packing) -> bool:
    return all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for name in ("ids", "sample_start", "samples", "tokens", "length_sq", "label_tokens")
    ) and all(
        np.array_equal(getattr(one.items[item], name), getattr(other.items[item], name))
        for item in one.items
        for name in ("start", "segment", "grid")
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "orders"


@pytest.fixture
def made_epochs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the epochs that are made."""
    numbers, real = list[int](), Epochs._pieces

    def pieces(self: Epochs, number: int) -> Any:
        numbers.append(number)
        return real(self, number)

    monkeypatch.setattr(Epochs, "_pieces", pieces)
    return numbers


def folders(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/epoch-*"))


def test_from_files_as_from_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "BLOCK_SAMPLES", 25)
    memory = SequenceStream(Mixture(made(None), 3)).batch(0, 50)
    assert len(memory) == 50 and memory.fill_fraction > 0.8
    assert same(SequenceStream(Mixture(made(folder), 3)).batch(0, 50), memory)
    again = SequenceStream(Mixture(made(folder), 3))
    assert same(again.batch(0, 50), memory)
    late = SequenceStream(Mixture(made(folder), 3)).batch(37, 5)
    assert (
        late.samples.tolist()
        == memory.samples[memory.sample_start[37] : memory.sample_start[42]].tolist()
    )


def test_a_resumed_run_opens_the_epoch_it_is_in(folder: Path, made_epochs: list[int]) -> None:
    first = SequenceStream(Mixture(made(folder), 3))
    for number in range(0, 5 * SEQUENCES, SEQUENCES):
        first.batch(number, SEQUENCES)
    expected, count = first.batch(4 * SEQUENCES, 3), len(made_epochs)
    assert made_epochs == list(range(count))
    # two before it stay
    assert [path.name for path in folders(folder)] == [
        f"epoch-{n:06d}" for n in range(count - 3, count)
    ]
    assert same(SequenceStream(Mixture(made(folder), 3)).batch(4 * SEQUENCES, 3), expected)
    assert len(made_epochs) == count
    shutil.rmtree(folder)  # all of it can be made again
    assert same(SequenceStream(Mixture(made(folder), 3)).batch(4 * SEQUENCES, 3), expected)


def test_other_seeds_indexes_and_weights_lie_apart(folder: Path, made_epochs: list[int]) -> None:
    for index, seed, weight in (
        (made(folder), 0, 1.0),
        (made(folder), 1, 1.0),
        (made(folder), 0, 2.0),
        (made(folder, 61), 0, 1.0),
        (replace(made(folder), held=True), 0, 1.0),
    ):
        SequenceStream(Mixture(index, seed, (Phase(0, [weight]),))).batch(0, 4)
    assert len(folders(folder)) == len(made_epochs) == 5
    # one that took another's place is noticed
    paths = folders(folder)
    shutil.rmtree(paths[0])
    shutil.copytree(paths[1], paths[0])
    for seed in (0, 1):
        expected = SequenceStream(Mixture(made(None), seed)).batch(0, 4)
        assert same(SequenceStream(Mixture(made(folder), seed)).batch(0, 4), expected)


def cut(path: Path) -> None:
    os.truncate(path / "samples", (path / "samples").stat().st_size - 4)


def longer(path: Path) -> None:
    with (path / "image.segment").open("ab") as file:
        file.write(bytes(4))


def gone(path: Path) -> None:
    (path / "tokens").unlink()


def header(change: Callable[[str], str]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        (path / HEADER).write_text(change((path / HEADER).read_text()))

    return write


@pytest.mark.parametrize(
    "damage",
    [
        cut,
        longer,
        gone,
        shutil.rmtree,
        header(lambda text: ""),
        header(lambda text: "[]"),
        header(lambda text: text[:-9]),
        header(lambda text: text.replace("<i4", "<i8")),
        header(lambda text: text.replace('"seed": 3', '"seed": 4')),
        header(lambda text: text.replace("[0, ", "[1, ")),
    ],
)
def test_what_cannot_be_used_is_made_anew(
    folder: Path, made_epochs: list[int], damage: Callable[[Path], None]
) -> None:
    expected = SequenceStream(Mixture(made(folder), 3)).batch(2, 5)
    damage(folders(folder)[0])
    assert same(SequenceStream(Mixture(made(folder), 3)).batch(2, 5), expected)
    assert made_epochs == [0, 0]
    assert same(SequenceStream(Mixture(made(folder), 3)).batch(2, 5), expected)
    assert made_epochs == [0, 0]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o500)
    with pytest.raises(SpecError, match="Cannot write"):
        SequenceStream(Mixture(made(folder), 3)).batch(0, 1)


def test_a_full_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = making.writing_columns

    class Full:
        def __init__(self, *args: Any) -> None:
            self.real = real(*args)

        def __enter__(self) -> Any:
            writer = self.real.__enter__()
            full = writer._stack.enter_context(open("/dev/full", "wb", buffering=0))
            writer._files["samples"] = full
            writer._shapes["samples"] = ("<i4", [0])
            return writer

        def __exit__(self, *error: Any) -> Any:
            return self.real.__exit__(*error)

    monkeypatch.setattr(making, "writing_columns", Full)
    with pytest.raises(SpecError, match="No space left"):
        SequenceStream(Mixture(made(folder), 3)).batch(0, 1)
    assert [path.name for path in folder.glob("*/*")] == ["lock"]
    monkeypatch.undo()
    assert same(
        SequenceStream(Mixture(made(folder), 3)).batch(0, 5),
        SequenceStream(Mixture(made(None), 3)).batch(0, 5),
    )


MAKER = """
import sys, time
from pathlib import Path
from disttrain_cli.data.epochs import making
from disttrain_cli.data.epochs.mixture import Mixture, Phase
from disttrain_cli.data.packing import SequenceStream
from tests.data.epochs.test_making import made
real = making.Epochs._pieces
def pieces(self, number):
    print("makes", flush=True)
    for piece in real(self, number):
        yield piece
        time.sleep(float(sys.argv[2]))
making.Epochs._pieces = pieces
print(SequenceStream(Mixture(made(Path(sys.argv[1])), 3)).batch(0, 20).samples.tolist(), flush=True)
"""


def start(folder: Path, sleeps_s: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", MAKER, str(folder), str(sleeps_s)], stdout=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_two_jobs_at_a_time_and_a_maker_that_is_killed(folder: Path) -> None:
    killed = start(folder, 600)
    assert killed.stdout is not None and killed.stdout.readline() == "makes\n"
    others = [start(folder, 0.1) for _ in range(2)]
    told = list[str]()
    lock = next(folder.glob("*/lock"))
    while "process" not in lock.read_text():
        time.sleep(0.01)

    def progress(what: str, done: int, total: int) -> None:
        told.append(what)
        if what.startswith("wait"):
            killed.send_signal(signal.SIGKILL)

    with alone(lock, "the order of epoch 0", progress):
        pass  # the lock ended with its process
    killed.wait()
    assert f"from process {killed.pid} on" in told[0] or any(
        f"process {other.pid}" in told[0] for other in others
    )
    texts = [other.communicate(timeout=60)[0].splitlines() for other in others]
    expected = SequenceStream(Mixture(made(None), 3)).batch(0, 20).samples.tolist()
    assert [text[-1] for text in texts] == [str(expected)] * 2
    assert sum(text.count("makes") for text in texts) == 2  # each of epochs 0 and 1 once
    assert sorted(path.name for path in folder.glob("*/*")) == [
        "epoch-000000",
        "epoch-000001",
        "lock",
    ]


def test_the_next_epoch_is_made_ahead(
    folder: Path, made_epochs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("disttrain_cli.data.epochs.phase.AHEAD_SAMPLES", 1)
    stream = SequenceStream(Mixture(made(folder), 3))
    stream.batch(0, 2)
    assert made_epochs == [0]
    first, last = stream.range_of(0, 0)
    stream.batch((first + last) // 2, 2)
    for thread in threading.enumerate():
        if thread.name == "epoch":
            thread.join()
    assert made_epochs == [0, 1]
    monkeypatch.undo()
    assert same(
        stream.batch(last - 1, 4), SequenceStream(Mixture(made(None), 3)).batch(last - 1, 4)
    )


def test_epochs_that_were_asked_for_stay(folder: Path, made_epochs: list[int]) -> None:
    stream = SequenceStream(Mixture(made(folder), 3), keep=True)
    stream.range_of(0, 5)
    shutil.rmtree(folders(folder)[2])
    again = SequenceStream(Mixture(made(folder), 3), keep=True)
    ranges = [again.range_of(0, number) for number in range(6)]
    assert [end for _, end in ranges[:-1]] == [begin for begin, _ in ranges[1:]]
    assert made_epochs == [0, 1, 2, 3, 4, 5, 2] and len(folders(folder)) == 6


def test_a_start_leaves_what_it_needs_and_the_rest_is_made_again(folder: Path) -> None:
    """Of phase 0 its last epoch, with which phase 1 begins, and all of what is beside."""

    def stream(*phases: Phase, seed: int = 3) -> SequenceStream:
        return SequenceStream(Mixture(made(folder), seed, phases=phases))

    first, second, beside = Phase(0, [1.0]), Phase(2 * SEQUENCES, [2.0]), Mixture(made(folder), 5)
    for at in range(4 * SEQUENCES):  # before the second phase was stated
        stream(first).batch(at, 1)
    for others in (stream(first, Phase(5, [3.0])), stream(seed=4), SequenceStream(beside)):
        others.batch(5, 2)
    busy = stream(seed=6)
    busy.batch(0, 2)
    now = stream(first, second)
    early, late = now.batch(0, 40), now.batch(second.first, 30)
    with alone(folder_of(busy._mixture, 0) / "lock", "an order", silent):
        now.remove_unneeded(second.first, [beside])
    needed = [folder_of(now._mixture, 0), folder_of(now._mixture, 1)]
    assert set(folder.iterdir()) == {*needed, folder_of(beside, 0), folder_of(busy._mixture, 0)}
    (left,) = needed[0].glob("epoch-*")
    assert left.name == making.NAME.format(now.epoch_of(second.first - 1)[1])
    shutil.rmtree(needed[1])
    again = stream(first, second)
    assert same(again.batch(second.first, 30), late) and list(needed[0].glob("epoch-*")) == [left]
    assert same(again.batch(0, 40), early)

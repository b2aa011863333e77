"""Starting the ranks of one machine, watching them, and ending all of them when one fails.

Each rank is a fresh process (`python -m disttrain_cli.runtime.launch`) that reads its payload from a JSON file;
nothing is pickled and no shell is involved. The rendezvous listens on loopback.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from disttrain_cli.errors import DisttrainError, RankFailedError
from disttrain_cli.spec.files import write_whole
from disttrain_cli.spec.rundir import rank_log

POLL_S = 0.05
GRACE_S = 5.0


def launch(world_size: int, target: str, payload: dict[str, Any], log_dir: Path, *,
           timeout_s: float | None = None, on_poll: Callable[[], None] | None = None) -> None:
    """Run `target` ("package.module:function") once per rank and wait for all of them.

    The function is called with `payload` in a process that has RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR,
    MASTER_PORT and OMP_NUM_THREADS=1 (unless set) in its environment; its output goes to the rank's log.
    `on_poll` is called about every 50 ms.

    Raises:
        RankFailedError: a rank ended with an error or the time ran out; the others are ended first.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {
        "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "PYTHONUNBUFFERED": "1",
    }
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory(prefix="disttrain-") as folder:
        file = Path(folder) / "payload.json"
        file.write_text(json.dumps(payload))
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(world_size):
                _error_file(rank_log(log_dir, rank)).unlink(missing_ok=True)
                with rank_log(log_dir, rank).open("wb") as log:
                    ranks.append(subprocess.Popen(
                        [sys.executable, "-m", "disttrain_cli.runtime.launch", target, str(file),
                         str(rank_log(log_dir, rank))],
                        env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True))
            _wait(ranks, log_dir, deadline, on_poll)
        finally:
            _end(ranks)


def _wait(ranks: list[subprocess.Popen[bytes]], log_dir: Path, deadline: float | None,
          on_poll: Callable[[], None] | None) -> None:
    while True:
        codes = [process.poll() for process in ranks]
        failed = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
        if failed:
            time.sleep(POLL_S)  # the rank that failed first often makes others fail: name the likeliest cause
            raise _failure(ranks, failed, log_dir)
        if all(code == 0 for code in codes):
            if on_poll:
                on_poll()
            return
        if deadline is not None and time.monotonic() > deadline:
            waiting = [rank for rank, code in enumerate(codes) if code is None]
            raise RankFailedError(f"Rank {waiting[0]} did not finish in time",
                                  f"still running: {waiting}; log: {rank_log(log_dir, waiting[0])}")
        if on_poll:
            on_poll()
        time.sleep(POLL_S)


def _failure(ranks: list[subprocess.Popen[bytes]], failed: list[int], log_dir: Path) -> RankFailedError:
    """Describe the rank that failed by itself rather than because a peer went away."""
    logs = {rank: _tail(rank_log(log_dir, rank)) for rank in failed}
    lost_peer = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "recvTensor", "Timed out")
    cause = next((r for r in failed if ranks[r].returncode < 0), None)
    if cause is None:
        cause = next((r for r in failed if not any(sign in logs[r] for sign in lost_peer)), failed[0])
    log = rank_log(log_dir, cause)
    if (told := _error_file(log)).exists():
        error = json.loads(told.read_text())
        return RankFailedError(f"Rank {cause} stopped: {error['what']}", f"{error['why']}\nlog: {log}".strip(),
                               error["next_step"])
    code = ranks[cause].returncode
    ending = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    last = next((line for line in reversed(logs[cause].splitlines()) if line.strip()), "")
    return RankFailedError(f"Rank {cause} {ending}", f"{last}\nlog: {log}".strip())


def _error_file(log: Path) -> Path:
    return log.with_suffix(".error.json")


def _tail(path: Path, limit: int = 8192) -> str:
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - limit))
        return file.read().decode(errors="replace")


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    """End every process group that is still alive: politely first, then for good."""
    alive = [process for process in ranks if process.poll() is None]
    for how in (signal.SIGTERM, signal.SIGKILL):
        for process in alive:
            try:
                os.killpg(process.pid, how)
            except ProcessLookupError:
                continue
        deadline = time.monotonic() + GRACE_S
        while alive and time.monotonic() < deadline:
            alive = [process for process in alive if process.poll() is None]
            time.sleep(POLL_S)
    for process in ranks:
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main(arguments: list[str]) -> None:
    """Entry of a rank's process: TARGET PAYLOAD_FILE LOG. An error meant for the user goes beside the log."""
    target, file, log = arguments
    module, _, function = target.partition(":")
    payload = json.loads(Path(file).read_text())
    try:
        getattr(importlib.import_module(module), function)(payload)
    except DisttrainError as error:
        write_whole(_error_file(Path(log)), json.dumps(
            {"what": error.what, "why": error.why, "next_step": error.next_step}))
        raise


if __name__ == "__main__":
    main(sys.argv[1:])

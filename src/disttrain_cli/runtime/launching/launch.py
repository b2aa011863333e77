"""Launcher of one machine's ranks: starts them, monitors them, and ends all when one fails.

`launch` starts one *starter* process, which imports what the ranks need once and forks them:
importing torch and related packages takes seconds of a core, and six ranks on a laptop would each
pay it. The launcher imports none of them: checks that need them, before a run's folder changes, are
done by the starter, which then waits for the launcher. A rank reports its error over a pipe, and
the starter the exit code of each rank. Messages are lines of JSON, nothing is pickled, no shell is
involved. The starter opens the socket of the rendezvous itself, on loopback: torch's would listen
on every interface. Ranks exit when the starter is gone, and the starter when the launcher is.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from disttrain_cli import errors
from disttrain_cli.errors import DisttrainError, RankFailedError, RankLostError
from disttrain_cli.runtime.launching.rank import live, resolve, settle
from disttrain_cli.spec.rundir import rank_log

LOOPBACK = "127.0.0.1"
#: Environment variable: the open socket on which rank 0 serves the rendezvous
#: (`process.rendezvous`).
LISTENER = "DISTTRAIN_LISTENER"
POLL_S = 0.05
GRACE_S = 5.0
PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>
#: Error texts of a rank that fails only because it lost a peer.
LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "recvTensor",
    "Timed out",
    "remote process exited",
    "NCCL communicator was aborted",
    "Watchdog caught collective operation timeout",
)


def launch(
    world_size: int,
    target: str,
    payload: dict[str, Any],
    log_dir: Path,
    *,
    timeout_s: float | None = None,
    begin: Callable[[list[str]], dict[str, Any]] = lambda notes: {},
    on_poll: Callable[[], None] | None = None,
    variables: Mapping[str, str] | None = None,
) -> None:
    """Run `target` ("package.module:function") once per rank and wait for all of them.

    The function is called with `payload` in a process that has RANK, LOCAL_RANK, WORLD_SIZE,
    MASTER_ADDR, MASTER_PORT (for `process.rendezvous`), OMP_NUM_THREADS=1 (unless set) and
    `variables` in its environment; its output goes to the rank's log. `payload["device"]` is "cuda"
    where the function uses a GPU (`rank.settle`). Where the target's module has a function
    `before_fork`, it is called with the payload once, before the ranks are forked, to import what
    they need; it starts no thread and touches no device.

    Args:
        begin: called with the notes that `before_fork` returns, if any, before anything is written
            to `log_dir`; its result is added to the payload.
        on_poll: called about every 50 ms.

    Raises:
        DisttrainError: as `before_fork`.
        RankFailedError: a rank failed or the time ran out; the other ranks are ended first.
    """
    environment = (
        os.environ
        | {
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": LOOPBACK,
            "PYTHONUNBUFFERED": "1",
            # counting devices by the CUDA runtime would make it unusable in forked processes
            "PYTORCH_NVML_BASED_CUDA_CHECK": ("1"),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", _loopback_interface()),
        }
        | dict(variables or {})
    )

    def ready(notes: list[str]) -> dict[str, Any]:
        more = begin(notes)
        log_dir.mkdir(parents=True, exist_ok=True)
        for rank in range(world_size):
            rank_log(log_dir, rank).write_bytes(b"")
        return more

    with tempfile.TemporaryFile() as output:
        reading, writing = os.pipe()
        starter = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "disttrain_cli.runtime.launching.launch",
                target,
                str(os.getpid()),
                str(log_dir),
                str(writing),
            ],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
            pass_fds=[writing],
        )
        os.close(writing)
        with os.fdopen(reading, "rb", buffering=0) as ends:
            try:
                _send(starter, payload)
                all_ended = _wait(starter, ends, world_size, log_dir, timeout_s, ready, on_poll)
            finally:
                _end(starter)
                log = log_dir / "starter.log"
                output.seek(0)
                if text := output.read():
                    with contextlib.suppress(OSError):  # a full disk
                        log_dir.mkdir(parents=True, exist_ok=True)
                        log.write_bytes(text)
        if not all_ended:
            failure = _starter_failure(starter.returncode, log)
            if isinstance(failure, RankLostError):
                failure.begun = all_ended is None
            raise failure


def _send(starter: subprocess.Popen[bytes], message: dict[str, Any]) -> None:
    assert starter.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # the starter is gone, which `_wait` reports
        starter.stdin.write(json.dumps(message).encode() + b"\n")
        starter.stdin.flush()


def _wait(
    starter: subprocess.Popen[bytes],
    ends: io.FileIO,
    world_size: int,
    log_dir: Path,
    timeout_s: float | None,
    ready: Callable[[list[str]], dict[str, Any]],
    on_poll: Callable[[], None] | None,
) -> bool | None:
    """Follow the starter's messages until all ranks have exited.

    Returns None if the starter exits before that, and False if it exits before `ready` was called.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    os.set_blocking(ends.fileno(), False)
    received, begun = b"", False  # from the starter, and whether `ready` was called
    while True:
        starter_gone = starter.poll() is not None
        received += ends.read() or b""
        lines = [json.loads(line) for line in received.split(b"\n")[:-1]]
        if lines and not begun:
            if "notes" not in lines[0]:
                raise getattr(errors, lines[0]["class"])(*lines[0]["error"])
            _send(starter, ready(lines[0]["notes"]))
            begun = True
        codes = {line["rank"]: line["code"] for line in lines if "code" in line}
        if any(codes.values()):
            raise _failure(
                codes, {line["rank"]: line["error"] for line in lines if "error" in line}, log_dir
            )
        if on_poll:
            on_poll()
        if len(codes) == world_size:
            return True
        if starter_gone:
            return None if begun else False
        if deadline is not None and time.monotonic() > deadline:
            waiting = [rank for rank in range(world_size) if rank not in codes]
            raise RankLostError(
                f"Rank {waiting[0]} did not finish in time",
                f"still running: {waiting}; log: {rank_log(log_dir, waiting[0])}",
                _read(rank_log(log_dir, waiting[0])),
            )
        time.sleep(POLL_S)


def _starter_failure(code: int, log: Path) -> RankFailedError:
    if code < 0:
        return RankLostError(
            f"The process that starts the ranks {_ending(code)}",
            f"{_memory(code)}log: {log}",
            _read(log),
        )
    return RankFailedError(
        "The process that starts the ranks failed",
        f"{_last_line(log) if log.exists() else ''}\nlog: {log}".strip(),
        _read(log),
    )


def _failure(codes: dict[int, int], errors: dict[int, list[str]], log_dir: Path) -> RankFailedError:
    """Return the error of the rank that failed by itself, not because of a lost peer.

    It is a RankLostError if the rank did not report a cause.

    Args:
        codes: exit codes of the ranks that have exited, in this order; not all are 0.
        errors: reported errors, in this order: what, why, next step; their ranks may still run.
    """

    def alone(ranks: Iterable[int]) -> list[int]:
        return [
            rank
            for rank in ranks
            if not any(sign in _tail(rank_log(log_dir, rank)) for sign in LOST_PEER)
        ]

    failed, early = (
        [rank for rank in codes if codes[rank]],
        [rank for rank in codes if not codes[rank]],
    )
    killed = [rank for rank, code in codes.items() if code < 0 and rank not in errors]
    # NCCL aborts a rank that has lost a peer
    first = [rank for rank in killed if codes[rank] != -signal.SIGABRT]
    cause = [*first, *alone(errors), *killed, *alone(failed), *early, *failed][0]
    log, code = rank_log(log_dir, cause), codes.get(cause, RankFailedError.exit_code)
    what, why, next_step = errors.get(cause) or [_last_line(log), "", ""]
    if code == RankFailedError.exit_code and cause in errors:
        return RankFailedError(
            f"Rank {cause} stopped: {what}", f"{why}\nlog: {log}".strip(), next_step or _read(log)
        )
    lost = RankLostError(
        f"Rank {cause} {_ending(code)}", f"{what}\n{_memory(code)}log: {log}".strip(), _read(log)
    )
    lost.rank = cause
    return lost


def _ending(code: int) -> str:
    return (
        f"was killed by {signal.Signals(-code).name}"
        if code < 0
        else f"ended with exit code {code}"
    )


def _memory(code: int) -> str:
    return (
        "Where nobody else did, the kernel did, for want of memory: dmesg -T | tail\n"
        if -code == signal.SIGKILL
        else ""
    )


def _read(log: Path) -> str:
    return f"See its log: {shlex.join(['less', str(log)])}"


def _tail(path: Path, limit: int = 8192) -> str:
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - limit))
        return file.read(limit).decode(errors="replace")


def _last_line(path: Path) -> str:
    return next((line for line in reversed(_tail(path).splitlines()) if line.strip()), "")


def _end(starter: subprocess.Popen[bytes]) -> None:
    """Kill the starter and every rank, which share its process group.

    SIGTERM would make them finish their step.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(starter.pid, signal.SIGKILL)
    deadline = time.monotonic() + GRACE_S
    while _group_lives(starter) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    starter.wait()


def _group_lives(starter: subprocess.Popen[bytes]) -> bool:
    starter.poll()  # reaps the starter, so that it does not count as alive
    try:
        os.killpg(starter.pid, 0)
    except ProcessLookupError:
        return False
    return True


def _loopback_interface() -> str:
    """Return the interface on which gloo listens, unless the user names another one."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


def main(arguments: list[str]) -> None:
    """Run the starter: TARGET LAUNCHER LOG_DIR PIPE.

    Reads the payload from stdin and, once the pipe has reported that ranks can be forked, additions
    to it; then reports each rank's exit code over the pipe.
    """
    target, launcher, log_dir, tell = arguments
    end_with(int(launcher))
    payload = json.loads(sys.stdin.readline())
    settle(payload.get("device", "cpu"))
    try:
        module, function = resolve(target)
        notes = module.before_fork(payload) if hasattr(module, "before_fork") else None
    except DisttrainError as error:
        named = next(one for one in type(error).__mro__ if one.__module__ == errors.__name__)
        _say(int(tell), {"class": named.__name__, "error": error.parts})
        sys.exit(1)
    _say(int(tell), {"notes": notes or []})
    more = sys.stdin.readline()
    if not more:  # the launcher is gone
        sys.exit(1)
    payload |= json.loads(more)
    gc.freeze()  # ranks share the imported objects, which no garbage collection visits again
    listener = socket.create_server((LOOPBACK, 0))
    os.environ |= {"MASTER_PORT": str(listener.getsockname()[1]), LISTENER: str(listener.fileno())}
    starter, ranks = os.getpid(), dict[int, int]()
    for rank in range(int(os.environ["WORLD_SIZE"])):
        pid = os.fork()
        if pid == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            end_with(starter)
            live(
                rank,
                function,
                payload,
                rank_log(Path(log_dir), rank),
                partial(_tell, int(tell), rank),
            )
        ranks[pid] = rank
    listener.close()
    while ranks:
        pid, status = os.wait()
        _say(int(tell), {"rank": ranks.pop(pid), "code": os.waitstatus_to_exitcode(status)})


def _say(pipe: int, message: dict[str, Any]) -> None:
    os.write(pipe, json.dumps(message).encode() + b"\n")


def _tell(pipe: int, rank: int, error: DisttrainError) -> None:
    """Write a rank's error as one atomic write, cut to the length that a pipe allows for it."""
    limit = select.PIPE_BUF
    while True:
        words = [text[:limit] for text in error.parts]
        line = json.dumps({"rank": rank, "error": words}).encode() + b"\n"
        if len(line) <= select.PIPE_BUF:
            os.write(pipe, line)
            return
        limit //= 2


def end_with(parent: int) -> None:
    """Exit this process when its parent is gone, for whatever reason.

    On Linux this works even while this process is stopped. If the parent is gone before the call,
    no signal is sent, so that a thread polls, too.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1:])

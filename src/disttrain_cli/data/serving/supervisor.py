"""Worker processes of one machine: started, restarted when they end, and stopped together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from disttrain_cli.calls import argument, call
from disttrain_cli.data.serving.access import is_loopback
from disttrain_cli.data.serving.process import Task
from disttrain_cli.errors import DisttrainError, UsageError

POLL_S = 0.1
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 15.0  # before a restart; doubled when a worker ends soon again
HEALTHY_S = 60.0  # after this time, the pause before a restart is the first one again
GRACE_S = 5.0


@dataclass
class Process:
    """A worker process and its state; the port is known after its first start."""

    task: Task
    popen: subprocess.Popen[str]
    port: int = 0
    pause_s: float = FIRST_PAUSE_S
    started_s: float = field(default_factory=time.monotonic)
    due_s: float | None = None  # time of the next start; None: it runs


def check_open(
    host: str, token_file: str | None, tls_cert: str | None, tls_key: str | None
) -> None:
    """Raise UsageError if a worker would serve beyond this machine without TLS and a token."""
    if (tls_cert is None) != (tls_key is None):
        raise UsageError(
            f"{argument('tls_cert')} and {argument('tls_key')} belong together",
            "given: only one of them",
            call("data_serve", help=True),
        )
    if is_loopback(host) or (token_file is not None and tls_cert is not None):
        return
    missing = [
        name
        for name, value in (
            (f"{argument('tls_cert')} and {argument('tls_key')}", tls_cert),
            ("preprocess.token_file", token_file),
        )
        if value is None
    ]
    raise UsageError(
        f"Serving on {host} opens the data to the network: that needs TLS and a token",
        f"missing: {', '.join(missing)}",
        f"Set {argument('tls_cert')} and {argument('tls_key')}, and preprocess.token_file in the"
        " run file; or serve"
        " on 127.0.0.1.",
    )


def serve(
    tasks: list[Task], ready: Callable[[list[str], list[int]], None], note: Callable[[str], None]
) -> None:
    """Run a worker process for each task until SIGTERM or SIGINT; call it in the main thread.

    `ready` is called once with the addresses and process ids, when all of them serve; `note`
    reports restarts.

    Raises:
        DisttrainError: a worker cannot start.
    """
    ended = threading.Event()
    handlers = {
        number: signal.signal(number, lambda *_: ended.set())
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    processes: list[Process] = []
    try:
        processes += [Process(task, _start(task)) for task in tasks]
        for process in processes:
            process.port = _port(process)
        if not ended.is_set():
            ready(
                [each.task.address(each.port) for each in processes],
                [each.popen.pid for each in processes],
            )
        while not ended.wait(POLL_S):
            for process in processes:
                _keep(process, note)
    finally:
        for process in processes:
            process.popen.terminate()
        for process in processes:
            _end(process.popen)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _start(task: Task) -> subprocess.Popen[str]:
    # A separate session: Ctrl-C reaches only the supervisor, which ends the workers. gRPC's log is
    # off, as errors contain its messages.
    return subprocess.Popen(
        [sys.executable, "-m", "disttrain_cli.data.serving.process", json.dumps(task._asdict())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"GRPC_VERBOSITY": "NONE"},
    )


def _port(process: Process) -> int:
    """Return the port of a worker once it serves."""
    assert process.popen.stdout is not None
    line = process.popen.stdout.readline()
    if not line:
        raise DisttrainError(
            "A preprocessing worker ended before it served",
            f"exit code {process.popen.wait()}; see its output above",
        )
    answer = json.loads(line)
    if "error" in answer:
        raise DisttrainError(*answer["error"])
    return int(answer["port"])


def _keep(process: Process, note: Callable[[str], None]) -> None:
    """Detect the end of a process, and restart it when due."""
    now_s, address = time.monotonic(), process.task.address(process.port)
    if process.due_s is None:
        if (code := process.popen.poll()) is None:
            return
        if now_s - process.started_s > HEALTHY_S:
            process.pause_s = FIRST_PAUSE_S
        note(
            f"The worker {address} ended ({_ending(process, code)}); it restarts in"
            f" {process.pause_s:g} s"
        )
        process.due_s = now_s + process.pause_s
        process.pause_s = min(2 * process.pause_s, LONGEST_PAUSE_S)
    elif now_s >= process.due_s:
        _end(process.popen)
        process.popen, process.started_s, process.due_s = (
            _start(process.task._replace(port=process.port)),
            now_s,
            None,
        )


def _ending(process: Process, code: int) -> str:
    """Describe the end of a process, by its error if it wrote one."""
    lines = (process.popen.stdout.read() if process.popen.stdout else "").strip().splitlines()
    try:
        error = json.loads(lines[-1])["error"]
        return f"{error['what']}: {error['why']}".rstrip(": ")
    except (IndexError, KeyError, ValueError):
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _end(popen: subprocess.Popen[str]) -> None:
    try:
        popen.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        popen.kill()
        popen.wait()
    for pipe in (popen.stdin, popen.stdout):
        if pipe is not None:
            pipe.close()

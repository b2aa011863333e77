"""One worker process: `supervisor` starts it with its task as JSON and reads one line of JSON.

The line is {"port": …} once it serves, or {"error": …}. The process ends when its standard input
does: a worker without its supervisor would hold the port of the next one.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from disttrain_cli.calls import argument
from disttrain_cli.data.index.sample_index import read_index
from disttrain_cli.data.ordering.orders import Orders
from disttrain_cli.data.ordering.shared_orders import SharedOrders
from disttrain_cli.data.preparing import Preparer
from disttrain_cli.data.serving.access import PLAIN, TLS, read_secret, read_token
from disttrain_cli.data.serving.identity import identity_of
from disttrain_cli.errors import DisttrainError
from disttrain_cli.spec.plan import read_plan
from disttrain_cli.spec.profile import profile_of
from disttrain_cli.spec.runfile import read_run

if TYPE_CHECKING:
    from disttrain_cli.data.serving.worker import Worker

EVERYWHERE = ("0.0.0.0", "::")


class Task(NamedTuple):
    """Run and address of a worker process; port 0 is any free one."""

    run: Sequence[str]  # arguments of `read_run`
    plan: str
    host: str
    port: int
    tls_cert: str | None = None
    tls_key: str | None = None

    def listens(self) -> str:
        """Return the address that it binds."""
        return self._url(self.host, self.port)

    def address(self, port: int) -> str:
        """Return the worker's address for ranks.

        The host is this machine's name if the worker listens on every interface.
        """
        return self._url(socket.getfqdn() if self.host in EVERYWHERE else self.host, port)

    def _url(self, host: str, port: int) -> str:
        return f"{TLS if self.tls_cert else PLAIN}://{f'[{host}]' if ':' in host else host}:{port}"


def main(task: Task) -> None:
    """Serve until standard input ends; an error before that is written to standard output."""
    try:
        worker = open_worker(task)
    except DisttrainError as error:
        _tell({"error": error.parts})
        sys.exit(error.exit_code)
    _tell({"port": worker.port})
    sys.stdin.read()
    os._exit(0)  # ranks repeat the pending calls


def open_worker(task: Task) -> Worker:
    """Return a worker that is already serving.

    Raises:
        DisttrainError: an artefact does not fit, or the port cannot be used.
    """
    import pyarrow as pa

    from disttrain_cli.data.serving.worker import Worker

    run = read_run(*task.run)
    plan, profile = read_plan(Path(task.plan)), profile_of(run)
    token_file, tls = run.file.preprocess.token_file, None
    token = None if token_file is None else read_token(run.resolve(token_file))
    if task.tls_cert is not None and task.tls_key is not None:
        tls = (
            read_secret(Path(task.tls_cert), argument("tls_cert")),
            read_secret(Path(task.tls_key), argument("tls_key")),
        )
    index = read_index(run, profile.inputs)
    orders = SharedOrders(Orders(run.file, plan.plan, index, profile))
    address = task.listens()
    steps = run.file.train.total_steps + run.file.preprocess.prefetch_slots + 1
    try:
        return Worker(
            address,
            Preparer(run, orders),
            identity_of(run, plan.plan, index, profile),
            steps,
            token,
            tls,
        )
    except (pa.ArrowException, OSError) as error:
        raise DisttrainError(
            f"A preprocessing worker cannot listen on {address}",
            str(error),
            f"Choose other ports, {argument('port')}, or stop the process that uses them; check"
            f" {argument('tls_cert')} and {argument('tls_key')}.",
        ) from None


def _tell(document: dict[str, object]) -> None:
    print(json.dumps(document), flush=True)


if __name__ == "__main__":
    main(Task(**json.loads(sys.argv[1])))

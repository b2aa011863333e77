"""Workers in the test's own process, certificates, and what to compare."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from disttrain_cli.data.index.sample_index import Index
from disttrain_cli.data.loader import Loader
from disttrain_cli.data.ordering.orders import Orders
from disttrain_cli.data.ordering.shared_orders import SharedOrders
from disttrain_cli.data.preparing import Preparer
from disttrain_cli.data.serving.client import Workers
from disttrain_cli.data.serving.identity import identity_of
from disttrain_cli.data.serving.worker import Worker
from disttrain_cli.data.slots import SlotBatch, flat_arrays
from disttrain_cli.spec.plan import Layout
from disttrain_cli.spec.progress import Progress, silent
from disttrain_cli.spec.runfile import Run
from tests.data.dataset import MONOLITHIC

ALL = {"image", "tokens", "layout", "context", "labels", "target"}
PLACES = [(step, slot) for step in range(3) for slot in range(MONOLITHIC.microbatches)]


@contextmanager
def serving(
    run: Run,
    index: Index,
    layout: Layout = MONOLITHIC,
    *,
    port: int = 0,
    host: str = "127.0.0.1",
    tls: tuple[bytes, bytes] | None = None,
    token: str | None = None,
    identity: dict[str, str] | None = None,
    steps: int = 6,
) -> Iterator[Worker]:
    """A worker that serves on loopback."""
    orders = SharedOrders(Orders(run.file, layout, index))
    preparer = Preparer(run, orders)
    location = f"grpc{'+tls' if tls else ''}://{host}:{port}"
    worker = Worker(
        location,
        preparer,
        identity_of(run, layout, index, None) | (identity or {}),
        steps,
        token,
        tls,
    )
    try:
        yield worker
    finally:
        worker.shutdown()
        preparer.close()
        orders.close()


def address(worker: Worker | int, scheme: str = "grpc") -> str:
    return f"{scheme}://127.0.0.1:{worker if isinstance(worker, int) else worker.port}"


def pulling(run: Run, *addresses: str, **preprocess: Any) -> Run:
    """The run with these workers."""
    changed = run.file.preprocess.model_copy(
        update={"addresses": list(addresses), "wait_s": 20.0} | preprocess
    )
    return run.model_copy(update={"file": run.file.model_copy(update={"preprocess": changed})})


def remote(
    run: Run,
    index: Index,
    *,
    say: Progress = silent,
    unit: str = "all",
    replica: int = 0,
    layout: Layout = MONOLITHIC,
    fields: set[str] = ALL,
    first_step: int = 0,
) -> Loader:
    """A loader that pulls from the run's workers."""
    return Loader(
        run,
        Orders(run.file, layout, index),
        unit=unit,
        replica=replica,
        fields=fields,
        first_step=first_step,
        source=Workers(run, layout, index, None, say),
    )


def local(
    run: Run,
    index: Index,
    *,
    unit: str = "all",
    replica: int = 0,
    layout: Layout = MONOLITHIC,
    fields: set[str] = ALL,
) -> Loader:
    return Loader(run, Orders(run.file, layout, index), unit=unit, replica=replica, fields=fields)


def content(batch: SlotBatch) -> dict[str, Any]:
    """Types, shapes and bytes of everything in a batch."""

    def of(value: Any) -> Any:
        return (
            [of(array) for array in value]
            if isinstance(value, list)
            else (value.dtype.str, value.shape, value.tobytes())
        )

    return {name: of(value) for name, value in flat_arrays(batch).items()}


def fetch_all(loader: Loader, places: list[tuple[int, int]] = PLACES) -> list[dict[str, Any]]:
    found = []
    for step, slot in places:
        found.append(content(loader.fetch(step, slot)))
        loader.prefetch(step, slot + 1)
    return found


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command to make a certificate")
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-keyout",
            key,
            "-out",
            cert,
            "-days",
            "2",
            "-subj",
            f"/CN={name}",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
        ],
        check=True,
        capture_output=True,
    )
    return cert, key

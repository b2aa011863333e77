"""Preprocessing workers of an emitted job, on separate nodes."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from disttrain_cli.errors import SpecError
from disttrain_cli.spec.runfile import Run

SERVE_PORT = 8815  # port of a preprocessing node's first worker; the others follow


def workers_per_node(run: Run) -> int:
    """Return the number of processes on one preprocessing node, each with its decoding threads."""
    return max(1, run.file.cluster.cpu_node_cores // run.file.preprocess.workers)


def serve_command(run: Run, plan_file: Path, *more: str) -> str:
    """Return the quoted module and arguments that start a preprocessing node's workers."""
    command = ["disttrain_cli", "data", "serve", str(run.path.resolve())]
    command += [word for setting in run.settings for word in ("--set", setting)]
    command += ["--plan", str(plan_file.resolve()), "--host", "0.0.0.0"]
    command += ["--port", str(SERVE_PORT), "--processes", str(workers_per_node(run)), *more]
    return shlex.join(command)


def addresses(run: Run, hosts: Sequence[str]) -> str:
    """Return the addresses of all workers on these hosts, as ranks read them (`join.WORKERS`)."""
    return ",".join(
        f"grpc+tls://{host}:{SERVE_PORT + number}"
        for host in hosts
        for number in range(workers_per_node(run))
    )


def check_no_nodes(run: Run, why: str) -> None:
    """Raise SpecError: the run file has preprocessing nodes, which this kind of job cannot have."""
    raise SpecError(
        f"{why}, and no preprocessing nodes",
        f"cluster.cpu_nodes: {run.file.cluster.cpu_nodes}",
        "Set cluster.cpu_nodes: 0 and let ranks prepare their data, or name workers that run"
        " already in preprocess.addresses.",
    )


def check_protected(run: Run) -> None:
    """Raise SpecError if TLS files or a token are missing, which workers on other nodes need."""
    spec = run.file.preprocess
    missing = [
        name
        for name, value in (
            ("tls_ca", spec.tls_ca),
            ("tls_cert", spec.tls_cert),
            ("tls_key", spec.tls_key),
            ("token_file", spec.token_file),
        )
        if value is None
    ]
    if missing:
        raise SpecError(
            "Preprocessing nodes serve data on the network: that needs TLS and a token",
            f"missing in preprocess: {', '.join(missing)}",
            "Name the files there ({host} in tls_cert and tls_key stands for the node), or set "
            "cluster.cpu_nodes: 0.",
        )
    if spec.addresses:
        raise SpecError(
            "preprocess.addresses names workers already",
            f"cluster.cpu_nodes: {run.file.cluster.cpu_nodes}",
            "Remove one of the two.",
        )

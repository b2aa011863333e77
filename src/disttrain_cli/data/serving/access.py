"""Access to a worker: TLS and a token, required unless only loopback can reach it."""

from __future__ import annotations

import ipaddress
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from disttrain_cli.calls import call
from disttrain_cli.errors import SpecError
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.runfile.preprocess import WORKER_SCHEMES, worker_host

PLAIN, TLS = WORKER_SCHEMES
HEADER = "authorization"


class Access(NamedTuple):
    """A rank's credentials for its workers."""

    authority: bytes | None  # PEM; None: the system's trusted certificates
    token: str | None


def access_of(run: Run) -> Access:
    """Read the certificate and the token that the run file names.

    Raises:
        SpecError: a file cannot be read, the token is empty, or an address beyond loopback is not
            protected by both.
    """
    spec = run.file.preprocess
    access = Access(
        None if spec.tls_ca is None else read_secret(run.resolve(spec.tls_ca), "preprocess.tls_ca"),
        None if spec.token_file is None else read_token(run.resolve(spec.token_file)),
    )
    for index, address in enumerate(spec.addresses):
        scheme, host = _parts(address, f"preprocess.addresses.{index}")
        if not is_loopback(host) and (scheme != TLS or access.token is None):
            raise SpecError(
                f"preprocess.addresses.{index}: a worker on an address other than loopback needs"
                " TLS and a token",
                f"given: {address}, preprocess.token_file: {spec.token_file or 'none'}",
                f"Set {TLS}://{address.partition('://')[2]}, preprocess.tls_ca and"
                " preprocess.token_file.",
            )
    return access


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach a host."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_token(path: Path) -> str:
    """Return the secret in a file, without the line's end."""
    token = read_secret(path, "preprocess.token_file").strip()
    if not re.fullmatch(rb"[!-~]+", token):
        raise SpecError(
            f"preprocess.token_file: {path} contains no token",
            "a token is one line of ASCII letters, digits and signs, without blanks",
            f"Create one: openssl rand -hex 32 > {path}",
        )
    return token.decode()


def read_secret(path: Path, name: str) -> bytes:
    """Return the content of a file that the user named."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise SpecError(
            f"{name}: cannot read {path}", str(error), "Name a readable file."
        ) from None


def exposed(secrets: Mapping[str, Path | None]) -> list[str]:
    """Return a warning for each secret file, by its field's name, that other users can read."""
    return [
        f"{name}: other users can read {path}; hide it: chmod 600 {shlex.quote(str(path))}"
        for name, path in secrets.items()
        if path is not None and path.is_file() and path.stat().st_mode & 0o077
    ]


def _parts(address: str, name: str) -> tuple[str, str]:
    """Return the scheme and host of an address."""
    try:
        return worker_host(address)
    except ValueError as error:
        raise SpecError(
            f"{name}: {address!r} is not the address of a worker",
            str(error),
            f"{call('data_serve')} shows the addresses of its workers.",
        ) from None

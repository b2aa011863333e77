"""`preprocess`: processes that prepare data, and how ranks reach them."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from disttrain_cli.spec.files import Strict
from disttrain_cli.spec.runfile.bounds import MOST_S

WORKER_SCHEMES = ("grpc", "grpc+tls")


def worker_host(address: str) -> tuple[str, str]:
    """Return scheme and host of a worker's address; raise ValueError if it is invalid."""
    url = urlsplit(address)
    if url.scheme not in WORKER_SCHEMES or not url.hostname or not url.port:
        allowed = ", ".join(f"{scheme}://HOST:PORT" for scheme in WORKER_SCHEMES)
        raise ValueError(f"not the address of a worker; allowed: {allowed}")
    return url.scheme, url.hostname


def _address(address: str) -> str:
    worker_host(address)
    return address


class PreprocessSpec(Strict):
    """Preparation of pixels: in every rank, or by workers on CPU nodes (`disttrain data serve`)."""

    workers: int = Field(
        1, ge=1, le=1024, description="Decoding threads per rank that loads images, or per worker."
    )
    prefetch_slots: int = Field(
        2, ge=1, le=1024, description="Number of slots prefetched per rank."
    )
    addresses: list[Annotated[str, AfterValidator(_address)]] = Field(
        default_factory=list,
        description="Preprocessing workers from which ranks fetch data, as grpc://HOST:PORT or"
        " grpc+tls://HOST:PORT; if empty, ranks prepare their data themselves.",
    )
    tls_ca: str | None = Field(
        None, description="CA certificate file (PEM) that signed the workers' certificates."
    )
    token_file: str | None = Field(
        None,
        description="File of the secret shared by ranks and workers; needed for workers on"
        " addresses other than loopback.",
    )
    tls_cert: str | None = Field(
        None,
        description="Certificate file (PEM) of the preprocessing nodes that --emit slurm and"
        " jobset start; with Slurm, {host} is replaced by the node's name.",
    )
    tls_key: str | None = Field(
        None,
        description="Private key file (PEM) of tls_cert; with Slurm, {host} is replaced by the"
        " node's name.",
    )
    wait_s: float = Field(
        300.0,
        ge=1e-3,
        le=MOST_S,
        description="Maximum time to wait for a worker if none answers, before training stops.",
    )

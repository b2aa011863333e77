"""A rank's connection to one worker: handshake (`greet`), requests, and failures.

gRPC's keepalive detects a silently lost peer within `KEEPALIVE_S` + `SILENCE_S`; a worker sends
something every second of a call, so its pings are accepted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.flight as flight

from disttrain_cli.data.preparing import Prepared, Request
from disttrain_cli.data.serving import wire
from disttrain_cli.data.serving.access import HEADER, TLS, Access
from disttrain_cli.data.serving.identity import IDENTITY_ACTION, Identity, check_same
from disttrain_cli.data.slots import Assignment
from disttrain_cli.errors import DataError, DisttrainError, RankFailedError
from disttrain_cli.spec.files import fingerprint

Answer = TypeVar("Answer")

GREETING_S = 5.0
KEEPALIVE_S, SILENCE_S = 5.0, 5.0
OPTIONS = [
    ("grpc.keepalive_time_ms", int(1000 * KEEPALIVE_S)),
    ("grpc.keepalive_timeout_ms", int(1000 * SILENCE_S)),
    ("grpc.http2.ping_timeout_ms", int(1000 * SILENCE_S)),  # else a minute
    ("grpc.http2.max_pings_without_data", 0),
    (
        "grpc.use_local_subchannel_pool",
        1,
    ),  # a new connection tries at once, whatever an earlier one met
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
]
#: Beginnings of gRPC's messages, before the cause.
PREAMBLE = re.compile(
    r"Flight returned \w+ error, with message: |failed to connect to all addresses; last error: "
    r"|UNKNOWN: ipv[46]:\S+: "
)
#: gRPC's messages about a certificate that does not fit.
CERTIFICATE = re.compile(
    r"certificate|ssl|tls handshake|hostname verification|peer name", re.IGNORECASE
)


class UnreachableError(Exception):
    """The worker does not answer: another one may."""


class Connection:
    """Connection to a worker at an address; several threads may fetch."""

    def __init__(self, address: str, access: Access, identity: Identity) -> None:
        self.address = address
        self._access, self._own, self._fingerprint = access, identity, fingerprint(identity)
        self._client: flight.FlightClient | None = None
        self._calls: set[flight.FlightStreamReader] = set()
        self._headers = (
            [] if access.token is None else [(HEADER.encode(), f"Bearer {access.token}".encode())]
        )

    def greet(self) -> None:
        """Open a new connection and compare the identities of both sides.

        Raises:
            UnreachableError: no worker answers.
            MismatchError: it would prepare other bytes.
            DisttrainError: it refuses the token, or its certificate is not the expected one.
        """
        roots = self._access.authority if self.address.startswith(TLS) else None
        options = flight.FlightCallOptions(timeout=GREETING_S, headers=self._headers)
        try:
            client = flight.FlightClient(
                self.address, tls_root_certs=roots, generic_options=OPTIONS
            )
            (answer,) = client.do_action(flight.Action(IDENTITY_ACTION, b""), options)
            theirs = json.loads(answer.body.to_pybytes())
        except (pa.ArrowException, OSError, ValueError) as error:
            raise self._meant(error) from None
        check_same(self.address, theirs, self._own)
        self._client = client

    def fetch(self, request: Request, beat: Callable[[], None]) -> Prepared:
        """Fetch a slot; `beat` is called while the worker is alive without an answer.

        Raises as `_get`.
        """
        return self._get(request, wire.read_slot, beat)

    def assignment(self, step: int, beat: Callable[[], None]) -> Assignment:
        """Fetch the policy's assignment of a step; `beat` as in `fetch`. Raises as `_get`."""
        return self._get(step, wire.read_assignment, beat)

    def _get(
        self,
        request: Request | int,
        read: Callable[[Iterator[Any]], Answer],
        beat: Callable[[], None],
    ) -> Answer:
        """Return the answer to a request.

        Raises:
            UnreachableError: the worker is gone.
            DataError: it cannot read a shard.
            RankFailedError: it failed at this slot, or `beat` raised it.
            DisttrainError: as `greet`, if another worker replaced it.
        """
        client, reader = self._client, None
        if client is None:
            raise UnreachableError("not greeted")
        try:
            ticket = flight.Ticket(wire.request_bytes(request, self._fingerprint))
            reader = client.do_get(ticket, flight.FlightCallOptions(headers=self._headers))
            self._calls.add(reader)
            return read(wire.beating(reader, beat))
        except (pa.ArrowException, OSError, EOFError) as error:
            raise self._meant(error) from None
        except RankFailedError:  # raised by `beat`
            if reader is not None:
                reader.cancel()
            raise
        finally:
            self._calls.discard(reader)

    def close(self) -> None:
        """Cancel pending calls."""
        self._client = None
        for reader in list(self._calls):
            reader.cancel()

    def _meant(self, error: Exception) -> Exception:
        """Translate an error of Flight."""
        said = PREAMBLE.sub(
            "", str(error).partition(". gRPC client debug context")[0].partition(". Detail:")[0]
        )
        detail = getattr(error, "extra_info", b"")
        if detail.startswith(b'{"kind"'):
            about = json.loads(detail)
            if about["kind"] == "data":
                what, why, next_step = about["about"]
                return DataError(f"{what} (preprocessing worker {self.address})", why, next_step)
            try:
                check_same(self.address, about["about"], self._own)
            except DisttrainError as mismatch:
                return mismatch
        if isinstance(error, flight.FlightUnauthenticatedError | flight.FlightUnauthorizedError):
            return DisttrainError(
                f"The preprocessing worker {self.address} refuses this run",
                "the token is wrong or missing",
                "Put the same token into preprocess.token_file of the worker's run file and of this"
                " one.",
            )
        if self.address.startswith(TLS) and CERTIFICATE.search(said):
            return DisttrainError(
                f"The certificate of the preprocessing worker {self.address} is not the one"
                " expected",
                said,
                "Set preprocess.tls_ca to the certificate that signed the worker's, and use an"
                " address that it names.",
            )
        if isinstance(error, flight.FlightServerError):
            return RankFailedError(
                f"The preprocessing worker {self.address} failed", said, "See its output."
            )
        return UnreachableError(said)

"""One preprocessing worker: answers requests of any replica, a bounded number at a time.

The number of slots in preparation or transfer is bounded (`permits`), for any number and speed of
clients: those slots, and one piece of each that gRPC holds, bound a worker's memory. Other requests
wait; an empty batch every second shows their clients that the worker is alive, and shows the worker
whether they are.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Iterator
from concurrent.futures import wait
from typing import Any

import pyarrow.flight as flight

from disttrain_cli.data.preparing import Preparer, Request, check_number, check_request
from disttrain_cli.data.serving import wire
from disttrain_cli.data.serving.access import HEADER
from disttrain_cli.data.serving.identity import IDENTITY_ACTION, Identity
from disttrain_cli.data.serving.permits import Permits
from disttrain_cli.errors import DataError
from disttrain_cli.spec.files import fingerprint

BEAT_S = 1.0


class Worker(flight.FlightServerBase):
    """Server of a job's slots; it serves from its construction on.

    `steps` is the number of the job's steps, with those that ranks prefetch beyond the last. `tls`
    is a certificate and its key (PEM); without `token` any client is served.
    """

    def __init__(
        self,
        location: str,
        preparer: Preparer,
        identity: Identity,
        steps: int,
        token: str | None = None,
        tls: tuple[bytes, bytes] | None = None,
    ) -> None:
        self._steps = steps
        self._preparer, self._identity, self._fingerprint = (
            preparer,
            identity,
            fingerprint(identity),
        )
        self._permits = Permits()
        middleware = {} if token is None else {"token": _TokenCheck(token)}
        super().__init__(
            location, tls_certificates=None if tls is None else [tls], middleware=middleware
        )

    def do_action(self, context: Any, action: Any) -> list[bytes]:
        """Answer the action `identity`: what a rank must share with this worker, as JSON."""
        if action.type != IDENTITY_ACTION:
            raise flight.FlightServerError(f"there is no action {action.type}")
        return [json.dumps(self._identity).encode()]

    def do_get(self, context: Any, ticket: Any) -> Any:
        """Answer a request (`wire`)."""
        try:
            request, identity = wire.read_request(ticket.ticket)
        except ValueError as error:
            raise flight.FlightServerError(f"cannot read the request: {error}") from None
        if identity != self._fingerprint:
            raise _refusal("mismatch", self._identity)
        try:
            self._check(request)
        except ValueError as error:
            raise flight.FlightServerError(f"the request cannot be answered: {error}") from None
        answer = self._assignment(request) if isinstance(request, int) else self._slot(request)
        return flight.GeneratorStream(wire.SCHEMA, answer)

    def _check(self, request: Request | int) -> None:
        orders = self._preparer.orders
        check_number("step", request if isinstance(request, int) else request.step, self._steps)
        if isinstance(request, Request):
            check_request(request, orders.layout, orders.index.inputs)

    def _assignment(self, step: int) -> Iterator[wire.Message]:
        assignment = self._preparer.orders.assignment(step)
        while not wait([assignment], BEAT_S).done:
            yield wire.EMPTY
        yield from wire.assignment_messages(assignment.result())

    def _slot(self, request: Request) -> Iterator[wire.Message]:
        while (permit := self._permits.take(BEAT_S)) is None:
            yield wire.EMPTY
        work = None
        try:
            work = self._preparer.begin(request)
            while not work.done(BEAT_S):
                yield wire.EMPTY
            self._preparer.orders.begin(min(request.step + 1, self._steps - 1))
            for message in wire.slot_messages(work.result()):
                permit.sent()
                yield message
        except DataError as error:
            raise _refusal("data", error.parts) from None
        finally:  # also when the client is gone
            if work is not None:
                work.cancel()
            self._permits.leave(permit)


class _TokenCheck(flight.ServerMiddlewareFactory):
    """Refuses calls without the token."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self._expected = f"Bearer {token}".encode()

    def start_call(self, info: Any, headers: dict[str, list[Any]]) -> None:
        given = headers.get(HEADER, [""])[0]
        if not hmac.compare_digest(
            given if isinstance(given, bytes) else given.encode(), self._expected
        ):
            raise flight.FlightUnauthenticatedError("the token is wrong or missing")


def _refusal(kind: str, about: dict[str, str] | list[str]) -> flight.FlightServerError:
    """Return an error that `connection` translates to one of this package."""
    return flight.FlightServerError(
        kind, extra_info=json.dumps({"kind": kind} | {"about": about}).encode()
    )

"""All workers of a run, as a source of prepared slots.

Requests are distributed over the available workers. An unreachable worker is left out until it
answers again; its requests go to others. A worker that would prepare other bytes, or refuses the
token, is left out with a warning. Without any worker a request waits, for at most
`preprocess.wait_s`.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor

from disttrain_cli.calls import call
from disttrain_cli.data.index.sample_index import Index
from disttrain_cli.data.ordering.orders import Orders
from disttrain_cli.data.preparing import Prepared, Request
from disttrain_cli.data.serving.access import access_of
from disttrain_cli.data.serving.connection import Answer, Connection, UnreachableError
from disttrain_cli.data.serving.identity import identity_of
from disttrain_cli.data.slots import Assignment
from disttrain_cli.errors import DataError, DisttrainError, RankFailedError, SpecError
from disttrain_cli.spec.plan import Layout
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.progress import Progress, silent
from disttrain_cli.spec.runfile import Run, RunFile

RETRY_S = 1.0  # between two handshakes with a worker that is left out
SAY_EVERY_S = 5.0
SLOW_S = 10.0  # without an answer from a live worker, before its name is reported
GREETINGS_AT_ONCE = 8
NOT_YET = "not contacted yet"


class UnansweredError(RankFailedError):
    """A worker is alive, but has not answered for so long that training cannot continue."""


class Workers:
    """A `loader.Source`; `say` reports workers left out, and waits for workers."""

    def __init__(
        self,
        run: Run,
        layout: Layout,
        index: Index,
        profile: Profile | None,
        say: Progress = silent,
    ) -> None:
        self._wait_s, self._slots, self._say = run.file.preprocess.wait_s, layout.microbatches, say
        access, identity = access_of(run), identity_of(run, layout, index, profile)
        self._all = [
            Connection(address, access, identity) for address in run.file.preprocess.addresses
        ]
        # left-out workers, and the reason
        self._out: dict[Connection, DisttrainError | str] = dict.fromkeys(self._all, NOT_YET)
        self._changed = threading.Condition()
        self._said_s, self._warned, self._closed = 0.0, set[str](), threading.Event()
        self._greeter = threading.Thread(target=self._keep_greeting, name="greet", daemon=True)
        self._greeter.start()

    def close(self) -> None:
        """Abandon pending requests."""
        self._closed.set()
        with self._changed:
            self._changed.notify_all()
        for connection in self._all:
            connection.close()
        self._greeter.join()

    def prepare(self, request: Request) -> Prepared:
        """Prepare a slot by any worker; raises as `_ask`."""
        number = (
            request.step * self._slots
            + request.slot
            + zlib.crc32(f"{request.unit}/{request.replica}".encode())
        )
        return self._ask(
            number,
            f"slot {request.slot} of step {request.step}",
            lambda connection, beat: connection.fetch(request, beat),
        )

    def assignment(self, step: int) -> Assignment:
        """Return the policy's assignment of a step; raises as `_ask`.

        One worker computes it for all ranks.
        """
        return self._ask(
            step,
            f"the order of step {step}",
            lambda connection, beat: connection.assignment(step, beat),
        )

    def _ask(
        self, number: int, what: str, ask: Callable[[Connection, Callable[[], None]], Answer]
    ) -> Answer:
        """Return an answer from one of the available workers, chosen by `number`.

        Raises:
            DataError: no worker can read a shard.
            MismatchError, DisttrainError: all workers refuse this run, or would prepare other
                bytes.
            RankFailedError: no worker answered for `preprocess.wait_s`, a live one prepared this
                request for as long, or all fail at it.
        """
        unread: dict[Connection, DisttrainError] = {}
        # time of the first loss; a slot at which every worker ends fails after `wait_s`
        lost_s: float | None = None
        while True:
            connection = self._pick(number, unread, lost_s)
            try:
                return ask(connection, self._patience(connection, what))
            except UnansweredError:
                raise
            except (DataError, RankFailedError) as error:
                unread[connection] = error
            except UnreachableError as error:
                lost_s = lost_s or time.monotonic()
                self._leave_out(connection, str(error))
            except DisttrainError as error:
                self._leave_out(connection, error)

    def _patience(self, connection: Connection, what: str) -> Callable[[], None]:
        """Return a callback to call while a worker is alive without an answer.

        It reports the wait, and ends it after `wait_s`.
        """
        began_s = time.monotonic()

        def beat() -> None:
            waited_s = time.monotonic() - began_s
            if waited_s >= self._wait_s:
                raise UnansweredError(
                    f"The preprocessing worker {connection.address} did not prepare {what} in"
                    f" {self._wait_s:g} s (preprocess.wait_s)",
                    "It is running but does not answer: its disk or decoding may hang.",
                    f"Restart it, {call('data_serve')}, then: {call('train', resume=True)}",
                )
            if waited_s >= SLOW_S:
                self._say_now_and_then(
                    f"waiting for the preprocessing worker {connection.address} to prepare {what}",
                    waited_s,
                )

        return beat

    def _pick(
        self, number: int, unread: dict[Connection, DisttrainError], lost_s: float | None
    ) -> Connection:
        """Return an available worker; waits for one if there is none."""
        began_s = lost_s or time.monotonic()
        with self._changed:
            while not self._closed.is_set():
                waited_s = time.monotonic() - began_s
                if waited_s >= self._wait_s:
                    raise self._gone()
                usable = [
                    each for each in self._all if each not in self._out and each not in unread
                ]
                if usable:
                    return usable[number % len(usable)]
                if unread:
                    raise next(iter(unread.values()))
                refused = [why for why in self._out.values() if isinstance(why, DisttrainError)]
                if len(refused) == len(self._all):
                    raise all_refused(refused)
                if waited_s >= RETRY_S:
                    self._say_waiting(waited_s)
                self._changed.wait(min(RETRY_S, self._wait_s - waited_s))
        raise CancelledError

    def _gone(self) -> RankFailedError:
        reasons = [
            f"{each.address}: {_reason(self._out.get(each, 'ends at this slot'))}"
            for each in self._all
        ]
        return RankFailedError(
            f"No preprocessing worker answered for {self._wait_s:g} s (preprocess.wait_s)",
            "\n".join(reasons),
            f"Restart them, {call('data_serve')}, then: {call('train', resume=True)}",
        )

    def _say_waiting(self, waited_s: float) -> None:
        address, why = next(
            (each.address, self._out[each]) for each in self._all if each in self._out
        )
        more = f" and {len(self._all) - 1} more" if len(self._all) > 1 else ""
        self._say_now_and_then(
            f"waiting for a preprocessing worker: {address} ({_reason(why)}){more}", waited_s
        )

    def _say_now_and_then(self, what: str, waited_s: float) -> None:
        if time.monotonic() - self._said_s >= SAY_EVERY_S:
            self._said_s = time.monotonic()
            self._say(f"{what}; seconds", round(waited_s), round(self._wait_s))

    def _leave_out(self, connection: Connection, why: DisttrainError | str) -> None:
        with self._changed:
            self._out[connection] = why
            self._changed.notify_all()
        if (
            isinstance(why, DisttrainError)
            and (warning := f"{why.what}: {_one_line(why.why)}") not in self._warned
        ):
            self._warned.add(warning)
            self._say(f"warning: {warning}", 0, 0)

    def _keep_greeting(self) -> None:
        """Repeat the handshake with left-out workers until the end."""
        with ThreadPoolExecutor(GREETINGS_AT_ONCE, "greet") as threads:
            while not self._closed.is_set():
                list(threads.map(self._greet, list(self._out)))
                self._closed.wait(RETRY_S)

    def _greet(self, connection: Connection) -> None:
        try:
            connection.greet()
        except UnreachableError as error:
            self._leave_out(connection, str(error))
        except DisttrainError as error:
            self._leave_out(connection, error)
        else:
            with self._changed:
                del self._out[connection]
                self._changed.notify_all()


class PulledOrders(Orders):
    """Orders whose assignments a worker computes, to keep the search of `best` out of training."""

    def __init__(
        self, run: RunFile, layout: Layout, index: Index, profile: Profile | None, workers: Workers
    ) -> None:
        super().__init__(run, layout, index, profile)
        self._workers = workers

    def _assign(self, step: int) -> Assignment:
        return self._workers.assignment(step)


def check_workers(
    run: Run,
    layout: Layout,
    index: Index,
    profile: Profile | None,
    steps: int,
    say: Progress = silent,
) -> None:
    """Check all workers by one handshake; `say` reports those that do not fit or answer.

    Args:
        steps: steps of the training.

    Raises:
        SpecError: `preprocess` is not usable as it is.
        MismatchError, DisttrainError: all workers refuse this run, or would prepare other bytes.
    """
    wait_s, hang_s = run.file.preprocess.wait_s, run.file.train.longest_hang_s
    if wait_s >= hang_s:
        raise SpecError(
            "preprocess.wait_s must be shorter than train.hang_s",
            f"given: {wait_s:g} s and {hang_s:g} s, after which a rank without progress counts as"
            " hung",
            "Raise train.timeout_s and train.hang_s, or lower preprocess.wait_s.",
        )
    if steps > run.file.train.total_steps:
        raise SpecError(
            f"{steps} steps are more than the {run.file.train.total_steps} of"
            f" {run.file.train.ends_by}",
            "preprocessing workers answer no request beyond the last step of their run file",
            f"Raise {run.file.train.ends_by} to as many in the run file, and start the"
            f" workers again: {call('data_serve')}",
        )
    access, identity = access_of(run), identity_of(run, layout, index, profile)

    def greeted(address: str) -> DisttrainError | None:
        try:
            Connection(address, access, identity).greet()
        except UnreachableError as error:
            say(f"the preprocessing worker {address} does not answer yet: {error}", 0, 0)
        except DisttrainError as error:
            say(f"warning: {error.what}: {_one_line(error.why)}", 0, 0)
            return error
        return None

    with ThreadPoolExecutor(GREETINGS_AT_ONCE) as threads:
        refused = [
            error
            for error in threads.map(greeted, run.file.preprocess.addresses)
            if error is not None
        ]
    if refused and len(refused) == len(run.file.preprocess.addresses):
        raise all_refused(refused)


def all_refused(errors: list[DisttrainError]) -> DisttrainError:
    """Combine the errors of all workers into one."""
    first = errors[0]
    if len(errors) == 1:
        return first
    why = "\n".join(f"{error.what}: {_one_line(error.why)}" for error in errors)
    return type(first)("No preprocessing worker matches this run", why, first.next_step)


def _reason(why: DisttrainError | str) -> str:
    return why if isinstance(why, str) else f"{why.what}: {_one_line(why.why)}"


def _one_line(text: str) -> str:
    return text.replace("\n", "; ")

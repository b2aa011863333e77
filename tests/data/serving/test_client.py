"""Pulling from workers: the same bytes whoever serves, through losses, refusals and waiting."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.flight as flight
import pytest

from disttrain_cli.data.index.sample_index import Index
from disttrain_cli.data.indexing.building import build_index
from disttrain_cli.data.ordering.orders import Orders, Policy
from disttrain_cli.data.preparing import Preparation, Prepared, Preparer, Request
from disttrain_cli.data.serving import permits, wire
from disttrain_cli.data.serving.client import PulledOrders, Workers, check_workers
from disttrain_cli.data.serving.connection import Connection, UnreachableError
from disttrain_cli.data.serving.identity import identity_of
from disttrain_cli.data.serving.permits import AT_ONCE, MOST_STALLED
from disttrain_cli.data.serving.worker import Worker
from disttrain_cli.data.slots import Assignment
from disttrain_cli.errors import (
    DataError,
    DisttrainError,
    MismatchError,
    RankFailedError,
    SpecError,
)
from disttrain_cli.spec.files import fingerprint
from disttrain_cli.spec.runfile import Run
from tests.data.dataset import (
    DISAGGREGATED,
    INPUTS,
    MONOLITHIC,
    damaged,
    encoded,
    image,
    interleaved,
    text,
)
from tests.data.serving.services import (
    ALL,
    PLACES,
    address,
    certificate,
    content,
    fetch_all,
    local,
    pulling,
    remote,
    serving,
)

MakeRun = Callable[..., Run]


class Said:
    """What a client said, and when it first said something like it."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._heard = threading.Condition()

    def __call__(self, what: str, done: int, total: int) -> None:
        with self._heard:
            self.lines.append(what)
            self._heard.notify_all()

    def wait_for(self, part: str) -> None:
        with self._heard:
            assert self._heard.wait_for(lambda: any(part in line for line in self.lines), 30), (
                self.lines
            )


@pytest.fixture(scope="module")
def expected(run: Run, index: Index) -> list[dict[str, Any]]:
    with local(run, index) as loader:
        return fetch_all(loader)


def test_every_unit_gets_what_it_would_prepare_itself(run: Run, index: Index) -> None:
    wanted = {
        "encoder": {"image"},
        "llm": {"tokens", "layout", "context", "labels"},
        "generator": {"target"},
    }
    with serving(run, index, DISAGGREGATED) as worker:
        for unit in DISAGGREGATED.units:
            for replica in range(unit.dp):
                who: dict[str, Any] = {
                    "unit": unit.name,
                    "replica": replica,
                    "layout": DISAGGREGATED,
                    "fields": wanted[unit.name],
                }
                with (
                    local(run, index, **who) as own,
                    remote(pulling(run, address(worker)), index, **who) as pulled,
                ):
                    places = [(0, slot) for slot in range(DISAGGREGATED.microbatches)]
                    assert fetch_all(pulled, places) == fetch_all(own, places)


def test_losing_a_worker_in_mid_epoch_changes_no_byte(
    run: Run, index: Index, expected: list[Any]
) -> None:
    with (
        serving(run, index) as stays,
        serving(run, index) as goes,
        remote(pulling(run, address(stays), address(goes)), index) as loader,
    ):
        half = len(PLACES) // 2
        got = fetch_all(loader, PLACES[:half])
        goes.shutdown()
        assert got + fetch_all(loader, PLACES[half:]) == expected


def test_requests_go_round_the_workers(
    run: Run, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: dict[int, list[tuple[int, int]]] = {}
    begin = Preparer.begin

    def counted(preparer: Preparer, request: Request) -> Preparation:
        served.setdefault(id(preparer), []).append((request.step, request.slot))
        return begin(preparer, request)

    with serving(run, index) as one, serving(run, index) as two:
        both = pulling(run, address(one), address(two))
        workers = Workers(both, MONOLITHIC, index, None)
        with workers._changed:
            assert workers._changed.wait_for(lambda: not workers._out, 30)
        monkeypatch.setattr(Preparer, "begin", counted)
        for step, slot in PLACES:
            workers.prepare(Request(step, slot, "all", 0, frozenset(ALL)))
        workers.close()
    assert sorted(len(places) for places in served.values()) == [len(PLACES) // 2] * 2


def test_one_worker_finds_the_assignment_of_a_step_for_all_ranks(
    run: Run, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    policy = Policy.__call__

    def counted(self: Policy, sizes: Any) -> Assignment:
        found.append(1)
        return policy(self, sizes)

    own = Orders(run.file, MONOLITHIC, index)
    expected = [own.of(step) for step in range(2)]
    monkeypatch.setattr(Policy, "__call__", counted)
    with serving(run, index) as worker:
        pulled = pulling(run, address(worker))
        for _ in range(3):
            workers = Workers(pulled, MONOLITHIC, index, None)
            orders = PulledOrders(pulled.file, MONOLITHIC, index, None, workers)
            for step, (order, _) in enumerate(expected):
                theirs, _ = orders.of(step)
                assert [slot.sequences.tolist() for slot in theirs.slots] == [
                    s.sequences.tolist() for s in order.slots
                ]
            workers.close()
    assert len(found) == len(expected)


def test_resuming_in_mid_epoch_gives_the_same_bytes(
    run: Run, index: Index, expected: list[Any]
) -> None:
    with serving(run, index) as worker:
        loader = remote(pulling(run, address(worker)), index, first_step=2)
        with loader:
            places = [place for place in PLACES if place[0] == 2]
            assert fetch_all(loader, places) == expected[-len(places) :]


@pytest.mark.slow
def test_training_waits_without_workers_and_goes_on_with_the_first(
    run: Run, index: Index, expected: list[Any]
) -> None:
    said = Said()
    with serving(run, index) as worker:
        port = worker.port
        loader = remote(pulling(run, address(worker)), index, say=said)
        got = fetch_all(loader, PLACES[:1])
    with loader:
        rest: list[Any] = []
        fetching = threading.Thread(target=lambda: rest.extend(fetch_all(loader, PLACES[1:])))
        fetching.start()
        said.wait_for("waiting for a preprocessing worker")
        assert address(port) in said.lines[-1] and fetching.is_alive()
        with serving(run, index, port=port):
            fetching.join(30)
            assert got + rest == expected


def test_waiting_ends_with_exit_code_4(run: Run, index: Index) -> None:
    with serving(run, index) as worker:
        gone = address(worker)
    with (
        remote(pulling(run, gone, wait_s=0.5), index) as loader,
        pytest.raises(
            RankFailedError, match=r"No preprocessing worker answered for 0\.5 s"
        ) as caught,
    ):
        loader.fetch(0, 0)
    assert (
        gone in caught.value.why and "refused" in caught.value.why and caught.value.exit_code == 4
    )
    assert "disttrain_cli.data_serve" in caught.value.next_step


@pytest.mark.slow
def test_a_slot_at_which_workers_end_is_not_asked_for_for_ever(
    run: Run, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that answers greetings and goes away at every slot."""

    def goes(connection: Connection, request: Request, beat: Any) -> Prepared:
        raise UnreachableError("Socket closed")

    monkeypatch.setattr(Connection, "fetch", goes)
    with (
        serving(run, index) as worker,
        remote(pulling(run, address(worker), wait_s=1.5), index) as loader,
        pytest.raises(RankFailedError, match=r"No preprocessing worker answered for 1\.5 s"),
    ):
        loader.fetch(0, 0)


def test_ranks_wait_longer_for_each_other_than_for_workers(run: Run, index: Index) -> None:
    impatient = pulling(run, "grpc://127.0.0.1:1", wait_s=run.file.train.longest_hang_s)
    with pytest.raises(SpecError, match=r"preprocess\.wait_s must be shorter than train\.hang_s"):
        check_workers(impatient, MONOLITHIC, index, None, 2)


def of_other_seed(run: Run) -> Run:
    train = run.file.train.model_copy(update={"seed": 77})
    return run.model_copy(update={"file": run.file.model_copy(update={"train": train})})


@pytest.mark.parametrize("differs", ["data", "plan", "program", "ordering", "model inputs"])
def test_a_worker_of_something_else_is_refused(
    run: Run, index: Index, own_run: MakeRun, differs: str
) -> None:
    theirs: dict[str, Any] = {"run": run, "index": index, "layout": MONOLITHIC}
    if differs == "data":
        elsewhere = own_run({"a.tar": [interleaved(f"{n}", text("hello" * 9)) for n in range(9)]})
        theirs |= {"run": elsewhere, "index": build_index(elsewhere, INPUTS)}
    elif differs == "plan":
        theirs["layout"] = DISAGGREGATED
    elif differs == "ordering":
        theirs["run"] = of_other_seed(run)
    else:
        theirs["identity"] = {differs: "other"}
    own = identity_of(run, MONOLITHIC, index, None)
    other = identity_of(theirs["run"], theirs["layout"], theirs["index"], None) | theirs.get(
        "identity", {}
    )
    with serving(**theirs) as worker:
        alone = pulling(run, address(worker))
        with pytest.raises(MismatchError, match="does not belong to this run") as caught:
            check_workers(alone, MONOLITHIC, index, None, 2)
        assert address(worker) in caught.value.what and differs in caught.value.why
        assert own[differs] in caught.value.why and other[differs] in caught.value.why
        with (
            remote(alone, index) as loader,
            pytest.raises(MismatchError, match="does not belong to this run"),
        ):
            loader.fetch(0, 0)


def test_one_that_does_not_fit_is_put_aside_with_a_warning(
    run: Run, index: Index, expected: list[Any]
) -> None:
    said = Said()
    with serving(run, index, identity={"program": "0.0.0"}) as old, serving(run, index) as fits:
        both = pulling(run, address(old), address(fits))
        check_workers(both, MONOLITHIC, index, None, 2, said)
        assert [
            line
            for line in said.lines
            if "0.0.0" in line and address(old) in line and "warning" in line
        ]
        said.lines.clear()
        with remote(both, index, say=said) as loader:
            assert fetch_all(loader) == expected
            said.wait_for("program: 0.0.0 at the worker")


def test_a_worker_replaced_under_way_is_asked_again_who_it_is(run: Run, index: Index) -> None:
    """gRPC connects again by itself: every request says whose it is."""
    wrong = wire.request_bytes(Request(0, 0, "all", 0, frozenset(ALL)), fingerprint("another run"))
    with serving(run, index) as worker:
        client = flight.FlightClient(address(worker))
        with pytest.raises(flight.FlightServerError, match="mismatch"):
            client.do_get(flight.Ticket(wrong))


@pytest.mark.parametrize("given", ["other", None])
def test_the_token_decides(run: Run, index: Index, tmp_path: Path, given: str | None) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    with serving(run, index, token="secret") as worker:
        with remote(pulling(run, address(worker), token_file=str(token)), index) as loader:
            assert content(loader.fetch(0, 0))
        if given is not None:
            token.write_text(given)
        wrong = pulling(run, address(worker), token_file=None if given is None else str(token))
        with pytest.raises(DisttrainError, match="refuses this run") as caught:
            check_workers(wrong, MONOLITHIC, index, None, 2)
        assert caught.value.exit_code == 1 and "token" in caught.value.why
        with (
            remote(wrong, index) as loader,
            pytest.raises(DisttrainError, match="refuses this run"),
        ):
            loader.fetch(0, 0)


@pytest.mark.slow
def test_the_certificate_decides(
    run: Run, index: Index, tmp_path: Path, expected: list[Any]
) -> None:
    cert, key = certificate(tmp_path, "right")
    wrong, _ = certificate(tmp_path, "wrong")
    with serving(run, index, tls=(cert.read_bytes(), key.read_bytes()), token="secret") as worker:
        (tmp_path / "token").write_text("secret")
        secure = pulling(
            run, address(worker, "grpc+tls"), tls_ca=str(cert), token_file=str(tmp_path / "token")
        )
        check_workers(secure, MONOLITHIC, index, None, 2)
        with remote(secure, index) as loader:
            assert fetch_all(loader) == expected
        for authority in (str(wrong), None):
            other = pulling(
                run,
                address(worker, "grpc+tls"),
                tls_ca=authority,
                token_file=str(tmp_path / "token"),
            )
            with pytest.raises(DisttrainError, match="certificate") as caught:
                check_workers(other, MONOLITHIC, index, None, 2)
            assert caught.value.exit_code == 1 and "preprocess.tls_ca" in caught.value.next_step


@pytest.mark.slow
def test_broken_images_are_named_and_counted_as_if_prepared_here(own_run: MakeRun) -> None:
    whole, cut = encoded(40, 40), damaged(encoded(40, 40))
    files = []
    for n in range(20):
        files += [
            interleaved(f"{n}", text("read"), image(f"{n}.a.jpg"), image(f"{n}.b.jpg", True)),
            (f"{n}.a.jpg", cut if n == 3 else whole),
            (f"{n}.b.jpg", cut if n == 5 else whole),
        ]
    run = own_run({"a.tar": files}, max_bad_fraction=0.1)
    index = build_index(run, INPUTS)
    with serving(run, index) as worker:
        with remote(pulling(run, address(worker)), index) as pulled, local(run, index) as own:
            assert fetch_all(pulled) == fetch_all(own)
            assert pulled.skipped == own.skipped and {s.key for s in own.skipped} == {"3", "5"}
        strict = run.file.data.model_copy(update={"max_bad_fraction": 0.0})
        refuses = run.model_copy(update={"file": run.file.model_copy(update={"data": strict})})
        with (
            remote(pulling(refuses, address(worker)), index) as pulled,
            pytest.raises(DataError, match="cannot be"),
        ):
            fetch_all(pulled)


def test_a_shard_that_disappears_is_named_by_every_worker(own_run: MakeRun) -> None:
    run = own_run({"a.tar": [interleaved(f"{n}", text("hello" * 9)) for n in range(9)]})
    index = build_index(run, INPUTS)
    (run.folder / "own" / "a.tar").unlink()
    with (
        serving(run, index) as one,
        serving(run, index) as two,
        remote(pulling(run, address(one), address(two)), index) as loader,
        pytest.raises(DataError, match=r"a\.tar.*preprocessing worker grpc://127\.0\.0\.1"),
    ):
        loader.fetch(0, 0)


def test_a_worker_that_fails_is_named(
    run: Run, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(preparer: Preparer, request: Request) -> Preparation:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Preparer, "begin", fails)
    with (
        serving(run, index) as worker,
        remote(pulling(run, address(worker)), index) as loader,
        pytest.raises(RankFailedError, match=f"{address(worker)} failed") as caught,
    ):
        loader.fetch(0, 0)
    assert "a bug" in caught.value.why


def request(**changed: Any) -> Request:
    return Request(0, 0, "all", 0, frozenset(ALL))._replace(**changed)


@pytest.mark.parametrize(
    "beyond",
    [
        10**18,
        6,
        -1,
        request(step=10**18),
        request(step=-1),
        request(slot=MONOLITHIC.microbatches),
        request(slot=-1),
        request(replica=2),
        request(replica=-1),
        request(unit="\x1b[2Jnone"),
        request(fields=frozenset({"image.-1"})),
        request(fields=frozenset({"target.7"})),
        request(fields=frozenset({"everything"})),
    ],
    ids=map(str, range(13)),
)
def test_what_the_job_has_not_is_refused_and_harms_nobody(
    run: Run, index: Index, expected: list[Any], beyond: Request | int
) -> None:
    own = fingerprint(identity_of(run, MONOLITHIC, index, None))
    with serving(run, index) as worker:
        client = flight.FlightClient(address(worker))
        with pytest.raises(
            flight.FlightServerError, match="the request cannot be answered"
        ) as caught:
            client.do_get(flight.Ticket(wire.request_bytes(beyond, own))).read_all()
        assert "\x1b" not in str(caught.value)
        with remote(pulling(run, address(worker)), index) as loader:
            assert fetch_all(loader, PLACES[:2]) == expected[:2]


def test_a_step_whose_order_takes_long_blocks_no_other(
    run: Run, index: Index, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, assign = threading.Event(), threading.Event(), Orders._assign

    def slow(orders: Orders, step: int) -> Assignment:
        if step == 5:
            begun.set()
            assert go_on.wait(30)
        return assign(orders, step)

    monkeypatch.setattr(Orders, "_assign", slow)
    with serving(run, index) as worker:
        workers = Workers(pulling(run, address(worker)), MONOLITHIC, index, None)
        found: list[Assignment] = []
        asking = threading.Thread(target=lambda: found.append(workers.assignment(5)))
        asking.start()
        assert begun.wait(30)
        with remote(pulling(run, address(worker)), index) as loader:
            assert fetch_all(loader) == expected
        assert not found
        go_on.set()
        asking.join(30)
        assert (
            found[0].positions.tolist()
            == Orders(run.file, MONOLITHIC, index).assignment(5).positions.tolist()
        )
        workers.close()


def test_a_worker_that_lives_and_has_no_answer_is_named(
    run: Run, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(Preparer, "_tokenize", lambda *_, **__: go_on.wait(30))
    monkeypatch.setattr("disttrain_cli.data.serving.worker.BEAT_S", 0.05)
    monkeypatch.setattr("disttrain_cli.data.serving.client.SLOW_S", 0.1)
    said = Said()
    with (
        serving(run, index) as worker,
        remote(pulling(run, address(worker), wait_s=1.0), index, say=said) as loader,
    ):
        with pytest.raises(
            RankFailedError, match=r"did not prepare slot 0 of step 0 in 1 s"
        ) as caught:
            loader.fetch(0, 0)
        go_on.set()
    assert address(worker) in caught.value.what and caught.value.exit_code == 4
    assert any(
        f"waiting for the preprocessing worker {address(worker)} to prepare slot" in line
        for line in said.lines
    )


def test_more_steps_than_workers_answer_are_refused_at_the_start(run: Run, index: Index) -> None:
    with pytest.raises(SpecError, match=r"3 steps are more than the 2 of train\.steps") as caught:
        check_workers(pulling(run, "grpc://127.0.0.1:1"), MONOLITHIC, index, None, 3)
    assert "Raise train.steps" in caught.value.next_step


class Gauge:
    """How many slots a preparer has begun and not been rid of."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.held, self.most = 0, 0, 0
        self.changed = threading.Condition()
        begin, cancel = Preparer.begin, Preparation.cancel

        def counted_begin(preparer: Preparer, request: Request) -> Preparation:
            self._count(1)
            return begin(preparer, request)

        def counted_cancel(preparation: Preparation) -> None:
            cancel(preparation)
            self._count(-1)

        monkeypatch.setattr(Preparer, "begin", counted_begin)
        monkeypatch.setattr(Preparation, "cancel", counted_cancel)

    def _count(self, change: int) -> None:
        with self.changed:
            self.held += change
            self.begun += change > 0
            self.most = max(self.most, self.held)
            self.changed.notify_all()

    def wait_for(self, begun: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.begun >= begun, 30)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers larger than what the connection buffers."""
    monkeypatch.setattr(wire, "PIECE_BYTES", 4096)
    pad = [b"x" * 4096] * 4096  # 16 MiB behind every slot
    messages = wire.slot_messages

    def padded(prepared: Any) -> Any:
        yield from messages(prepared)
        for block in pad:
            yield wire.EMPTY, block

    monkeypatch.setattr(wire, "slot_messages", padded)


def asked(worker: Worker, run: Run, index: Index, gauge: Gauge, count: int) -> list[Any]:
    """As many answers that nobody reads, the first `AT_ONCE` of them under way."""
    own = fingerprint(identity_of(run, MONOLITHIC, index, None))
    client, streams = flight.FlightClient(address(worker)), []
    for n in range(count):
        ticket = flight.Ticket(wire.request_bytes(Request(0, n % 6, "all", 0, frozenset(ALL)), own))
        streams.append(client.do_get(ticket))
        gauge.wait_for(min(n + 1, AT_ONCE))
    return streams


@pytest.mark.usefixtures("large")
def test_who_reads_nothing_holds_a_bounded_number_of_slots(
    run: Run, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker goes no further until someone reads or leaves."""
    monkeypatch.setattr(permits, "STALL_S", 3600.0)  # no place is lent on, however slow this is
    gauge = Gauge(monkeypatch)
    with serving(run, index) as worker:
        streams = asked(worker, run, index, gauge, 3 * AT_ONCE)
        # shows that the worker lives, and that this one has to wait
        beat = streams[-1].read_chunk()
        assert beat.data.num_rows == 0 and beat.app_metadata is None
        assert gauge.begun == gauge.most == AT_ONCE
        for stream in streams[:AT_ONCE]:
            stream.cancel()  # they leave without a word
        gauge.wait_for(2 * AT_ONCE)
        for stream in streams:
            stream.cancel()
    assert gauge.most == AT_ONCE


@pytest.mark.slow
@pytest.mark.usefixtures("large")
def test_who_reads_nothing_for_long_stops_nobody_else(
    run: Run, index: Index, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(permits, "STALL_S", 0.2)
    monkeypatch.setattr("disttrain_cli.data.serving.worker.BEAT_S", 0.05)
    gauge = Gauge(monkeypatch)
    with serving(run, index) as worker:
        streams = asked(worker, run, index, gauge, 2 * AT_ONCE)
        try:
            with remote(pulling(run, address(worker), wait_s=5.0), index) as loader:
                assert fetch_all(loader, PLACES[:2]) == expected[:2]
        finally:
            for stream in streams:
                stream.cancel()
        assert gauge.most <= AT_ONCE + MOST_STALLED


def test_a_rank_asks_for_no_more_than_it_prefetches(
    run: Run, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    gauge = Gauge(monkeypatch)
    with (
        serving(run, index) as worker,
        remote(pulling(run, address(worker), prefetch_slots=2), index) as loader,
    ):
        gauge.wait_for(2)
        for slot in range(2):
            loader.fetch(0, slot)
            loader.prefetch(0, slot + 1)
            gauge.wait_for(3 + slot)
    assert gauge.begun == 4 and gauge.most <= 3

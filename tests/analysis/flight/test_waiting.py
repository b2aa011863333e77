"""Who waits for whom: batches of messages, coalesced collectives, buffers that have dropped
entries, and ranks without a dump."""

from pathlib import Path
from typing import Any

import pytest

from disttrain_cli.analysis.flight.dumps import read_dumps
from disttrain_cli.analysis.flight.verdict import Dumped, analyze_dumps
from tests.analysis.flight.recorded import batch, coalesced, entry, message, write

STARTED = {"state": "started"}
PEERS = [">1 <1", ">2 <2 >0 <0", ">3 <3 >1 <1", ">2 <2"]
Ranks = list[list[dict[str, Any]]]


def pipeline(batches: list[int], joined: int = 4, **more: Any) -> Ranks:
    """Four stages, which ask for so many batches; all that `joined` say have ended."""
    return [
        [
            one
            for sequence in range(1, count + 1)
            for one in batch(
                sequence,
                rank,
                PEERS[rank],
                state="completed" if sequence < joined else more.get("state", "started"),
            )
        ]
        for rank, count in enumerate(batches)
    ]


def cases() -> dict[str, tuple[Ranks, str, list[int]]]:
    done = pipeline([3, 3, 3, 3])
    join = entry(3, **STARTED)
    gathers = coalesced(4, ["_all_gather_base", "_all_gather_base"], sizes=(2,))
    reduce, uneven = entry(5, **STARTED), ["all_to_all", "ALLTOALLV_BASE", "all_gather_v"]
    lone = {"p2p_seq_id": 1, "is_p2p": True}
    return {
        "a batch is missing": (pipeline([4, 4, 3, 4]), "message", [2]),
        "a batch is missing, without timing": (
            pipeline([4, 4, 3, 4], state="scheduled"),
            "message",
            [2],
        ),
        "the first stage holds all up": (pipeline([3, 4, 4, 4]), "message", [0]),
        "a collective is missing after batches": (
            [[*own, *([join] if rank != 1 else [])] for rank, own in enumerate(done)],
            "missing",
            [1],
        ),
        "a collective is missing after coalesced ones": (
            [[*gathers, reduce]] * 3 + [gathers],
            "missing",
            [3],
        ),
        "a coalesced collective is missing": (
            [[entry(3), *coalesced(4, ["all_reduce"] * 2, **STARTED)]] * 3 + [[entry(3)]],
            "missing",
            [3],
        ),
        "another coalesced collective": (
            [coalesced(4, ["all_reduce"] * 2, **STARTED)] * 3
            + [coalesced(4, ["all_reduce", "broadcast"], **STARTED)],
            "other operation",
            [3],
        ),
        "one collective fewer in a coalesced one": (
            [coalesced(4, ["all_reduce"] * 2, **STARTED)] * 3
            + [coalesced(4, ["all_reduce"], **STARTED)],
            "other count",
            [3],
        ),
        "all have joined a batch": (pipeline([4, 4, 4, 4]), "not finished", [0, 1, 2, 3]),
        "all has ended": (done, "nothing pending", []),
        "a receive of another size": (
            [
                [entry(0, "send 0->1", sizes=(8,), **lone, **STARTED)],
                [entry(0, "recv 1<-0", sizes=(16,), **lone, **STARTED)],
            ],
            "other size",
            [0, 1],
        ),
        "a receive of another shape": (
            [
                [entry(0, "send 0->1", sizes=(8, 2), **lone, **STARTED)],
                [entry(0, "recv 1<-0", sizes=(16,), **lone, **STARTED)],
            ],
            "not finished",
            [0, 1],
        ),
        "more receives than sends": (
            [
                [message(1, "send 0->1") | {"state": "completed"}],
                [message(1, "recv 1<-0") | {"state": "completed"}, message(2, "recv 1<-0")],
            ],
            "message",
            [0],
        ),
        "a send that has left before its receive": (
            [
                [message(1, "send 0->1") | {"state": "completed"}, entry(0, **STARTED)],
                [message(1, "recv 1<-0")],
            ],
            "missing",
            [1],
        ),
        "one rank has the list of a gather": (
            [
                [entry(1, "gather", **STARTED) | {"output_sizes": sizes}]
                for sizes in ([[4]] * 3, [], [])
            ]
            + [[]],
            "missing",
            [3],
        ),
        "one rank has the list of a scatter": (
            [
                [entry(1, "scatter", **STARTED) | {"input_sizes": sizes}]
                for sizes in ([], [[4]] * 3, [])
            ]
            + [[]],
            "missing",
            [3],
        ),
        "other shapes of one size": (
            [[entry(1, sizes=(4, 2), **STARTED)], [entry(1, sizes=(8,), **STARTED)], []],
            "missing",
            [2],
        ),
    } | {
        f"sizes differ in {name}": (
            [
                [entry(5, name, sizes=(rank + 1,), output=(9 - rank,), **STARTED)]
                for rank in range(3)
            ]
            + [[]],
            "missing",
            [3],
        )
        for name in [*uneven, "all_to_all_v_single", "reduce_scatter_v", "_all_gather_v_base"]
    }


def judged(folder: Path, ranks: Ranks, **more: Any) -> Dumped:
    return analyze_dumps(write(folder, ranks, **more))


@pytest.mark.parametrize("case", cases())
def test_the_cause_is_named(tmp_path: Path, case: str) -> None:
    ranks, cause, named = cases()[case]
    verdict = judged(tmp_path, ranks).verdict
    assert (verdict.cause, verdict.ranks) == (cause, named), verdict.sentence


def test_members_get_the_state_of_what_closes_them(tmp_path: Path) -> None:
    plain = entry(7, state="scheduled", p2p_seq_id=1, retired=False)
    old = [
        one | {"is_p2p": one["is_p2p"] and one["input_sizes"] != []} for one in batch(2, 0, ">1")
    ]
    own = [*batch(1, 0, ">1 <1"), plain, *old, *batch(3, 0, ">1", **STARTED)]
    (dump,) = read_dumps(write(tmp_path, [own]))[0].values()
    assert [(one.operation, one.state) for one in dump.entries] == [
        ("send 0->1", "completed"),
        ("recv 0<-1", "completed"),
        ("all_reduce", "scheduled"),
        ("send 0->1", "completed"),
        ("send 0->1", "started"),
    ]


def test_a_stage_that_is_held_up_is_not_blamed(tmp_path: Path) -> None:
    """3 waits for 2, whose batch with 1 both have asked for; 1 waits for 0 in the same batch."""
    first, second = pipeline([3, 4, 3, 4])[1], pipeline([3, 4, 3, 4])[3]
    to_first = batch(4, 2, ">1 <1", **STARTED)
    ranks = [pipeline([3, 3, 3, 3])[0], first, [*pipeline([3] * 4)[2], *to_first], second]
    verdict = judged(tmp_path, ranks).verdict
    assert (verdict.cause, verdict.ranks) == ("message", [0]), verdict.sentence


def test_who_cannot_be_known_without_a_dump_is_said(tmp_path: Path) -> None:
    ranks = pipeline([4, 4, 3, 4])
    files = write(tmp_path, ranks)
    verdict = analyze_dumps([files[0], files[1], files[3]]).verdict
    assert (verdict.cause, verdict.ranks) == ("unknown", [2])
    assert "no dump of it" in verdict.sentence and "rank 2" in verdict.next_step
    ended = analyze_dumps(write(tmp_path / "ended", pipeline([3, 3, 3, 3]))[:2]).verdict
    assert (ended.cause, ended.ranks) == ("unknown", [2, 3])
    gloo = [entry(1, "send", backend="gloo", is_p2p=True, p2p_seq_id=1, state="scheduled")]
    assert judged(tmp_path / "gloo", [gloo, []]).verdict.cause == "unknown"


def test_what_a_buffer_has_dropped_blames_nobody(tmp_path: Path) -> None:
    """Rank 1 has used another group since; rank 2 has run ahead of the collective of rank 0."""
    groups = {"0": ("default_pg", range(3)), "1": ("pair", [1, 2])}
    pair = ("1", "pair")
    busy = [entry(sequence, group=pair) for sequence in range(90, 99)]
    ended = judged(
        tmp_path / "a", [[entry(5)], busy, [entry(5), *busy]], groups=groups, first=[0, 90, 0]
    )
    assert ended.verdict.cause == "nothing pending", ended.verdict.sentence
    late = [entry(5, **STARTED)]
    ahead = [entry(sequence, state="scheduled") for sequence in range(6, 9)]
    verdict = judged(tmp_path / "b", [late, ahead], first=[0, 6]).verdict
    assert (verdict.cause, verdict.ranks) == ("missing", [0]), verdict.sentence
    sent = [message(number, "send 0->1") | {"state": "completed"} for number in range(7, 9)]
    taken = [message(number, "recv 1<-0") | {"state": "completed"} for number in range(1, 9)]
    ranks = [[*sent, message(9, "send 0->1")], taken]
    verdict = judged(tmp_path / "c", ranks, first=[7, 0]).verdict
    assert (verdict.cause, verdict.ranks) == ("message", [1]), verdict.sentence


def test_groups_used_in_another_order_are_a_circle_though_all_were_asked_for(
    tmp_path: Path,
) -> None:
    groups = {"0": ("default_pg", range(2)), "1": ("pair", [0, 1])}
    world, pair = entry(0, **STARTED), entry(0, group=("1", "pair"), **STARTED)
    verdict = judged(tmp_path, [[world], [pair, world]], groups=groups).verdict
    assert (verdict.cause, verdict.ranks) == ("circle", [0, 1]), verdict.sentence


def test_a_group_of_collectives_of_which_a_buffer_has_dropped_some_is_not_compared(
    tmp_path: Path,
) -> None:
    both, join = coalesced(1, ["all_reduce", "broadcast"]), entry(2, **STARTED)
    found = judged(tmp_path, [[*both, join], [*both[1:], join], both], first=[0, 1, 0])
    assert (found.verdict.cause, found.verdict.ranks) == ("missing", [2]), found.verdict.sentence


@pytest.mark.parametrize("answered", [True, False])
def test_messages_are_paired_by_time_where_some_were_dropped(
    tmp_path: Path, answered: bool
) -> None:
    """The batch of 1 waits for 2; whether 0 has sent what it receives, only times tell."""

    def at(ms: int, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [one | {"time_created_ns": ms * 10**6 + at} for at, one in enumerate(entries)]

    steps = range(3, 6)
    sent = [one for step in steps for one in at(100 * step, batch(step, 0, ">1"))]
    taken = [one for step in steps for one in at(100 * step, batch(step, 1, "<0 <2"))]
    second = [one for step in steps for one in at(100 * step, batch(step, 2, ">1"))]
    if answered:
        sent += at(600, batch(6, 0, ">1"))
    taken += at(600, batch(6, 1, "<0 <2", **STARTED))
    found = judged(tmp_path, [sent, taken, second], first=[40, 30, 20])
    assert found.verdict.ranks == ([2] if answered else [0, 2]), found.verdict.sentence


def timed(ms: int, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Entries asked for, and found to have ended if they have, from a time on."""
    return [
        one
        | {
            "time_created_ns": (ms + number) * 10**6,
            "time_discovered_completed_ns": (ms + number) * 10**6 if one["retired"] else None,
        }
        for number, one in enumerate(entries)
    ]


def stages(times: dict[int, int], joined: dict[int, int]) -> list[list[dict[str, Any]]]:
    """Three stages, each with the messages of steps from `times` (of the first to the last)."""
    peers = [">1", "<0 >2", "<1"]
    return [
        [
            one
            for step in range(times[rank], joined[rank] + 1)
            for one in timed(
                100 * step + 8 * rank,
                batch(step, rank, peers[rank], state="completed" if step < 7 else "started"),
            )
        ]
        for rank in range(3)
    ]


@pytest.mark.parametrize(
    ("first", "last", "cause", "ranks"),
    [
        ([7, 6, 6], [7, 6, 7], "message", [1]),  # the receive of 1 ended before 0 sent again
        ([7, 5, 7], [7, 6, 7], "message", [1]),
        ([7, 6, 7], [7, 6, 7], "message", [1]),
        ([7, 7, 7], [7, 7, 7], "not finished", [0, 1, 2]),
        ([6, 7, 6], [6, 7, 6], "message", [2]),  # a send of 0 that ended may be what 1 waits for
    ],
)
def test_pending_messages_are_not_those_that_have_ended(
    tmp_path: Path, first: list[int], last: list[int], cause: str, ranks: list[int]
) -> None:
    """What is pending on one side of buffers that hold a batch or two has not ended on another."""
    entries = stages(dict(enumerate(first)), dict(enumerate(last)))
    verdict = judged(tmp_path, entries, first=[10, 20, 30]).verdict
    assert (verdict.cause, verdict.ranks) == (cause, ranks), verdict.sentence


def test_messages_that_cannot_be_paired_are_unknown(tmp_path: Path) -> None:
    """An older send that has ended, and a receive that has not: it may be the next one's."""
    sent, taken = timed(600, batch(6, 0, ">1")), timed(700, batch(7, 1, "<0", **STARTED))
    verdict = judged(tmp_path, [sent, taken], first=[10, 10]).verdict
    assert (verdict.cause, verdict.ranks) == ("unknown", [1]), verdict.sentence
    assert "not known" in verdict.sentence


@pytest.mark.parametrize("offset_ms", [-100, 100])
def test_clocks_that_differ_do_not_separate_messages(tmp_path: Path, offset_ms: int) -> None:
    """The send of 0 seems to be that of the step before or after."""
    for last, cause, named in (6, "message", [2]), (7, "not finished", [0, 1, 2]):
        ranks = stages({0: 2, 1: 2, 2: 2}, {0: 7, 1: 7, 2: last})
        for one in ranks[0]:
            one["time_created_ns"] += offset_ms * 10**6
        verdict = judged(tmp_path / cause, ranks, first=[8, 9, 10]).verdict
        assert (verdict.cause, verdict.ranks) == (cause, named), verdict.sentence


@pytest.mark.parametrize(
    ("name", "lists"), [("all_gather", "output_sizes"), ("reduce_scatter", "input_sizes")]
)
def test_uneven_lists_must_agree_as_a_whole(tmp_path: Path, name: str, lists: str) -> None:
    single = "input_sizes" if lists == "output_sizes" else "output_sizes"

    def ranks(**changed: Any) -> Ranks:
        return [
            [entry(1, name, **STARTED) | {lists: [[8], [16], [24]], single: [[8 * (rank + 1)]]}]
            for rank in range(2)
        ] + [[entry(1, name, **STARTED) | {lists: [[8], [16], [24]], single: [[24]]} | changed]]

    for folder, changed, cause in (
        ("a", {}, "not finished"),
        ("b", {single: [[16]]}, "other size"),
        ("c", {lists: [[8], [8], [24]]}, "other size"),
    ):
        verdict = judged(tmp_path / folder, ranks(**changed)).verdict
        assert verdict.cause == cause, verdict.sentence
        assert verdict.ranks == ([2] if changed else [0, 1, 2])


def test_a_rank_beside_one_without_a_dump_is_not_blamed(tmp_path: Path) -> None:
    """1 waits for 2, which is in a collective that 3 may not have joined."""
    groups = {"0": ("default_pg", range(4)), "1": ("pair", [2, 3])}
    world, pair = entry(0, **STARTED), entry(0, group=("1", "pair"), **STARTED)
    files = write(tmp_path, [[world], [world], [pair], []], groups=groups)
    verdict = analyze_dumps(files[:3]).verdict
    assert (verdict.cause, verdict.ranks) == ("unknown", [3]), verdict.sentence
    assert analyze_dumps(files[3:]).verdict.ranks == [0, 1, 2]  # its groups name them
    groups = {"0": ("all but 3", range(3)), "1": ("pair", [2, 3])}
    pair = entry(1, group=("1", "pair"), **STARTED)  # after a collective that all have joined
    world = entry(0, group=("0", "all but 3"), **STARTED)
    files = write(tmp_path / "later", [[world], [world], [world, pair], []], groups=groups)
    assert analyze_dumps(files[:3]).verdict.cause == "not finished"

"""Sends and receives: matched by their two ends, waited for, and blamed on the rank that is slow
and on no other."""

import pytest

from disttrain_cli.analysis.analyze import analyze, ask
from disttrain_cli.analysis.losses import CAUSES
from tests.analysis.kineto import traces
from tests.cases import first_fast

STAGES, MICROBATCHES, STEPS, FORWARD_US, MOVES_US = 4, 8, 4, 50, 4
SEND_RECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"


def end(start, until, number, does, peer, named=True, **more):
    """One end of a message: the kernel of a send to `peer`, or of a receive from it."""
    args = {
        "Collective name": does,
        "Process Group Name": "pp",
        "In msg nelems": 4096,
        "dtype": "BFloat16",
    }
    if named:
        args["Dst Rank" if does == "send" else "Src Rank"] = peer
    return traces.kernel(
        SEND_RECV, start, until - start, number, stream=20 + (does == "recv"), **args | more
    )


def schedule(stage):
    """The passes of a stage in 1F1B order: (is forward, microbatch)."""
    ahead = min(STAGES - 1 - stage, MICROBATCHES)
    order = [(True, number) for number in range(ahead)]
    for number in range(MICROBATCHES - ahead):
        order += [(True, ahead + number), (False, number)]
    return order + [(False, number) for number in range(MICROBATCHES - ahead, MICROBATCHES)]


def step_of(slow):
    """When the passes of one 1F1B step run, and its messages: receive posted after the pass before,
    both ends at once.

    Args:
        slow: stage → factor on its passes.
    """
    orders = [schedule(stage) for stage in range(STAGES)]
    done, at, free = {}, [0] * STAGES, [10.0] * STAGES
    passes, messages = [], []
    while any(at[stage] < len(orders[stage]) for stage in range(STAGES)):
        for stage in range(STAGES):
            if at[stage] == len(orders[stage]):
                continue
            forward, number = orders[stage][at[stage]]
            source = stage - 1 if forward else stage + 1
            start = free[stage]
            if 0 <= source < STAGES:
                if (source, forward, number) not in done:
                    continue
                sent = done[source, forward, number]
                arrived = max(sent, start) + MOVES_US
                messages.append((source, stage, sent, start, arrived))
                start = arrived
            free[stage] = start + FORWARD_US * (1 if forward else 2) * slow.get(stage, 1)
            done[stage, forward, number] = free[stage]
            passes.append((stage, start, free[stage]))
            at[stage] += 1
    return passes, messages, max(free)


def pipeline(folder, slow=(), named=True, ranks=range(STAGES)):
    """Traces of a pipeline of one rank per stage, `STEPS` steps that begin together."""
    passes, messages, length = step_of(dict(slow))
    events = [[] for _ in range(STAGES)]
    for step in range(STEPS):
        began = traces.BASE_US + step * (length + 20)
        for rank in range(STAGES):
            events[rank].append(
                traces.span(f"ProfilerStep#{step}", began, length + 20, cat="user_annotation")
            )
        for number, (rank, start, until) in enumerate(passes):
            events[rank] += traces.kernel(
                traces.GEMM, began + start, until - start, 1000 * step + number
            )
        for number, (source, stage, sent, asked, arrived) in enumerate(messages):
            ids = 1000 * step + 500 + number
            events[source] += end(began + sent, began + arrived, ids, "send", stage, named)
            events[stage] += end(began + asked, began + arrived, ids, "recv", source, named)
    return [
        traces.write(folder / f"rank{rank}.json", traces.document(events[rank], rank, STAGES))
        for rank in ranks
    ]


def test_the_two_ends_of_a_message_are_matched_and_the_wait_is_measured(tmp_path):
    at = traces.BASE_US
    zero = [
        *end(at + 100, at + 160, 1, "send", 1),
        *end(at + 200, at + 210, 2, "send", 1),
        *end(at + 300, at + 420, 3, "recv", "1"),
    ]
    one = [
        *end(at + 150, at + 160, 1, "recv", 0),
        *end(at + 250, at + 260, 2, "recv", 0),
        *end(at + 400, at + 420, 3, "send", 0),
    ]
    for rank, events in enumerate((zero, one)):
        traces.write(tmp_path / f"rank{rank}.json", traces.document(events, rank, 2))
    found = analyze([tmp_path])
    assert [
        (
            row.name,
            row.group,
            row.index,
            row.ranks,
            row.last_rank,
            row.longest_wait_us,
            row.transfer_us,
        )
        for row in found.collectives
    ] == [
        ("message 1 → 0", "pp", 0, 2, 1, 100, 20),
        ("message 0 → 1", "pp", 0, 2, 1, 50, 10),
        ("message 0 → 1", "pp", 1, 2, 1, 0, 10),
    ]  # sent and gone before the receiver came: nobody waited
    assert [row.collective_wait_us for row in found.ranks] == [150, 0]
    assert found.job.exposed_communication_fraction == pytest.approx(
        (10 + 10 + 20 + 10 + 10 + 20) / (320 + 270)
    )
    assert not any("not matched" in warning for warning in found.warnings)


@pytest.mark.slow
def test_a_clean_pipeline_has_no_straggler(tmp_path):
    """Its waiting fills and drains it, and is no rank's fault."""
    found = analyze(pipeline(tmp_path))
    lost = found.stragglers.lost_s
    assert len(ask([tmp_path], "SELECT DISTINCT collective FROM waits WHERE message").rows) == (
        2 * (STAGES - 1) * MICROBATCHES * (STEPS - 1)
    )
    assert (
        found.verdict.cause == "communication" and "wait for one another" in found.verdict.headline
    )
    assert (
        lost["worker"] < 0.01 * found.verdict.lost_s and "more microbatches" in found.verdict.advice
    )
    waiting = [row for row in found.verdict.evidence if "waiting at sends and receives" in row.what]
    assert [row.value for row in waiting] == [1]


@pytest.mark.parametrize(
    "stage", [1, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 3))]
)
def test_a_slow_stage_is_the_straggler_wherever_it_is(tmp_path, stage):
    found = analyze(pipeline(tmp_path, slow=[(stage, 1.5)]))
    assert (found.verdict.cause, found.verdict.place.rank) == ("worker", stage), found.verdict
    assert "messages" in found.verdict.headline and "slower device" in found.verdict.advice
    lost, gain_s = found.stragglers, (step_of({stage: 1.5})[2] - step_of({})[2]) / 1e6
    # that steps begin together is in no trace: what a first stage does after its last message then
    # counts as idle
    assert (0.55 if stage < 2 else 0.97) * gain_s < lost.lost_s["worker"] < 1.03 * gain_s
    assert lost.lost_s["worker"] == pytest.approx(found.verdict.lost_s)
    assert tuple(lost.lost_s) == CAUSES and lost.ideal_s + sum(
        lost.lost_s.values()
    ) == pytest.approx(traces.mean_step_s([tmp_path]))


def test_messages_that_name_no_peer_are_left_unmatched_and_said(tmp_path):
    found = analyze(pipeline(tmp_path, named=False))
    sent = 2 * (STAGES - 1) * MICROBATCHES * (STEPS - 1)
    assert not found.collectives and found.stragglers.lost_s["worker"] == 0
    assert any(
        f"{2 * sent} sends and receives, 100 % of the time of communication, are not matched"
        in warning
        for warning in found.warnings
    )


@pytest.mark.parametrize(
    "told", first_fast([{"Process Group Ranks": "[4, 6]", "Group size": 2}, {}])
)
def test_the_peer_among_two_needs_no_name(tmp_path, told):
    """As gloo and older profilers write them."""
    ranks = (4, 6) if told else (0, 1)
    for rank, (start, does) in zip(ranks, ((100, "send"), (30, "recv")), strict=True):
        events = end(traces.BASE_US + start, traces.BASE_US + 110, 1, does, 0, named=False, **told)
        traces.write(tmp_path / f"rank{rank}.json", traces.document(events, rank, 8 if told else 2))
    found = analyze([tmp_path])
    assert [(row.name, row.last_rank, row.longest_wait_us) for row in found.collectives] == [
        (f"message {ranks[0]} → {ranks[1]}", ranks[0], 70)
    ]


def test_messages_to_ranks_without_a_trace_are_unmatched(tmp_path):
    found = analyze(pipeline(tmp_path, ranks=(1, 2)))
    assert {row.name for row in found.collectives} == {"message 1 → 2", "message 2 → 1"}
    assert any("are not matched" in warning for warning in found.warnings)
    assert any(warning.startswith("2 of 4 ranks are missing (0, 3)") for warning in found.warnings)

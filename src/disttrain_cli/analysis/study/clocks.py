"""Alignment of the clocks of an operation-level trace's ranks, if they contradict each other.

Rows name no host, so every rank has a separate clock here. That of the lowest one is the reference;
the others are bounded as the hosts of disttrain's traces are (`job.clocks`): a receive does not end
before its send has begun, and no rank finishes clipping gradients before the last rank has started
it. A difference of less than `APART_S` may be rounding and is ignored: published traces, whose
clocks are right, have such. If shifts leave more than half of the contradictions, the rows are
wrong, not the clocks.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from disttrain_cli.analysis.figures import counted
from disttrain_cli.analysis.job.clocks import bounds_of, clocks_of
from disttrain_cli.analysis.result.rows import HostClock
from disttrain_cli.analysis.study.operations import CLIP
from disttrain_cli.analysis.study.reader import StudyTrace
from disttrain_cli.analysis.walk import Floats

#: Smaller contradictions are ignored, in seconds.
APART_S = 1e-3
_SHOWN = 5  # ranks that a warning names

# by sender and receiver, seconds from a send to the end of its receive, [steps]
Sent = dict[tuple[int, int], Floats]


def on_one_clock(trace: StudyTrace, groups: list[list[int]]) -> StudyTrace:
    """Shift the times of ranks whose clocks contradict others', and report it in the warnings.

    Args:
        trace: as read.
        groups: operations of a replica that are two sides of one transfer, the send first; other
            groups are ignored.
    """
    sent, left_s = _sent(trace, groups), _left(trace)
    contradictions = _contradictions(sent, left_s)
    if not contradictions:
        return trace
    numbers = np.unique(trace.rank)
    clocks = _clocks(trace, sent, numbers.tolist())
    shift_s = np.zeros((len(numbers), len(trace.steps)))
    for index, clock in enumerate(clocks):
        if clock.applied:
            assert clock.offset_us is not None and clock.drift_ppm is not None
            shift_s[index] = (
                clock.offset_us + clock.drift_ppm * (trace.origin - trace.origin[0])
            ) / 1e6
    shifted = _shifted(trace, shift_s[np.searchsorted(numbers, trace.rank.reshape(-1))])
    explained = 2 * _contradictions(_sent(shifted, groups), _left(shifted)) <= contradictions
    early = [
        (-1e3 * float(least.min()), pair) for pair, least in sent.items() if least.min() < -APART_S
    ]
    if early:
        most_ms, (one, other) = max(early)
        sentence = (
            f"transfers between {counted(len(early), 'pair')} of ranks end before they were sent,"
            f" by {most_ms:.3g} ms at most, from rank {one} to rank {other}"
        )
    else:
        sentence = (
            f"ranks are done with clipping gradients up to {-1e3 * left_s.min():.3g} ms before the"
            " last has joined"
        )
    if not explained:
        return replace(
            trace,
            warnings=[
                *trace.warnings,
                f"{sentence}: no shift of clocks explains that, so none is applied",
            ],
        )
    moved = np.flatnonzero([clock.applied for clock in clocks]).tolist()
    listed = ", ".join(
        f"rank {numbers[index]} ({1e3 * shift_s[index].mean():+.3g} ± "
        f"{(clocks[index].error_us or 0.0) / 1e3:.2g} ms)"
        for index in moved[:_SHOWN]
    )
    more = f" and {len(moved) - _SHOWN} more" if len(moved) > _SHOWN else ""
    return replace(
        shifted,
        warnings=[
            *trace.warnings,
            (
                f"{sentence}: the clocks of their hosts are apart. Put right by what they show more"
                f" than that of rank {numbers[0]}: {listed}{more}"
            ),
        ],
    )


def _clocks(trace: StudyTrace, sent: Sent, ranks: list[int]) -> list[HostClock]:
    """Return each rank's clock relative to the first one's, with bounds looser by `APART_S`."""
    slack_ns, steps = round(1e9 * APART_S), range(len(trace.steps))
    messages = [
        (step, str(one), str(other), round(1e9 * least[step]) + slack_ns)
        for (one, other), least in sent.items()
        for step in steps
    ]
    meetings = [
        (
            step,
            str(trace.rank.reshape(-1)[op]),
            round(1e9 * trace.start[op, step]),
            round(1e9 * trace.end[op, step]) + slack_ns,
        )
        for op in _clips(trace)
        for step in steps
    ]
    return clocks_of(
        [str(rank) for rank in ranks],
        bounds_of(messages, meetings),
        {step: round(1e9 * trace.origin[step]) for step in steps},
    )


def _sent(trace: StudyTrace, groups: list[list[int]]) -> Sent:
    """Return the least time over the messages of each step, by sender and receiver."""
    start, end = (times.reshape(*trace.rank.shape, -1) for times in (trace.start, trace.end))
    sent: Sent = {}
    pairs = [
        group for group in groups if len(group) == 2 and trace.optype[group[0]].endswith("-send")
    ]
    for cut in np.unique(trace.stage[pairs], axis=0) if pairs else ():
        of_cut = np.array(pairs)[(trace.stage[pairs] == cut).all(axis=1)]
        least = (end[:, of_cut[:, 1]] - start[:, of_cut[:, 0]]).min(axis=1)
        sent |= {
            (int(ranks[of_cut[0, 0]]), int(ranks[of_cut[0, 1]])): seconds
            for ranks, seconds in zip(trace.rank, least, strict=True)
        }
    return sent


def _clips(trace: StudyTrace) -> list[int]:
    """Return the indices of gradient clipping, which all ranks do together."""
    return np.flatnonzero(np.tile(trace.optype == CLIP, len(trace.replicas))).tolist()


def _left(trace: StudyTrace) -> Floats:
    """Return seconds from the last rank's start of clipping to the first one's end, [steps]."""
    clips = _clips(trace)
    if clips:
        return trace.end[clips].min(axis=0) - trace.start[clips].max(axis=0)
    return np.zeros(len(trace.steps))


def _contradictions(sent: Sent, left_s: Floats) -> int:
    return sum(int((seconds < -APART_S).sum()) for seconds in [*sent.values(), left_s])


def _shifted(trace: StudyTrace, shift_s: Floats) -> StudyTrace:
    """Subtract the clocks' offsets [operations, steps] from the times.

    Steps start with their first row.
    """
    first = (trace.start - shift_s).min(axis=0)
    return replace(
        trace,
        origin=trace.origin + first,
        start=trace.start - shift_s - first,
        end=trace.end - shift_s - first,
    )

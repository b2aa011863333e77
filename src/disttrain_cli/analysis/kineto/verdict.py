"""What slows a job of which only Kineto traces are known: a straggler, the host, data, communication, or compute.

A straggler is a rank that comes last into collectives more often than chance allows, and for which the others wait
long. How often chance allows it: everyone is last with probability 1/n, independently; the tail of the binomial,
times n because any rank could have been the one.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
from typing import Any

from disttrain_cli.analysis.kineto.database import KinetoDatabase
from disttrain_cli.analysis.result import Evidence, Place, Verdict

#: A cause that costs a smaller share of a step is none.
LEAST_SHARE = {"worker": 0.05, "data": 0.05, "communication": 0.1, "host": 0.1, "copies": 0.1}
#: The chance to take noise for a straggler.
LEAST_SURE = 0.05


@dataclass(frozen=True)
class Losses:
    """Where the time of every rank goes (rows of `times`), and who was waited for (rows of `kineto/blame.sql`)."""

    steps: int
    marked: bool
    ranks: list[dict[str, Any]]
    blame: list[dict[str, Any]]

    def mean(self, column: str) -> float:
        """Mean over the ranks of a column in ns, as s per step."""
        return sum(self.of(row, column) for row in self.ranks) / len(self.ranks)

    def of(self, row: dict[str, Any], column: str) -> float:
        return float(row[column]) / 1e9 / self.steps

    def straggler(self) -> tuple[dict[str, Any], float, float] | None:
        """The rank that is waited for most, its share of all waiting, and the chance that this is chance."""
        waited = sum(row["blamed_ns"] for row in self.blame)
        if not waited:
            return None
        row = self.blame[0]
        chance = float(row["expected"]) / row["joined"]
        tail = sum(comb(row["joined"], k) * chance**k * (1 - chance) ** (row["joined"] - k)
                   for k in range(row["last"], row["joined"] + 1)) if row["joined"] <= MOST_EXACT else _far(row, chance)
        return row, row["blamed_ns"] / waited, min(1.0, tail * len(self.blame))

    def lost_s(self) -> dict[str, float]:
        """Seconds per step and rank by cause."""
        named = self.straggler()
        share = named[1] if named is not None and named[2] < LEAST_SURE else 0.0
        return {cause: sum(by_rank) / len(self.ranks) for cause, by_rank in self.by_rank(share).items()}

    def by_rank(self, share: float) -> dict[str, list[float]]:
        """The same of every rank; `share` of the waiting in collectives is for the straggler."""
        rows, of = self.ranks, self.of
        return {
            "worker": [share * of(row, "exposed_wait_ns") for row in rows],
            "communication": [of(row, "exposed_ns") - share * of(row, "exposed_wait_ns") for row in rows],
            "data": [of(row, "idle_data_ns") for row in rows],
            "host": [of(row, "idle_ns") - of(row, "idle_data_ns") for row in rows],
            "copies": [of(row, "memory_ns") for row in rows],
        }


MOST_EXACT = 500


def _far(row: dict[str, Any], chance: float) -> float:
    """Chernoff's bound of the binomial's tail, where the exact sum would be long."""
    from math import exp, log

    seen = row["last"] / row["joined"]
    if seen <= chance:
        return 1.0
    rest = 0.0 if seen == 1 else (1 - seen) * log((1 - seen) / (1 - chance))
    return exp(-row["joined"] * (seen * log(seen / chance) + rest))


def judge(losses: Losses, database: KinetoDatabase) -> Verdict:
    """Name what costs most; a straggler goes first, because the others' waiting for it hides the rest."""
    span_s = losses.mean("span_ns")
    lost_s = losses.lost_s()
    large = {cause: seconds for cause, seconds in lost_s.items() if seconds >= LEAST_SHARE[cause] * span_s}
    evidence = [
        Evidence(what="a step, from the first kernel to the last" if losses.marked else "recorded, from the first "
                 "kernel to the last", value=span_s, unit="s"),
        Evidence(what="compute", value=losses.mean("compute_ns"), unit="s"),
        *(Evidence(what=_WHAT[cause], value=seconds, unit="s")
          for cause, seconds in sorted(lost_s.items(), key=lambda item: -item[1]) if seconds > 0.005 * span_s),
    ]
    if "worker" in large:
        return _straggler(losses, database, large["worker"], span_s, evidence)
    if not large:
        return _calm(losses, lost_s, evidence)
    cause = max(large, key=lambda name: large[name])
    by_rank = losses.by_rank(0.0)
    agree = sum(max(by_rank, key=lambda name: by_rank[name][at]) == cause for at in range(len(losses.ranks)))
    told, advice, command = _DETAILS[cause]
    return Verdict(
        cause=cause,
        headline=f"{told}: {_of(lost_s[cause], span_s, losses.marked)}.",
        place=Place(),
        lost_s=lost_s[cause],
        confidence=round(agree / len(losses.ranks), 3),
        evidence=[*evidence, Evidence(what="ranks on which this is the largest loss",
                                      value=agree / len(losses.ranks), unit="share of ranks"), *_not_one(losses)],
        advice=advice,
        next_command=command,
    )


def _straggler(
    losses: Losses, database: KinetoDatabase, seconds: float, span_s: float, evidence: list[Evidence]
) -> Verdict:
    named = losses.straggler()
    assert named is not None, "a loss to a worker comes from a straggler"
    row, share, chance = named
    rank, did = row["rank"], {found["is_it"]: found for found in database.query("before", rank=row["rank"])}
    it, others = did[True], did[False]
    later_s, work_s = it["gap_s"] - others["gap_s"], it["compute_s"] - others["compute_s"]
    works_longer = work_s > 0.5 * later_s > 0
    advice = (
        f"Before them rank {rank} computes {1e3 * work_s:.3g} ms longer than the others: it has more work (uneven "
        "data or shards) or a slower device (clocks, temperature)."
        if works_longer else
        f"Before them its device does not compute longer than the others': its host is late. Look at the CPU of rank "
        f"{rank}: other processes, data loading, garbage collection, pinning."
    )
    return Verdict(
        cause="worker",
        headline=f"Rank {rank} is the straggler: it is last into {row['last']} of {row['joined']} collectives, and "
                 f"waiting for it costs every rank {_of(seconds, span_s, losses.marked)}.",
        place=Place(rank=rank),
        lost_s=seconds,
        confidence=round((1 - chance) * share, 3),
        evidence=[
            *evidence,
            Evidence(what=f"collectives into which rank {rank} comes last", value=row["last"] / row["joined"],
                     unit="share"),
            Evidence(what="the same, were everyone last equally often", value=float(row["expected"]) / row["joined"],
                     unit="share"),
            Evidence(what="chance that this is chance", value=chance, unit="probability"),
            Evidence(what=f"waiting that is for rank {rank}", value=share, unit="share"),
            Evidence(what=f"rank {rank}: from its collective before to these", value=it["gap_s"], unit="s"),
            Evidence(what="the others: the same", value=others["gap_s"], unit="s"),
            Evidence(what=f"rank {rank}: compute in that time", value=it["compute_s"], unit="s"),
            Evidence(what="the others: the same", value=others["compute_s"], unit="s"),
        ],
        advice=advice,
        next_command=f'disttrain analyze --sql "SELECT step, name, index, wait_ns / 1e3 AS waits_us, is_last FROM '
                     f'waits WHERE rank = {rank} ORDER BY start_ns"',
    )


def _calm(losses: Losses, lost_s: dict[str, float], evidence: list[Evidence]) -> Verdict:
    by_rank = losses.by_rank(0.0)
    calm = sum(all(by_rank[cause][at] < LEAST_SHARE[cause] * losses.of(row, "span_ns") for cause in by_rank)
               for at, row in enumerate(losses.ranks))
    return Verdict(
        cause="none",
        headline=f"No straggler: the devices compute {100 * losses.mean('compute_ns') / losses.mean('span_ns'):.0f} % "
                 "of the time, and nothing else costs much.",
        place=Place(),
        lost_s=0.0,
        confidence=round(calm / len(losses.ranks), 3),
        evidence=[*evidence, *_not_one(losses)],
        advice="More speed needs faster kernels (lower precision, fusion, torch.compile) or more devices.",
        next_command='disttrain analyze --sql "SELECT name, kind, count(*), sum(end_ns - start_ns) / 1e6 AS ms FROM '
                     'kernels GROUP BY ALL ORDER BY ms DESC LIMIT 20"',
    )


def _not_one(losses: Losses) -> list[Evidence]:
    """Why no rank is called a straggler, where collectives were matched."""
    named = losses.straggler()
    if named is None:
        return []
    row, share, chance = named
    return [
        Evidence(what=f"rank {row['rank']} is waited for most: last into", value=row["last"] / row["joined"],
                 unit="share of collectives"),
        Evidence(what="waiting that is for it", value=share, unit="share"),
        Evidence(what="chance that this is chance", value=chance, unit="probability"),
    ]


def _of(seconds: float, span_s: float, marked: bool) -> str:
    return (f"{1e3 * seconds:.3g} ms of {'every' if marked else 'the'} {1e3 * span_s:.3g} ms "
            f"{'step' if marked else 'recorded'} ({100 * seconds / span_s:.0f} %)")


_WHAT = {
    "worker": "waiting for one rank in collectives",
    "communication": "communication that nothing hides",
    "data": "idle while data is loaded",
    "host": "idle without work from the host",
    "copies": "copies and fills that nothing hides",
}
_DETAILS = {
    "host": (
        "The devices wait for their hosts to launch work",
        "Launch less and larger: torch.compile or CUDA graphs, fused optimizers, larger batches; and avoid what waits "
        "for the device (.item(), .cpu(), printing losses).",
        'disttrain analyze --sql "SELECT name, count(*), sum(duration_ns) / 1e6 AS ms FROM events WHERE category IN '
        "('cpu_op', 'cuda_runtime') GROUP BY ALL ORDER BY ms DESC LIMIT 20\"",
    ),
    "data": (
        "The devices wait for data",
        "Prepare more ahead: more DataLoader workers, a larger prefetch_factor, pin_memory and non_blocking copies.",
        'disttrain analyze --sql "SELECT rank, name, count(*), sum(duration_ns) / 1e6 AS ms FROM events WHERE name '
        "ILIKE '%dataloader%' GROUP BY ALL ORDER BY ms DESC\"",
    ),
    "communication": (
        "Communication is not hidden behind compute",
        "Overlap it (gradient buckets, prefetching of shards), send less (lower precision, larger microbatches per "
        "reduction), or place the groups that talk most on the fastest links.",
        'disttrain analyze --sql "SELECT operation, process_group, count(*), sum(end_ns - start_ns) / 1e6 AS ms FROM '
        "kernels WHERE kind = 'communication' GROUP BY ALL ORDER BY ms DESC\"",
    ),
    "copies": (
        "Copies between host and device are not hidden",
        "Pin the memory and copy with non_blocking=True on a stream of its own; keep on the device what is used again.",
        'disttrain analyze --sql "SELECT name, count(*), sum(bytes) / 1e6 AS mb, sum(end_ns - start_ns) / 1e6 AS ms '
        "FROM kernels WHERE kind = 'memory' GROUP BY ALL ORDER BY ms DESC\"",
    ),
}

"""Context parallelism on long packed documents: how level the ranks of a CP group work, and what
they keep.

Load: the busiest rank's work over the mean of its group, on sequences of 131,072 tokens packed from
the distribution `long-documents`; the mean over sequences, and the worst of them. Work of attention
is the pairs of tokens of causal attention inside documents, times heads; that of a whole block has
the linears of Llama 7B beside it. Ours: `a2a`, every rank has an equal run of the tokens for the
linears, and in attention all tokens for an equal share of the heads (DeepSpeed-Ulysses, arXiv
2309.14509); `all_gather`, a rank attends with its own tokens for all heads, keys and values of the
others given, and tokens are dealt out in chunks by their work (`models.levelling`). Beside the
latter two ways of dividing tokens for it: contiguous runs, and a chunk of the head with one of the
tail of the sequence (Llama 3, arXiv 2407.21783, section 3.3.2), which is level for one document
only. Deterministic.

Memory: a step of `disttrain train --dry-run --device cuda` for Llama 7B on one sequence of 131,072
tokens, one document, at CP 1 and CP 8: activations kept from forward to backward and the peak of
the step, as executed on a fake H100 (with memory for CP 1, which no H100 has) and as planned.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from benchmarks.common import Tables, main
from disttrain_cli import api
from disttrain_cli.data.epochs.mixture import Mixture
from disttrain_cli.data.indexing.building import open_index
from disttrain_cli.data.packing import Packing, pack
from disttrain_cli.models.division import Place
from disttrain_cli.models.graph import describe
from disttrain_cli.models.levelling import runs_of
from disttrain_cli.runtime.dryrun.dryrun import dry_run
from disttrain_cli.spec.plan import Plan, read_plan
from disttrain_cli.spec.runfile import Run, read_run

DEGREES = (2, 4, 8)
LENGTH, SEQUENCES = 131_072, 256
HIDDEN, INNER, HEADS, LAYERS = 4096, 11_008, 32, 32  # Llama 7B
FLOPS_PER_TOKEN = 2 * (4 * HIDDEN**2 + 3 * HIDDEN * INNER)
FLOPS_PER_PAIR = 4 * HIDDEN  # all heads

Floats = NDArray[np.float64]


def run_of(folder: Path, length: int, layers: int, sequences: int) -> Run:
    """Llama 7B alone on long documents."""
    config = {
        "vocab_size": 32_000,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "num_hidden_layers": layers,
        "tie_word_embeddings": False,
    }
    asked = {"name": "long-documents", "images_per_sequence": 0, "generated_per_sequence": 0}
    file = {
        "name": "long",
        "model": {"modules": {"llm": {"kind": "llm", "architecture": "llama", "config": config}}},
        "data": {"distribution": asked | {"sequences": sequences}, "sequence_length": length},
        "cluster": {"nodes": 1, "gpus_per_node": 8, "device": "analytic:H100", "memory_gib": 1024},
        "train": {"global_batch_size": 1, "steps": 1, "precision": "bf16"},
    }
    (folder / "disttrain.yaml").write_text(yaml.safe_dump(file))
    return read_run(folder / "disttrain.yaml")


def lengths_in(packing: Packing, sequence: int) -> list[int]:
    """Tokens of each document of a sequence, its padding as one, which attends to itself alike."""
    first, last = packing.sample_start[sequence : sequence + 2]
    lengths: list[int] = packing.index.lengths[packing.samples[first:last]].tolist()
    rest = packing.index.inputs.sequence_length - sum(lengths)
    return [*lengths, rest] if rest else lengths


def pairs_before(lengths: list[int]) -> Floats:
    """[tokens] of a sequence, how many tokens of its document each of them attends."""
    return np.concatenate([np.arange(1.0, length + 1.0) for length in lengths])


def loads(pairs: Floats, lengths: list[int], cp: int) -> dict[str, tuple[Floats, Floats]]:
    """By way of dividing, (tokens, pairs of tokens times share of the heads) of every CP rank."""
    before = np.concatenate([[0.0], np.cumsum(pairs)])
    levelled = [
        sum(before[stop] - before[first] for first, stop in own)
        for own in runs_of(lengths, cp, causal=True)
    ]
    tokens = np.array(
        [np.subtract(*Place(cp=cp, cp_rank=rank).of_group(len(pairs))[::-1]) for rank in range(cp)]
    )
    heads = np.full(cp, (HEADS // cp) / HEADS)
    chunks = pairs.reshape(2 * cp, -1).sum(axis=1)
    return {
        "a2a": (tokens, pairs.sum() * heads),
        "all_gather, levelled": (tokens, np.array(levelled)),
        "contiguous runs": (tokens, chunks.reshape(cp, 2).sum(axis=1)),
        "head and tail chunks": (tokens, chunks[:cp] + chunks[: cp - 1 : -1]),
    }


def level(packing: Packing) -> list[dict[str, Any]]:
    """One row per degree and way."""
    rows = []
    lengths = [lengths_in(packing, sequence) for sequence in range(len(packing))]
    every = [(pairs_before(one), one) for one in lengths]
    for cp in DEGREES:
        of_sequences = [loads(*one, cp) for one in every]
        for way in of_sequences[0]:
            attention = np.array([busiest(one[way][1]) for one in of_sequences])
            block = np.array(
                [
                    busiest(one[way][0] * FLOPS_PER_TOKEN + one[way][1] * FLOPS_PER_PAIR)
                    for one in of_sequences
                ]
            )
            rows.append(
                {
                    "CP": cp,
                    "way": way,
                    "attention": float(attention.mean()),
                    "at worst": float(attention.max()),
                    "block": float(block.mean()),
                    "block, at worst": float(block.max()),
                }
            )
    return rows


def busiest(work: Floats) -> float:
    """The largest over the mean."""
    return float(work.max() / work.mean())


def memory(run: Run, degrees: tuple[int, int]) -> list[dict[str, Any]]:
    """One row per degree; and what the first has over the last."""
    api.profile(run)
    made = api.plan(run, gpus=1).plan
    assert made.plan.gpus_used == 1
    rows = []
    for cp in degrees:
        file = run.path.parent / f"cp-{cp}.yaml"
        file.write_text(yaml.safe_dump(with_cp(made, cp)))
        plan, profile = api.checked_plan(run, read_plan(file))
        found = dry_run(run, plan, profile)
        assert not found.problems, found.problems
        (stage,) = found.stages
        rows.append(
            {
                "CP": cp,
                "kept GiB": stage.seen.kept_gib,
                "planned": stage.priced_kept_gib,
                "peak GiB": stage.seen.peak_gib,
                "peak, planned": stage.priced_gib,
            }
        )
    first, last = rows[0], rows[-1]
    return [*rows, {"CP": "times less"} | {key: first[key] / last[key] for key in list(first)[1:]}]


def with_cp(plan: Plan, cp: int) -> dict[str, Any]:
    """The plan of one device as a file, with its LLM on a CP group and nothing recomputed."""
    file: dict[str, Any] = plan.model_dump(mode="json")
    (unit,) = file["plan"]["units"]
    unit |= {"cp": cp, "gpus": cp, "checkpointing": False, "weight_delay": None}
    file["plan"] |= {"gpus_used": cp}
    return file


def measure(small: bool) -> Tables:
    length, layers, sequences = (4096, 2, 8) if small else (LENGTH, LAYERS, SEQUENCES)
    with tempfile.TemporaryDirectory() as folder:
        run = run_of(Path(folder), length, layers, sequences)
        inputs = describe(run)
        packing = pack(Mixture(open_index(run, inputs), 0), 0)
        title = (
            f"Busiest CP rank's work over the mean, {len(packing)} sequences of {length:,} tokens"
        )
        kept = f"Activations of Llama 7B ({layers} layers) on one document of {length:,} tokens"
        return {title: level(packing), kept: memory(run, (1, 8))}


if __name__ == "__main__":
    main(__doc__, measure)

"""A step of disttrain's engine beside DeepSpeed's own PipelineEngine: same layout, same Llama, same
tokens, same run.

One unit of an LLM over two pipeline stages, once and with two replicas. Both engines live in the
same ranks and take steps in turn (A B A B …); CPU seconds are summed over the ranks, wall seconds
those of the slowest. The stock side is given its best case: every sequence is one document, so that
its segments and rotary factors are made once and kept, where disttrain makes them for every slot;
and its inputs are there already, as ours are.

    python -m benchmarks.stock_pipeline
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.small_llm import VOCABULARY, write_run

# Layout name → (replicas, precision, ZeRO stage).
LAYOUTS = {
    "PP 2": (1, "fp32", 0),
    "PP 2 × DP 2": (2, "fp32", 0),
    "PP 2 × DP 2, ZeRO-1": (2, "fp32", 1),
    "PP 2 × DP 2, bf16": (2, "bf16", 1),
}
#: hidden width, blocks, tokens of a sequence, sequences of a microbatch, slots, rounds
SIZES = (128, 8, 128, 2, 8, 7)
SMALL = (32, 2, 32, 1, 3, 1)


def measure(small: bool) -> common.Tables:
    """Ratios of paired steps by layout."""
    from disttrain_cli.runtime.launching.launch import launch

    rows = []
    for name, (dp, precision, zero) in list(LAYOUTS.items())[1:2] if small else LAYOUTS.items():
        with tempfile.TemporaryDirectory() as folder:
            run = _write_run(Path(folder), SMALL if small else SIZES, dp, precision, zero)
            payload = {"run": str(run), "dp": dp, "sizes": SMALL if small else SIZES, "out": folder}
            launch(
                2 * dp,
                "benchmarks.stock_pipeline:ranks",
                payload,
                Path(folder) / "logs",
                timeout_s=3600,
            )
            ranks = [
                json.loads((Path(folder) / f"rank-{rank}.json").read_text())
                for rank in range(2 * dp)
            ]
        cpu, wall = (
            {
                side: [
                    combine(rank[side][clock][i] for rank in ranks)
                    for i in range(len(ranks[0][side][clock]))
                ]
                for side in ("disttrain", "DeepSpeed")
            }
            for clock, combine in (("cpu", sum), ("wall", max))
        )
        rows.append(
            {
                "layout": name,
                "CPU ratio": common.paired_ratio(cpu["disttrain"], cpu["DeepSpeed"]),
                "wall ratio": common.paired_ratio(wall["disttrain"], wall["DeepSpeed"]),
                "disttrain CPU s": float(np.median(cpu["disttrain"])),
                "DeepSpeed CPU s": float(np.median(cpu["DeepSpeed"])),
                "first loss, disttrain": ranks[-1]["disttrain"]["loss"],
                "first loss, DeepSpeed": ranks[-1]["DeepSpeed"]["loss"],
            }
        )
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return {"One step, disttrain ÷ DeepSpeed's pipeline (medians of pairs)": rows}


def ranks(payload: dict[str, Any]) -> None:
    """One rank: both engines, steps in turn."""
    import torch.distributed as dist

    from disttrain_cli.runtime.launching.process import joined
    from disttrain_cli.spec.runfile import read_run

    run = read_run(Path(payload["run"]))
    with joined("cpu", 600.0) as device:
        batches = _tokens(payload["sizes"], payload["dp"])
        ours = _ours(run, payload, device, batches)
        sides = {
            "disttrain": ours,
            "DeepSpeed": _stock(run, payload, batches),
        }  # stock last: its p2p groups are global
        found: dict[str, dict[str, Any]] = {name: {"cpu": [], "wall": []} for name in sides}
        for turn in range(payload["sizes"][-1] + 1):
            for name, step in sides.items():
                dist.barrier()
                cpu, wall = time.process_time(), time.perf_counter()
                loss = step(turn)
                if turn:
                    found[name]["cpu"].append(time.process_time() - cpu)
                    found[name]["wall"].append(time.perf_counter() - wall)
                else:
                    found[name]["loss"] = loss
        Path(payload["out"], f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))


def before_fork(payload: dict[str, Any]) -> None:
    """Import what all ranks need."""
    from disttrain_cli.models.graph import layer_table
    from disttrain_cli.spec.runfile import read_run

    layer_table(read_run(Path(payload["run"])))


def _write_run(folder: Path, sizes: tuple[int, ...], dp: int, precision: str, zero: int) -> Path:
    width, blocks, length, microbatch, slots, _ = sizes
    train = {
        "global_batch_size": dp * microbatch * slots,
        "steps": 100,
        "precision": precision,
        "zero_stage": zero,
        "optimizer": {"lr": 1e-4},
    }
    return write_run(folder, width, blocks, length, train)


def _tokens(sizes: tuple[int, ...], dp: int) -> np.ndarray:
    """Token ids [slots, replicas, M, L + 1], the same on every rank."""
    _, _, length, microbatch, slots, _ = sizes
    return np.random.default_rng(0).integers(0, VOCABULARY, (slots, dp, microbatch, length + 1))


def _ours(
    run: Any, payload: dict[str, Any], device: Any, tokens: np.ndarray
) -> Callable[[int], float]:
    import torch

    from disttrain_cli.data.slots import Slot, StepOrder, replica_items, slot_items
    from disttrain_cli.models.graph import describe, layer_table
    from disttrain_cli.models.layer import Batch
    from disttrain_cli.runtime.engine.assemble import build_engine
    from disttrain_cli.runtime.engine.optimizer import set_lrs
    from disttrain_cli.runtime.watching.tracing import Tracer, wall_clock
    from disttrain_cli.spec.index import KINDS
    from disttrain_cli.spec.plan import Layout, Plan, Search, UnitPlan
    from disttrain_cli.spec.prediction import Prediction
    from disttrain_cli.spec.profile import Fingerprints
    from disttrain_cli.spec.stage_graph import stage_graph

    slots, dp, microbatch, length = *tokens.shape[:3], tokens.shape[3] - 1
    table, inputs = layer_table(run), describe(run)
    unit = UnitPlan(
        name="all",
        modules=["llm"],
        dp=dp,
        pp=2,
        gpus=2 * dp,
        layers_per_stage=[len(table) // 2] * 2,
    )
    layout = Layout(
        global_batch_size=dp * microbatch * slots,
        microbatch_size=microbatch,
        microbatches=slots,
        zero_stage=run.file.train.zero_stage,
        gpus_used=2 * dp,
        units=[unit],
    )
    plan = Plan(
        fingerprints=Fingerprints(model="", data="", cluster=""),
        plan=layout,
        search=Search(solve_s=0, candidates=1, exact=True),
        predicted=Prediction(
            iteration_s=1,
            sequences_per_s=1,
            mfu=0,
            warmup_s=0,
            steady_s=0,
            bubble_fraction=0,
            memory=[],
        ),
    )
    graph = stage_graph(layout, "llm")
    place = graph.coords(int(os.environ["RANK"]))
    tracer = Tracer(Path(payload["out"]), "stock", place, wall_clock())
    engine = build_engine(run, plan, graph, place, device, tracer)
    everything = np.full(dp * microbatch, length)
    own_items = np.arange(dp * microbatch).reshape(dp, microbatch)
    replicas = [replica_items(sequence=sequences) for sequences in own_items]
    order = StepOrder(
        0,
        [
            Slot(
                inputs,
                np.arange(dp * microbatch),
                everything,
                everything**2,
                {item: slot_items() for item in KINDS},
                {"all": replicas},
            )
            for _ in range(slots)
        ],
        label_tokens=dp * microbatch * slots * length,
        targets=0,
    )
    own = torch.from_numpy(tokens[:, place.replica])

    def fetch(slot: int) -> Batch:
        return Batch(
            token_ids=own[slot, :, :-1],
            labels=own[slot, :, 1:],
            sample_lengths=[length] * microbatch,
            positions=torch.arange(length).expand(microbatch, -1),
            label_tokens=float(order.label_tokens),
        )

    def step(turn: int) -> float:
        set_lrs(engine.optimizer, engine.train_spec, turn)
        engine.run_step(order, fetch)
        return engine.step_losses["text"]

    return step


def _stock(run: Any, payload: dict[str, Any], tokens: np.ndarray) -> Callable[[int], float]:
    import deepspeed
    import torch
    from deepspeed.pipe import PipelineModule
    from torch import Tensor, nn
    from torch.nn import functional

    from disttrain_cli.models.attention import Segments
    from disttrain_cli.models.graph import build_layers, layer_table

    slots, dp, microbatch, length = *tokens.shape[:3], tokens.shape[3] - 1
    layers = build_layers(run, 0, len(layer_table(run)))
    train, bf16 = run.file.train, run.file.train.precision == "bf16"
    samples = Segments([length] * microbatch, torch.device("cpu"))

    class Block(nn.Module):
        def __init__(self, ours: Any) -> None:
            super().__init__()
            self.layer = ours.layer
            self.kept = [
                part.to(torch.bfloat16) if bf16 else part
                for part in _rotary(run, length, microbatch)
            ]

        def forward(self, hidden: Tensor) -> Tensor:
            return self.layer(
                hidden, attention_mask=samples, position_embeddings=(self.kept[0], self.kept[1])
            )

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    embed, *blocks, head = layers
    parts = [
        embed.embedding,
        *(Block(block) for block in blocks),
        nn.Sequential(head.norm, head.lm_head),
    ]
    module = PipelineModule(parts, num_stages=2, loss_fn=loss, partition_method="uniform")
    config: dict[str, Any] = {
        "train_batch_size": dp * microbatch * slots,
        "train_micro_batch_size_per_gpu": microbatch,
        "gradient_accumulation_steps": slots,
        "gradient_clipping": train.gradient_clipping,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "zero_optimization": {
            "stage": train.zero_stage,
            "reduce_bucket_size": 4_000_000,
            "allgather_bucket_size": 4_000_000,
        },
    }
    if bf16:
        config |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    spec = train.optimizer
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=spec.lr, betas=spec.betas, eps=spec.eps, fused=True
    )
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    own = torch.from_numpy(tokens[:, engine.grid.get_data_parallel_rank()])

    def data() -> Iterator[tuple[Tensor, Tensor]]:
        for slot in range(slots):
            yield own[slot, :, :-1], own[slot, :, 1:]

    return lambda turn: float(engine.train_batch(data()))


def _rotary(run: Any, length: int, microbatch: int) -> Any:
    """Rotary factors (cos, sin) of sequences that begin at 0."""
    import torch
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from disttrain_cli.models.architectures import read_configs

    positions = torch.arange(length).expand(microbatch, -1)
    return LlamaRotaryEmbedding(read_configs(run)["llm"].config)(torch.zeros(1), positions)


if __name__ == "__main__":
    common.main(__doc__, measure)

"""disttrain beside transformers' Trainer: the same weights, packed rows, order, optimizer and
precision on one device; tokens per second, peak memory and time to the first step.

Parts: `llm`, an LLM on packed documents; `vlm`, a Qwen2.5-VL on packed conversations about JPEG
photos; `llm_one_document`, rows of one document, where Trainer's attention needs no mask. Each side
is a process of its own, in turns (A B C A B C …) while the part's seconds last. Rates are those
after the first steps; on a CPU they are CPU seconds of the process tree.

Trainer attends packed rows by `position_ids`, from which transformers makes the block-diagonal mask
(or, with flash-attn, its varlen call). Its fp32 weights run under bf16 autocast on a GPU, where
disttrain keeps bf16 weights with fp32 masters. Trainer takes microbatches of the plan's size, on a
GPU of 4 at most, as it holds more of each; they are halved until they fit.

    python -m benchmarks.peers --device cuda --parts llm,vlm --seconds 180 --out peers.json

The file is written after every process. Parts measured by an earlier call with the same file stay.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks import common
from benchmarks.gpu.surroundings import ROOT, environment
from benchmarks.peer_work import PARTS, SHAPES
from disttrain_cli.spec.whole import write_whole

Figures = dict[str, Any]
OURS = "disttrain"
ROUNDS = {"cpu": 3, "cuda": 2}
WARM_UP = 3  # steps, the first of which may compile
COMPARED = 3  # first steps whose losses must agree
#: Relative difference of losses that rounding explains: order of sums in fp32; where bf16 rounds.
TOLERANCES = {"cpu": 1e-5, "cuda": 5e-3}
POLL_S, MEMORY_S = 0.02, 0.5
TAIL = 3000  # characters kept of what a process printed


def ways(device: str) -> dict[str, tuple[str, str]]:
    """Attention and compilation of Trainer by the way's name, most used first."""
    attentions = ["sdpa"]
    if device == "cuda":
        attentions = (
            ["flash_attention_2"] if find_spec("flash_attn") else ["sdpa", "flex_attention"]
        )
    return {
        f"Trainer, {attention}{', ' * bool(mode)}{mode}": (attention, mode or "eager")
        for mode in ("", "compiled")
        for attention in (attentions[::-1] if mode else attentions)
    }


def measure_part(part: str, device: str, limit_s: float, result: Figures) -> Iterator[None]:
    """Add figures to `result`; yields after every process."""
    deadline = time.monotonic() + limit_s
    with tempfile.TemporaryDirectory(prefix=f"peers-{part}-", ignore_cleanup_errors=True) as place:
        folder = Path(place)
        begin = time.monotonic()
        code, output = _finish(
            [sys.executable, "-m", "benchmarks.peer_work", part, device, str(folder)], limit_s
        )
        result["prepared_s"] = time.monotonic() - begin
        if code:
            result["error"] = output
            return
        work = json.loads((folder / "work.json").read_text())
        result |= {"tokens": work["tokens"], "runs": []}
        yield
        most = work["microbatch"] if device == "cpu" else min(work["microbatch"], 4)
        microbatch = dict.fromkeys(ways(device), most)
        for number in range(ROUNDS[device]):
            for way in (OURS, *microbatch):
                known = [run["seconds"] for run in result["runs"] if run["way"] == way]
                left_s = deadline - time.monotonic()
                if left_s < max(known, default=5.0):
                    continue
                run = _run(way, device, folder, microbatch.get(way, 0), left_s, work["tokens"])
                while (
                    "out of memory" in run.get("error", "").lower() and microbatch.get(way, 1) > 1
                ):
                    microbatch[way] //= 2
                    left_s = deadline - time.monotonic()
                    run = _run(way, device, folder, microbatch[way], left_s, work["tokens"])
                result["runs"].append({"way": way, "round": number} | run)
                yield


def _run(
    way: str, device: str, folder: Path, microbatch: int, limit_s: float, tokens: list[int]
) -> Figures:
    """Train in a process until the last step is reported, and end it there."""
    reports = folder / "runs" / "peers" / "logs" if way == OURS else folder / "steps"
    command = ["disttrain_cli", "train", "--restart", "--quiet"]
    if way != OURS:
        reports.mkdir(exist_ok=True)
        path = reports / "trainer-steps.jsonl"
        command = ["benchmarks.peer_trainer", str(folder), device, *ways(device)[way]]
        command += [str(path), str(microbatch)]
    for old in reports.glob("*-steps.jsonl"):
        old.unlink()
    steps = list[Figures]()
    with (folder / "output").open("wb") as output:
        start = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_environment(device),
        )
        tree, memory_gib, looked = psutil.Process(process.pid), 0.0, 0.0
        try:
            while len(steps) < len(tokens) and time.monotonic() < start + limit_s:
                running = process.poll() is None
                now = time.monotonic() - start
                rows = [
                    row
                    for path in reports.glob("*-steps.jsonl")
                    for line in path.read_text().split("\n")[:-1]  # complete ones
                    if "loss" in (row := json.loads(line))
                ]
                if new := rows[len(steps) :]:
                    cpu_s = _cpu_s(tree)
                    steps += [{"at_s": now, "cpu_s": cpu_s} | row for row in new]
                if now > looked + MEMORY_S:
                    looked, memory_gib = now, max(memory_gib, _pss_gib(tree))
                if not running:
                    break
                time.sleep(POLL_S)
        finally:
            _end(tree)
            process.wait()
    figures: Figures = {"seconds": time.monotonic() - start, "microbatch": microbatch or None}
    if len(steps) < len(tokens):
        text = (folder / "output").read_text(errors="replace")
        why = "ended" if time.monotonic() < start + limit_s else f"not finished in {limit_s:.0f} s"
        figures["error"] = f"{why} after {len(steps)} steps: {text[-TAIL:]}"
    if len(steps) > WARM_UP:
        first, last = steps[WARM_UP - 1], steps[-1]
        counted = sum(tokens[WARM_UP : len(steps)])
        figures |= {
            "tokens_per_s": counted / (last["at_s"] - first["at_s"]),
            "cpu_s_per_1000_tokens": 1e3 * (last["cpu_s"] - first["cpu_s"]) / counted,
        }
    if steps:
        figures |= {
            "first_step_s": steps[0]["at_s"],
            "first_step_cpu_s": steps[0]["cpu_s"],
            "losses": [step["loss"] for step in steps],
            "host_gib": memory_gib,
            "device_gib": steps[-1]["memory_gib"] if device == "cuda" else None,
        }
    return figures


def _environment(device: str) -> dict[str, str]:
    return environment() | ({"OMP_NUM_THREADS": "1"} if device == "cpu" else {})


def _finish(command: list[str], limit_s: float) -> tuple[int, str]:
    """Exit code and end of the output of a command, ended at its limit."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=environment()
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            _end(psutil.Process(process.pid)) if process.poll() is None else None
            process.wait()
        output.seek(0)
        return code, output.read().decode(errors="replace")[-TAIL:]


def _tree(root: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return [root, *root.children(recursive=True)]
    return []


def _cpu_s(root: psutil.Process) -> float:
    """CPU seconds of a tree of processes, those that ended included."""
    total = 0.0
    for process in _tree(root):
        with suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])  # own and of children waited for
    return total


def _pss_gib(root: psutil.Process) -> float:
    """Memory of a tree of processes, shared pages counted once."""
    total = 0
    for process in _tree(root):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            total += process.memory_full_info().pss
    return total / 2**30


def _end(root: psutil.Process) -> None:
    for process in _tree(root):
        with suppress(psutil.NoSuchProcess):
            process.kill()


def table_of(device: str, runs: list[Figures]) -> list[Figures]:
    """A row per way: medians over rounds, and medians of the rounds' ratios to disttrain."""
    rate, memory = (
        ("cpu_s_per_1000_tokens", "host_gib") if device == "cpu" else ("tokens_per_s", "device_gib")
    )
    rounds: dict[str, dict[int, Figures]] = {}
    for run in runs:
        if rate in run:
            rounds.setdefault(run["way"], {})[run["round"]] = run
    ours, rows = rounds.get(OURS, {}), []
    for way, own in rounds.items():
        row: Figures = {"way": way, "rounds": len(own)}
        for name in (rate, memory, "first_step_s", "first_step_cpu_s"):
            row[name] = median(run[name] for run in own.values())
            pairs = [run[name] / ours[at][name] for at, run in own.items() if at in ours]
            row[f"{name}, over disttrain"] = median(pairs) if pairs else None
        row["largest difference of a loss"] = max(
            (
                abs(loss / own_loss - 1)
                for at, run in own.items()
                if at in ours
                for loss, own_loss in zip(
                    run["losses"][:COMPARED], ours[at]["losses"][:COMPARED], strict=True
                )
            ),
            default=None,
        )
        difference = row["largest difference of a loss"]
        row["same work"] = None if difference is None else difference <= TOLERANCES[device]
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=tuple(SHAPES), default="cpu")
    parser.add_argument("--parts", default=",".join(PARTS), help="with commas between; all")
    parser.add_argument("--seconds", type=float, default=3600, help="for all parts together (3600)")
    parser.add_argument("--out", type=Path, default=Path("peers.json"), help="results (peers.json)")
    options = parser.parse_args()
    # through `finally`, where processes are ended
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    sys.exit(not measure(parts, options.device, options.seconds, options.out))


def measure(parts: list[str], device: str, seconds: float, out: Path) -> bool:
    """Measure parts, each with an equal share of the time left; True if none failed."""
    results = json.loads(out.read_text()) if out.exists() else {}
    deadline, good = time.monotonic() + seconds, True
    for at, part in enumerate(parts):
        result: Figures = {"device": device}
        results[part] = result
        for _ in measure_part(
            part, device, (deadline - time.monotonic()) / (len(parts) - at), result
        ):
            result["table"] = table_of(device, result["runs"])
            write_whole(out, json.dumps(results, indent=1) + "\n")
        write_whole(out, json.dumps(results, indent=1) + "\n")
        if result.get("table"):
            print(common.table(part, result["table"]), flush=True)
        failed = [one for one in (result, *result.get("runs", [])) if "error" in one]
        for one in failed:
            print(f"{part}, {one.get('way', 'preparing')}: {one['error']}", flush=True)
        good = good and not failed
    return good


if __name__ == "__main__":
    main()

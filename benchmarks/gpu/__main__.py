"""What a first look at a GPU must show, in at most 12.5 minutes, as one JSON file.

Every part runs in a process of its own and under a limit of its own, so that one that fails or
hangs loses only itself; the file is written anew after each. On a CPU the parts are tiny: that
shows that they run, and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.gpu.aims import aims
from benchmarks.gpu.surroundings import ROOT, environment
from disttrain_cli.spec.whole import write_whole

Figures = dict[str, Any]
MINUTES = 12.5
#: The parts in the order in which they run, and the seconds that are kept for each; what earlier
#: ones leave is added.
LIMITS_S = {
    "tests": 50.0,
    "collectives": 30.0,
    "nccl": 120.0,
    "block_7b": 22.0,
    "head": 18.0,
    "vit": 18.0,
    "unet": 25.0,
    "chain": 105.0,
    "shared": 65.0,
    "large": 115.0,
    "multimodal": 130.0,
    "block_70b": 30.0,
    "curve": 22.0,
}
HOST_S = 60.0  # at most, to ask for the device; the first import of torch may read gigabytes
ON_A_CPU = 10.0  # times the limits, which are those of a device
TAIL = 4000  # characters kept of what a part printed
LIBRARIES = (
    "torch",
    "deepspeed",
    "transformers",
    "diffusers",
    "numpy",
    "triton",
    "nvidia-cudnn-cu13",
    "nvidia-nccl-cu13",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out", type=Path, default=Path("gpu.json"), help="file of the results (gpu.json)"
    )
    parser.add_argument("--parts", help="which ones, with commas between; all if not given")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help="for all parts together (12.5)"
    )
    parser.add_argument("--part", help=argparse.SUPPRESS)  # of the processes that this one starts
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        from benchmarks.gpu.parts import run_part
        from benchmarks.gpu.setting import Setting

        run_part(options.part, Setting(options.device, options.folder, options.out))
        return
    # through `finally`, where a part's processes are ended
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    known = list(LIMITS_S)
    chosen = options.parts.split(",") if options.parts else known
    if unknown := set(chosen) - set(known):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    results = measure(
        [name for name in known if name in chosen], options.device, options.out, options.minutes
    )
    failed = [name for name, found in results["parts"].items() if "error" in found]
    print(
        f"{options.out}: {len(results['parts']) - len(failed)} parts measured"
        + (f", failed: {', '.join(failed)}" if failed else "")
    )
    for aim in results["aims"]:
        said = {None: "not measured", True: "reached", False: "not reached"}[aim["reached"]]
        print(f"{aim['part']}: {aim['figure']} {aim['aim']}, {said}: {aim['measured']}")
    for line in results["parts"].get("curve", {}).get("figures", {}).get("proposed", []):
        print(line)
    sys.exit(bool(failed))


def measure(parts: list[str], device: str, out: Path, minutes: float = MINUTES) -> Figures:
    """Run the parts one after the other, and write what they found after each."""
    deadline, scale = time.monotonic() + 60.0 * minutes, 1.0 if device == "cuda" else ON_A_CPU
    results: Figures = {
        "command": " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": _host(device),
        "parts": {},
        "aims": [],
    }
    # a place that cannot be written is known before all else
    write_whole(out, json.dumps(results, indent=1) + "\n")
    for place, name in enumerate(parts):
        own_s, later_s = (
            scale * sum(LIMITS_S[one] for one in some) for some in ([name], parts[place + 1 :])
        )
        left_s = deadline - time.monotonic()
        limit_s = min(max(own_s, left_s - later_s), left_s)
        results["parts"][name] = (
            _run(name, device, limit_s) if limit_s > 1.0 else {"error": "no time was left"}
        )
        results["aims"] = aims(results["parts"]) if device == "cuda" else []
        write_whole(out, json.dumps(results, indent=1) + "\n")
        found = results["parts"][name]
        print(
            f"{name}: {found.get('seconds', 0.0):.1f} s"
            f" {found.get('error', 'ok').splitlines()[-1]}",
            flush=True,
        )
    return results


def _run(name: str, device: str, limit_s: float) -> Figures:
    """One part as a process; what it had told before it failed or was ended is kept."""
    with tempfile.TemporaryDirectory(prefix=f"gpu-{name}-", ignore_cleanup_errors=True) as place:
        folder, said = Path(place), Path(place) / "said"
        (folder / "work").mkdir()
        own = folder / "figures.json"
        words = [
            "--part",
            name,
            "--device",
            device,
            "--out",
            str(own),
            "--folder",
            str(folder / "work"),
        ]
        start, ended = time.monotonic(), ""
        with said.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu", *words],
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment(),
            )
            try:
                code = process.wait(limit_s)
                ended = f"exit code {code}" if code else ""
            except subprocess.TimeoutExpired:
                ended = f"not finished after {limit_s:.0f} s"
            finally:
                _end(process)
        found: Figures = {
            "seconds": time.monotonic() - start,
            "figures": json.loads(own.read_text()) if own.exists() else {},
        }
        if ended:
            text = said.read_text(errors="replace")
            found |= {
                "error": f"{ended}: {(text.strip().splitlines() or [''])[-1][:400]}",
                "output": text[-TAIL:],
            }
        return found


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the part and whatever it started, which shares its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _host(device: str) -> Figures:
    """Machine and versions; asked of another process, so that this one holds no memory of the
    device."""
    host: Figures = {"python": platform.python_version(), "cores": os.cpu_count(), "versions": {}}
    for library in LIBRARIES:
        try:
            host["versions"][library] = version(library)
        except PackageNotFoundError:
            continue
    program = (
        "import json, torch; p = torch.cuda.get_device_properties(0); print(json.dumps({'device':"
        " p.name, 'capability': [p.major, p.minor], 'memory_gib': p.total_memory / 2**30, 'cuda':"
        " torch.version.cuda, 'cudnn': torch.backends.cudnn.version(), 'nccl':"
        " torch.cuda.nccl.version(), 'processors': p.multi_processor_count}))"
    )
    return host | (
        _answer([sys.executable, "-c", program]) | _driver()
        if device == "cuda"
        else {"device": "cpu"}
    )


def _answer(words: list[str]) -> dict[str, Any]:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=HOST_S)
        return dict(json.loads(done.stdout))
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {HOST_S:.0f} s"}
    except ValueError:
        return {"error": (done.stderr.strip().splitlines() or ["no answer"])[-1]}


def _driver() -> dict[str, Any]:
    try:
        done = subprocess.run(
            [
                "nvidia-smi",
                "--query-gpu=driver_version,clocks.max.sm,power.limit",
                "--format=csv,noheader",
            ],
            capture_output=True,
            text=True,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return {"driver": done.stdout.strip()}


if __name__ == "__main__":
    main()

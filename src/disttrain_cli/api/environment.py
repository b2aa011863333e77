"""State of this machine and Python environment, and missing requirements."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple

from disttrain_cli import __version__
from disttrain_cli.spec.extras import EXTRAS, install_command

ASK_TORCH = """
import json, torch, torch.distributed as dist
gpus = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
nccl = dist.is_nccl_available() and torch.version.cuda and torch.cuda.nccl.version()
print(json.dumps({
    "cuda": torch.version.cuda,
    "nccl": ".".join(map(str, nccl)) if nccl else None,
    "gloo": dist.is_gloo_available(),
    "devices": [[gpu.name, round(gpu.total_memory / 2**30, 1)] for gpu in gpus],
}))
"""
TORCH_S = 120.0  # to import torch on a cold disk
LEAST_SHM_GIB = 1.0  # NCCL's buffers between GPUs of one host; containers often have 64 MiB
LEAST_FILES = 4096  # sockets and shards of a rank with its reading processes

State = Literal["ok", "advice", "problem"]


class Finding(NamedTuple):
    """One line of the report."""

    what: str
    found: str
    state: State = "ok"
    advice: str = ""


@dataclass(frozen=True)
class Environment:
    """Versions, devices, compilers and limits, and what the extras add."""

    version: str
    findings: list[Finding]
    extras: dict[str, dict[str, Any]]
    torch: dict[str, Any]

    @property
    def problems(self) -> list[Finding]:
        """Findings without which no run works."""
        return [one for one in self.findings if one.state == "problem"]


def examine() -> Environment:
    """Query torch, the installed packages and the system."""
    torch = _torch()
    findings = [*_packages(), *_devices(torch), *_machine()]
    extras = {
        name: {
            "installed": extra.installed,
            "gives": extra.gives,
            "install": install_command(name),
        }
        for name, extra in EXTRAS.items()
    }
    return Environment(__version__, findings, extras, torch)


def _torch() -> dict[str, Any]:
    """Return the output of `ASK_TORCH` in a separate process, or {"error": …}."""
    try:
        answer = subprocess.run(
            [sys.executable, "-c", ASK_TORCH], capture_output=True, text=True, timeout=TORCH_S
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {TORCH_S:.0f} s"}
    if answer.returncode:
        return {"error": (answer.stderr.strip().splitlines() or ["it ended"])[-1]}
    try:  # other imported packages may print, too
        return dict(json.loads(answer.stdout.splitlines()[-1]))
    except (LookupError, ValueError):
        return {"error": f"no answer but {answer.stdout[-200:]!r}"}


def _packages() -> Iterator[Finding]:
    """Yield findings on Python, and on every package that `pyproject.toml` requires."""
    from importlib.metadata import PackageNotFoundError, requires, version  # 20 ms

    from packaging.requirements import Requirement

    yield Finding("python", platform.python_version())
    for line in requires("disttrain") or []:
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        advice = f"python -m pip install '{wanted.name}{wanted.specifier}'"
        try:
            found = version(wanted.name)
        except PackageNotFoundError:
            yield Finding(wanted.name, "not installed", "problem", advice)
            continue
        fits = wanted.specifier.contains(found, prereleases=True)
        needed = "" if fits else f", needed: {wanted.specifier}"
        yield Finding(wanted.name, found + needed, "ok" if fits else "problem", advice)


def _devices(torch: dict[str, Any]) -> Iterator[Finding]:
    if "error" in torch:
        advice = "torch cannot be imported; install it again in a separate environment"
        yield Finding("torch", torch["error"], "problem", advice)
        return
    seen, there = torch["devices"], cuda_devices()
    names = ", ".join(f"{name} {gib:g} GiB" for name, gib in seen) or "none"
    hidden = there and not seen
    advice = f"the driver shows {there}, torch none: install torch's build for the driver's CUDA"
    yield Finding("GPUs", names, "problem" if hidden else "ok", advice)
    yield Finding("CUDA of torch", torch["cuda"] or "CPU build")
    missing = bool(seen) and not torch["nccl"]
    advice = "ranks on GPUs need a torch that is built with NCCL"
    yield Finding("NCCL", torch["nccl"] or "none", "problem" if missing else "ok", advice)
    if not torch["gloo"]:
        yield Finding("gloo", "none", "problem", "ranks on a CPU need a torch built with gloo")


def _machine() -> Iterator[Finding]:
    pages = Path(sys.prefix) / "share" / "disttrain" / "docs"
    yield Finding("documentation", str(pages) if pages.is_dir() else "docs/ of the repository")
    yield Finding("cores", str(len(os.sched_getaffinity(0))))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield Finding("memory", f"{memory / 2**30:.1f} GiB")
    compilers = [name for name in ("g++", "c++", "clang++") if shutil.which(name)]
    yield Finding(
        "C++ compiler",
        ", ".join(compilers) or "none",
        "ok" if compilers else "advice",
        "train --dry-run --device cuda, and Triton on GPUs, need one: install g++",
    )
    yield Finding("nvcc", shutil.which("nvcc") or "none")
    shared = shutil.disk_usage("/dev/shm").total / 2**30 if os.path.isdir("/dev/shm") else 0.0
    yield Finding(
        "shared memory",
        f"{shared:.2f} GiB in /dev/shm",
        "ok" if shared >= LEAST_SHM_GIB else "advice",
        f"NCCL wants {LEAST_SHM_GIB:g} GiB: docker run --shm-size 8g, or a larger /dev/shm",
    )
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield Finding(
        "open files",
        f"{files:,} (at most {'any' if most == resource.RLIM_INFINITY else f'{most:,}'})",
        "ok" if files == resource.RLIM_INFINITY or files >= LEAST_FILES else "advice",
        "many ranks and shards need more: ulimit -n 65536",
    )
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = locked == resource.RLIM_INFINITY
    fast_network = os.path.isdir("/dev/infiniband")
    yield Finding(
        "locked memory",
        "any" if unlimited else f"{locked / 2**20:,.0f} MiB",
        "advice" if fast_network and not unlimited else "ok",
        "InfiniBand and EFA need ulimit -l unlimited (containers: IPC_LOCK)",
    )


def cuda_devices() -> int:
    """Return the number of GPUs that the driver shows, without loading torch; 0 without a driver.

    As in CUDA, CUDA_VISIBLE_DEVICES ends at the first entry that names no device.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        answer = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    devices = sum(line.startswith("GPU ") for line in answer.splitlines())
    if visible is None:
        return devices
    names = [name.strip() for name in visible.split(",")]
    there = [*map(str, range(devices))]
    known = takewhile(lambda name: name in there or name.startswith(("GPU-", "MIG-")), names)
    return len({*known})

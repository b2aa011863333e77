"""Library for fake tensors on CUDA devices in PyTorch's CPU build, compiled and preloaded."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from functools import partial
from importlib.resources import files
from pathlib import Path

from disttrain_cli.calls import call
from disttrain_cli.errors import DisttrainError
from disttrain_cli.spec.user_cache import cache_folder

COMPILERS = ("c++", "g++", "clang++")
#: Limits of the compiler, which takes seconds of a core: CPU time of each of its processes, and
#: wall time, which a busy machine stretches.
_CPU_S, _WALL_S = 300, 3600
SPENT = "CPU time limit exceeded"  # in the errors of g++


def environment() -> dict[str, str]:
    """Return environment variables for a new Python process in which `device.pretend` works.

    The library is compiled once per version of torch, in a few seconds, and stored in the user's
    cache folder.

    Raises:
        DisttrainError: torch is built with CUDA, no C++ compiler can build against it, the cache
            cannot be written, or the cached library cannot be loaded.
    """
    torch = _torch_folder()
    library = _library(torch)
    folders = [
        str(library.parent),
        str(torch / "lib"),
        *filter(None, [os.environ.get("LD_LIBRARY_PATH")]),
    ]
    variables = {
        "LD_PRELOAD": library.name,  # a name, as LD_PRELOAD would split a path at spaces
        "LD_LIBRARY_PATH": os.pathsep.join(folders),
    }
    _try_out(library, variables)
    return variables


def _try_out(library: Path, variables: dict[str, str]) -> None:
    """Start a process with the library, as the loader only warns of one that it cannot use."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", "print(open('/proc/self/maps').read())"],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=_WALL_S,
    )
    if library.name not in done.stdout:
        raise DisttrainError(
            "The library of fake CUDA devices cannot be loaded",
            next(iter(done.stderr.splitlines()), f"exit code {done.returncode}"),
            f"Remove it, so that it is compiled again: {shlex.join(['rm', str(library)])}\n"
            "Or name another folder in XDG_CACHE_HOME, without a colon in its path.",
        )


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent
    if (folder / "lib" / "libtorch_cuda.so").exists():
        raise DisttrainError(
            "Fake CUDA devices want PyTorch's CPU build",
            f"installed: {folder}, built with CUDA",
            "Run it where the CPU build is installed (pip install torch --index-url "
            "https://download.pytorch.org/whl/cpu, in an environment of its own).",
        )
    return folder


def _library(torch: Path) -> Path:
    source = (files("disttrain_cli.runtime.dryrun") / "fake_cuda.cpp").read_text()
    name = hashlib.sha256(
        f"{torch}\n{importlib.metadata.version('torch')}\n{source}".encode()
    ).hexdigest()[:16]
    try:
        cache = cache_folder()
    except RuntimeError as error:  # HOME is not set, and the user has no passwd entry
        raise DisttrainError(
            "There is no home folder to keep a library in",
            str(error),
            "Name a folder in XDG_CACHE_HOME.",
        ) from None
    library = cache / f"fake_cuda-{name}.so"
    if not library.exists():
        try:
            _compile(source, torch, library)
        except OSError as error:
            raise DisttrainError(
                f"Cannot write into {cache}",
                error.strerror or str(error),
                "Name another folder in XDG_CACHE_HOME.",
            ) from None
    return library


def _compile(source: str, torch: Path, library: Path) -> None:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise DisttrainError(
            "There is no C++ compiler",
            f"looked for {', '.join(COMPILERS)}",
            f"Install one (Debian: apt-get install g++), or show the ranks alone:"
            f" {call('dry_run')}",
        )
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        text, made = Path(folder, "fake_cuda.cpp"), Path(folder, "fake_cuda.so")
        text.write_text(source)
        done = _run(
            [
                compiler,
                "-O0",
                "-std=c++20",
                "-shared",
                "-fPIC",
                f"-I{torch / 'include'}",
                str(text),
                "-o",
                str(made),
                f"-L{torch / 'lib'}",
                "-lc10",
                "-ltorch_cpu",
            ]
        )
        if done.returncode:
            raise DisttrainError(
                f"{compiler} could not compile for torch {importlib.metadata.version('torch')}",
                "\n".join(done.stderr.splitlines()[:4]) or f"exit code {done.returncode}",
                "It takes a compiler with C++20: g++ 11 or clang 14.",
            )
        made.replace(library)


def _run(words: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a compiler; raises DisttrainError if it cannot be started, or loops or hangs."""
    hard_s = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft_s, most_s = _CPU_S, _CPU_S + 5
    if hard_s != resource.RLIM_INFINITY:  # a limit of the user's, which can only be lowered
        soft_s, most_s = min(soft_s, hard_s), min(most_s, hard_s)
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=_WALL_S,
            # the signal of the soft limit tells a driver why the compiler proper ended
            preexec_fn=partial(resource.setrlimit, resource.RLIMIT_CPU, (soft_s, most_s)),
            env=os.environ | {"LC_ALL": "C"},  # `SPENT` is English
        )
        if done.returncode != -signal.SIGXCPU and SPENT not in done.stderr:
            return done
        what, why = f"{words[0]} did not end", f"it was given {soft_s} s of CPU time"
    except OSError as error:
        what, why = f"{words[0]} cannot be started", error.strerror or str(error)
    except subprocess.TimeoutExpired:
        load = f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
        what = f"{words[0]} did not end"
        why = f"it was given {_WALL_S} s; load of this machine: {load}"
    raise DisttrainError(what, why, "Repair it, or put another compiler first in PATH.")

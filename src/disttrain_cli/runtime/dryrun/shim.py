"""The library that lets fake tensors live on CUDA devices in PyTorch's CPU build, compiled here and preloaded."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import tempfile
from importlib.resources import files
from pathlib import Path

from disttrain_cli.errors import DisttrainError

COMPILERS = ("c++", "g++", "clang++")
_LONGEST_S = 300


def environment() -> dict[str, str]:
    """Variables for a new Python process, in which `device.pretend` then finds CUDA devices.

    The library is compiled once per version of torch, in a few seconds, and kept in the user's cache.

    Raises:
        DisttrainError: torch has CUDA of its own, no C++ compiler can build against it, or the cache cannot be written.
    """
    torch = _torch_folder()
    return {"LD_PRELOAD": str(_library(torch)), "LD_LIBRARY_PATH": os.pathsep.join(
        [str(torch / "lib"), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])}


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent
    if (folder / "lib" / "libtorch_cuda.so").exists():
        raise DisttrainError("Fake CUDA devices want PyTorch's CPU build", f"installed: {folder}, built with CUDA",
                             "Run it where the CPU build is installed (pip install torch --index-url "
                             "https://download.pytorch.org/whl/cpu, in an environment of its own).")
    return folder


def _library(torch: Path) -> Path:
    source = (files("disttrain_cli.runtime.dryrun") / "fake_cuda.cpp").read_text()
    name = hashlib.sha256(f"{torch}\n{importlib.metadata.version('torch')}\n{source}".encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "disttrain"
    library = cache / f"fake_cuda-{name}.so"
    if not library.exists():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            _compile(source, torch, library)
        except OSError as error:
            raise DisttrainError(f"Cannot write into {cache}", error.strerror or str(error),
                                 "Name another folder in XDG_CACHE_HOME.") from None
    return library


def _compile(source: str, torch: Path, library: Path) -> None:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise DisttrainError("There is no C++ compiler", f"looked for {', '.join(COMPILERS)}",
                             "Install one (Debian: apt-get install g++), or leave out --device cuda.")
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        text, made = Path(folder, "fake_cuda.cpp"), Path(folder, "fake_cuda.so")
        text.write_text(source)
        done = subprocess.run([compiler, "-O0", "-std=c++20", "-shared", "-fPIC", f"-I{torch / 'include'}", str(text),
                               "-o", str(made), f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu"],
                              capture_output=True, text=True, timeout=_LONGEST_S)
        if done.returncode:
            raise DisttrainError(f"{compiler} could not compile for torch {importlib.metadata.version('torch')}",
                                 "\n".join(done.stderr.splitlines()[:4]),
                                 "It takes a compiler with C++20: g++ 11 or clang 14.")
        made.replace(library)

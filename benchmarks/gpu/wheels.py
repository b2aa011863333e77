"""What `benchmarks.gpu` needs beyond torch, for a machine with Python 3.12 and torch but no
network: small archives.

    python -m benchmarks.gpu.wheels --out DIR         # core.tar.xz, analysis.tar.xz,
    pictures.tar.xz tar -xJf core.tar.xz -C site && PYTHONPATH=src:site python -m benchmarks.gpu  #
    there

The wheels of constraints.txt are unpacked into one folder, without what nothing here imports, and
packed as a whole: a third smaller than the wheels. Each archive is at most 60 MiB. `core` serves
all parts, the chain on texts alone and without a verdict; `analysis` (duckdb) adds the verdict,
`pictures` (OpenCV, scikit-learn) the pictures. DeepSpeed has no wheel: one is built, without its
operators. Run it in an environment with disttrain, torch and pip.
"""

from __future__ import annotations

import argparse
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PYTHON = "3.12"
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
    "manylinux_2_12_x86_64",
    "manylinux2010_x86_64",
    "manylinux1_x86_64",
)
THERE = {
    "python_version": PYTHON,
    "python_full_version": f"{PYTHON}.0",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "os_name": "posix",
}
LIMIT_MIB = 60.0
#: xz with its filter for x86 machine code: libraries become 15 % smaller than without.
FILTERS = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 26}]
#: Archives besides `core`, and the packages in them.
BESIDE = {
    "analysis": ("duckdb",),
    "pictures": (
        "opencv-python-headless",
        "simplejpeg",
        "scikit-learn",
        "joblib",
        "threadpoolctl",
        "narwhals",
    ),
}
#: Parts of scipy that only scikit-learn imports; they go with it, and so do scipy's metadata:
#: where diffusers finds those, it imports scipy.stats.
WITH_PICTURES = (
    "scipy-*.dist-info",
    "scipy/cluster",
    "scipy/integrate",
    "scipy/interpolate",
    "scipy/io",
    "scipy/ndimage",
    "scipy/signal",
    "scipy/stats",
)
#: Asked for, but imported by nothing that runs here: it only fetches from hubs.
LEFT_OUT = ("hf-xet",)
#: Parts of packages that nothing here imports: tests, headers, sources, other stores, formats and
#: servers of Arrow.
TRIMMED = (
    "**/tests",
    "**/*.pyi",
    "**/*.pyx",
    "**/*.pxi",
    "**/*.pxd",
    "**/*.h",
    "**/*.hpp",
    "**/*.a",
    "pyarrow/include",
    "pyarrow/src",
    "pyarrow/*flight*",
    "pyarrow/*_s3*",
    "pyarrow/*gcs*",
    "pyarrow/libarrow_python.so",
    "pyarrow/libarrow_python.so.*.*.*",
    "PIL/_avif*",
    "pillow.libs/libavif*",
    "deepspeed/ops/csrc",
    "transformers/models/*/modular_*.py",
    "transformers/models/*/convert_*.py",
)


def needed() -> list[str]:
    """Names of all packages that disttrain, its demo and its tests need, but torch and what torch
    alone needs.

    What both need is among them: with torch there may be a version of it that is too old for the
    others.
    """
    return sorted(
        _closure(["disttrain[demo]", "pytest", "hypothesis"], {"torch"}) - {"disttrain", *LEFT_OUT}
    )


def _closure(roots: Iterable[str], without: set[str]) -> set[str]:
    left, seen = [Requirement(root) for root in roots], dict[str, set[str]]()
    while left:
        wanted = left.pop()
        name, extras = canonicalize_name(wanted.name), {"", *wanted.extras}
        if name in without or extras <= seen.get(name, set()):
            continue
        seen[name] = seen.get(name, set()) | extras
        try:
            more = [Requirement(line) for line in requires(name) or []]
        except PackageNotFoundError:  # an extra of another platform
            del seen[name]
            continue
        left += [
            one
            for one in more
            if one.marker is None
            or any(one.marker.evaluate({**THERE, "extra": extra}) for extra in extras)
        ]
    return set(seen)


def gather(names: Iterable[str], folder: Path) -> list[Path]:
    """Download the wheels of these packages, in the versions of constraints.txt; build
    DeepSpeed's."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {canonicalize_name(line.split("==")[0]): line for line in lines if "==" in line}
    wanted = [pins[name] for name in names]
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    for choice in (
        [
            *pip,
            "download",
            "--no-deps",
            "--only-binary=:all:",
            "--python-version",
            PYTHON,
            "--implementation",
            "cp",
            *(f"--platform={one}" for one in PLATFORMS),
            "--dest",
            str(folder),
            *(one for one in wanted if not one.startswith("deepspeed")),
        ],
        [
            *pip,
            "wheel",
            "--no-deps",
            "--no-build-isolation",
            "--wheel-dir",
            str(folder),
            *(one for one in wanted if one.startswith("deepspeed")),
        ],
    ):
        if any("==" in word for word in choice):
            subprocess.run(
                choice, check=True, env={**os.environ, "DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
            )
    return sorted(folder.glob("*.whl"))


def unpack(wheel: Path, folder: Path) -> None:
    """Lay a wheel's packages in a folder, as pip would."""
    with zipfile.ZipFile(wheel) as whole:
        whole.extractall(folder)
    for data in folder.glob("*.data"):
        for kind in ("purelib", "platlib"):
            if (data / kind).is_dir():
                shutil.copytree(data / kind, folder, dirs_exist_ok=True)
        shutil.rmtree(data)


def trim(folder: Path) -> None:
    """Remove what nothing here imports."""
    for pattern in TRIMMED:
        for path in list(folder.glob(pattern)):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def lay_out(wheels: Iterable[Path], place: Path) -> None:
    """Unpack every wheel into the folder of its archive."""
    archive_of = {package: name for name, packages in BESIDE.items() for package in packages}
    for wheel in wheels:
        unpack(wheel, place / archive_of.get(canonicalize_name(wheel.name.split("-")[0]), "core"))
    (place / "pictures" / "scipy").mkdir(parents=True, exist_ok=True)
    for pattern in WITH_PICTURES:
        for path in list((place / "core").glob(pattern)):
            path.rename(place / "pictures" / path.relative_to(place / "core"))
    for name in (*BESIDE, "core"):
        trim(place / name)


def pack(folder: Path, archive: Path) -> float:
    """Pack all that lies in the folder; returns MiB."""
    with (
        lzma.open(archive, "w", filters=FILTERS) as whole,
        tarfile.open(fileobj=whole, mode="w") as packed,
    ):
        for path in sorted(folder.iterdir()):
            packed.add(path, path.name)
    return archive.stat().st_size / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the archives")
    parser.add_argument(
        "--keep", type=Path, help="keep the wheels in this folder, and take those that are there"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        folder = options.keep or Path(place) / "wheels"
        folder.mkdir(parents=True, exist_ok=True)
        wheels = gather(needed(), folder)
        print(
            f"{len(wheels)} wheels, {sum(path.stat().st_size for path in wheels) / 2**20:.0f} MiB",
            flush=True,
        )
        lay_out(wheels, Path(place))
        too_large = False
        for name in (*BESIDE, "core"):
            size = pack(Path(place) / name, options.out / f"{name}.tar.xz")
            too_large |= size > LIMIT_MIB
            print(
                f"{options.out / name}.tar.xz: {size:.1f} MiB (at most {LIMIT_MIB:.0f})", flush=True
            )
    sys.exit(too_large)


if __name__ == "__main__":
    main()

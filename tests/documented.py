"""Commands that pages print, as they stand there, and a wheel to run them from."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "docs" / "tour.md", *sorted(ROOT.glob("docs/howto/*.md"))]
BLOCK = re.compile(r"^```(\S*)\n(.*?)^```$|^((?: {4}\S.*\n)+)", re.MULTILINE | re.DOTALL)
#: First words of commands in blocks that have no prompt.
COMMANDS = re.compile(r"(disttrain|python\S*|cd|\$EDITOR|\.) ")


def commands_of(page: Path) -> Iterator[str]:
    """Yield the commands in a page's blocks, in order; those joined by && one by one.

    In blocks of the languages text and console they follow a prompt; those of the language sh and
    indented ones have nothing else. A line with an arrow is a diagram.
    """
    for language, fenced, indented in BLOCK.findall(page.read_text(encoding="utf-8")):
        for line in (fenced or indented).splitlines():
            prompted = language in ("text", "console") and line.startswith("$ ")
            text = line.removeprefix("$ ") if prompted else line.strip()
            if prompted or (language in ("", "sh") and COMMANDS.match(text) and "→" not in text):
                yield from re.sub(r"\s+#.*", "", text).split(" && ")


def blocks_of(page: Path, language: str) -> list[str]:
    """Return the content of a page's fenced blocks in a language."""
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [fenced for named, fenced, _ in found if named == language]


def build_wheel(folder: Path) -> Path:
    """Build the wheel of this checkout below `folder`, without an index."""
    source, built = folder / "source", folder / "built"
    source.mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("src", "docs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("*.egg-info"))
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", build, built], cwd=source, check=True, capture_output=True
    )
    return next(built.glob("*.whl"))


def install_wheel(folder: Path) -> dict[str, str]:
    """Install the wheel into an environment below `folder`; return variables that activate it.

    Its dependencies are those of the environment that runs the tests; nothing is downloaded. An
    empty PYTHONPATH keeps this checkout out.
    """
    place = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    scripts = place / "bin"
    (site,) = place.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", scripts / "python", "install", "--quiet"]
    options = ["--no-deps", "--no-index", "--ignore-installed", "--disable-pip-version-check"]
    subprocess.run([*pip, *options, build_wheel(folder)], check=True)
    return {
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": "",
        "VIRTUAL_ENV": str(place),
        "OMP_NUM_THREADS": "1",
        "EDITOR": "true",
    }

"""The package as it ships: licence, version, constraints, templates, Makefile."""

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

import pytest

from disttrain_cli import __version__
from disttrain_cli.spec import extras
from tests import documented

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def names(requirements):
    return {
        re.split(r"[<>=!~\[ ;]", line, maxsplit=1)[0].lower().replace("_", "-")
        for line in requirements
    }


def pins():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_version_is_the_same_everywhere():
    assert PROJECT["version"] == __version__ == version("disttrain")
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_licence_is_apache_2():
    text = (ROOT / "LICENSE").read_text()
    assert (
        PROJECT["license"] == "Apache-2.0"
        and "Version 2.0, January 2004" in text
        and len(text) > 11000
    )


def test_every_dependency_is_pinned_exactly():
    wanted = names(PROJECT["dependencies"])
    for extra in PROJECT["optional-dependencies"].values():
        wanted |= names(extra)
    pinned = {name.lower().replace("_", "-") for name in pins()}
    assert wanted - pinned <= {"types-pyyaml"}


def test_constraints_suit_cuda_builds_too():
    assert pins()["torch"] == "2.13.0"  # no local version: +cpu would exclude every CUDA build
    assert not [name for name in pins() if name.lower().startswith(("nvidia", "triton", "cuda"))]


def test_the_oldest_torch_that_is_tested_is_the_oldest_that_serves():
    tested = re.search(r"^OLDEST_TORCH := (\S+)$", (ROOT / "Makefile").read_text(), re.M)
    assert tested and f"torch>={tested[1].removesuffix('.0')},<2.14" in PROJECT["dependencies"]


def test_data_files_are_part_of_the_package():
    package = files("disttrain_cli")
    assert (package / "templates" / "presets" / "tiny.yaml").is_file() and (
        package / "py.typed"
    ).is_file()


def test_the_makefile_has_the_promised_targets():
    text = (ROOT / "Makefile").read_text()
    targets = ("run", "test", "test-oldest", "test-all", "check", "docs")
    assert all(re.search(rf"^{target}:", text, re.M) for target in targets)


def test_extras_are_described_and_installed_by_what_is_published(monkeypatch):
    stated = PROJECT["optional-dependencies"]
    assert {name: [one.requirement] for name, one in extras.EXTRAS.items()} == {
        name: wanted for name, wanted in stated.items() if name != "dev"
    }
    for torch, ends in (
        ("2.13.0", "'torchvision==0.28.*'"),
        ("2.11.1", "'torchvision==0.26.*'"),
        ("2.12.0+cpu", "'torchvision==0.27.*' --index-url https://download.pytorch.org/whl/cpu"),
    ):
        monkeypatch.setattr("importlib.metadata.version", lambda name, torch=torch: torch)
        assert extras.install_command("generate") == f"python -m pip install {ends}"
    sources = [
        path.read_text() for path in (ROOT / "src").rglob("*.*") if path.suffix in (".py", ".yaml")
    ]
    assert not [text for text in sources if re.search(r"install[^\n]*disttrain\[", text)]


@pytest.mark.slow
def test_a_wheel_runs_and_holds_what_messages_name(tmp_path):
    """Built and unpacked without an index, it answers for itself from another folder."""
    with zipfile.ZipFile(documented.build_wheel(tmp_path)) as wheel:
        names = set(wheel.namelist())
        wheel.extractall(tmp_path / "there")
    shared = f"disttrain-{__version__}.data/data/share/disttrain/docs"
    for kind in ("*.md", "decisions/*.md", "examples/*.py", "howto/*.md", "schema/*.json"):
        for path in (ROOT / "docs").glob(kind):
            assert f"{shared}/{path.relative_to(ROOT / 'docs').as_posix()}" in names
    package = Path(files("disttrain_cli"))
    for path in package.rglob("*"):
        inside = path.relative_to(package.parent).as_posix()
        assert not path.is_file() or "__pycache__" in inside or inside in names, inside
    done = subprocess.run(
        [sys.executable, "-m", "disttrain_cli", "init", "run", "--preset", "tiny-llava", "--json"],
        cwd=tmp_path,
        env={
            "PYTHONPATH": str(tmp_path / "there"),
            "PATH": "/usr/bin:/bin",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and json.loads(done.stdout)["model"] == "run/model", done.stderr

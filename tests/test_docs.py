"""The documentation is complete and tells today's truth."""

import subprocess
import sys
from pathlib import Path

from disttrain_cli.app import command_names
from disttrain_cli.spec.runfile import RunFile

ROOT = Path(__file__).parent.parent


def test_generated_pages_are_up_to_date():
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "generate.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_every_command_and_option_is_documented():
    text = (ROOT / "docs" / "cli.md").read_text()
    for command in command_names():
        assert f"## `disttrain {command}`" in text
    for option in (
        "--sample-data",
        "--device",
        "--gpus",
        "--strategy",
        "--top",
        "--resume",
        "--dry-run",
        "--html",
        "--sql",
        "--compare",
        "--fail-if",
        "--processes",
        "--tls-cert",
        "--json",
        "--quiet",
    ):
        assert option in text


def test_every_section_of_the_run_file_is_documented():
    text = (ROOT / "docs" / "runfile.md").read_text()
    assert all(f"| `{name}` |" in text for name in RunFile.model_fields)


def test_relative_links_lead_somewhere():
    import re

    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page.name} links to {link}"

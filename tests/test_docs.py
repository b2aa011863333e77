"""The documentation is complete and tells today's truth."""

import re
import shlex
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import pytest
from typer.main import get_command

from disttrain_cli.app import command_line, command_names
from disttrain_cli.spec.runfile import RunFile
from tests.documented import PAGES, commands_of

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
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for link in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page.name} links to {link}"


HOWTO = sorted((ROOT / "docs" / "howto").glob("*.md"))


def test_every_howto_is_in_the_index():
    index = (ROOT / "docs" / "howto" / "README.md").read_text()
    assert all(f"]({page.name})" in index for page in HOWTO if page.name != "README.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_documented_commands_parse(page):
    for program, *words in map(shlex.split, commands_of(page)):
        if program == "disttrain":
            parse(takewhile(lambda word: word != ">", words))


def test_an_option_that_does_not_exist_fails_to_parse():
    with pytest.raises(Exception, match="--no-such-option"):
        parse(["plan", "--no-such-option"])


def parse(words):
    """Parse a command line without running it."""
    words = list(words)
    command = get_command(command_line())
    while hasattr(command, "commands"):
        command, words = command.commands[words[0]], words[1:]
    command.make_context(command.name, words)

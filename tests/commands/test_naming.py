"""Suggested commands repeat the paths that the user gave, whichever room suggests them."""

import inspect
import json
import re
import shutil
from pathlib import Path

import pytest

import disttrain_cli
from disttrain_cli.naming import with_named
from tests.analysis import synthetic
from tests.commands.calling import call

ELSEWHERE = Path("some where/demo.yaml")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("disttrain plan", "disttrain plan 'some where/demo.yaml'"),
        (
            "Profile and plan again: disttrain profile && disttrain plan",
            (
                "Profile and plan again: disttrain profile 'some where/demo.yaml' && disttrain plan"
                " 'some where/demo.yaml'"
            ),
        ),
        (
            "Start them, disttrain data serve, then: disttrain train --resume.",
            (
                "Start them, disttrain data serve 'some where/demo.yaml', then: disttrain train"
                " 'some where/demo.yaml' --resume."
            ),
        ),
        ("disttrain train --help", "disttrain train --help"),
        ("disttrain init DIR --preset tiny", "disttrain init DIR --preset tiny"),
        ("disttrain train other.yaml --resume", "disttrain train other.yaml --resume"),
        ("`disttrain train` checks it", "`disttrain train 'some where/demo.yaml'` checks it"),
    ],
)
def test_a_run_file_goes_into_every_command(text, expected):
    assert with_named(text, ELSEWHERE) == expected
    assert with_named(expected, ELSEWHERE) == expected  # once
    assert with_named(text, Path("disttrain.yaml")) == text == with_named(text)


def test_every_suggestion_in_the_program_can_be_named():
    """Whatever a room suggests: bare commands are followed by nothing that would hide them."""
    sources = [
        path.read_text(encoding="utf-8")
        for path in Path(inspect.getfile(disttrain_cli)).parent.rglob("*.py")
    ]
    quoted = re.compile(r'"[^"\n]*\bdisttrain (?:plan|train|profile)\b[^"\n]*"')
    lines = [line for text in sources for line in quoted.findall(text)]
    suggested = [line for line in lines if "--help" not in line]
    assert len(suggested) > 30
    unnamed = [
        line
        for line in suggested
        if str(ELSEWHERE) not in with_named(line.strip('"'), ELSEWHERE)
        and not line.endswith('train "')
    ]
    assert unnamed == []


def test_errors_of_every_command_name_the_users_run_file(run_folder, capsys, monkeypatch):
    monkeypatch.chdir(run_folder.parent)
    shutil.rmtree(run_folder / "runs")
    given = run_folder.name
    for command in ("plan", "train --resume", "data serve"):  # the profile or the plan is missing
        code, _, err = call([*command.split(), given], capsys)
        assert code == 1 and re.search(rf"disttrain (profile|plan) {given}\b", err), (command, err)


@pytest.mark.slow
def test_analyze_names_the_traces_and_the_run_file_beside_them(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = tmp_path / "my demo" / "runs" / "one"
    synthetic.write(run / "traces", synthetic.Synthetic(slow_rank={3: 1.6}))
    (tmp_path / "my demo" / "disttrain.yaml").touch()
    monkeypatch.chdir(tmp_path)
    given = "my demo/runs/one"
    _, out, err = call(["analyze", given, "--json", "--html", tmp_path / "page.html"], capsys)
    found = json.loads(out)
    commands = [
        found["verdict"]["next_command"],
        *(remedy["command"] for remedy in found["remedies"]),
    ]
    assert f"disttrain analyze '{given}' --sql" in commands[0] and len(commands) > 2
    assert all(
        f"'{given}'" in command or "'my demo/disttrain.yaml'" in command for command in commands
    )
    for command in commands:
        for part in command.split("&&"):
            assert "my demo" in part, command
    assert f"Next: {commands[0]}" in err
    page = (tmp_path / "page.html").read_text()
    assert (
        "disttrain analyze &#x27;my demo/runs/one&#x27; --sql" in page
        and "disttrain analyze --sql" not in page
    )
    monkeypatch.chdir(tmp_path / "my demo")
    _, out, _ = call(["analyze", "runs/one", "--json"], capsys)
    assert "disttrain.yaml" not in "".join(
        remedy["command"] for remedy in json.loads(out)["remedies"]
    )
    shutil.rmtree(run / "traces")
    monkeypatch.chdir(tmp_path)
    (run / "traces").mkdir()
    code, _, err = call(["analyze", given], capsys)
    assert code == 1 and "disttrain train 'my demo/disttrain.yaml'" in err

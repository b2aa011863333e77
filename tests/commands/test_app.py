"""The command line as a whole: help, exit codes, and errors as people and programs see them."""

import errno
import json
import os
import subprocess
import sys

import pytest

from disttrain_cli import __version__
from disttrain_cli.api.starting import MODELINE
from disttrain_cli.app import command_names
from disttrain_cli.commands import plan as plan_command
from disttrain_cli.errors import (
    ConditionHoldsError,
    DataError,
    DisttrainError,
    InfeasibleError,
    MismatchError,
    RankFailedError,
    SpecError,
    UsageError,
)
from tests.cases import first_fast
from tests.commands.calling import call

COMMANDS = [name for name in command_names() if name != "data"]  # a group, whose commands are there


def test_the_commands_are_the_promised_ones():
    assert COMMANDS == [
        "init",
        "profile",
        "plan",
        "train",
        "analyze",
        "watch",
        "sample",
        "export",
        "doctor",
        "models",
        "schema",
        "data serve",
        "data index",
        "data check",
        "data latents",
        "data order",
    ]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_explains_every_option_and_gives_examples(name, capsys):
    code, out, err = call([*name.split(), "--help"], capsys)
    assert code == 0 and err == ""
    assert "Examples:" in out and out.count(f"$ disttrain {name}") >= 2
    assert "--json" in out and "--quiet" in out


def test_bare_call_shows_the_commands(capsys):
    code, out, _ = call([], capsys)
    assert (
        code == 0 and all(name.split()[0] in out for name in COMMANDS) and "$ disttrain init" in out
    )


def test_version(capsys):
    assert call(["--version"], capsys) == (0, f"disttrain {__version__}\n", "")


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (["plon"], "plon"),
        (["plan", "--gpu-count", "3"], "--gpu-count"),
        (["plan", "--gpus", "many"], "--gpus"),
        (["plan", "--gpus", "0"], "--gpus"),
        (["plan", "a.yaml", "b.yaml"], "b.yaml"),
        (["init"], "DIR"),
        (["profile", "--device", "tpu"], "tpu"),
        (["init", "x", "--preset", "huge"], "huge"),
    ],
)
def test_wrong_usage_is_exit_2_and_names_what_was_given(words, given, capsys):
    code, out, err = call(words, capsys)
    assert code == 2 and out == "" and given in err and "Next: disttrain" in err
    code, out, err = call([*words, "--json"], capsys)
    error = json.loads(out)["error"]
    assert code == 2 and err == "" and error["exit_code"] == 2 and given in error["what"]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (DisttrainError, 1),
        (UsageError, 2),
        (SpecError, 1),
        (MismatchError, 1),
        (DataError, 1),
        (InfeasibleError, 3),
        (RankFailedError, 4),
        (ConditionHoldsError, 5),
    ],
)
def test_every_error_has_its_exit_code(kind, expected, capsys, monkeypatch):
    raise_in_plan(monkeypatch, kind("It broke", "because", "disttrain fix"))
    code, out, err = call(["plan"], capsys)
    assert (code, out, err) == (expected, "", "Error: It broke\n  because\nNext: disttrain fix\n")


def test_anything_else_is_called_a_bug_and_hides_the_traceback(capsys, monkeypatch):
    raise_in_plan(monkeypatch, KeyError("missing"))
    monkeypatch.delenv("DISTTRAIN_DEBUG", raising=False)
    code, out, err = call(["plan"], capsys)
    assert (
        code == 1
        and out == ""
        and "bug in disttrain" in err
        and "KeyError" in err
        and "Traceback" not in err
    )
    monkeypatch.setenv("DISTTRAIN_DEBUG", "1")
    code, out, err = call(["plan", "--json"], capsys)
    assert code == 1 and "Traceback" in err and json.loads(out)["error"]["exit_code"] == 1


def test_interrupt_is_130(capsys, monkeypatch):
    raise_in_plan(monkeypatch, KeyboardInterrupt())
    code, _, err = call(["plan"], capsys)
    assert code == 130 and "Interrupted" in err and "Traceback" not in err
    error = json.loads(call(["plan", "--json"], capsys)[1])["error"]
    assert error["exit_code"] == 130 and error["why"] == "Ctrl-C (SIGINT)"


def test_a_full_disk_is_not_a_bug(capsys, monkeypatch):
    raise_in_plan(monkeypatch, OSError(errno.ENOSPC, "No space left on device", "/data/x"))
    code, _, err = call(["plan"], capsys)
    assert code == 1 and "/data/x" in err and "No space left" in err and "bug" not in err


def run_module(words, **options):
    return subprocess.run(
        [sys.executable, "-m", "disttrain_cli", *words],
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        **options,
    )


@pytest.mark.parametrize("words", [["plan", "nowhere.yaml", "--json"], ["--version"]])
def test_a_full_disk_under_the_output_is_said_without_a_traceback(words):
    with open("/dev/full", "w") as full:
        done = run_module(words, stdout=full)
    assert done.returncode == 1 and "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr


@pytest.mark.slow
def test_letters_that_stdout_lacks_are_no_bug(tmp_path):
    (tmp_path / "Übung.yaml").write_text("name: [1")
    plain = os.environ | {"PYTHONIOENCODING": "ascii"}
    for words in (
        ["plan", str(tmp_path / "Übung.yaml")],
        ["plan", os.fsdecode(b"no\xfftext.yaml")],
    ):
        shown = run_module(words, stdout=subprocess.PIPE, env=plain)
        assert shown.returncode == 1 and "bug" not in shown.stderr and "yaml" in shown.stderr
        document = run_module([*words, "--json"], stdout=subprocess.PIPE, env=plain)
        assert words[1] in json.dumps(json.loads(document.stdout), ensure_ascii=False)


@pytest.mark.parametrize("json_mode", [False, True])
@pytest.mark.parametrize(
    ("command", "event", "code", "what"),
    [
        ("plan", "raise KeyboardInterrupt", 130, "Interrupted"),
        ("train", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)", 143, "Terminated"),
    ],
)
def test_a_signal_while_the_program_is_loaded_is_reported(
    tmp_path, command, event, code, what, json_mode
):
    (tmp_path / "typer.py").write_text(f"{event}\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    words = [command, *["--json"] * json_mode]
    done = run_module(words, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == code and "Traceback" not in done.stderr
    assert what in (json.loads(done.stdout)["error"]["what"] if json_mode else done.stderr)


def raise_in_plan(monkeypatch, error):
    """Make `disttrain plan` raise `error` as soon as it starts."""

    def fail(**flags):
        raise error

    monkeypatch.setattr(plan_command, "Console", fail)


def test_help_loads_nothing_heavy():
    heavy = {
        "torch",
        "transformers",
        "diffusers",
        "deepspeed",
        "duckdb",
        "pyarrow",
        "cv2",
        "scipy",
        "sklearn",
        "numpy",
    }
    code = (
        "import sys\nfrom disttrain_cli.app import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        f"print('LOADED', sorted({heavy} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "LOADED []"


def test_console_script_and_module_are_the_same():
    script = os.path.join(os.path.dirname(sys.executable), "disttrain")
    for words in ([script, "--version"], [sys.executable, "-m", "disttrain_cli", "--version"]):
        assert (
            subprocess.run(words, capture_output=True, text=True, check=True).stdout
            == f"disttrain {__version__}\n"
        )


@pytest.mark.parametrize("closed", first_fast(["<&-", ">&-", "2>&-", "<&- >&- 2>&-"], 2))
def test_closed_streams_are_no_bug(tmp_path, closed):
    """And what is written gets none of their numbers: a file must not take what is printed."""
    done = subprocess.run(
        [
            "bash",
            "-c",
            f'"$0" -m disttrain_cli init "$1" {closed}',
            sys.executable,
            str(tmp_path / "made"),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert (
        (tmp_path / "made" / "disttrain.yaml").read_text().startswith(MODELINE + "# The tiny demo")
    )

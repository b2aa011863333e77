"""Files that users name, which may be anything: bounded, never waited for without end, wrong fields
named by line."""

import os
import threading

import pytest

from disttrain_cli.errors import SpecError
from disttrain_cli.spec import files
from disttrain_cli.spec.files import parse_json, parse_yaml
from disttrain_cli.spec.plan import read_plan
from disttrain_cli.spec.runfile import read_run


@pytest.mark.parametrize("parse", [parse_yaml, parse_json])
def test_what_never_ends_is_refused(tmp_path, parse, monkeypatch):
    monkeypatch.setattr(files, "JSON_MIB", 2)
    (tmp_path / "endless").symlink_to("/dev/zero")
    with pytest.raises(SpecError, match="Cannot read the plan") as refused:
        parse(tmp_path / "endless", "plan", "Make one.")
    assert "MiB, more than any plan" in refused.value.why and refused.value.next_step == "Make one."


def test_a_pipe_is_read_to_its_end(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(
        target=lambda: pipe.write_text("a: 1\n" + "# " + "x" * 200_000 + "\nb: 2\n")
    )
    writer.start()
    assert parse_yaml(pipe, "plan", "") == {"a": 1, "b": 2}
    writer.join()


def test_a_pipe_that_nobody_writes_into_is_not_waited_for_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PIPE_WAIT_S", 0)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SpecError, match="Cannot read the plan") as refused:
        parse_yaml(tmp_path / "pipe", "plan", "")
    assert "nothing was written into this pipe" in refused.value.why


def test_wrong_fields_are_named_by_line_and_the_next_command_by_the_file(tmp_path):
    path = tmp_path / "disttrain.yaml"
    path.write_text(
        "\ufeffname: x\nmodel:\n  modules:\n    llm:\n      kind: lm\ndata: {}\ntrain: {steps: 0}\n"
    )
    with pytest.raises(SpecError) as refused:
        read_run(path)
    lines = refused.value.why.splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "  line 5",
        "  line 6",
        "  line 7",
        "  line 7",
    ]
    assert "model.modules.llm.kind" in lines[0] and "train.steps" in "".join(lines[2:])
    assert refused.value.next_step == f"Correct {path} and run the command again."
    path.write_text("plan:\n  units:\n  - {name: llm, tp: x}\n")
    with pytest.raises(SpecError, match="wrong field") as refused:
        read_plan(path)
    assert "line 3, plan.units.0.tp" in refused.value.why


def test_a_malformed_file_always_has_a_next_step():
    assert "docs/runfile.md" in SpecError("It is wrong").next_step
    assert SpecError("It is wrong", next_step="Mend it.").next_step == "Mend it."

"""Own data in three public forms, from `init --folder --data` to an export that answers, without
editing a file."""

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.data.dataset import encoded, write_tar
from tests.test_chain import disttrain, document
from tests.whole_models import write_llava

QUESTION, ANSWER = "What is this?", "A cat."  # the question is that of the line that export prints
PICTURES = [encoded(40 + number, 60, shade=4 * number) for number in range(60)]


def beside(folder: Path) -> list[str]:
    """Write the pictures and return their names."""
    folder.mkdir()
    for number, picture in enumerate(PICTURES):
        (folder / f"{number}.jpg").write_bytes(picture)
    return [f"{number}.jpg" for number in range(len(PICTURES))]


def jsonl(folder: Path) -> Path:
    lines = []
    for name in beside(folder):
        asked = [{"type": "image", "image": name}, {"type": "text", "text": QUESTION}]
        said = [{"type": "text", "text": ANSWER}]
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
        lines.append(json.dumps({"messages": turns}))
    (folder / "talks.jsonl").write_text("\n".join(lines))
    return folder / "talks.jsonl"


def turns() -> list[dict[str, str]]:
    return [
        {"from": "human", "value": f"<image>\n{QUESTION}"},
        {"from": "gpt", "value": ANSWER},
    ]


def sharegpt(folder: Path) -> Path:
    records = [{"image": name, "conversations": turns()} for name in beside(folder)]
    (folder / "talks.json").write_text(json.dumps(records))
    return folder / "talks.json"


def webdataset(folder: Path) -> Path:
    folder.mkdir()
    said = json.dumps({"conversations": turns()}).encode()
    members = [
        member
        for number, picture in enumerate(PICTURES)
        for member in ((f"{number:04d}.json", said), (f"{number:04d}.jpg", picture))
    ]
    write_tar(folder / "shard-000000.tar", members)
    return folder


@pytest.mark.benchmark
@pytest.mark.slow
@pytest.mark.parametrize("form", [jsonl, sharegpt, webdataset])
def test_own_data_to_an_export_that_answers(tmp_path: Path, form: Callable[[Path], Path]) -> None:
    write_llava(tmp_path / "model")
    data = form(tmp_path / "given")
    document(tmp_path, "init", "run", "--folder", "model", "--data", data)
    run = tmp_path / "run"
    trained = document(run, "train", "--set", "train.epochs=40")
    answers = {(one["prompt"], one["text"]) for one in trained["samples"]["answers"]}
    assert answers == {(QUESTION, ANSWER)}
    code, out, err = disttrain(run, "export", "--to", "out")
    assert code == 0, out + err
    printed = next(line for line in err.splitlines() if line.startswith("Next: "))
    (run / "IMAGE.jpg").write_bytes(PICTURES[3])
    words = shlex.split(printed.removeprefix("Next: "))
    assert words[0] == "python"
    done = subprocess.run([sys.executable, *words[1:]], cwd=run, capture_output=True, text=True)
    assert ANSWER in done.stdout, done.stdout + done.stderr

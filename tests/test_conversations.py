"""Conversations from profile to sample: trained by a chat template, answered at the end."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.data.chat_folders import write_folder
from tests.data.dataset import encoded
from tests.runtime.factory import MODEL

ROOT = Path(__file__).parents[1]
RECORDS = 48
STEPS = 60

pytestmark = pytest.mark.slow


def record(number: int) -> dict[str, Any]:
    """Two images, of which nothing has to be known: the answer is yes, then no."""
    picture = {"type": "image", "image": f"{number % 4}.jpg"}
    return {
        "messages": [
            {"role": "user", "content": f"Is it {number}?"},
            {"role": "assistant", "content": "yes."},
            {"role": "user", "content": [picture, picture, {"type": "text", "text": "Sure?"}]},
            {"role": "assistant", "content": "no."},
        ]
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("conversations")
    (folder / "chats").mkdir()
    for number in range(4):
        (folder / "chats" / f"{number}.jpg").write_bytes(encoded(32, 24, shade=50 * number))
    lines = [json.dumps(record(number)) for number in range(RECORDS)]
    (folder / "chats" / "chat.jsonl").write_text("\n".join(lines))
    write_folder(folder / "tokens", "vision")
    llm = MODEL["modules"]["llm"]
    llm = llm | {"config": llm["config"] | {"vocab_size": 512}}
    content = {
        "name": "chats",
        "model": {"modules": {"image_encoder": MODEL["modules"]["image_encoder"], "llm": llm}},
        "data": {
            "sources": [{"path": "chats"}],
            "tokenizer": "tokens",
            "sequence_length": 256,
            "max_image_pixels": 1024,
            "held_out": 0.1,
        },
        "cluster": {"gpus_per_node": 2, "device": "cpu"},
        "train": {
            "global_batch_size": 2,
            "steps": STEPS,
            "precision": "fp32",
            "optimizer": {"lr": 3e-3},
        },
        "samples": {"answers": 2},
    }
    (folder / "disttrain.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return folder


def call(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "disttrain_cli", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT / "src"))},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_is_trained_is_answered(folder: Path) -> None:
    profile = json.loads(call(folder, "profile", "--json"))
    assert profile["data"]["samples"] == RECORDS and profile["data"]["images"] > 0
    call(folder, "plan", "--json")
    trained = json.loads(call(folder, "train", "--restart", "--json"))
    answers = trained["samples"]["answers"]
    assert len(answers) == 2
    for answer in answers:
        assert (answer["text"], answer["recorded"]) == ("no.", "no.")
        assert "Sure?" in answer["prompt"] and "Is it" not in answer["prompt"]
        assert len(answer["images"]) == 2
    folders = [path.parent for path in (folder / "runs").rglob("samples.json")]
    assert all((folders[0] / name).is_file() for name in answers[0]["images"])
    call(folder, "analyze", "--json")
    page = next((folder / "runs").rglob("report.html")).read_text()
    assert "Answers to held-out conversations" in page and "<td>no.</td>" in page
    said = json.loads(call(folder, "sample", "--prompt", "Is it 7?", "--json"))
    assert said["written"][0]["text"] == "yes."

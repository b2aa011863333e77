"""Published vision-language models as a user trains them: profile, plan, train and export as
processes, on conversations with images."""

import json
import shlex
import subprocess
import sys
from functools import partial

import pytest
import torch
from PIL import Image

from tests.data.dataset import encoded
from tests.test_chain import disttrain, document
from tests.whole_models import (
    IMAGE,
    image_processor,
    qwen_processor,
    run_of,
    tokenizer,
    write_llava,
    write_qwen,
)

pytestmark = pytest.mark.slow
FAMILIES = {
    "llava": (write_llava, image_processor()),
    "qwen2_5_vl": (partial(write_qwen, family="qwen2_5_vl", flat=True), qwen_processor()),
    "qwen3_vl": (partial(write_qwen, family="qwen3_vl"), qwen_processor()),
}
SAMPLES, LENGTH = 4, 256


def write_conversations(folder):
    """As many conversations as there are sequences, each longer than half of one; returns their
    messages."""
    records = []
    (folder / "data").mkdir()
    for number in range(SAMPLES):
        name = f"{number}.jpg"
        (folder / "data" / name).write_bytes(encoded(40 + 9 * number, 60, shade=50 * number))
        ask = {"type": "text", "text": f"What is number {number}? " + "It may be any. " * 4}
        answer = {"type": "text", "text": f"It is {'a b c d'[: 2 * number + 1]}."}
        again = {"type": "text", "text": "And now?"}
        records.append(
            [
                {"role": "user", "content": [{"type": "image", "image": name}, ask]},
                {"role": "assistant", "content": [answer]},
                {"role": "user", "content": [again]},
                {"role": "assistant", "content": [answer]},
            ]
        )
    lines = [{"id": str(n), "messages": messages} for n, messages in enumerate(records)]
    (folder / "data" / "talks.json").write_text(json.dumps(lines))
    return records


def expected_loss(model, processor, folder, records):
    """The mean over all trained tokens by transformers' own template, processor and forward."""
    words, total, count = tokenizer(), torch.zeros(()), 0
    for messages in records:
        made = words.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, trained = torch.tensor(made["input_ids"]), torch.tensor(made["assistant_masks"])
        image = Image.open(folder / "data" / messages[0]["content"][0]["image"]).convert("RGB")
        given = dict(processor([image], return_tensors="pt"))
        grid = given.get("image_grid_thw")
        rows = 16 if grid is None else int(grid.prod()) // 4
        repeats = torch.where(ids == IMAGE, rows, 1)
        ids, trained = ids.repeat_interleave(repeats), trained.repeat_interleave(repeats)
        assert LENGTH // 2 < len(ids) <= LENGTH
        if grid is not None:
            given["mm_token_type_ids"] = (ids == IMAGE).int()[None]
        with torch.no_grad():
            logits = model(input_ids=ids[None], **given).logits[0]
        labels = torch.where(trained.bool(), ids, -100)[1:]
        total += torch.nn.functional.cross_entropy(logits[:-1], labels, reduction="sum")
        count += int((labels != -100).sum())
    return float(total / count)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_is_trained_on_conversations_and_written_back(tmp_path, family):
    write, processor = FAMILIES[family]
    model = write(tmp_path / "given")
    records = write_conversations(tmp_path)
    devices = 2 if family == "qwen2_5_vl" else 1
    run_of(
        tmp_path / "given",
        data={"sequence_length": LENGTH},
        cluster={"nodes": 1, "gpus_per_node": devices},
        optimizer={"lr": 1e-4},
    )
    profile = document(tmp_path, "profile")
    assert profile["data"]["samples"] == profile["data"]["sequences"] == SAMPLES
    document(tmp_path, "plan")
    trained = document(tmp_path, "train")
    loss = trained["steps"][0]["losses"]["text"]
    assert loss == pytest.approx(expected_loss(model, processor, tmp_path, records), abs=1e-4)
    code, out, err = disttrain(tmp_path, "export", "--to", "out")
    assert code == 0, out + err
    command = next(line for line in err.splitlines() if line.startswith("Next: ")).partition(" ")[2]
    if family == "llava":  # Qwen's processors need torchvision for videos
        words = shlex.split(command.replace("IMAGE.jpg", "data/0.jpg"))
        done = subprocess.run(
            [sys.executable, *words[1:]], cwd=tmp_path, capture_output=True, text=True
        )
        assert "generated_text" in done.stdout, done.stderr

    from transformers import AutoModelForImageTextToText

    again, said = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not said["missing_keys"] and not said["unexpected_keys"]
    changed = sum(
        not torch.equal(tensor, again.state_dict()[name])
        for name, tensor in model.state_dict().items()
    )
    assert changed > 0.75 * len(model.state_dict())
    assert expected_loss(again.eval(), processor, tmp_path, records) < loss

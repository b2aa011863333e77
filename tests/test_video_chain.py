"""Videos as a user trains on them: profile, plan, train and analyze as processes, and the loss is
transformers' own."""

from pathlib import Path

import pytest
import torch

from tests.data.test_films import FILMS, TALKS, video_run
from tests.test_chain import document
from tests.video_models import RULES, Talk, write_folder

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("family", RULES)
def test_a_folder_is_trained_on_videos(tmp_path: Path, family: str) -> None:
    model = write_folder(tmp_path / "given", family)
    run = video_run(tmp_path, family, sequence_length=300)
    fields = run.file.model_dump(mode="json", exclude_none=True)
    devices = 2 if family == "qwen2_5_vl" else 1
    fields["cluster"] = {"nodes": 1, "gpus_per_node": devices, "device": "cpu"}
    fields["train"] |= {"global_batch_size": 2, "steps": 2}
    import yaml

    (tmp_path / "disttrain.yaml").write_text(yaml.safe_dump(fields))
    profile = document(tmp_path, "profile")
    assert profile["data"]["samples"] == 2 and profile["data"]["videos"] == 3
    document(tmp_path, "plan")
    trained = document(tmp_path, "train")
    total, count = torch.zeros(()), 0
    for talk_of in TALKS.values():
        names = [part["video"] for part in talk_of[0]["content"] if part["type"] == "video"]
        talk = Talk(family, talk_of, [FILMS[name] for name in names])
        mean, std = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
        own, tokens = talk.loss(model, mean, std)
        total, count = total + own, count + tokens
    loss = trained["steps"][0]["losses"]["text"]
    assert loss == pytest.approx(float(total / count), abs=1e-4)
    document(tmp_path, "analyze")

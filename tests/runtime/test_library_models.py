"""Whole published models of families that are known by the library alone: the loss of their
conversations is the library's own, by its own processor and chat template."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from disttrain_cli.data.indexing.building import build_index
from disttrain_cli.models.graph import describe
from disttrain_cli.spec.library_processor import OF_TEXT
from disttrain_cli.spec.runfile.published import is_all
from tests.data.test_parts import SIZES, told, write_json
from tests.library_models import FAMILIES, TRAINED, write
from tests.models.test_whole import loaded, loss_of
from tests.runtime.test_whole_conversations import loaded_batch
from tests.test_chain import document
from tests.whole_models import run_of

#: Families that are trained by commands: rows of patches, spans, recurrent layers, M-RoPE.
BY_COMMANDS = ("mistral3", "gemma4", "lfm2_vl", "glm4v")


def of_files(value):
    """Return an output of a processor for its model, which has weights in fp32."""
    if isinstance(value, list) and isinstance(value[0], torch.Tensor):  # bf16: Llama 4's
        return torch.cat(value).float()
    return np.array(value)


def loss_by_library(model, processor):
    """Return the loss of all conversations, one at a time, and the tokens that it is a mean of."""
    total, count = torch.zeros(()), 0
    for sizes in SIZES:
        made = told(processor if sizes else processor.tokenizer, sizes)  # some want an image
        given = {
            key: np.atleast_2d(value) if key in (*OF_TEXT, "assistant_masks") else of_files(value)
            for key, value in made.items()
        }
        trained = torch.as_tensor(given.pop("assistant_masks"))[0].bool()
        given = {key: torch.as_tensor(value) for key, value in given.items()}
        with torch.no_grad():
            logits = model(**given).logits[0]
        labels = torch.where(trained, given["input_ids"][0], -100)[1:]
        total += torch.nn.functional.cross_entropy(logits[:-1], labels, reduction="sum")
        count += int((labels >= 0).sum())
    return total / count, count


@pytest.mark.slow
@pytest.mark.parametrize("family", TRAINED)
def test_the_loss_of_conversations_is_the_librarys_own(tmp_path, family):
    model, processor = write(tmp_path / "whole", family)
    write_json(tmp_path / "data")
    data = {"sequence_length": FAMILIES[family].length}
    run = run_of(tmp_path / "whole", data=data, global_batch_size=1)
    assert is_all(run.published, run.file.model)
    layers, index = loaded(run), build_index(run, describe(run))
    assert not index.skipped and len(index) == len(SIZES)
    batch = loaded_batch(run, index, layers)
    expected, count = loss_by_library(model, processor)
    assert int((batch.labels >= 0).sum()) == count == batch.label_tokens
    torch.testing.assert_close(loss_of(layers, batch), expected, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("family", BY_COMMANDS)
def test_an_export_of_two_steps_has_the_loss_of_the_third(tmp_path, family):
    here = tmp_path / "before"
    model, processor = write(here / "whole", family)
    write_json(here / "data")
    run_of(
        here / "whole",
        data={"sequence_length": 1024},
        cluster={"gpus_per_node": 2},
        global_batch_size=1,  # of all conversations
        steps=3,
        checkpoint={"every_steps": 1},
    )
    document(here, "profile", "--device", "cpu")
    document(here, "plan")
    here = here.rename(tmp_path / "moved")
    losses = [one["losses"]["text"] for one in document(here, "train")["steps"]]
    document(here, "export", "--to", "out", "--checkpoint", 2)
    exported = AutoModelForImageTextToText.from_pretrained(here / "out").eval()
    again = AutoProcessor.from_pretrained(here / "out")
    again.return_mm_token_type_ids = processor.return_mm_token_type_ids
    assert losses[0] == pytest.approx(float(loss_by_library(model, processor)[0]), abs=1e-4)
    assert losses[2] == pytest.approx(float(loss_by_library(exported, again)[0]), abs=1e-4)
    assert len({round(loss, 3) for loss in losses}) == 3

"""Questions of held-out conversations: what the model is given is what it was trained on, up to the
answer."""

from pathlib import Path

import numpy as np
import pytest
import torch

from disttrain_cli.data.epochs.mixture import Mixture
from disttrain_cli.data.packing import pack
from disttrain_cli.data.reading import ShardReader
from disttrain_cli.data.sequences import SequencePlan
from disttrain_cli.runtime.outputs.conversations import held_out_questions
from disttrain_cli.runtime.outputs.prompts import Prompt, batch_of
from disttrain_cli.runtime.outputs.trained import Trained
from tests.cases import first_fast
from tests.data.test_conversations import ANSWERS, PICTURES, WIDE, made


@pytest.mark.parametrize("template", first_fast([True, False]))
def test_a_question_is_what_was_trained_on_up_to_the_answer(tmp_path: Path, template: bool) -> None:
    run, index, tokens = made(tmp_path, "parquet", template)
    three = WIDE.model_copy(update={"positions": "mrope"})
    model = Trained(run, three, torch.device("cpu"), [], {})
    questions = list(held_out_questions(run, WIDE))
    assert [question.recorded for question in questions] == [ANSWERS[1]] * 3  # no document
    assert [len(question.prompt.images) for question in questions] == [0, 1, 2]
    given = batch_of(model, tokens, [question.prompt for question in questions], room=8)
    assert given.batch.token_ids is not None and given.batch.positions is not None
    width = given.batch.token_ids.shape[1]
    packing, reader = pack(Mixture(index, 0), 0), ShardReader(index, tokens)
    rows = []
    for number in range(len(packing)):
        plan = SequencePlan(packing, number)
        plan.inputs = three
        ids, labels = plan.token_ids(tokens, reader.texts)
        positions, _ = plan.layout()
        for sample, first, count in zip(
            plan.samples.tolist(), plan.sample_at, plan.sample_tokens, strict=True
        ):
            if sample == 3:
                continue
            own, trained = ids[first : first + count], labels[first : first + count] >= 0
            length = given.lengths[sample]
            assert given.batch.token_ids[sample, :length].tolist() == own[:length].tolist()
            placed = positions[:, first : first + length]
            assert given.batch.positions[:, sample, :length].tolist() == placed.tolist()
            assert trained[length - 1 :].any() and trained[: length - 1].any()
            begins = np.flatnonzero(np.diff(trained.astype(int)) == 1)
            assert begins[-1] + 1 == length - 1  # the label of its last token begins the answer
    images = given.batch.of("image")
    assert images.rows is not None
    for row in images.rows.tolist():
        assert given.batch.token_ids[row // width, row % width] == tokens.image
        rows.append(row)
    assert len(set(rows)) == int((given.batch.token_ids == tokens.image).sum())
    assert len(images.grids) == 3


@pytest.mark.parametrize("template", [True, False])
def test_an_answer_leaves_its_images_beside_what_is_said(tmp_path: Path, template: bool) -> None:
    run, _, _ = made(tmp_path, "json", template)
    *_, question = held_out_questions(run, WIDE)
    answer = question.answered(" A dog. ", tmp_path / "out")
    assert (answer.text, answer.recorded) == ("A dog.", ANSWERS[1])
    assert answer.prompt == "What is it?"
    assert [(tmp_path / "out" / name).read_bytes() for name in answer.images] == PICTURES[:2]


def test_a_prompt_is_a_users_turn_where_there_is_a_template(tmp_path: Path) -> None:
    run, _, tokens = made(tmp_path, "json")
    model = Trained(run, WIDE, torch.device("cpu"), [], {})
    given = batch_of(model, tokens, [Prompt("What is it?", (PICTURES[0],))])
    assert given.batch.token_ids is not None
    ids = [one for one in given.batch.token_ids[0].tolist() if one != tokens.image]
    text = tokens._rules.decode(ids, skip_special_tokens=False)  # type: ignore[attr-defined]
    assert text == (
        "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\n"
        "<|vision_start|><|vision_end|>What is it?<|im_end|>\n<|im_start|>assistant\n"
    )
    alone = batch_of(model, tokens, [Prompt(images=(PICTURES[0],))])
    assert alone.batch.token_ids is not None and alone.batch.token_ids[0, 0] == tokens.bos

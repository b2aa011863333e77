"""Prompts with images that are cut into tiles: what the model is given is what it was trained on,
and what transformers' processors make of the same question."""

from pathlib import Path

import numpy as np
import pytest
import torch

from disttrain_cli.data.epochs.mixture import Mixture
from disttrain_cli.data.packing import pack
from disttrain_cli.data.reading import ShardReader
from disttrain_cli.data.sequences import SequencePlan
from disttrain_cli.data.tokenizer import read_tokenizer
from disttrain_cli.runtime.feeding import normalised
from disttrain_cli.runtime.outputs.conversations import held_out_questions
from disttrain_cli.runtime.outputs.pictures import pictures_of
from disttrain_cli.runtime.outputs.prompts import Prompt, batch_of
from disttrain_cli.runtime.outputs.trained import Trained
from disttrain_cli.spec.index import IMAGE
from disttrain_cli.spec.places import together
from tests.data.test_parts import ANSWERS, SIZES, expected, in_order, made, messages, picture
from tests.data.tiled import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_a_question_has_the_tiles_and_places_that_were_trained(tmp_path: Path, family: str) -> None:
    processor, run, inputs, index = made(tmp_path, family, "json")
    model, tokens = Trained(run, inputs, torch.device("cpu"), [], {}), read_tokenizer(run)
    questions = list(held_out_questions(run, inputs))
    assert [question.recorded for question in questions] == [ANSWERS[1]] * len(SIZES)
    assert [len(question.prompt.images) for question in questions] == [len(one) for one in SIZES]
    packing, reader = pack(Mixture(index, 0), 0), ShardReader(index, tokens)
    trained = {}
    for number in range(len(packing)):
        plan = SequencePlan(packing, number)
        ids, _ = plan.token_ids(tokens, reader.texts)
        rows, begins = plan.rows(IMAGE), plan.segment_at[plan.kinds == IMAGE]
        for sample, first, count in zip(
            plan.samples.tolist(), plan.sample_at, plan.sample_tokens, strict=True
        ):
            inside = np.flatnonzero((first <= begins) & (begins < first + count))
            places = together([rows[at].moved(-first) for at in inside])
            trained[sample] = ids[first : first + count], places
    for sample, question in enumerate(questions):
        given = batch_of(model, tokens, [question.prompt])
        (length,), images = given.lengths, given.batch.of("image")
        ids, places = trained[sample]
        assert given.batch.token_ids[0, :length].tolist() == ids[:length].tolist()
        assert images.rows.tolist() == places.seen.tolist()
        assert (images.shared is not None) is ("llava" in family and bool(SIZES[sample]))
        tiles = expected(processor, SIZES[sample])[2]
        affine = inputs.image.affine
        made_of = [one for block in images.values[0] for one in block]
        for one, tile in zip(made_of, tiles, strict=True):
            theirs = normalised(torch.from_numpy(np.array(tile))[None], affine, torch.float32)[0]
            assert torch.equal(one, theirs)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_is_the_processors(tmp_path: Path, family: str) -> None:
    processor, run, inputs, _ = made(tmp_path, family, "json")
    model, tokens = Trained(run, inputs, torch.device("cpu"), [], {}), read_tokenizer(run)
    for size in ((50, 30), (9, 70)):
        given = batch_of(model, tokens, [Prompt("What is it?", (picture(*size),))])
        from PIL import Image

        turn = messages([size])[2]
        turn["content"][0] = {"type": "image", "image": Image.new("RGB", size)}
        told = processor.apply_chat_template(
            [turn], tokenize=True, return_dict=True, add_generation_prompt=True
        )
        assert given.batch.token_ids[0].tolist() == told["input_ids"][0]
    alone = batch_of(model, tokens, [Prompt(images=(picture(50, 30),))])
    (one,) = pictures_of([picture(50, 30)], inputs)
    first, *others = (tokens.encode(text) for text in one.around)
    content = [
        id_
        for count, text in zip(one.tokens(), others, strict=True)
        for id_ in [*[tokens.image] * count, *text]
    ]
    assert alone.batch.token_ids[0].tolist() == [tokens.bos, *first, *content]


def test_several_prompts_share_a_batch(tmp_path: Path) -> None:
    """Rows of each lie in its own sequence."""
    _, run, inputs, _ = made(tmp_path, "llava_next", "json")
    model, tokens = Trained(run, inputs, torch.device("cpu"), [], {}), read_tokenizer(run)
    prompts = [
        Prompt("What?", tuple(picture(*size) for size in in_order(sizes))) for sizes in SIZES[:3]
    ]
    together = batch_of(model, tokens, prompts, room=3)
    rows = together.batch.of("image").rows
    width = together.batch.token_ids.shape[1]
    seen = rows[rows >= 0]
    assert len(set(seen.tolist())) == len(seen)
    assert (together.batch.token_ids.flatten()[seen] == tokens.image).all()
    assert len(seen) == int((together.batch.token_ids == tokens.image).sum())
    for number, prompt in enumerate(prompts):
        one = batch_of(model, tokens, [prompt])
        ids = together.batch.token_ids[number, : one.lengths[0]]
        assert ids.tolist() == one.batch.token_ids[0].tolist()
        own = seen[(seen >= number * width) & (seen < (number + 1) * width)] - number * width
        theirs = one.batch.of("image").rows
        assert sorted(own.tolist()) == sorted(theirs[theirs >= 0].tolist())

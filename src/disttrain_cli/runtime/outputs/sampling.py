"""Samples of a trained model, generated in a separate process: `images/step-000060/00.png`, ….

`samples.json` lists them. Several generators draw the same images, each in its folder:
`images/step-000060/MODULE/00.png`, ….
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from disttrain_cli.data.index.index_checks import checked_tokenizer
from disttrain_cli.data.index.sample_index import held_out, read_index
from disttrain_cli.data.loader import Loader
from disttrain_cli.data.metrics import judged, scored
from disttrain_cli.data.ordering.orders import Orders
from disttrain_cli.data.reading import ShardReader
from disttrain_cli.data.tokenizer import Tokenizer, read_tokenizer
from disttrain_cli.models.graph import layer_table
from disttrain_cli.models.layer import Batch
from disttrain_cli.models.sampling import generate
from disttrain_cli.models.writing import write
from disttrain_cli.runtime.checkpoints.folder import describe as describe_checkpoint
from disttrain_cli.runtime.feeding import to_batch
from disttrain_cli.runtime.outputs.conversations import held_out_questions
from disttrain_cli.runtime.outputs.pictures import suffix_of
from disttrain_cli.runtime.outputs.prompts import Prompt, batch_of
from disttrain_cli.runtime.outputs.trained import Trained, load_trained
from disttrain_cli.spec.index import IMAGE, TEXT
from disttrain_cli.spec.plan import Layout, UnitPlan
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.runfile import Run, read_run
from disttrain_cli.spec.samples import FILE, Answer, Drawn, Samples, Written
from disttrain_cli.spec.whole import write_whole

NICE = 10  # niceness during training: about a tenth of a core that a rank keeps busy
MOST_STEPS = 16  # global batches searched for images to generate
TEXT_TOKENS = 64  # limit of the text written after an image at the end of training
TOGETHER = 50  # prompts of a batch
_OF_TRAINING = (
    "labels",
    "target",
    "weights",
    "dropout",
)  # batch fields that sampling does not need

Images = dict[str, list[NDArray[np.uint8]]]  # by generator, [H, W, C] each


def main(payload: dict[str, Any]) -> None:
    """Generate the run file's `samples` from the checkpoint in `payload["checkpoint"]`."""
    run, profile = read_run(*payload["run"]), Profile.model_validate(payload["profile"])
    folder, out, spec = Path(payload["checkpoint"]), Path(payload["images"]), run.file.samples
    if (most := payload.get("most")) is not None:
        os.nice(NICE)
        fewer = {name: min(getattr(spec, name), most) for name in ("images", "read", "answers")}
        spec = spec.model_copy(update=fewer)
    model, seed = load_trained(run, folder, torch.device(payload["device"])), run.file.train.seed
    texts: list[str] = []
    images: Images = {}
    if spec.images and model.inputs.generators and spec.prompts:
        texts = [spec.prompts[number % len(spec.prompts)] for number in range(spec.images)]
        images = draw(model, [Prompt(text) for text in texts], seed)
    elif spec.images and model.inputs.generators:
        texts, images = _draw_as_data_ask(model, profile, spec.images)
    written = []
    if spec.read and model.inputs.of("image"):
        read = list(islice(_pictures(run, model), spec.read))
        said = write_after(model, [Prompt(images=(picture,)) for picture, _ in read], TEXT_TOKENS)
        for number, ((picture, recorded), text) in enumerate(zip(read, said, strict=True)):
            name = f"read/{number:02d}.{suffix_of(picture)}"
            write_whole(out / name, picture)
            written.append(
                Written(prompt="", text=text.partition("\n")[0], image=name, recorded=recorded)
            )
    answers = []
    if spec.answers:
        asked = list(islice(held_out_questions(run, model.inputs), spec.answers))
        said = write_after(model, [one.prompt for one in asked], TEXT_TOKENS)
        answers = scored(
            [one.answered(text, out) for one, text in zip(asked, said, strict=True)], spec.metrics
        )
    save(model, folder, out, [(text, None) for text in texts], images, written, answers)


def draw(model: Trained, prompts: Sequence[Prompt], seed: int) -> Images:
    """Return an image of every generator for each prompt, from seeded noise.

    The noise depends on the seed and the prompt's index.
    """
    tokenizer, drawn = checked_tokenizer(model.run, model.inputs), Images()
    for first in range(0, len(prompts), TOGETHER):
        batch = batch_of(model, tokenizer, prompts[first : first + TOGETHER], draws=True).batch
        for name, images in _generated(model, batch, seed * 65537 + first).items():
            drawn.setdefault(name, []).extend(images)
    return drawn


def write_after(
    model: Trained, prompts: Sequence[Prompt], tokens: int, temperature: float = 0.0, seed: int = 0
) -> list[str]:
    """Return the text that the model writes after each prompt, of at most `tokens` tokens."""
    tokenizer, texts = checked_tokenizer(model.run, model.inputs), list[str]()
    ids = torch.arange(model.inputs.vocabulary, device=model.device)
    rows = [id_ for head in model.inputs.heads for id_ in head.row_ids]
    special = torch.tensor(
        [tokenizer.pad, tokenizer.bos, tokenizer.image, tokenizer.context, *rows],
        device=model.device,
    )
    of_turns = None if tokenizer.chat is None else tokenizer.chat.end
    ends = {tokenizer.eos} if of_turns is None else {tokenizer.eos, of_turns}
    allowed = (ids < tokenizer.vocabulary) & ~torch.isin(ids, special)
    allowed[list(ends)] = True
    for first in range(0, len(prompts), TOGETHER):
        given = batch_of(model, tokenizer, prompts[first : first + TOGETHER], room=tokens)
        texts += [
            tokenizer.decode(written)
            for written in write(
                model.layers,
                given.batch,
                model.inputs,
                given.lengths,
                most=tokens,
                ends=ends,
                allowed=allowed,
                temperature=temperature,
                seed=seed * 65537 + first,
            )
        ]
    return texts


def save(
    model: Trained,
    checkpoint: Path,
    out: Path,
    given: Sequence[tuple[str, str | None]],
    images: Images,
    written: Sequence[Written],
    answers: Sequence[Answer] = (),
) -> Samples:
    """Write images, drawn for the texts and named images in `given`, and `samples.json`.

    The latter contains a judge's scores of images and texts, if the run has one.
    """
    import cv2

    drawn = []
    for module, pictures in images.items():
        for number, ((text, before), image) in enumerate(zip(given, pictures, strict=True)):
            name = f"{module}/{number:02d}.png" if len(images) > 1 else f"{number:02d}.png"
            write_whole(out / name, cv2.imencode(".png", image[:, :, ::-1])[1].tobytes())
            drawn.append(Drawn(file=name, prompt=text, image=before))
    result = judged(
        Samples(
            checkpoint=str(checkpoint),
            step=int(describe_checkpoint(checkpoint)["step"]),
            drawn=drawn,
            written=list(written),
            answers=list(answers),
        ),
        images,
        model.run.file.samples.judge,
    )
    write_whole(out / FILE, result.model_dump_json(indent=2))
    return result


def _generated(model: Trained, batch: Batch, seed: int) -> Images:
    steps = model.run.file.samples.denoising_steps
    return {
        name: list(generate(model.layers, batch, model.inputs, steps, seed, decoder, name))
        for name, decoder in model.decoders.items()
    }


def _draw_as_data_ask(model: Trained, profile: Profile, wanted: int) -> tuple[list[str], Images]:
    """Return images for the first image targets of the data, and the text right before each."""
    run, tokenizer = model.run, read_tokenizer(model.run)
    units = [
        UnitPlan(
            name="all",
            modules=run.file.model.order,
            gpus=1,
            layers_per_stage=[len(layer_table(run))],
        )
    ]
    slots = run.file.train.global_batch_size
    layout = Layout(
        global_batch_size=slots, microbatch_size=1, microbatches=slots, gpus_used=1, units=units
    )
    orders = Orders(run.file, layout, read_index(run, profile.inputs), profile)
    fields = {
        field
        for layer in model.layers
        for field in layer.needs
        if not field.startswith(_OF_TRAINING)
    }
    texts, drawn = list[str](), Images()
    with Loader(run, orders, unit="all", replica=0, fields=fields) as loader:
        for step, slot in product(range(MOST_STEPS), range(slots)):
            order = loader.order(step)
            if len(texts) >= wanted or not len(order.slots[slot].items["target"]):
                continue
            batch = to_batch(loader.fetch(step, slot), order, model.device, torch.float32)
            for name, images in _generated(
                model, batch, run.file.train.seed + step * slots + slot
            ).items():
                drawn.setdefault(name, []).extend(images)
            texts += _texts_before(batch, tokenizer, model.inputs.targets[0].context_tokens)
    return texts[:wanted], {name: images[:wanted] for name, images in drawn.items()}


def _texts_before(batch: Batch, tokenizer: Tokenizer, context_tokens: int) -> list[str]:
    """Return the text right before the context tokens of each image to be drawn."""
    rows = batch.of("target").rows
    assert batch.token_ids is not None and rows is not None
    ids, special = (
        batch.token_ids.flatten().tolist(),
        (tokenizer.bos, tokenizer.image, tokenizer.context),
    )
    texts = []
    for end in rows.tolist()[::context_tokens]:
        begin = end
        while begin and ids[begin - 1] not in special:
            begin -= 1
        texts.append(tokenizer.decode(ids[begin:end]).strip().rpartition("\n")[2])
    return texts


def _pictures(run: Run, model: Trained) -> Iterator[tuple[bytes, str]]:
    """Yield image files of held-out samples, each with the first line of the text after it.

    Images of all samples where none are held out.
    """
    index = read_index(run, model.inputs)
    reader = ShardReader(index, tokenizer := read_tokenizer(run))
    drawn = None if index.drawn is None else held_out(index).chosen
    for row in range(len(index)) if drawn is None else np.flatnonzero(drawn).tolist():
        if index.templated is not None and index.templated[row]:
            continue  # there, a question follows the image
        first, last = index.segment_start[row : row + 2].tolist()
        kinds, own = index.kinds[first:last].tolist(), index.own_texts[first:last].tolist()
        texts, image = iter(reader.texts(row)), None
        for segment, (kind, is_own) in enumerate(zip(kinds, own, strict=True), first):
            ids = next(texts) if kind == TEXT else None
            if kind == IMAGE:
                image = int(index.file[segment])
            elif ids is None or is_own:  # not a text around the parts of an image
                if ids is not None and image is not None:
                    yield reader.file(row, image), tokenizer.decode(ids).partition("\n")[0]
                image = None

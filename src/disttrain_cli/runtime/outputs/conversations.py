"""Questions from held-out conversations: each up to its last answer, which is the reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from disttrain_cli.data.chat import IMAGE_ROW
from disttrain_cli.data.index.sample_index import Index, held_out, read_index
from disttrain_cli.data.reading import ShardReader
from disttrain_cli.data.sources.chats import plain_message
from disttrain_cli.data.tokenizer import Tokenizer, read_tokenizer
from disttrain_cli.runtime.outputs.pictures import suffix_of
from disttrain_cli.runtime.outputs.prompts import Prompt
from disttrain_cli.spec.index import AUDIO, IMAGE, TEXT
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.samples import Answer
from disttrain_cli.spec.whole import write_whole


@dataclass(frozen=True)
class Question:
    """Conversation up to its last answer."""

    key: str
    prompt: Prompt
    asked: str  # the user's message before the last answer
    recorded: str  # the last answer in the data

    def answered(self, text: str, out: Path) -> Answer:
        """Return the record of a model's answer; write the images below the folder `out`."""
        names = []
        for number, image in enumerate(self.prompt.images):
            names.append(f"answers/{self.key}-{number}.{suffix_of(image)}")
            write_whole(out / names[-1], image)
        return Answer(prompt=self.asked, images=names, text=text.strip(), recorded=self.recorded)


def held_out_questions(run: Run, inputs: ModelInputs) -> Iterator[Question]:
    """Yield the questions of held-out conversations (of all where none are held out), in order.

    A conversation is a sample with a text that is not trained before one that is.
    """
    index, tokenizer = read_index(run, inputs), read_tokenizer(run)
    reader = ShardReader(index, tokenizer)
    drawn = None if index.drawn is None else held_out(index).chosen
    for row in range(len(index)) if drawn is None else np.flatnonzero(drawn).tolist():
        question = _question(index, reader, tokenizer, row)
        if question is not None:
            yield question


def _question(index: Index, reader: ShardReader, tokenizer: Tokenizer, row: int) -> Question | None:
    """Return the question of a sample, if it is a conversation of texts and files that are read."""
    first, last = index.segment_start[row : row + 2].tolist()
    kinds, trained = index.kinds[first:last], index.trained[first:last]
    own = index.own_texts[first:last]
    answers, others = np.flatnonzero(trained), np.flatnonzero(own & ~trained)
    read = np.isin(kinds, (TEXT, IMAGE, AUDIO)).all()
    if not (read and len(answers) and (others < answers[-1]).any()):
        return None
    answer = int(answers[-1])
    since = int(answers[-2]) + 1 if len(answers) > 1 else 0
    texts = iter(reader.texts(row))
    ids = [next(texts) if kind == TEXT else [IMAGE_ROW] for kind in kinds.tolist()]
    begin = [tokenizer.bos] if index.specials(row) else []
    said = [at for at in range(since, answer) if own[at]]
    asked = [id_ for at in said for id_ in ids[at]]
    files = (kinds != TEXT) & index.files[first:last]
    seen = (first + np.flatnonzero(files[:answer])).tolist()
    return Question(
        key=f"{row:06d}",
        prompt=Prompt(
            images=tuple(reader.file(row, segment) for segment in seen),
            ids=tuple(begin + [id_ for own in ids[:answer] for id_ in own]),
            sizes=tuple(index.numbers_of(segment) for segment in seen),
        ),
        asked=tokenizer.chat.message(asked)
        if tokenizer.chat
        else plain_message(tokenizer.decode(asked)),
        recorded=tokenizer.decode(ids[answer]).strip(),
    )

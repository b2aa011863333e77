"""What a model drew and wrote for given prompts: `samples.json` beside the images, read by the
report."""

from __future__ import annotations

from pathlib import Path, PurePath

from pydantic import BaseModel

FILE = "samples.json"


class Drawn(BaseModel):
    """An image that a generator drew after a text."""

    # its name beside `samples.json`, with the module's folder where there are several generators
    file: str
    prompt: str
    image: str | None = None  # that was read before
    asked: str | None = None  # what the prompt asks for, where there is a judge
    recognised: str | None = None  # what the judge sees


class Written(BaseModel):
    """A text that the model wrote after a prompt, an image, or both."""

    prompt: str
    text: str
    # its path, as given; or beside `samples.json`, where it is of the data
    image: str | None = None
    recorded: str | None = None  # what the data say about it
    names_it: bool | None = None  # whether the text names what is recorded, where there is a judge


class Answer(BaseModel):
    """What the model says at the end of a held-out conversation, beside what the data say."""

    prompt: str  # what was said since the answer before
    images: list[str] = []  # of the whole conversation, beside `samples.json`
    text: str
    recorded: str
    scores: dict[str, float | None] = {}  # by metric; None where it failed


class Judge(BaseModel):
    """Who says what an image shows, and how often it is right about images that it has not seen."""

    name: str
    accuracy: float | None  # None: not known


class Samples(BaseModel):
    """`samples.json`."""

    checkpoint: str
    step: int
    drawn: list[Drawn] = []
    written: list[Written] = []
    answers: list[Answer] = []
    judge: Judge | None = None

    @property
    def read(self) -> list[str]:
        """Images beside `samples.json` that texts were written about; none where they lie
        elsewhere."""
        return [one.image for one in self.written if one.image and one.recorded is not None]

    @property
    def recognised(self) -> int:
        """Drawn images in which the judge sees what was asked for."""
        return sum(one.asked is not None and one.asked == one.recognised for one in self.drawn)

    @property
    def named(self) -> int:
        """Texts that name what is recorded."""
        return sum(one.names_it is True for one in self.written)

    @property
    def matched(self) -> int:
        """Answers that are those of the data, word for word."""
        return sum(one.text == one.recorded for one in self.answers)

    @property
    def summary(self) -> str:
        """What there is, for people."""
        parts = [f"{len(self.drawn)} images drawn"] if self.drawn else []
        parts += [f"{len(self.written)} images read"] if self.written else []
        parts += [f"{self.matched} of {len(self.answers)} held-out answers right"] * bool(
            self.answers
        )
        return ", ".join(parts)

    @property
    def metrics(self) -> dict[str, float]:
        """By name, the mean score of the answers that have one."""
        names = dict.fromkeys(name for one in self.answers for name in one.scores)
        found = {name: [one.scores.get(name) for one in self.answers] for name in names}
        given = {name: [score for score in of if score is not None] for name, of in found.items()}
        return {name: sum(of) / len(of) for name, of in given.items() if of}


def read_samples(folder: Path) -> Samples | None:
    """What is said of the images in a folder; None where nothing readable is, or it names files
    outside."""
    try:
        samples = Samples.model_validate_json((folder / FILE).read_bytes())
    except (OSError, ValueError):
        return None
    names = [one.file for one in samples.drawn] + samples.read
    names += [name for one in samples.answers for name in one.images]
    return samples if all(_is_inside(name) for name in names) else None


def _is_inside(name: str) -> bool:
    path = PurePath(name)
    return not path.is_absolute() and ".." not in path.parts

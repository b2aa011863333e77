"""Generated samples: `samples.json` next to the images, read by the report."""

from __future__ import annotations

from pathlib import Path, PurePath

from pydantic import BaseModel

FILE = "samples.json"


class Drawn(BaseModel):
    """Image generated for a text."""

    # file name relative to `samples.json`, in the module's folder if there are several generators
    file: str
    prompt: str
    image: str | None = None  # input image, if any
    asked: str | None = None  # label requested by the prompt, if there is a judge
    recognised: str | None = None  # label recognised by the judge


class Written(BaseModel):
    """Text generated for a prompt, an image, or both."""

    prompt: str
    text: str
    # its path, as given; or relative to `samples.json`, if it comes from the data
    image: str | None = None
    recorded: str | None = None  # reference text in the data
    names_it: bool | None = None  # True if the text names the reference; None without a judge


class Answer(BaseModel):
    """Model's last answer in a held-out conversation, with the reference answer of the data."""

    prompt: str  # conversation since the previous answer
    images: list[str] = []  # of the entire conversation, relative to `samples.json`
    text: str
    recorded: str
    scores: dict[str, float | None] = {}  # by metric; None if it failed


class Judge(BaseModel):
    """Classifier of images, with its accuracy on unseen images."""

    name: str
    accuracy: float | None  # None: not known


class Samples(BaseModel):
    """Contents of `samples.json`."""

    checkpoint: str
    step: int
    drawn: list[Drawn] = []
    written: list[Written] = []
    answers: list[Answer] = []
    judge: Judge | None = None

    @property
    def read(self) -> list[str]:
        """Images next to `samples.json` about which texts were generated; none if elsewhere."""
        return [one.image for one in self.written if one.image and one.recorded is not None]

    @property
    def recognised(self) -> int:
        """Number of generated images in which the judge recognises the requested label."""
        return sum(one.asked is not None and one.asked == one.recognised for one in self.drawn)

    @property
    def named(self) -> int:
        """Number of texts that name their reference."""
        return sum(one.names_it is True for one in self.written)

    @property
    def matched(self) -> int:
        """Number of answers that equal the reference, word for word."""
        return sum(one.text == one.recorded for one in self.answers)

    @property
    def summary(self) -> str:
        """Summary of the counts for the user."""
        parts = [f"{len(self.drawn)} images drawn"] if self.drawn else []
        parts += [f"{len(self.written)} images read"] if self.written else []
        parts += [f"{self.matched} of {len(self.answers)} held-out answers right"] * bool(
            self.answers
        )
        return ", ".join(parts)

    @property
    def metrics(self) -> dict[str, float]:
        """Mean score by metric, over the answers that have one."""
        names = dict.fromkeys(name for one in self.answers for name in one.scores)
        found = {name: [one.scores.get(name) for one in self.answers] for name in names}
        given = {name: [score for score in of if score is not None] for name, of in found.items()}
        return {name: sum(of) / len(of) for name, of in given.items() if of}


def read_samples(folder: Path) -> Samples | None:
    """Return the samples described in a folder.

    None if nothing readable is there, or it names files outside the folder.
    """
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

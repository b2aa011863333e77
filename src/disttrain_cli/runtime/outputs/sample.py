"""`disttrain sample`: images and texts from any checkpoint, for the user's prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch

from disttrain_cli.calls import argument, call
from disttrain_cli.data.metrics import check_scores
from disttrain_cli.errors import DataError, DisttrainError, MismatchError, SpecError, UsageError
from disttrain_cli.models.graph import describe
from disttrain_cli.models.host import use_cuda
from disttrain_cli.runtime.checkpoints.folder import (
    DESCRIPTION,
    check_belongs,
    latest,
    model_of,
)
from disttrain_cli.runtime.checkpoints.folder import describe as describe_checkpoint
from disttrain_cli.runtime.checkpoints.origin import EXPORT
from disttrain_cli.runtime.outputs.pictures import pictures_of
from disttrain_cli.runtime.outputs.prompts import Prompt
from disttrain_cli.runtime.outputs.sampling import Images, draw, save, write_after
from disttrain_cli.runtime.outputs.trained import load_trained
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.progress import Progress, silent
from disttrain_cli.spec.runfile import Run, read_run
from disttrain_cli.spec.samples import Samples, Written

RUN_FILE = "disttrain.yaml"


@dataclass(frozen=True)
class Wish:
    """Request for samples by a user ("wish")."""

    prompts: Sequence[str] = ()
    images: Sequence[Path] = ()  # each combined with every prompt, or alone without prompts
    count: int | None = None  # images drawn per prompt; None: one if the model draws
    tokens: int = 64  # limit of written tokens
    temperature: float = 0.0
    seed: int = 0


def sample(
    run: Run, folder: Path, wish: Wish, out: Path | None = None, progress: Progress = silent
) -> tuple[Path, Samples]:
    """Draw and write for a request; return the folder and the samples.

    Text is written after every combination of prompt and image; images are drawn after every
    prompt, by models that draw.

    Args:
        out: new folder for the samples; None = next to the run's other samples.

    Raises:
        UsageError: the model has no encoder for an image, or a prompt is too long for it.
        DataError: an image cannot be read, or a package that `samples.judge` needs is not
            installed.
        MismatchError: the checkpoint is of another model than the run file.
        SpecError: it is damaged, or the folder cannot be written.
    """
    _check_model(run, folder)
    check_scores(run.file.samples)
    inputs = describe(run)
    if wish.count and not inputs.generators:
        raise UsageError(
            "The model draws no images", "it has no generator", f"Leave {argument('count')} out."
        )
    files = [_read_file(path, inputs) for path in wish.images]
    pictures: list[tuple[str | None, bytes | None]] = [
        (str(path), data) for path, data in zip(wish.images, files, strict=True)
    ] or [(None, None)]
    asked = [
        (name, Prompt(text, () if data is None else (data,)))
        for (name, data), text in product(pictures, wish.prompts or [""])
    ]
    progress("loading the checkpoint", 0, 0)
    model = load_trained(run, folder, _device(run))
    prompts = [prompt for _, prompt in asked]
    progress("writing", 0, 0)
    texts = write_after(model, prompts, wish.tokens, wish.temperature, wish.seed)
    wanted = [
        (name, prompt)
        for name, prompt in asked
        if prompt.text
        for _ in range(1 if wish.count is None else wish.count)
    ]
    images = Images()
    if wanted and inputs.generators:
        progress("drawing", 0, 0)
        images = draw(model, [prompt for _, prompt in wanted], wish.seed)
    to = out or _new_folder(run.dir.samples / folder.name)
    written = [
        Written(prompt=prompt.text, text=text, image=name)
        for (name, prompt), text in zip(asked, texts, strict=True)
    ]
    return to, save(
        model, folder, to, [(prompt.text, name) for name, prompt in wanted], images, written
    )


def find(
    given: Path | None, run_file: Path | None = None, settings: Sequence[str] = ()
) -> tuple[Run, Path]:
    """Return the run and the checkpoint's folder that the user named.

    `given` is a checkpoint, or a run file, its folder, or a run's folder, whose newest checkpoint
    is used; None means `disttrain.yaml` in the current folder. `run_file` is the run file of a
    checkpoint elsewhere; else it is searched in the folders above.

    Raises:
        SpecError: there is none.
    """
    path = given or run_file or Path(RUN_FILE)
    if path.is_dir() and (path / RUN_FILE).is_file():
        path = path / RUN_FILE
    if path.is_file() or (given is None and not path.is_dir()):
        run = read_run(path, *settings)
        return run, _newest(run.dir.checkpoints, path)
    if not path.is_dir():
        raise SpecError(
            f"There is no checkpoint {path}",
            "a checkpoint is a folder such as runs/tiny/checkpoints/step-000120",
            f"Name one, or a run file: {call('sample', 'RUN')}",
        )
    checkpoints = path if path.name == "checkpoints" else path / "checkpoints"
    folder = path if (path / DESCRIPTION).is_file() else _newest(checkpoints, path)
    return (read_run(run_file, *settings) if run_file else _run_above(folder, settings)), folder


def _newest(checkpoints: Path, asked: Path) -> Path:
    folder = latest(checkpoints)
    if folder is None and (asked / EXPORT).is_file():
        raise SpecError(
            f"{asked} is an export, not a checkpoint",
            "its folders are for transformers and diffusers",
            f"Name the run or checkpoint that it came from, or train from it:"
            f" {call('train', origin=asked)}",
        )
    if folder is None:
        raise SpecError(
            f"There is no checkpoint of {asked}",
            f"none in {checkpoints}",
            f"Train first: {call('train')}",
        )
    return folder


def _run_above(folder: Path, settings: Sequence[str]) -> Run:
    """Return the run file in a folder above a checkpoint that describes its model."""
    model, tried = describe_checkpoint(folder)["model"], []
    for parent in folder.absolute().parents:
        for path in sorted(parent.glob("*.y*ml")):
            try:
                run = read_run(path)
            except DisttrainError:
                continue
            if run.file.model_fingerprint() == model:
                return read_run(path, *settings)
            tried.append(f"{path} describes the model {run.file.model_fingerprint()}")
    raise MismatchError(
        f"No run file above {folder} describes its model",
        "\n".join([f"model of the checkpoint: {model}", *tried]),
        "Name the run file that it was trained with:"
        f" {call('sample', 'CHECKPOINT', run_file='RUN')}",
    )


def _check_model(run: Run, folder: Path) -> None:
    theirs, ours = describe_checkpoint(folder)["model"], run.file.model_fingerprint()
    if theirs != ours:
        raise MismatchError(
            f"The checkpoint {folder} was made from another model than {run.path} describes",
            f"model of the checkpoint: {theirs}; of the run file: {ours}",
            "Restore the model section of the run file, or name the run file that it was trained"
            f" with: {argument('run_file', 'RUN')}",
        )
    check_belongs(folder, model_of(run))


def _read_file(path: Path, inputs: ModelInputs) -> bytes:
    """Read an image, video or sound file that can be decoded."""
    if not inputs.of("image") and not inputs.of("audio"):
        raise UsageError(
            "This model reads no images",
            f"it has no image encoder before {inputs.llm}",
            f"Leave {argument('images')} out: {call('sample', prompts='TEXT')}",
        )
    try:
        data = path.read_bytes()
        (picture,) = pictures_of([data], inputs)
        picture.check()
    except OSError as error:
        raise DataError(
            f"Cannot read the image {path}", error.strerror or str(error), "Name another file."
        ) from None
    except ValueError as error:
        raise DataError(
            f"Cannot read the image {path}",
            str(error),
            "Give a JPEG, PNG or WebP file; a video, where the run file has data.video; or a sound"
            " file, if the model reads audio.",
        ) from None
    return data


def _device(run: Run) -> torch.device:
    return (
        use_cuda(0)
        if run.file.cluster.device != "cpu" and torch.cuda.is_available()
        else torch.device("cpu")
    )


def _new_folder(beside: Path) -> Path:
    """Return `beside`, or the first unused path with a number appended: nothing is overwritten."""
    numbered = (
        beside if not number else beside.with_name(f"{beside.name}-{number}")
        for number in range(10**6)
    )
    return next(path for path in numbered if not path.exists())

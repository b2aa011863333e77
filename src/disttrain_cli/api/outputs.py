"""Use of a checkpoint's weights: `export`, `sample`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from disttrain_cli.api.opening import check_list, check_number, name_run, open_run, path_of
from disttrain_cli.calls import DEFAULT_RUN_FILE, argument, call
from disttrain_cli.errors import UsageError
from disttrain_cli.spec.progress import Progress, silent

if TYPE_CHECKING:
    from disttrain_cli.runtime.outputs.export import Exported
    from disttrain_cli.spec.runfile import Run
    from disttrain_cli.spec.samples import Samples


def export(
    run: Run | Path | str = DEFAULT_RUN_FILE,
    *,
    to: Path | str,
    checkpoint: int | None = None,
    ema: bool = False,
    merge: bool = False,
    progress: Progress = silent,
) -> Exported:
    """Write a checkpoint as Hugging Face folders (safetensors).

    Args:
        to: new folder to write.
        checkpoint: step of the checkpoint, instead of the newest.
        ema: exponential moving averages instead of the last weights, where a module has them.
        merge: write full weights with the adapters merged in, instead of the adapters.

    Raises:
        As `runtime.outputs.export.export`.
    """
    check_number("checkpoint", checkpoint, 0)
    opened = open_run(run)
    from disttrain_cli.runtime.outputs.export import export as write

    return write(opened, Path(to), step=checkpoint, ema=ema, merge=merge, progress=progress)


@dataclass(frozen=True)
class SampleResult:
    """The generated samples, the folder that holds them, and the run whose model generated them."""

    samples: Samples
    path: Path
    run: Run


def sample(
    checkpoint: Path | str | None = None,
    *,
    prompts: Sequence[str] = (),
    images: Sequence[Path | str] = (),
    count: int | None = None,
    tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    run_file: Path | str | None = None,
    settings: Sequence[str] = (),
    out: Path | str | None = None,
    progress: Progress = silent,
) -> SampleResult:
    """Generate images and text with a checkpoint.

    Args:
        checkpoint: its folder, or a run file or run folder, whose newest checkpoint is used;
            ./disttrain.yaml if not given.
        prompts: texts to continue.
        images: images or videos, each read before every prompt.
        count: number of images to generate per prompt; None: one if the model generates images.
        tokens: maximum number of text tokens to generate.
        temperature: sampling temperature of the text; 0 takes the likeliest token.
        seed: seed of noise and sampled tokens.
        run_file: run file of a checkpoint that lies elsewhere.
        settings: changes of the run file, as for `open_run`.
        out: new folder to write, instead of one in the run's.

    Raises:
        UsageError: there is nothing to sample from, or `out` exists; others as
            `runtime.outputs.sample`.
    """
    for name, given in (("prompts", prompts), ("images", images), ("settings", settings)):
        check_list(name, given)
    check_number("count", count, 0, 10_000)
    check_number("tokens", tokens, 0)
    check_number("temperature", temperature, 0, 100, whole=False)
    check_number("seed", seed, 0, 2**31 - 1)
    target = path_of(out)
    name_run(path_of(run_file))
    if not prompts and not images:
        raise UsageError(
            "Nothing to sample from",
            f"neither {argument('prompts')} nor {argument('images')} is given",
            call("sample", prompts=["Draw a seven."]),
        )
    if target is not None and target.exists():
        raise UsageError(
            f"{target} exists",
            "Samples are written to a new folder; existing files are not overwritten.",
            "Name another folder, or move this one.",
        )
    from disttrain_cli.runtime.outputs.sample import Wish, find
    from disttrain_cli.runtime.outputs.sample import sample as draw

    opened, folder = find(path_of(checkpoint), path_of(run_file), settings)
    wish = Wish(prompts, [Path(image) for image in images], count, tokens, temperature, seed)
    path, samples = draw(opened, folder, wish, target, progress)
    return SampleResult(samples, path, opened)

"""Image preprocessing for an encoder, by its class or by `preprocessor_config.json`."""

from __future__ import annotations

import math
from typing import Any

from disttrain_cli.errors import SpecError
from disttrain_cli.models.configs.checks import wrong_field
from disttrain_cli.spec.families.defaults import IMAGE_PROCESSORS, completed, named_class
from disttrain_cli.spec.families.folder import PublishedFolder
from disttrain_cli.spec.families.processors import OWN
from disttrain_cli.spec.files import parse_json
from disttrain_cli.spec.heads import ImageInput
from disttrain_cli.spec.image_processor import ImageProcessor
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.runfile.published import is_of

#: Mean and standard deviation of each channel, the defaults of the classes' processors.
HALVES = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

_Channels = tuple[float, ...]
Normal = tuple[_Channels, _Channels]


def image_input(
    run: Run,
    module: str,
    normal: Normal,
    *,
    patch_px: int,
    merge: int,
    extra_tokens: int = 0,
    window: int = 1,
    side_px: int | None = None,
) -> ImageInput:
    """Return the image requirements of an encoder.

    The module of a whole published model (`model.folder`) also has its image processor's rule.

    Args:
        normal: mean and deviation if no folder sets them.
        side_px: side of the images that the tower has positions for; None: any.

    Raises:
        SpecError: the folder's `preprocessor_config.json` cannot be read, or holds unsupported
            values; the processor does not fit the tower.
    """
    most, block_px = run.file.data.max_image_pixels, patch_px * merge
    if block_px**2 > most:
        raise SpecError(
            f"model.modules.{module}: one token stands for more pixels than an image may have",
            f"patch_size {patch_px} × merge {merge}: {block_px} × {block_px} pixels; "
            f"data.max_image_pixels: {most:,}",
            "Lower merge or patch_size, or raise data.max_image_pixels.",
        )
    published = run.published
    processor = None
    if published is not None and is_of(published, run.file.model, module):
        processor = _fitting(run, published, module, patch_px, merge, side_px)
        most = min(most, processor.most_pixels)
    mean, std = _from_folder(run, module, *normal)
    return ImageInput(
        module=module,
        patch_px=patch_px,
        merge=merge,
        mean=mean,
        std=std,
        extra_tokens=extra_tokens,
        window=window,
        max_pixels=most,
        processor=processor,
    )


def _fitting(
    run: Run,
    published: PublishedFolder,
    module: str,
    patch_px: int,
    merge: int,
    side_px: int | None,
) -> ImageProcessor:
    """Return the image processor's rule; raise SpecError if its images do not fit the tower."""
    processor, most = published.processor(), run.file.data.max_image_pixels
    where = f"{published.path}: the image processor does not fit the tower"
    step = "Download the folder again; or give the module of that name another folder."
    if processor.fixed_px is None:
        for field, given, expected in (
            ("patch_size", processor.patch_px, patch_px),
            ("merge_size", processor.merge, merge),
        ):
            if given not in (None, expected):
                raise SpecError(where, f"{field}: {given}; the tower's: {expected}", step)
        return processor.model_copy(update={"min_pixels": min(processor.min_pixels, most)})
    height, width = processor.fixed_px
    if side_px is not None and (height, width) != (side_px, side_px):
        raise SpecError(
            where,
            f"images of {width} × {height} pixels; the tower's image_size: {side_px}",
            step,
        )
    if (height // patch_px) % merge or (width // patch_px) % merge:
        raise wrong_field(
            module, "merge", merge, f"a divisor of {height // patch_px} and {width // patch_px}"
        )
    rows = (height // patch_px // merge) * (width // patch_px // merge)
    if processor.tokens not in (None, rows):
        raise SpecError(
            where,
            f"a tile of {width} × {height} pixels is {rows} rows in the LLM (patches of {patch_px},"
            f" {merge} × {merge} to a row); the processor writes {processor.tokens} placeholders",
            step,
        )
    if height * width > most:
        raise SpecError(
            f"data.max_image_pixels is less than the one size of images of {published.path}",
            f"given: {most:,}; images have {width} × {height} = {height * width:,} pixels",
            f"Set data.max_image_pixels: {height * width}, or leave it out.",
        )
    return processor


def _from_folder(
    run: Run, module: str, mean: _Channels, std: _Channels
) -> tuple[_Channels, _Channels]:
    """Return mean and deviation for values scaled to 0..1.

    A processor that scales bytes by another factor r computes (x·r - m) / s = (x / 255 - m / 255r)
    / (s / 255r).
    """
    given = run.file.model.modules[module].folder
    if given is None:
        return mean, std
    folder, published = run.resolve(given), run.published
    path = folder / OWN
    if published is not None and published.path == folder:
        path, fields = published.image_fields()
    elif path.exists():
        fields = parse_json(
            path, "image processor configuration", f"Correct it, or model.modules.{module}.folder."
        )
    else:
        return mean, std
    if not isinstance(fields, dict):
        raise SpecError(
            f"The image processor configuration {path} must be a mapping", f"given: {type(fields)}"
        )
    fields = completed(fields, IMAGE_PROCESSORS.get(named_class(fields), {}))
    if fields.get("do_normalize", True):
        mean = _channels(path, "image_mean", fields.get("image_mean", mean))
        std = _channels(path, "image_std", fields.get("image_std", std))
        if min(std) <= 0:
            raise SpecError(
                f"{path}: image_std does not fit", f"given: {std}; allowed: positive numbers"
            )
    else:
        mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    factor = fields.get("rescale_factor", 1 / 255) if fields.get("do_rescale", True) else 1.0
    if not isinstance(factor, (int, float)) or not 0 < factor < math.inf:
        raise SpecError(
            f"{path}: rescale_factor does not fit", f"given: {factor!r}; allowed: a positive number"
        )
    if abs(factor * 255 - 1) < 1e-6:
        return mean, std
    return tuple(value / (255 * factor) for value in mean), tuple(
        value / (255 * factor) for value in std
    )


def _channels(path: Any, field: str, given: Any) -> _Channels:
    values = [given] * 3 if isinstance(given, (int, float)) else given
    if (
        isinstance(values, (list, tuple))
        and len(values) == 3
        and all(isinstance(v, (int, float)) and math.isfinite(v) for v in values)
    ):
        return tuple(float(value) for value in values)
    raise SpecError(
        f"{path}: {field} does not fit", f"given: {given!r}; allowed: a number for each of RGB"
    )

"""Checks of a generator's training image sizes (`buckets` of the run file)."""

from __future__ import annotations

from typing import Any

from disttrain_cli.errors import SpecError
from disttrain_cli.models.configs.checks import wrong_field
from disttrain_cli.models.configs.library_generators import FAMILIES
from disttrain_cli.spec.buckets import Buckets
from disttrain_cli.spec.runfile.model import ModuleSpec

#: Architectures that support images of any size, and the field that limits their patches per side.
BUCKETED = {
    "sd3": "pos_embed_max_size",
    "flux": None,
    "lumina2": "axes_lens",
    "qwen_image": None,
    **{name: "axes_lens" if name == "z_image" else None for name in FAMILIES},
}


def read_buckets(
    name: str, architecture: str, spec: ModuleSpec, config: Any, factor: int, patch: int
) -> Buckets | None:
    """Return the image sizes of a run file's module, if it sets any.

    Args:
        factor: pixels per side of a latent.
        patch: latents per side of a patch.

    Raises:
        SpecError: the architecture supports squares only, or a size is not a multiple of the patch,
            exceeds the model's positions, or is listed twice.
    """
    if spec.buckets is None:
        return None
    if architecture not in BUCKETED:
        known = ", ".join(BUCKETED)
        raise SpecError(
            f"model.modules.{name}.buckets: {architecture} learns images of one size",
            f"generators with sizes of their own: {known}",
            "Remove the buckets: images are then squares of image_size.",
        )
    side_px, grids = factor * patch, list[tuple[int, int]]()
    for width, height in spec.buckets:
        size = [width, height]
        if width % side_px or height % side_px:
            allowed = f"multiples of {side_px}: {factor} pixels per latent times patches of {patch}"
            raise wrong_field(name, "buckets", size, allowed)
        grid = height // side_px, width // side_px
        for patches, most in zip(grid, _most(config, BUCKETED[architecture]), strict=True):
            if patches > most:
                allowed = f"{most * side_px} pixels or fewer: {BUCKETED[architecture]} is {most}"
                raise wrong_field(name, "buckets", size, allowed)
        if grid in grids:
            raise wrong_field(name, "buckets", size, "every size once")
        grids.append(grid)
    return Buckets(grids=grids, patch_px=side_px, patch=patch)


def _most(config: Any, field: str | None) -> tuple[float, float]:
    """Return the most patches per column and per row that the model has positions for."""
    if field is None:
        return float("inf"), float("inf")
    most = config[field]
    return (most, most) if isinstance(most, int) else tuple(most[1:])

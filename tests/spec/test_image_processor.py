"""The size that a published image processor gives an image."""

import numpy as np
import pytest

from disttrain_cli.spec.heads import ImageInput
from disttrain_cli.spec.image_processor import ImageProcessor


@pytest.mark.parametrize(
    ("patch", "merge", "least", "most"),
    [(14, 2, 3136, 12_845_056), (16, 2, 65_536, 1_000_000), (14, 1, 200_000, 300_000)],
)
def test_a_budget_is_the_one_of_transformers(patch, merge, least, most):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    random = np.random.default_rng(0)
    sizes = np.exp(random.uniform(np.log(1), np.log(6000), (3000, 2))).astype(np.int64)
    sizes = np.concatenate([sizes, [(14, 14), (1, 1), (42, 70), (28, 5600), (5600, 28)]])
    sizes = sizes[sizes.max(axis=1) <= 200 * sizes.min(axis=1)]
    head = ImageInput(
        module="eye",
        patch_px=patch,
        merge=merge,
        max_pixels=most,
        processor=ImageProcessor(resize="budget", min_pixels=least, max_pixels=most),
    )
    expected = [
        smart_resize(height, width, patch * merge, least, most) for width, height in sizes.tolist()
    ]
    assert (head.grids(sizes) * patch).tolist() == [list(size) for size in expected]
    assert head.misfit(201, 1) and not head.misfit(200, 1)


def test_a_processor_is_kept_when_written():
    head = ImageInput(module="eye", patch_px=14, max_pixels=4096)
    fixed = ImageProcessor(resize="stretch", height_px=30, width_px=45)
    other = head.model_copy(update={"processor": fixed})
    assert ImageInput.model_validate_json(other.model_dump_json()) == other
    assert other.grid(1, 1000) == (2, 3)  # the last pixels of both sides are cut off


@pytest.mark.parametrize(
    "fields",
    [
        {"resize": "stretch"},
        {"resize": "budget"},
        {"resize": "crop", "height_px": 32, "width_px": 32, "shortest_px": 31},
        {"resize": "budget", "max_pixels": 64, "height_px": 8, "width_px": 8},
    ],
)
def test_numbers_that_say_nothing_are_refused(fields):
    with pytest.raises(ValueError, match=r"size of the result|shorter side"):
        ImageProcessor(**fields)

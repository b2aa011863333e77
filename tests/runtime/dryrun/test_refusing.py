"""Operators that no kernel of CUDA takes, and some that one does."""

import pytest

from tests.runtime.dryrun.on_fake_cuda import on_fake_cuda


def refused() -> dict[str, bool]:
    import torch

    from disttrain_cli.runtime.dryrun.observing import Observer

    half, single = (
        torch.ones(1, 4, 128, 64, device="cuda", dtype=dtype)
        for dtype in (torch.bfloat16, torch.float32)
    )
    wide = torch.ones(1, 4, 128, 320, device="cuda", dtype=torch.bfloat16)
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    image, filters = half[0], torch.ones(8, 4, 3, 3, device="cuda")
    asked = {
        "mixed product": lambda: half[0, 0].mm(single[0, 0].T),
        "mixed batch": lambda: half[0].bmm(single[0].mT),
        "mixed convolution": lambda: torch.conv2d(image[None], filters),
        "flash in fp32": lambda: flash(single, single, single),
        "flash too wide": lambda: flash(wide, wide, wide),
        "product": lambda: half[0, 0].mm(half[0, 0].T),
        "sum of both": lambda: half + single,
        "convolution": lambda: torch.conv2d(image[None], filters.bfloat16()),
        "flash": lambda: flash(half, half, half),
    }
    found = {}
    for name, ask in asked.items():
        try:
            with Observer():
                ask()
            found[name] = False
        except RuntimeError:
            found[name] = True
    return found


@pytest.mark.slow
def test_what_no_kernel_takes_is_refused() -> None:
    found = on_fake_cuda(refused)
    assert [name for name, failed in found.items() if failed] == [
        "mixed product",
        "mixed batch",
        "mixed convolution",
        "flash in fp32",
        "flash too wide",
    ]

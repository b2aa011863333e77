"""Which versions of torch serve, and what the oldest of them lacks."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from disttrain_cli.errors import DisttrainError
from disttrain_cli.models import torch_versions
from disttrain_cli.models.torch_versions import BEYOND, OLDEST, check, varlen_attn

ROOT = Path(__file__).parents[2]
PRESETS = ROOT / "src" / "disttrain_cli" / "templates" / "presets"


@pytest.mark.parametrize(
    ("version", "numbers"),
    [
        ("2.11.0+cu130", (2, 11)),
        ("2.12.1", (2, 12)),
        ("2.13.0+cpu", (2, 13)),
        ("2.13.0a0+gitdeadbee", (2, 13)),
    ],
)
def test_versions_of_the_range_serve(version, numbers):
    assert check(version) == numbers


@pytest.mark.parametrize(
    "version", ["2.10.0+cu128", "1.13.1", "2.14.0", "3.0.0.dev20270101", "unknown"]
)
def test_other_versions_are_refused_with_what_to_install(version):
    with pytest.raises(DisttrainError) as caught:
        check(version)
    assert version in caught.value.what and "'torch>=2.11,<2.14'" in caught.value.next_step


def test_the_package_asks_for_the_same_range():
    wanted = [
        line
        for line in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
        if line.startswith("torch")
    ]
    assert wanted == [f"torch>={OLDEST[0]}.{OLDEST[1]},<{BEYOND[0]}.{BEYOND[1]}"]


@pytest.mark.slow
def test_a_user_is_told_before_names_are_imported_that_such_a_torch_lacks(tmp_path):
    (tmp_path / "disttrain.yaml").write_text((PRESETS / "tiny.yaml").read_text())
    program = (
        "import sys, torch; torch.__version__ = '2.9.1'; sys.modules['torch.nn.attention.varlen'] ="
        " None\nsys.argv = ['disttrain', 'profile', '--json']\nfrom disttrain_cli.__main__ import"
        " main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path
    )
    assert json.loads(done.stdout)["error"] == {
        "what": "torch 2.9.1 cannot be used",
        "why": "disttrain runs with torch >=2.11,<2.14",
        "next": "Install one of them: python -m pip install 'torch>=2.11,<2.14'",
        "exit_code": 1,
    }


@pytest.mark.parametrize("heads", [4, 2])
def test_the_flops_of_segments_are_those_of_their_attention(heads):
    """In 2.11 by our own count; in all others by torch's, which ours must equal."""
    query, key, value = (
        torch.empty(32, count, 16, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for count in (4, heads, heads)
    )
    starts = torch.tensor([0, 20, 32], dtype=torch.int32)
    with FlopCounterMode(display=False) as forward:
        made = varlen_attn(
            query, key, value, starts, starts, 20, 20, window_size=(-1, 0), enable_gqa=heads < 4
        )
    with FlopCounterMode(display=False) as backward:
        made.backward(torch.empty_like(made))
    products = 2 * 4 * 16 * (20**2 + 12**2)  # of all heads
    assert (forward.get_total_flops(), backward.get_total_flops()) == (2 * products, 5 * products)
    given = (made, query, key, value, made, None, starts)
    assert torch_versions._varlen_flops(*given[1:4], starts) == 2 * products
    assert torch_versions._varlen_backward_flops(*given) == 5 * products


def test_gradients_of_a_grouped_convolution_cost_what_its_forward_does():
    convolution = torch.nn.Conv1d(8, 8, 4, groups=8)
    with FlopCounterMode(display=False) as forward:
        made = convolution(torch.ones(2, 8, 9, requires_grad=True))
    with FlopCounterMode(display=False) as backward:
        made.sum().backward()
    assert backward.get_total_flops() == 2 * forward.get_total_flops()

"""Positions of tokens: in one dimension as ever, with M-RoPE those of transformers' own
`get_rope_index`."""

from typing import Any

import numpy as np
import pytest
import torch

from disttrain_cli.data.epochs.mixture import Mixture
from disttrain_cli.data.index.sample_index import Index
from disttrain_cli.data.indexing.building import build_index
from disttrain_cli.data.packing import pack
from disttrain_cli.data.positions import grid_positions, sample_positions
from disttrain_cli.data.sequences import PADDING_DOCUMENT, SequencePlan
from disttrain_cli.spec.index import IMAGE
from disttrain_cli.spec.runfile import Run
from tests.data.dataset import INPUTS

#: Numbers of text tokens, and (frames, rows, columns) of tokens of images ("i") and videos ("v").
SAMPLES: list[list[Any]] = [
    [5, ("i", 1, 2, 3), 4, ("i", 1, 4, 2), 1, ("i", 1, 1, 1), 3],
    [("i", 1, 5, 5)],
    [2, ("v", 4, 3, 2), 3, ("i", 1, 2, 2), 1, ("v", 2, 1, 4), 2],
]


def transformers_own(family: str, sample: list[Any], seconds: float) -> torch.Tensor:
    """[3, tokens] by the library's whole model."""
    import transformers
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

    made: Any = {"qwen2_5": Qwen2_5_VLModel, "qwen3": Qwen3VLModel}[family]
    config = {"qwen2_5": transformers.Qwen2_5_VLConfig, "qwen3": transformers.Qwen3VLConfig}[family]
    types: list[int] = []
    grids: dict[str, list[list[int]]] = {"i": [], "v": []}
    for part in sample:
        if isinstance(part, int):
            types += [0] * part
            continue
        kind, frames, rows, columns = part
        grids[kind].append([frames, 2 * rows, 2 * columns])
        types += [1 if kind == "i" else 2] * (frames * rows * columns)
    with torch.device("meta"):
        whole = made.__new__(made)
    torch.nn.Module.__init__(whole)
    whole.config = config()
    found, _ = whole.get_rope_index(
        torch.zeros(1, len(types)).long(),
        mm_token_type_ids=torch.tensor(types)[None],
        image_grid_thw=torch.tensor(grids["i"]) if grids["i"] else None,
        video_grid_thw=torch.tensor(grids["v"]) if grids["v"] else None,
        second_per_grid_ts=torch.tensor([seconds] * len(grids["v"])),
    )
    return found[:, 0]


def own(sample: list[Any], every: float = 1.0) -> np.ndarray[Any, Any]:
    length, grids = 0, []
    for part in sample:
        if isinstance(part, int):
            length += part
        else:
            kind, *grid = part
            grids.append((length, grid_positions(grid, every if kind == "v" else 1.0)))
            length += int(np.prod(grid))
    return sample_positions("mrope", length, grids)


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("seconds", [1.0, 0.5, 0.3])
def test_mrope_equals_transformers_own(sample: list[Any], seconds: float) -> None:
    expected = transformers_own("qwen2_5", sample, seconds)
    assert own(sample, every=4 * seconds).tolist() == expected.tolist()  # 4 tokens per second


def test_of_qwen3_every_frame_of_a_video_is_a_grid_of_its_own() -> None:
    frames: list[Any] = [("v", 1, 3, 2), 2] * 3
    expected = transformers_own("qwen3", [3, ("v", 1, 3, 2), 2], 1.0)
    assert own([3, ("v", 1, 3, 2), 2]).tolist() == expected.tolist()
    assert own(frames)[0, ::8].tolist() == [0, 5, 10]


def test_in_one_dimension_tokens_are_counted() -> None:
    assert sample_positions("1d", 4, [(1, grid_positions((1, 1, 2)))]).tolist() == [0, 1, 2, 3]


def test_positions_restart_with_every_sample_of_a_sequence(run: Run, index: Index) -> None:
    three = INPUTS.model_copy(update={"positions": "mrope"})
    packing, placed = (
        pack(Mixture(of, run.file.train.seed), 0)
        for of, inputs in ((index, INPUTS), (build_index(run, three), three))
    )
    images = 0
    for number in range(len(packing)):
        plan = SequencePlan(packing, number)
        (counted, documents), (positions, same) = (
            plan.layout(),
            SequencePlan(placed, number).layout(),
        )
        assert counted.shape == documents.shape and positions.shape == (3, len(documents))
        assert (documents == same).all() and not positions[:, documents == PADDING_DOCUMENT].any()
        rows = [places.at for places in plan.rows(IMAGE)]
        grids = plan.grids[plan.kinds == IMAGE]
        for sample, start in enumerate(plan.sample_at.tolist()):
            length = int(plan.sample_tokens[sample])
            assert counted[start : start + length].tolist() == list(range(length))
            expected, place, at = np.zeros((3, 0), dtype=np.int64), 0, start
            for tokens, (high, wide) in zip(rows, grids, strict=True):
                if not start <= tokens[0] < start + length:
                    continue
                text = place + np.arange(tokens[0] - at)
                place += len(text)
                m = three.images[0].merge
                inside = [
                    [place, place + row, place + column]
                    for row in range(high // m)
                    for column in range(wide // m)
                ]
                expected = np.concatenate(
                    [expected, np.tile(text, (3, 1)), np.transpose(inside)], 1
                )
                place, at, images = place + max(high, wide) // m, tokens[-1] + 1, images + 1
            rest = place + np.arange(start + length - at)
            expected = np.concatenate([expected, np.tile(rest, (3, 1))], 1)
            assert (positions[:, start : start + length] == expected).all()
    assert images > 3


def test_positions_are_part_of_the_fingerprint() -> None:
    three = INPUTS.model_copy(update={"positions": "mrope"})
    assert three.fingerprint() != INPUTS.fingerprint()
    assert type(INPUTS).model_validate(three.model_dump(mode="json")) == three


def test_the_token_after_a_grid_may_follow_its_time() -> None:
    """As after a video of Qwen2.5-Omni, which lasts longer than it is wide and high."""
    inside = grid_positions((2, 1, 2), every=25.0)
    made = sample_positions("mrope", 7, [(1, inside, 26)])
    assert made.tolist() == [
        [0, 1, 1, 26, 26, 27, 28],
        [0, 1, 1, 1, 1, 27, 28],
        [0, 1, 2, 1, 2, 27, 28],
    ]

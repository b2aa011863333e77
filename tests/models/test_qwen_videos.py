"""The towers of Qwen2.5-VL and Qwen3-VL see videos as transformers' own do: two frames an item."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from disttrain_cli.errors import SpecError
from disttrain_cli.models.graph import describe
from disttrain_cli.models.layer import Batch, Items
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.runfile.data import VideoSpec
from tests.models.test_qwen_models import FAMILIES, model_layers, qwen_run, whole_model


def video_run(make_run: Callable[..., Run], family: str, **video: Any) -> Run:
    """A run of a family that reads videos."""
    run = qwen_run(make_run, family)
    data = run.file.data.model_copy(update={"video": VideoSpec(**video)})
    return Run(path=run.path, file=run.file.model_copy(update={"data": data}))


def patches(frames_TCHW: Tensor) -> Tensor:
    """[P, ...] of a video as `patchify` of transformers' video processors lays patches out."""
    frames, channels, height, width = frames_TCHW.shape
    shape = (frames // 2, 2, channels, height // 8, 2, 4, width // 8, 2, 4)
    return frames_TCHW.view(shape).permute(0, 3, 6, 4, 7, 2, 1, 5, 8).flatten(4).flatten(0, 3)


@pytest.mark.parametrize("family", FAMILIES)
def test_temporal_patches_are_items_of_their_own(
    make_run: Callable[..., Run], family: str, tmp_path: Path
) -> None:
    run, whole = video_run(make_run, family), whole_model(family)
    head = describe(run).image
    assert head is not None and head.temporal == 2 and head.video is not None
    draws = torch.Generator().manual_seed(3)
    film = torch.randn(6, 3, 24, 32, generator=draws)  # three temporal patches of 6 × 8
    image = torch.randn(1, 3, 24, 32, generator=draws).expand(2, -1, -1, -1)
    items = torch.cat([film, image]).unflatten(0, (-1, 2)).flatten(1, 2)
    assert items.shape[1:] == head.shape_of((6, 8))
    batch = Batch({"image": Items([(6, 8)] * 4, {0: [items]})})
    state: dict[str, Tensor] = {}
    with torch.no_grad():
        for layer in model_layers(run, whole, tmp_path):
            if layer.module == "eye":
                state |= layer(state, batch)
        given = torch.cat([patches(film), patches(image)])
        made = whole.model.visual(given, grid_thw=torch.tensor([[3, 6, 8], [1, 6, 8]]))
    torch.testing.assert_close(state["image_embeds"], made.pooler_output, rtol=1e-4, atol=1e-4)
    for level, features in enumerate(getattr(made, "deepstack_features", None) or ()):
        torch.testing.assert_close(state[f"image_features.{level}"], features, rtol=1e-4, atol=1e-4)


def test_without_videos_nothing_of_a_head_changes(make_run: Callable[..., Run]) -> None:
    head = describe(qwen_run(make_run, "qwen2_5_vl")).image
    assert head is not None and head.temporal == 1


def test_bounds_of_the_run_file_go_before_those_of_the_class(make_run: Callable[..., Run]) -> None:
    head = describe(video_run(make_run, "qwen3_vl", fps=1.0, max_frames=2, max_pixels=4096)).image
    assert head is not None and head.video is not None
    assert (head.video.fps, head.video.min_frames, head.video.max_frames) == (1.0, 2, 2)
    assert (head.video.most_pixels, head.video.most_frame_pixels) == (4096, head.max_pixels)


def test_videos_without_an_encoder_that_reads_them_are_refused(
    make_run: Callable[..., Run],
) -> None:
    run = make_run()
    data = run.file.data.model_copy(update={"video": VideoSpec()})
    with pytest.raises(SpecError, match="no encoder of this model reads videos"):
        describe(Run(path=run.path, file=run.file.model_copy(update={"data": data})))

"""Which frames of a video are seen, and at which size: as the published classes' own functions
say."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from disttrain_cli.spec.video_processor import NHZ, Film, VideoProcessor
from tests.video_models import RULES, published

RATES = (24.0, 25.0, 30.0, 30_000 / 1001, 24_000 / 1001, 60.0, 12.5, 7.0)
LARGEST = 2**40
LIMITS = {"qwen2_5_vl": (28, 3136, 602_112), "qwen3_vl": (32, 4096, 3_145_728)}


def rule(family: str, **fields: Any) -> VideoProcessor:
    _, least, most = LIMITS[family]
    given = {"min_pixels": least, "max_pixels": most, "most_frame_pixels": LARGEST, **fields}
    return VideoProcessor(rule=RULES[family], **given)


def drawn(family: str, count: int = 300) -> list[Film]:
    """Videos of all lengths up to ten minutes."""
    draws = random.Random(family)
    return [
        Film(
            draws.randint(20, 2000),
            draws.randint(20, 2000),
            draws.choice([draws.randint(2, 40), draws.randint(2, 5000)]),
            round(draws.choice(RATES) * NHZ),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("family", RULES)
@pytest.mark.parametrize(("fps", "least", "most"), [(2.0, 4, 768), (1.0, 2, 17), (3.3, 8, 16)])
def test_frames_are_those_of_the_class(family: str, fps: float, least: int, most: int) -> None:
    from transformers.video_utils import VideoMetadata

    sample = published(family, "sample_frames")
    own = SimpleNamespace(
        num_frames=None, fps=fps, temporal_patch_size=2, min_frames=least, max_frames=most
    )
    for film in drawn(family):
        meta = VideoMetadata(total_num_frames=film.frames, fps=film.fps)
        expected = [int(number) for number in sample(own, meta)]
        expected += expected[-1:] * (len(expected) % 2)
        made = rule(family, fps=fps, min_frames=least, max_frames=most).numbers(film)
        assert made == expected, film


@pytest.mark.parametrize("family", RULES)
def test_sizes_are_those_of_smart_resize(family: str) -> None:
    block, least, most = LIMITS[family]
    resize, processor = published(family, "smart_resize"), rule(family)
    refused = 0
    for film in [*drawn(family), Film(4000, 12, 30, 30 * NHZ), Film(9, 9, 30, 30 * NHZ)]:
        given = {"height": film.height_px, "width": film.width_px, "factor": block}
        if family == "qwen3_vl":
            given |= {"num_frames": processor._seen(film)}
        try:
            expected = resize(**given, min_pixels=least, max_pixels=most)
        except ValueError:
            refused += 1
            assert processor.misfit(film, block)
            continue
        assert processor.size_px(film, block) == expected and not processor.misfit(film, block)
    assert refused


@pytest.mark.parametrize("family", RULES)
def test_caps_of_frames_are_those_of_the_class(family: str) -> None:
    """`cap_pixels_per_frame`, through the class's own `resize`."""
    block, least, most = LIMITS[family]
    tokens = 2000 if family == "qwen2_5_vl" else 70
    sizes: list[tuple[int, int]] = []
    resize = published(family, "resize")
    base = SimpleNamespace(resize=lambda image, size, resample: sizes.append(size))
    space = resize.__globals__
    space["super"] = lambda: base
    space["SizeDict"] = lambda height, width: (height, width)
    space["smart_resize"] = published(family, "smart_resize")
    own = SimpleNamespace(max_video_tokens=tokens)
    processor = rule(family, most_tokens=tokens)
    for film in drawn(family, 60):
        shape = (1, processor._seen(film), 3, film.height_px, film.width_px)
        limits = SimpleNamespace(shortest_edge=least, longest_edge=most)
        try:
            resize(own, SimpleNamespace(shape=shape), limits, None, block, 2, True)
        except ValueError:
            continue
        assert processor.size_px(film, block) == sizes[-1]
    assert len(sizes) > 40


def test_times_are_those_of_rope_in_single_precision() -> None:
    processor = rule("qwen2_5_vl", tokens_per_second=2.0)
    for film in drawn("times"):
        seen = processor._seen(film)
        seconds = torch.tensor([2 / (seen / film.frames * film.fps)])
        expected = (torch.arange(processor.patches(film)) * (2 * seconds[0])).long().tolist()
        assert processor.times(film) == expected


def test_bounds_of_a_run_hold_whatever_the_folder_says() -> None:
    for family, (block, _, _) in LIMITS.items():
        for film in drawn(family, 60):
            processor = rule(family, most_pixels=40_000, most_frame_pixels=30_000)
            if processor.misfit(film, block):
                continue
            height, width = processor.size_px(film, block)
            of_all = height * width * len(processor.numbers(film))
            assert of_all <= 45_000 or min(height, width) == block  # the last frame may be twice


def test_short_videos_are_refused_by_name() -> None:
    for family in RULES:
        with pytest.raises(ValueError, match="a video of 1 frame, at least 2 are needed"):
            rule(family).numbers(Film(64, 64, 1, 30 * NHZ))


def test_what_is_written_around_patches() -> None:
    film = Film(64, 64, 20, 10 * NHZ)
    assert rule("qwen2_5_vl", fps=2.0).written(film) == ("", "", "")
    assert rule("qwen3_vl", fps=2.0).written(film) == (
        "<0.3 seconds><|vision_start|>",
        "<|vision_end|><1.6 seconds><|vision_start|>",
        "<|vision_end|>",
    )

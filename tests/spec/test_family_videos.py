"""Numbers of a folder's video processor: which file they come from, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from disttrain_cli.errors import SpecError
from disttrain_cli.spec.families.videos import video_budget, video_processor_fields


def write(folder: Path, name: str, **fields: Any) -> None:
    (folder / name).write_text(json.dumps(fields))


def test_the_first_file_that_has_them_tells(tmp_path: Path) -> None:
    write(tmp_path, "preprocessor_config.json", min_pixels=3136, max_pixels=12_845_056)
    read = video_budget("qwen2_vl", *video_processor_fields(tmp_path))
    assert (read.min_pixels, read.max_pixels, read.fps) == (3136, 12_845_056, 2.0)
    size = {"shortest_edge": 4096, "longest_edge": 25_165_824}
    write(tmp_path, "video_preprocessor_config.json", size=size, fps=4, max_frames=32)
    read = video_budget("qwen3_vl", *video_processor_fields(tmp_path))
    assert (read.min_pixels, read.max_pixels) == (4096, 25_165_824)
    assert (read.fps, read.min_frames, read.max_frames) == (4.0, 4, 32)
    write(tmp_path, "processor_config.json", video_processor={"fps": 1, "min_pixels": 9})
    read = video_budget("qwen3_vl", *video_processor_fields(tmp_path))
    # Qwen3-VL's class takes no min_pixels
    assert (read.fps, read.min_pixels) == (1.0, 128 * 32 * 32)


def test_caps_have_the_tokens_of_their_class(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    assert video_budget("qwen2_vl", path, {"cap_pixels_per_frame": True}).most_tokens == 128_000
    assert video_budget("qwen3_vl", path, {"cap_pixels_per_frame": True}).most_tokens == 768
    given = {"cap_pixels_per_frame": True, "max_video_tokens": 5}
    assert video_budget("qwen3_vl", path, given).most_tokens == 5
    assert video_budget("qwen3_vl", path, {"max_video_tokens": 5}).most_tokens is None


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"video_processor_type": "Other"}, "video_processor_type"),
        ({"do_resize": False}, "do_resize"),
        ({"do_center_crop": True}, "do_center_crop"),
        ({"num_frames": 8}, "num_frames"),
        ({"temporal_patch_size": 4}, "temporal_patch_size"),
        ({"size": 5}, "size"),
        ({"size": {"shortest_edge": "a"}}, "min_pixels"),
        ({"size": {"shortest_edge": 10_000_000, "longest_edge": 1000}}, "size"),
        ({"fps": "two"}, "fps"),
        ({"max_frames": 1}, "max_frames"),
        ({"resample": 77}, "resample"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    tmp_path: Path, fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(SpecError, match=named):
        video_budget("qwen2_vl", tmp_path / "a.json", fields)


def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path) -> None:
    (tmp_path / "video_preprocessor_config.json").write_text("[]")
    with pytest.raises(SpecError, match="must be a mapping"):
        video_processor_fields(tmp_path)

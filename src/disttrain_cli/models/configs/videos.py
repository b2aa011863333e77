"""Video preprocessing for an encoder (`data.video`): its class's own processor, or the folder's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from disttrain_cli.errors import SpecError
from disttrain_cli.models.configs.checks import wrong
from disttrain_cli.spec.families.folder import PublishedFolder
from disttrain_cli.spec.families.videos import (
    completed_video,
    video_budget,
    video_processor_fields,
)
from disttrain_cli.spec.heads import ImageInput
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.runfile.published import is_of
from disttrain_cli.spec.video_processor import TEMPORAL, VideoRule

#: Video rule by architecture.
RULES: dict[str, VideoRule] = {
    "qwen2_5_vl_vision": "qwen2_vl",
    "qwen3_vl_vision": "qwen3_vl",
}


#: Fields that determine a processor's normalisation.
NORMALISATION = ("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")


def with_video(
    run: Run, module: str, architecture: str, config: Any, head: ImageInput
) -> ImageInput:
    """Return an image encoder's requirements, with those for videos if both run and class use them.

    Raises:
        SpecError: the folder's video processor cannot be read, or does not fit the tower.
    """
    asked, rule = run.file.data.video, RULES.get(architecture)
    if asked is None or rule is None:
        return head
    if config.temporal_patch_size != TEMPORAL:
        raise wrong(
            module,
            "temporal_patch_size",
            config.temporal_patch_size,
            f"{TEMPORAL}, where videos are read (data.video)",
        )
    processor = video_budget(rule, Path(), {})
    published = run.published
    if published is not None and is_of(published, run.file.model, module):
        _check_fit(published, rule, config)
        processor = published.video_processor() or processor
    given = {
        "fps": asked.fps,
        "max_frames": asked.max_frames,
        "most_pixels": asked.max_pixels,
        "most_frame_pixels": head.max_pixels,
        "tokens_per_second": float(getattr(config, "tokens_per_second", 0.0)),
    }
    asked_for = {name: one for name, one in given.items() if one is not None}
    made = processor.model_copy(update=asked_for)
    least = min(made.min_frames, made.max_frames)
    return head.model_copy(update={"video": made.model_copy(update={"min_frames": least})})


def _check_fit(published: PublishedFolder, rule: VideoRule, config: Any) -> None:
    """Raise SpecError if the video processor fits neither the tower nor the image processor.

    It must use the tower's patches and the same normalisation as for images.
    """
    path, given = video_processor_fields(published.path)
    fields, images = completed_video(rule, given), published.image_fields()[1]
    expected = {
        "patch_size": config.patch_size,
        "merge_size": config.spatial_merge_size,
        **{name: images[name] for name in NORMALISATION},
    }
    for field, value in expected.items():
        if fields[field] != value:
            raise SpecError(
                f"{path}: the video processor does not fit the tower and its image processor",
                f"{field}: {fields[field]}; theirs: {value}",
                "Download the folder again; or give the module of that name another folder.",
            )


def check_read(run: Run, heads: list[Any]) -> None:
    """Raise SpecError if the run reads videos and no encoder supports them."""
    if run.file.data.video is None or any(getattr(head, "video", None) for head in heads):
        return
    raise SpecError(
        "data.video: no encoder of this model reads videos",
        f"architectures that do: {', '.join(RULES)}",
        "Leave data.video out, or give the model one of these encoders.",
    )

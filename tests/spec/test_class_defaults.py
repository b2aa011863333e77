"""Defaults of processor classes against the installed library's."""

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from disttrain_cli.spec.families.defaults import IMAGE_PROCESSORS, VIDEO_PROCESSORS

#: Fields that are read, too, and have no value where the table leaves them out.
ABSENT = (
    "do_center_crop",
    "crop_size",
    "fps",
    "num_frames",
    "min_pixels",
    "max_pixels",
    "cap_pixels_per_frame",
)


@pytest.mark.parametrize("name", IMAGE_PROCESSORS)
def test_image_defaults_are_those_of_the_class(name):
    import transformers

    ours, theirs = IMAGE_PROCESSORS[name], getattr(transformers, f"{name}Pil")
    assert ours == {field: getattr(theirs, field) for field in ours}
    assert not any(getattr(theirs, field, None) for field in ABSENT if field not in ours)


@pytest.mark.parametrize("name", VIDEO_PROCESSORS)
def test_video_defaults_are_those_of_the_class(name):
    """Read from its source: the class cannot be imported without torchvision."""
    import transformers.image_utils as constants

    part = re.sub("(VL).*", r"_\1", name).lower()
    module = find_spec(f"transformers.models.{part}.video_processing_{part}")
    assert module is not None and module.origin is not None
    tree = ast.parse(Path(module.origin).read_text())
    body = next(node for node in tree.body if getattr(node, "name", None) == name).body
    theirs = {"rescale_factor": 1 / 255} | {
        node.targets[0].id: eval(ast.unparse(node.value), vars(constants))
        for node in body
        if isinstance(node, ast.Assign) and "wargs" not in ast.unparse(node.value)
    }
    ours = VIDEO_PROCESSORS[name]
    assert ours == {field: theirs[field] for field in ours}
    assert not any(theirs.get(field) for field in ABSENT if field not in ours)

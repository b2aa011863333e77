"""Every form of dataset has pictures and videos upright, in sizes and in pixels; what cannot be
decoded is named."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from disttrain_cli.data.checking import find_broken
from disttrain_cli.data.indexing.building import build_index
from disttrain_cli.data.modalities.images import Images
from disttrain_cli.data.reading import ShardReader
from disttrain_cli.data.tokenizer import read_tokenizer
from disttrain_cli.spec.heads import ImageInput, TargetInput
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.progress import silent
from disttrain_cli.spec.runfile import Run
from tests.data.dataset import image, interleaved, make_run, text, write_tar
from tests.data.sources.forms import hf_images, write_arrow, write_parquet
from tests.data.sources.talks import FORMS as TALKS
from tests.data.sources.talks import write as write_talks

HEAD = ImageInput(module="e", patch_px=8, max_pixels=4096)
INPUTS = ModelInputs(llm="llm", vocabulary=261, sequence_length=128, heads=[HEAD])
UPRIGHT = np.random.default_rng(0).integers(0, 256, (6, 4, 3), np.uint8).repeat(8, 0).repeat(8, 1)
FORMATS: dict[str, dict[str, Any]] = {
    "JPEG": {"quality": 100, "subsampling": 0},
    "PNG": {},
    "WEBP": {"lossless": True, "exact": True},
}
FORMS = ["captions", "interleaved", "parquet", "parquet lists", "arrow", "imagefolder"]


def lying(kind: str) -> bytes:
    """A picture of 32 x 48 pixels that is stored on its side."""
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x0112] = 6
    turned = Image.fromarray(UPRIGHT).transpose(Image.Transpose.ROTATE_90)
    turned.save(file, kind, exif=exif, **FORMATS[kind])
    return file.getvalue()


def write(folder: Path, form: str, picture: bytes) -> None:
    """Write a dataset of one sample: a picture and a text."""
    pair = [("a.jpg", picture), ("a.txt", b"words")]
    if form == "captions":
        write_tar(folder / "0.tar", pair)
    elif form == "interleaved":
        write_tar(folder / "0.tar", [interleaved("a", image("a.jpg"), text("words")), pair[0]])
    elif form == "imagefolder":
        (folder / "train").mkdir(parents=True)
        (folder / "train" / "a.jpg").write_bytes(picture)
        line = json.dumps({"file_name": "a.jpg", "text": "words"})
        (folder / "train" / "metadata.jsonl").write_text(line)
    elif form == "parquet lists":
        kind = pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
        images = pa.array([hf_images([picture, None])], kind)
        write_parquet(
            folder / "0.parquet", pa.table({"images": images, "texts": [[None, "words"]]})
        )
    elif form in ("parquet", "arrow"):
        table = pa.table({"image": hf_images([picture]), "text": ["words"]})
        writer = write_parquet if form == "parquet" else write_arrow
        writer(folder / f"0.{form}", table)
    else:
        write_talks(folder, form, [[{}]], picture)


def run_of(folder: Path) -> Run:
    return make_run(folder, [{"path": "data"}], max_bad_fraction=1.0)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("form", [*FORMS, *TALKS])
def test_pictures_of_every_form_are_upright(tmp_path: Path, form: str, kind: str) -> None:
    write(tmp_path / "data", form, lying(kind))
    run = run_of(tmp_path)
    index = build_index(run, INPUTS)
    (segment,) = np.flatnonzero(index.kinds).tolist()
    assert (index.grids[segment].tolist(), index.tokens[segment]) == ([6, 4], 24)
    out = np.zeros((3, 48, 32), np.uint8)
    data = ShardReader(index, read_tokenizer(run)).file(0, segment)
    Images().decode(data, HEAD, (6, 4), out)
    assert np.abs(out.transpose(1, 2, 0).astype(int) - UPRIGHT).max() <= 2


def test_pictures_to_generate_are_upright(tmp_path: Path) -> None:
    files = [(f"{kind}.jpg", lying(kind)) for kind in FORMATS]
    samples = [interleaved(name[:-4] + "j", text("a"), image(name, True)) for name, _ in files]
    write_tar(tmp_path / "data" / "0.tar", [*samples, *files])
    buckets = {"grids": [(4, 6), (6, 4)], "patch_px": 8, "patch": 1}
    target = TargetInput(module="g", size_px=32, context_tokens=4, latent_pixels=4, buckets=buckets)
    inputs = INPUTS.model_copy(update={"heads": [target]})
    index = build_index(run_of(tmp_path), inputs)
    assert index.grids[index.kinds > 0].tolist() == [[6, 4]] * 3


NAMES = {
    "captions": "a.jpg",
    "tar": "p.png",
    "interleaved": "a.jpg",
    "imagefolder": "a.jpg",
    "parquet": "image[0]",
    "arrow": "image[0]",
    "parquet lists": "images[0]",
    "list": "p.png",
    "uri": "data:…",
    "beside": "0.png",
    "tables parquet": "images[0]",
    "tables arrow": "images[0]",
}


@pytest.mark.parametrize("form", NAMES)
def test_a_picture_that_cannot_be_decoded_is_named(tmp_path: Path, form: str) -> None:
    broken = bytearray(lying("PNG"))
    place = broken.index(b"IDAT") + 40
    broken[place : place + 20] = bytes(20)
    write(tmp_path / "data", form, bytes(broken))
    run = run_of(tmp_path)
    (found,) = find_broken(run, build_index(run, INPUTS), silent).values()
    assert f", {NAMES[form]}: cannot be decoded" in found.reason


@pytest.mark.parametrize("form", [*FORMS[:-1], "list", "uri", "tar", "tables parquet"])
def test_what_is_no_picture_is_named_by_its_kind(tmp_path: Path, form: str) -> None:
    file = io.BytesIO()
    Image.fromarray(UPRIGHT).save(file, "GIF")
    write(tmp_path / "data", form, file.getvalue())
    write_tar(tmp_path / "other" / "0.tar", [("b.png", lying("PNG")), ("b.txt", b"words")])
    sources = [{"path": "data"}, {"path": "other"}]
    index = build_index(make_run(tmp_path, sources, max_bad_fraction=1.0), INPUTS)
    (skipped,) = index.skipped
    assert skipped.reason.endswith("a GIF, not a JPEG, PNG or WebP image")
    assert len(skipped.reason) < 100


def test_a_picture_of_another_kind_beside_a_caption_is_named(tmp_path: Path) -> None:
    files = [("a.gif", b"GIF89a" + bytes(20)), ("a.txt", b"words")]
    more = [("b.png", lying("PNG")), ("b.txt", b"words")]
    write_tar(tmp_path / "data" / "0.tar", [*files, *more])
    (skipped,) = build_index(run_of(tmp_path), INPUTS).skipped
    assert skipped.reason.endswith("; a.gif: a GIF, not a JPEG, PNG or WebP image")

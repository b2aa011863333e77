"""Builders of tiny datasets of both tar forms, runs over them, and layouts."""

import io
import json
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from hypothesis import settings

from disttrain_cli.spec.heads import ImageInput, TargetInput
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.plan import Layout, UnitPlan
from disttrain_cli.spec.runfile import Run, RunFile

#: For property tests: the same examples on every run, no limit on wall time, no files left behind.
PROPERTY = settings(deadline=None, database=None, derandomize=True, max_examples=50)

INPUTS = ModelInputs(
    llm="llm",
    vocabulary=261,
    sequence_length=128,
    heads=[
        ImageInput(module="encoder", patch_px=8, merge=2, max_pixels=4096),
        TargetInput(module="generator", size_px=16, context_tokens=4, latent_pixels=256),
    ],
)


def encoded(width: int, height: int, suffix: str = ".jpg", shade: int = 0) -> bytes:
    """An image file with a gradient and a shade of its own."""
    rows, columns = np.mgrid[0:height, 0:width]
    pixels = np.stack(
        [rows * 255 // height, columns * 255 // width, np.full_like(rows, shade % 256)], axis=2
    )
    return cv2.imencode(suffix, pixels.astype(np.uint8))[1].tobytes()


def normalised(planes: Any, head: ImageInput | TargetInput) -> Any:
    """Pixels as the model reads them: (x / 255 - mean) / std, in single precision."""
    scale, shift = np.array(head.affine, dtype=np.float32).T[..., None, None]
    return planes * scale - shift


def damaged(file: bytes) -> bytes:
    """A JPEG whose end is there and whose code stops in the middle: only a decoder notices."""
    return file[:-100] + bytes(98) + file[-2:]


def write_tar(path: Path, files: Iterable[tuple[str, bytes]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "value": value}


def image(file: str, generate: bool = False) -> dict[str, Any]:
    return {"type": "image", "file": file, "generate": generate}


def interleaved(key: str, *segments: dict[str, Any]) -> tuple[str, bytes]:
    return f"{key}.json", json.dumps({"segments": list(segments)}).encode()


def write_dataset(folder: Path, samples: int = 40) -> None:
    """`mixed/`: interleaved samples of skewed size, some of text only; `captions/`: images with
    captions."""
    random = np.random.default_rng(7)
    shards: list[list[tuple[str, bytes]]] = [[], []]
    for number in range(samples):
        key, files, segments = f"{number:04d}", [], [text("x" * int(random.integers(1, 45)))]
        for place in range(int(random.choice([0, 1, 1, 2, 4]))):
            name, generate = f"{key}.{place}.jpg", bool(random.random() < 0.4)
            files.append((name, encoded(*random.integers(16, 90, size=2).tolist(), shade=number)))
            segments += [image(name, generate), text(f"of {number}.")]
        shards[number % 2] += [interleaved(key, *segments), *files]
    for number, files in enumerate(shards):
        write_tar(folder / "mixed" / f"{number:05d}.tar", files)
    captions = [
        (f"c{n}{suffix}", data)
        for n in range(6)
        for suffix, data in (
            (".png", encoded(20 + n, 30, ".png")),
            (".txt", f"caption {n}".encode()),
        )
    ]
    write_tar(folder / "captions" / "00000.tar", captions)


def make_run(folder: Path, sources: list[dict[str, Any]] | None = None, **data: Any) -> Run:
    sources = sources or [{"path": "mixed"}, {"path": "captions"}]
    file = RunFile.model_validate(
        {
            "name": "t",
            "model": {"modules": {"llm": {"kind": "llm", "architecture": "llama"}}},
            "data": {
                "sources": sources,
                "sequence_length": INPUTS.sequence_length,
                "max_image_pixels": 4096,
                **data,
            },
            "train": {"global_batch_size": 12, "steps": 2},
        }
    )
    return Run(path=folder / "disttrain.yaml", file=file)


def unit(name: str, modules: list[str], dp: int, pp: int = 1) -> UnitPlan:
    return UnitPlan(
        name=name, modules=modules, dp=dp, pp=pp, gpus=dp * pp, layers_per_stage=[1] * pp
    )


def make_layout(
    units: list[UnitPlan], microbatch_size: int = 1, global_batch_size: int = 12
) -> Layout:
    dp = next(u.dp for u in units if "llm" in u.modules)
    return Layout(
        global_batch_size=global_batch_size,
        microbatch_size=microbatch_size,
        microbatches=global_batch_size // (dp * microbatch_size),
        gpus_used=sum(u.gpus for u in units),
        units=units,
    )


DISAGGREGATED = make_layout(
    [
        unit("encoder", ["encoder"], 3),
        unit("llm", ["llm"], 2, 2),
        unit("generator", ["generator"], 1),
    ],
    microbatch_size=2,
)
MONOLITHIC = make_layout([unit("all", ["encoder", "llm", "generator"], 2, 3)])

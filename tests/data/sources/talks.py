"""Conversations about one picture in every form, of which parts may state more than its name."""

import base64
import json
from pathlib import Path
from typing import Any

import pyarrow as pa

from tests.data.dataset import write_tar
from tests.data.sources.forms import write_arrow, write_parquet


def talk(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": [*parts, {"type": "text", "text": "Q"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "A"}]},
    ]


def write(folder: Path, form: str, of_talks: list[list[dict[str, Any]]], picture: bytes) -> None:
    """Write conversations about one picture, with parts that state this of it."""
    folder.mkdir()
    names = {
        "uri": f"data:image/png;base64,{base64.b64encode(picture).decode()}",
        "tables": None,
        "record": None,
        "beside": None,
    }
    name = names.get(form.split()[0], "p.png")
    part: dict[str, Any] = {"type": "image"} if name is None else {"type": "image", "image": name}
    if form == "image_url":
        part = {"type": "image_url", "image_url": {"url": "p.png"}}
    talks = [talk(*({**part, **one} for one in keys)) for keys in of_talks]
    if form == "inside image_url":
        talks = [
            talk(*({"type": "image_url", "image_url": {"url": "p.png", **one}} for one in keys))
            for keys in of_talks
        ]
    (folder / "p.png").write_bytes(picture)
    records = [{"messages": one} for one in talks]
    images = [[picture] * len(keys) for keys in of_talks]
    if form == "record images":
        for record, of in zip(records, images, strict=True):
            record["images"] = ["p.png"] * len(of)
    if form in ("tar", "beside"):
        files = [(f"{at}.json", json.dumps(one).encode()) for at, one in enumerate(records)]
        beside = [(f"{at}.png", picture) for at in range(len(records))]
        write_tar(folder / "0.tar", files + (beside if form == "beside" else [("p.png", picture)]))
    elif form.startswith("tables"):
        table = pa.table({"messages": talks, "images": pa.array(images, pa.list_(pa.binary()))})
        writer = write_parquet if form == "tables parquet" else write_arrow
        writer(folder / f"0.{form.split()[1]}", table)
    elif form == "list":
        (folder / "a.json").write_text(json.dumps(records))
    else:
        (folder / "a.jsonl").write_text("\n".join(map(json.dumps, records)))


FORMS = [
    *("lines", "list", "image_url", "inside image_url", "uri", "record images"),
    *("tar", "beside", "tables parquet", "tables arrow"),
]

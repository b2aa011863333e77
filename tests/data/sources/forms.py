"""The same few samples in every form of dataset: where they lie, and what a reader must find
there."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from disttrain_cli.data.sources import Compact, Sample, Shard, Skipped, read_shard
from disttrain_cli.spec.index import IMAGE, TEXT
from tests.data.dataset import encoded, image, interleaved, text, write_tar

PICTURES = [
    encoded(20 + 4 * number, 30, ".png" if number % 2 else ".jpg", shade=40 * number)
    for number in range(6)
]


def read_one_by_one(shard: Shard, label: str) -> Iterator[Sample | Skipped]:
    """What `read_shard` gives, an object for each sample."""
    for one in read_shard(shard, label):
        yield from one.samples if isinstance(one, Compact) else [one]


class Written(NamedTuple):
    """A source, and its samples as (kind, text or image file, trained)."""

    source: dict[str, Any]
    samples: list[list[tuple[int, Any, bool]]]


def pairs() -> list[tuple[bytes, str]]:
    return [(picture, f"wörds {number}") for number, picture in enumerate(PICTURES)]


def documents() -> list[list[bytes | str]]:
    """Interleaved: text only, one image, several, none at the ends."""
    return [
        ["only wörds"],
        ["a", PICTURES[0], "b"],
        [PICTURES[1], PICTURES[2], "two"],
        ["x", "y", PICTURES[3]],
    ]


def expected(documents: Iterable[Iterable[bytes | str]]) -> list[list[tuple[int, Any, bool]]]:
    return [
        [(TEXT, part, True) if isinstance(part, str) else (IMAGE, part, False) for part in document]
        for document in documents
    ]


def hf_images(pictures: list[bytes | None]) -> list[dict[str, Any] | None]:
    """Hugging Face's Image feature."""
    return [
        None if picture is None else {"bytes": picture, "path": f"{number}.jpg"}
        for number, picture in enumerate(pictures)
    ]


def pair_table(struct: bool = True, **more: Any) -> pa.Table:
    pictures = [picture for picture, _ in pairs()]
    return pa.table(
        {
            "image": hf_images(pictures) if struct else pa.array(pictures, pa.binary()),
            "text": [words for _, words in pairs()],
            **more,
        }
    )


def list_table(struct: bool = True, large: bool = False) -> pa.Table:
    """OBELICS form."""
    texts = [
        [part if isinstance(part, str) else None for part in document] for document in documents()
    ]
    images = [
        [part if isinstance(part, bytes) else None for part in document] for document in documents()
    ]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())]) if struct else pa.binary()
    values = [hf_images(own) for own in images] if struct else images
    listed = pa.large_list if large else pa.list_
    return pa.table(
        {"images": pa.array(values, listed(kind)), "texts": pa.array(texts, listed(pa.string()))}
    )


def write_arrow(path: Path, table: pa.Table, rows: int = 2, whole: bool = False) -> Path:
    """As `save_to_disk` writes it: a stream of batches; `whole`: the file format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = pa.ipc.new_file if whole else pa.ipc.new_stream
    with pa.OSFile(str(path), "wb") as file, new(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


def write_parquet(path: Path, table: pa.Table, rows: int = 2) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=rows)
    return path


def records() -> list[dict[str, Any]]:
    """LLaVA's form: one image, none, two of them in two turns; the marks in the first and the last
    word."""
    return [
        {
            "id": "one",
            "image": "a.jpg",
            "conversations": [
                {"from": "human", "value": "<image>\nWhat is it?"},
                {"from": "gpt", "value": "A grädient."},
            ],
        },
        {
            "id": "none",
            "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}],
        },
        {
            "id": "two",
            "image": ["sub/b.png", "a.jpg"],
            "conversations": [
                {"from": "human", "value": "<image> and"},
                {"from": "gpt", "value": "yes"},
                {"from": "human", "value": "this: <image>"},
                {"from": "gpt", "value": "no"},
            ],
        },
    ]


ENDED = "\x03"  # stands for the token EOS inside a sample


def conversations() -> list[list[tuple[int, Any, bool]]]:
    """What `records` mean."""
    a, b = (IMAGE, PICTURES[0], False), (IMAGE, PICTURES[1], False)
    return [
        [
            (TEXT, "USER: ", False),
            a,
            (TEXT, "\nWhat is it? ASSISTANT:", False),
            (TEXT, " A grädient.", True),
        ],
        [(TEXT, "USER: Hi ASSISTANT:", False), (TEXT, " Hello", True)],
        [
            (TEXT, "USER: ", False),
            b,
            (TEXT, " and ASSISTANT:", False),
            (TEXT, f" yes{ENDED}", True),
            (TEXT, "USER: this: ", False),
            a,
            (TEXT, " ASSISTANT:", False),
            (TEXT, " no", True),
        ],
    ]


def write_llava(folder: Path, name: str = "chat.json", lines: bool = False, **dump: Any) -> None:
    (folder / "sub").mkdir(parents=True, exist_ok=True)
    (folder / "a.jpg").write_bytes(PICTURES[0])
    (folder / "sub" / "b.png").write_bytes(PICTURES[1])
    rows = [json.dumps(record, **dump) for record in records()]
    (folder / name).write_text(
        "\n".join(rows) if lines else f"[{', '.join(rows)}]", encoding="utf-8"
    )


def write_form(folder: Path, form: str) -> Written:
    """A dataset in `folder` / FORM."""
    here = folder / form
    source: dict[str, Any] = {"path": form}
    if form == "tars":
        write_tar(
            here / "0.tar",
            [
                (f"{n}{end}", data)
                for n, (picture, words) in enumerate(pairs())
                for end, data in ((".jpg", picture), (".txt", words.encode()))
            ],
        )
    elif form == "interleaved":
        files = []
        for number, document in enumerate(documents()):
            names = [f"{number}.{place}.jpg" for place in range(len(document))]
            files.append(
                interleaved(
                    f"{number}",
                    *(
                        text(part) if isinstance(part, str) else image(name)
                        for name, part in zip(names, document, strict=True)
                    ),
                )
            )
            files += [
                (name, part)
                for name, part in zip(names, document, strict=True)
                if isinstance(part, bytes)
            ]
        write_tar(here / "0.tar", files)
    elif form == "llava":
        write_llava(here)
    elif form == "llava lines":
        write_llava(here / "json", "chat.jsonl", lines=True, ensure_ascii=False)
        source = {"path": f"{form}/json/chat.jsonl", "images": f"{form}/json"}
    elif form == "parquet":
        write_parquet(here / "data" / "train-0.parquet", pair_table(url=["u"] * 6, label=range(6)))
        (here / "README.md").write_text("a dataset")
    elif form == "parquet lists":
        write_parquet(here / "0.parquet", list_table(large=True))
    elif form == "arrow":
        write_arrow(here / "train" / "data-0.arrow", pair_table())
        (here / "train" / "cache-1.arrow").write_bytes(b"of datasets.map")
        (here / "train" / "state.json").write_text("{}")
    else:
        write_arrow(here / "data-0.arrow", list_table(struct=False), whole=True)
    samples = {
        "tars": [[picture, words] for picture, words in pairs()],
        "parquet": [list(pair) for pair in pairs()],
    }
    samples["arrow"] = samples["parquet"]
    return Written(
        source,
        conversations() if form.startswith("llava") else expected(samples.get(form, documents())),
    )


FORMS = [
    "tars",
    "interleaved",
    "llava",
    "llava lines",
    "parquet",
    "parquet lists",
    "arrow",
    "arrow lists",
]

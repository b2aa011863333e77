"""The index pass against merely reading and tokenizing the same shards, one thread, alternating.

Merely reading: every file of every sample is read, its text is tokenized, and nothing is made of
it. Of a tar that is `tarfile` over its members and the content of each, parsed where it is JSON; of
Parquet `iter_batches` of 64 rows over the two columns, as Python values: all values of a batch
together (`to_pylist`), whose memory malloc gives back and takes again, or, in a row of its own, an
image at a time; of conversations `json.load` of the
file and the content of each image. The last column leaves the images unread (of Parquet, they stay
in Arrow's memory), which no loader could do. Tokenizing: as many texts at a time as the index
takes, by `encode_batch_fast` of the tokenizers library, or UTF-8 bytes counted. The index pass is
`build_index`: besides texts it reads the header of every image, fits samples to the sequence
length, writes the file and reads it back. CPU seconds of the process; a ratio of 1 means that the
index costs nothing on top. Images are 60 KiB of noise behind a JPEG header, captions 5 to 60 words
from a vocabulary of 2,000 with frequencies 1/rank, documents 2.5 images and 400 words on average
(OBELICS: 2.5 images, 815 tokens), seed 0.

The second table is of many shards: conversations that name pictures again and again, and documents
of text alone, read by this process and by a process for each core, in turns. Its speed is by the
clock, which needs a machine without other work; CPU is that of all processes, their start included:
cores × CPU of one process over it is the speed where every core is free.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common import Tables, alternate, main, paired_ratio
from disttrain_cli.data.indexing.building import build_index
from disttrain_cli.data.indexing.index_rows import CHUNK_SAMPLES
from disttrain_cli.data.tokenizer import Tokenizer, read_tokenizer
from disttrain_cli.spec.heads import ImageInput
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.runfile import Run, RunFile

IMAGE_BYTES = 60 * 1024
WORDS = 2000
IMAGES, DOCUMENT_WORDS = 2.5, 400  # of a document, on average
GROUP_ROWS, READ_ROWS = 100, 64  # of Parquet: in a group, and read together
PICTURES = 500  # of the many shards
INPUTS = ModelInputs(
    llm="llm",
    vocabulary=10_000,
    sequence_length=65_536,
    heads=[ImageInput(module="encoder", patch_px=14, merge=2, max_pixels=1024 * 1024)],
)


class Maker:
    """Texts and image files, the same in every run."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)
        letters = np.array(list("etaoinshrdlu"))
        self._words = [
            "".join(self._random.choice(letters, size=size))
            for size in self._random.integers(1, 10, WORDS)
        ]
        self._share = 1 / np.arange(1, WORDS + 1)
        self._share /= self._share.sum()

    def text(self, words: int) -> str:
        return " ".join(
            self._words[place] for place in self._random.choice(WORDS, size=words, p=self._share)
        )

    def caption(self) -> str:
        return self.text(int(self._random.integers(5, 60)))

    def image(self) -> bytes:
        height, width = self._random.integers(128, 1024, size=2).tolist()
        head = (
            b"\xff\xd8\xff\xe0\x00\x10JFIF\x00\x01\x01\x00\x00\x01\x00\x01\x00\x00\xff\xdb\x00\x43\x00"
            + bytes(64)
        )
        frame = (
            b"\xff\xc0\x00\x11\x08"
            + height.to_bytes(2, "big")
            + width.to_bytes(2, "big")
            + b"\x03"
            + bytes(9)
        )
        scan = b"\xff\xda\x00\x0c\x03\x01\x00\x02\x11\x03\x11\x00\x3f\x00"
        return (
            head
            + frame
            + scan
            + self._random.bytes(IMAGE_BYTES).replace(b"\xff", b"\xfe")
            + b"\xff\xd9"
        )

    def document(self) -> list[str | None]:
        """Texts, None = an image."""
        images = int(self._random.poisson(IMAGES))
        words = max(1, int(self._random.exponential(DOCUMENT_WORDS / (images + 1))))
        return [
            self.text(words),
            *(part for _ in range(images) for part in (None, self.text(words))),
        ]


def write_tokenizer(folder: Path) -> None:
    """Byte-level BPE, the kind of Llama 3 and Qwen, trained on the texts' own vocabulary."""
    from tokenizers import Tokenizer as Rules
    from tokenizers import decoders, models, pre_tokenizers, trainers

    maker, rules = Maker(), Rules(models.BPE())
    rules.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rules.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4000,
        special_tokens=["<s>", "</s>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    rules.train_from_iterator([maker.caption() for _ in range(2000)], trainer)
    folder.mkdir()
    rules.save(str(folder / "tokenizer.json"))
    (folder / "special_tokens_map.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')


def write_tar(path: Path, files: Iterator[tuple[str, bytes]]) -> None:
    path.parent.mkdir()
    with tarfile.open(path, "w") as tar:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def captioned(maker: Maker, samples: int) -> Iterator[tuple[str, bytes]]:
    """As img2dataset writes them."""
    for number in range(samples):
        caption = maker.caption()
        yield f"{number:09d}.jpg", maker.image()
        yield (
            f"{number:09d}.json",
            json.dumps(
                {
                    "caption": caption,
                    "key": f"{number:09d}",
                    "status": "success",
                    "url": "https://example.com/" + "x" * 60,
                    "sha256": "0" * 64,
                }
            ).encode(),
        )
        yield f"{number:09d}.txt", caption.encode()


def interleaved(maker: Maker, samples: int) -> Iterator[tuple[str, bytes]]:
    for number in range(samples):
        files, segments = [], []
        for place, part in enumerate(maker.document()):
            if part is None:
                files.append((f"{number}.{place}.jpg", maker.image()))
                segments.append({"type": "image", "file": files[-1][0]})
            else:
                segments.append({"type": "text", "value": part})
        yield f"{number}.json", json.dumps({"segments": segments}).encode()
        yield from files


def write_conversations(folder: Path, samples: int) -> None:
    maker, records = Maker(), []
    folder.mkdir()
    for number in range(samples):
        (folder / f"{number}.jpg").write_bytes(maker.image())
        said = [{"from": who, "value": maker.caption()} for who in ("human", "gpt") * 3]
        said[0]["value"] += "\n<image>"
        records.append({"id": f"{number:09d}", "image": f"{number}.jpg", "conversations": said})
    (folder / "chat.json").write_text(json.dumps(records))


def write_parquet(path: Path, samples: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    maker = Maker()
    path.parent.mkdir()
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    form = pa.schema([("image", image), ("text", pa.string())])
    with pq.ParquetWriter(path, form) as file:
        for first in range(0, samples, GROUP_ROWS):
            rows = range(first, min(first + GROUP_ROWS, samples))
            images = [{"bytes": maker.image(), "path": None} for _ in rows]
            texts = [maker.caption() for _ in rows]
            file.write_table(pa.table({"image": images, "text": texts}, schema=form))


def tokenized(texts: Iterator[str], tokenizer: Tokenizer) -> int:
    """Tokens of all texts, as many at a time as the index takes."""
    count = 0
    while chunk := list(islice(texts, CHUNK_SAMPLES)):
        count += sum(tokenizer.count(chunk))
    return count


def read_tar(path: Path, images: bool) -> Iterator[str]:
    """Captions from the txt, of interleaved samples the texts in the json."""
    with tarfile.open(path, "r:") as tar:
        for member in tar:
            if member.name.endswith(".txt"):
                yield tar.extractfile(member).read().decode()  # type: ignore[union-attr]
            elif member.name.endswith(".json"):
                parts = json.loads(tar.extractfile(member).read()).get("segments", ())  # type: ignore[union-attr]
                yield from (part["value"] for part in parts if part["type"] == "text")
            elif images:
                tar.extractfile(member).read()  # type: ignore[union-attr]


def read_parquet(path: Path, images: bool, together: bool) -> Iterator[str]:
    """The values of a batch `together`, or each image by itself."""
    import pyarrow.parquet as pq

    for batch in pq.ParquetFile(path, memory_map=True).iter_batches(
        READ_ROWS, columns=["image", "text"]
    ):
        if images and together:
            batch.column("image").to_pylist()
        elif images:
            for image in batch.column("image").field("bytes"):
                image.as_py()
        yield from batch.column("text").to_pylist()


def read_conversations(path: Path, images: bool) -> Iterator[str]:
    with path.open("rb") as file:
        for record in json.load(file):
            if images:
                (path.parent / record["image"]).read_bytes()
            yield from (turn["value"] for turn in record["conversations"])


#: By form of dataset: how it is written, and how it is merely read (with images or not).
FORMS: dict[str, tuple[str, Callable[[Path, int], None], Callable[[Path, bool], Iterator[str]]]] = {
    "tar, captions": (
        "a/0.tar",
        lambda path, samples: write_tar(path, captioned(Maker(), samples)),
        read_tar,
    ),
    "tar, interleaved": (
        "b/0.tar",
        lambda path, samples: write_tar(path, interleaved(Maker(), samples)),
        read_tar,
    ),
    "Parquet, 64 rows together": (
        "c/0.parquet",
        write_parquet,
        lambda path, images: read_parquet(path, images, together=True),
    ),
    "Parquet, row by row": (
        "c/0.parquet",
        write_parquet,
        lambda path, images: read_parquet(path, images, together=False),
    ),
    "conversations": (
        "d/chat.json",
        lambda path, samples: write_conversations(path.parent, samples),
        read_conversations,
    ),
}


def write_many(folder: Path, shards: int, records: int) -> None:
    """`chats/` with pictures that all shards share, and `texts/`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    maker = Maker()
    for name in ("chats", "texts"):
        (folder / name).mkdir()
    for number in range(PICTURES):
        (folder / "chats" / f"{number}.jpg").write_bytes(maker.image())
    said = [[maker.caption() for _ in range(6)] for _ in range(PICTURES)]
    documents = [maker.text(DOCUMENT_WORDS) for _ in range(PICTURES)]
    for shard in range(shards):
        chats = []
        for number in range(records):
            turns = [
                {"from": who, "value": text}
                for who, text in zip(
                    ("human", "gpt") * 3, said[(7 * number + shard) % PICTURES], strict=True
                )
            ]
            turns[0]["value"] += "\n<image>"
            image = f"{number % PICTURES}.jpg"
            chats.append({"id": f"{shard}.{number}", "image": image, "conversations": turns})
        (folder / "chats" / f"{shard:03d}.json").write_text(json.dumps(chats))
        texts = [documents[(7 * number + shard) % PICTURES] for number in range(records)]
        pq.write_table(pa.table({"text": texts}), folder / "texts" / f"{shard:03d}.parquet")


def beside(folder: Path, form: str, tokenizer: str, rounds: int) -> dict[str, Any]:
    """One row: this process and one for each core, by clock and by CPU."""
    run, cores = make_run(folder, form, tokenizer), len(os.sched_getaffinity(0))
    seconds: dict[int, list[tuple[float, float]]] = {0: [], cores: []}
    for counted in [False] + [True] * rounds:
        for processes, own in seconds.items():
            start, cpu = time.monotonic(), sum(os.times()[:4])
            index = build_index(run, INPUTS, processes=processes)
            if counted:
                own.append((time.monotonic() - start, sum(os.times()[:4]) - cpu))
    (one, one_cpu), (all_, all_cpu) = (zip(*own, strict=True) for own in seconds.values())
    return {
        "dataset": form,
        "tokenizer": "bytes" if tokenizer == "bytes" else "BPE",
        "samples": len(index),
        "shards": len(index.shards),
        "processes": cores,
        "s of one": median(one),
        "speed by the clock": paired_ratio(list(one), list(all_)),
        "CPU s of one": median(one_cpu),
        "speed by CPU": cores * paired_ratio(list(one_cpu), list(all_cpu)),
    }


def make_run(folder: Path, path: str, tokenizer: str) -> Run:
    file = RunFile.model_validate(
        {
            "name": "benchmark",
            "model": {"modules": {"llm": {"kind": "llm", "architecture": "llama"}}},
            "data": {"sources": [{"path": path}], "tokenizer": tokenizer},
            "train": {"global_batch_size": 1, "steps": 1},
        }
    )
    return Run(path=folder / "disttrain.yaml", file=file)


def compared(folder: Path, form: str, tokenizer: str, samples: int, rounds: int) -> dict[str, Any]:
    """One row: microseconds per sample both ways, and how fast the index is."""
    name, write, read = FORMS[form]
    path = folder / name
    if not path.exists():
        write(path, samples)
    run = make_run(folder, name, tokenizer)
    rules = read_tokenizer(run)
    index = build_index(run, INPUTS)
    assert len(index) == samples and not index.skipped, index.skipped[:3]
    seconds = alternate(
        {
            "read": lambda: tokenized(read(path, True), rules),
            "index": lambda: build_index(run, INPUTS),
            "texts": lambda: tokenized(read(path, False), rules),
        },
        rounds,
    )
    per_sample = {way: 1e6 * median(own) / samples for way, own in seconds.items()}
    return {
        "dataset": form,
        "tokenizer": "bytes" if tokenizer == "bytes" else "BPE",
        "samples": samples,
        "µs to read and tokenize one": per_sample["read"],
        "µs to index one": per_sample["index"],
        "speed of the index over it": paired_ratio(seconds["read"], seconds["index"]),
        "over texts alone": paired_ratio(seconds["texts"], seconds["index"]),
    }


def measure(small: bool = False) -> Tables:
    """One row per form of dataset and tokenizer."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    samples, rounds = (20, 1) if small else (10_000, 5)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokenizer(folder / "bpe")
        write_many(folder, *((4, 50) if small else (16, 6000)))
        return {
            "Index pass": [
                compared(folder, form, tokenizer, samples, rounds)
                for form in FORMS
                for tokenizer in ("bytes", "bpe")
            ],
            "Processes": [
                beside(folder, form, tokenizer, min(rounds, 3))
                for form in ("chats", "texts")
                for tokenizer in ("bytes", "bpe")
            ],
        }


if __name__ == "__main__":
    main(__doc__, measure)

"""Reads what the index points at: bytes of images and tokens of texts, by offset, from any thread."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from io import FileIO

from disttrain_cli.data.index import Index
from disttrain_cli.data.index_checks import REINDEX
from disttrain_cli.data.sources import Part, parse_parts
from disttrain_cli.data.tokenizer import Tokenizer
from disttrain_cli.errors import DataError
from disttrain_cli.spec.index import TEXT

OPEN_SHARDS = 64


class ShardReader:
    """Positioned reads from the shards of an index; keeps the files used last open."""

    def __init__(self, index: Index, tokenizer: Tokenizer) -> None:
        self._index = index
        self._tokenizer = tokenizer
        self._files: OrderedDict[int, FileIO] = OrderedDict()
        self._lock = threading.Lock()

    def image(self, sample: int, segment: int) -> bytes:
        """The image file of a segment. Raises DataError where the shard is gone or cut."""
        return self._read(sample, segment)

    def texts(self, sample: int) -> list[list[int]]:
        """Token ids of every text segment of a sample.

        Raises:
            DataError: the shard is gone, or its text is not the one that was indexed.
        """
        index = self._index
        first, last = index.segment_start[sample], index.segment_start[sample + 1]
        segments = [s for s in range(first, last) if index.kinds[s] == TEXT]
        if not segments:
            return []
        try:
            parts = parse_parts(self._read(sample, segments[0]))
        except ValueError:
            raise self._changed(sample) from None
        if isinstance(parts, str):
            parts = [Part(TEXT, parts)]
        texts = [self._tokenizer.encode(part.value) for part in parts if part.kind == TEXT]
        if [len(text) for text in texts] != index.tokens[segments].tolist():
            raise self._changed(sample)
        return texts

    def _read(self, sample: int, segment: int) -> bytes:
        shard = int(self._index.shard[sample])
        size = int(self._index.sizes[segment])
        try:
            data = os.pread(self._file(shard).fileno(), size, int(self._index.offsets[segment]))
        except OSError as error:
            raise DataError(f"Cannot read the shard {self._index.shards[shard]}", str(error), REINDEX) from None
        if len(data) < size:
            raise self._changed(sample)
        return data

    def _file(self, shard: int) -> FileIO:
        with self._lock:
            file = self._files.pop(shard, None) or FileIO(self._index.shards[shard])
            self._files[shard] = file
            if len(self._files) > OPEN_SHARDS:
                self._files.popitem(last=False)  # closed when the last thread that reads it lets go
            return file

    def _changed(self, sample: int) -> DataError:
        shard = self._index.shards[int(self._index.shard[sample])]
        return DataError(
            f"The sample {self._index.keys[sample]} of {shard} is not the one that was indexed",
            "the shard changed while it was in use",
            REINDEX,
        )

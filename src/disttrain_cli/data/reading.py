"""Reads of the segments in an index: bytes of images and sounds, and tokens of texts.

Reads are in any order, from any thread.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

from disttrain_cli.calls import call
from disttrain_cli.data.modalities.registry import MODALITIES
from disttrain_cli.data.parts import written_around
from disttrain_cli.data.sources import Location, OpenShard, RowGroups, open_shard, printable, shown
from disttrain_cli.data.tokenizer import Tokenizer
from disttrain_cli.errors import DataError
from disttrain_cli.spec.heads import Numbers
from disttrain_cli.spec.index import AROUND, ITEMS, TEXT

if TYPE_CHECKING:
    from disttrain_cli.data.index.sample_index import Index

REINDEX = f"Index the data again with: {call('profile', reindex=True)}"
OPEN_SHARDS = 64
NO_RECORD = Location(-1, 0)


class ShardReader:
    """Reader of the shards of an index; keeps the most recently used files open.

    Further caches are those of `sources.tables`.
    """

    def __init__(self, index: Index, tokenizer: Tokenizer) -> None:
        self._index = index
        self._tokenizer = tokenizer
        self._chat = tokenizer.chat and tokenizer.chat.of_model(index.inputs)
        self._open: OrderedDict[int, OpenShard] = OrderedDict()
        self._row_groups = RowGroups()
        self._lock = threading.Lock()

    def file(self, sample: int, segment: int) -> bytes:
        """Return the image or sound file of a segment.

        Raises:
            DataError: the shard is gone, truncated, or not the one that was indexed.
        """
        try:
            return self._shard(sample).file(*self._place(sample, segment))
        except (ValueError, LookupError) as error:
            raise self._changed(sample, error) from None
        except OSError as error:
            raise self._unreadable(sample, error) from None

    def file_name(self, sample: int, segment: int) -> str:
        """Return the name of a segment's file for messages, "" if its shard has no name for it."""
        try:
            return printable(self._shard(sample).file_name(*self._place(sample, segment)))
        except (ValueError, LookupError, OSError, DataError):
            return ""

    def _place(self, sample: int, segment: int) -> tuple[str, Location, Location]:
        """Return (type of a segment's file, its location, location of the sample's first text)."""
        texts = self._texts_of(sample)
        record = self._location(texts[0]) if texts else NO_RECORD
        media = MODALITIES[ITEMS[int(self._index.kinds[segment])]].media.name
        media = "video" if self._index.frames[segment] else media
        return media, self._location(segment), record

    def texts(self, sample: int) -> list[list[int]]:
        """Return the token ids of every text segment of a sample.

        Texts around parts of files are included.

        Raises:
            DataError: the shard is gone, or its text is not the one that was indexed.
        """
        segments = self._texts_of(sample)
        return self._with_around(sample, self._own_texts(sample, segments) if segments else [])

    def _own_texts(self, sample: int, segments: list[int]) -> list[list[int]]:
        """Return the token ids of the texts that the shard contains."""
        try:
            files = self._files_of(sample)
            texts = self._shard(sample).texts(self._location(segments[0]), files)
            if self._index.pieces is not None and (piece := self._index.pieces[sample]).any():
                first, characters = piece.tolist()
                texts = [texts[0][first : first + characters]]
        except (ValueError, LookupError) as error:
            raise self._changed(sample, error) from None
        except OSError as error:
            raise self._unreadable(sample, error) from None
        ids = [
            self._tokenizer.encode(text) if isinstance(text, str) else list(text) for text in texts
        ]
        for token_ids, ended in zip(ids, self._index.ended[segments].tolist(), strict=False):
            token_ids += [self._tokenizer.eos] * ended
        if [len(token_ids) for token_ids in ids] != self._index.tokens[segments].tolist():
            raise self._changed(sample, "its text has different tokens")
        return ids

    def _with_around(self, sample: int, own: list[list[int]]) -> list[list[int]]:
        """Return the texts of a sample in order, with those around the parts of its files."""
        index = self._index
        first, last = index.segment_start[sample : sample + 2].tolist()
        if index.part is None or not (index.part[first:last] == AROUND).any():
            return own
        texts, around = iter(own), written_around(self._files_of(sample), index.inputs)
        known = (self._tokenizer.encode(text) for texts in around for text in texts if text)
        of_segments = zip(index.kinds[first:last], index.part[first:last], strict=True)
        return [
            next(known if part == AROUND else texts) for kind, part in of_segments if kind == TEXT
        ]

    def _files_of(self, sample: int) -> list[tuple[int, Numbers]]:
        """Return the kinds and header sizes of a sample's files; none if no file is cut."""
        if self._index.numbers is None:
            return []
        first, last = self._index.segment_start[sample : sample + 2].tolist()
        files = (first + np.flatnonzero(self._index.files[first:last])).tolist()
        return [(int(self._index.kinds[at]), self._index.numbers_of(at)) for at in files]

    def _texts_of(self, sample: int) -> list[int]:
        """Return the text segments of a sample that its shard contains."""
        first, last = self._index.segment_start[sample : sample + 2].tolist()
        return (first + np.flatnonzero(self._index.own_texts[first:last])).tolist()

    def _location(self, segment: int) -> Location:
        return Location(int(self._index.offsets[segment]), int(self._index.sizes[segment]))

    def _shard(self, sample: int) -> OpenShard:
        shard = int(self._index.shard[sample])
        with self._lock:
            opened = self._open.pop(shard, None) or open_shard(
                self._index.shards[shard], self._row_groups, self._chat
            )
            self._open[shard] = opened
            if len(self._open) > OPEN_SHARDS:
                self._open.popitem(last=False)  # closed when the last thread that reads it is done
            return opened

    def _unreadable(self, sample: int, error: OSError) -> DataError:
        shard = self._index.shards[int(self._index.shard[sample])]
        return DataError(
            f"Cannot read the shard {shown(shard.path)}", printable(str(error), 1000), REINDEX
        )

    def _changed(self, sample: int, why: object) -> DataError:
        shard = self._index.shards[int(self._index.shard[sample])]
        return DataError(
            f"The sample {self._index.keys[sample]} of {shown(shard.path)} is not the one that was"
            " indexed",
            f"the shard changed while it was in use: {printable(str(why), 1000)}",
            REINDEX,
        )

"""The sample index: one row per sample with the sizes of its segments, no pixel decoded. Stored as
Parquet.

Columns of the file, one row per sample, in dataset order (sources, shards by name, samples by
place); the rows of a shard are one row group:
  sample       int64   row number source       int32   position in `data.sources` shard
  string  name of the shard, relative to the source's path key          string  name of the sample
  inside the shard, for messages kinds        list<int8>   per segment: 0 text, 1 image read, 2
  image generated, 3 audio clip tokens       list<int32>  per segment: LLM tokens it takes (text,
  image tokens, context tokens, audio tokens) trained      list<bool>   per segment: a text whose
  tokens are labels ended        list<bool>   per segment: a text that EOS follows inside the
  sample, one of its `tokens` widths       list<int32>  pixels from the image's header; duration of
  a clip in ms, rounded up; of a text 0, or
                            the character at which it begins where it is a piece of a document
                            (`data.documents`)
  heights      list<int32>  and samples per second of a clip; characters of a piece offsets
  list<int64>  where the segment lies in the shard: two numbers whose meaning is the form's own
  sizes        list<int64> Tars: byte offset and length of the member's content (text: of the json /
  txt). Conversations: of the record in the JSON; of an image its number in the record and the
  length of its file. Parquet and Arrow: row, and position in it. The file's key-value metadata
  holds `fingerprint`, `version`, `inputs`, `files` and `skipped` (JSON).
"""

from __future__ import annotations

TEXT, IMAGE, TARGET, AUDIO = 0, 1, 2, 3
SAMPLE_SPECIALS = 2  # every sample starts with BOS and ends with EOS
INDEX_VERSION = 4
COLUMNS = (
    "sample",
    "source",
    "shard",
    "key",
    "kinds",
    "tokens",
    "trained",
    "ended",
    "widths",
    "heights",
    "offsets",
    "sizes",
)
#: What a sample holds beside texts, by kind, as users are told.
UNREAD = {IMAGE: "images to read", TARGET: "images to generate", AUDIO: "audio clips"}

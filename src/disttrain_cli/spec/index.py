"""The sample index: one row per sample with the sizes of its segments, no pixel decoded. Stored as Parquet.

Columns of the file, one row per sample, in dataset order (sources, shards by name, members by place):
  sample       int64   row number
  source       int32   position in `data.sources`
  shard        string  path of the tar, relative to the source's path
  key          string  member key inside the shard
  kinds        list<int8>   per segment: 0 text, 1 image read, 2 image generated, 3 audio clip
  tokens       list<int32>  per segment: LLM tokens it takes (text, image tokens, context tokens, audio tokens)
  widths       list<int32>  pixels from the image's header; 0 for text
  heights      list<int32>
  offsets      list<int64>  byte offset of the member's content in the shard (text: of the json / txt)
  sizes        list<int64>  its length in bytes
The file's key-value metadata holds `fingerprint`, `version`, `inputs` and `skipped` (JSON).
"""

from __future__ import annotations

TEXT, IMAGE, TARGET, AUDIO = 0, 1, 2, 3
SAMPLE_SPECIALS = 2  # every sample starts with BOS and ends with EOS
INDEX_VERSION = 1
COLUMNS = ("sample", "source", "shard", "key", "kinds", "tokens", "widths", "heights", "offsets", "sizes")

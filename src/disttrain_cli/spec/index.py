"""Sample index: one row per sample with the sizes of its segments, no pixel decoded; Parquet.

Columns of the file, one row per sample, in dataset order (sources, shards by name, samples by
position); the rows of a shard are one row group:

- sample, int64: row number.
- source, int32: index in `data.sources`.
- shard, string: name of the shard, relative to the source's path.
- key, string: name of the sample inside the shard, for messages.
- and lists with a number for each segment:
  - kinds, int8: 0 text, else that of an item's modality (1 image read, 2 image generated, 3 clip).
  - tokens, int32: its LLM tokens (text, image tokens, context tokens, audio tokens).
  - trained: a text whose tokens are labels.
  - ended: a text followed by EOS inside the sample, which is one of its `tokens`.
  - widths, int32: pixels of the upright image from its header, or negative the size to which it is
    resized, if its record sets it; duration of a clip in ms, rounded up; for a text 0, or its first
    character if it is a piece of a document (`data.indexing.documents`).
  - heights, int32: the same; samples per second of a clip; characters of a piece; -1 for a text
    that a chat template wrote: its sample has no BOS and EOS but the template's.
  - offsets, sizes, int64: location of the segment in the shard, two numbers that depend on the file
    format. Tars: byte offset and length of the member's content (text: of the json / txt).
    Conversations: of the record in the JSON; for an image its index in the record and the length of
    its file. Parquet and Arrow: row, and position in it; for texts of a conversation the number of
    images before its turns.
  - frames, int32, and rates, int64: for a video, its frames and their rate in billionths per
    second; else 0. Indexes without these columns have no videos. Widths and heights are those of a
    frame.
  - parts, int32: for an item that is one of several of its file, its index among them, from 0; for
    a text that the model's processor writes around a file's parts `AROUND`; else 0. Indexes without
    this column have no such item. The parts of a file follow each other, with texts between; each
    has the file's widths, heights, offsets and sizes.
  - contents, int64: a hash of the text or of the file's bytes (`data.duplicates`) if
    `data.deduplicate` is set; else 0, and in indexes without this column.

The file's key-value metadata holds `fingerprint`, `version`, `inputs`, `files` and `skipped`
(JSON).
"""

from __future__ import annotations

from disttrain_cli.errors import SpecError
from disttrain_cli.spec.inputs import HEADS

TEXT = 0
#: BOS and EOS of every sample, except those that a chat template wrote.
SAMPLE_SPECIALS = 2
TEMPLATED = -1  # `heights` of a text that a chat template wrote
AROUND = -1  # `parts` of a text around a file's parts, outside of chat templates
INDEX_VERSION = 6
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
    "parts",
    "frames",
    "rates",
    "contents",
)
#: Columns that an index may lack; all 0 then.
OPTIONAL = ("parts", "frames", "rates", "contents")
#: Number of an item's segments in `kinds`; in the order in which a slot's items are listed.
KINDS: dict[str, int] = {item: head.kind for item, head in HEADS.items()}
IMAGE, TARGET, AUDIO = KINDS["image"], KINDS["target"], KINDS["audio"]
#: Inverse of `KINDS`.
ITEMS: dict[int, str] = {kind: item for item, kind in KINDS.items()}
#: Non-text contents of a sample by kind, as named in messages.
UNREAD: dict[int, str] = {head.kind: head.what for head in HEADS.values()}
VIDEOS = "videos (data.video reads them)"
if len(ITEMS) < len(HEADS):
    raise SpecError(
        "Two modalities have the same number in the index",
        f"kinds: {', '.join(f'{item} {kind}' for item, kind in KINDS.items())}",
        "Give `kind` of the one that you added another value.",
    )

"""The sample index: one row per sample with the sizes of its segments, no pixel decoded. Stored as
Parquet.

Columns of the file, one row per sample, in dataset order (sources, shards by name, samples by
place); the rows of a shard are one row group:

- sample, int64: row number.
- source, int32: position in `data.sources`.
- shard, string: name of the shard, relative to the source's path.
- key, string: name of the sample inside the shard, for messages.
- and lists with a number for each segment:
  - kinds, int8: 0 text, else that of an item's head (1 image read, 2 image generated, 3 clip).
  - tokens, int32: LLM tokens it takes (text, image tokens, context tokens, audio tokens).
  - trained: a text whose tokens are labels.
  - ended: a text that EOS follows inside the sample, one of its `tokens`.
  - widths, int32: pixels of the upright image from its header, or below 0 those that it is resized
    to, where its record says so; duration of a clip in ms, rounded up; of a text 0, or the
    character at which it begins where it is a piece of a document (`data.documents`).
  - heights, int32: the same; samples per second of a clip; characters of a piece; -1 of a text that
    a chat template wrote: its sample has no BOS and EOS but the template's.
  - offsets, sizes, int64: where the segment lies in the shard, two numbers whose meaning is the
    form's own. Tars: byte offset and length of the member's content (text: of the json / txt).
    Conversations: of the record in the JSON; of an image its number in the record and the length of
    its file. Parquet and Arrow: row, and position in it; of texts of a conversation the number of
    images that stand before its turns.
  - frames, int32, and rates, int64: of a video, its frames and their rate in billionths per second;
    else 0. Indexes without these columns have no videos. Widths and heights are those of a frame.
  - parts, int32: of an item that is one of several of its file, its number among them, from 0; of a
    text that the model's processor writes around a file's parts `AROUND`; else 0. Indexes without
    this column have no such item. The parts of a file follow each other, with texts between; each
    has the file's widths, heights, offsets and sizes.
  - contents, int64: a hash of the text or of the file's bytes (`data.duplicates`) where
    `data.deduplicate` asks for it; else 0, and in indexes without this column.

The file's key-value metadata holds `fingerprint`, `version`, `inputs`, `files` and `skipped`
(JSON).
"""

from __future__ import annotations

from disttrain_cli.errors import SpecError
from disttrain_cli.spec.inputs import HEADS

TEXT = 0
#: Every sample starts with BOS and ends with EOS, but those that a chat template wrote.
SAMPLE_SPECIALS = 2
TEMPLATED = -1  # `heights` of a text that a chat template wrote
AROUND = -1  # `parts` of a text that stands around a file's parts, outside of chat templates
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
#: Columns that an index may lack: all 0 then.
OPTIONAL = ("parts", "frames", "rates", "contents")
#: Number of an item's segments in `kinds`; in the order in which a slot's items are listed.
KINDS: dict[str, int] = {item: head.kind for item, head in HEADS.items()}
IMAGE, TARGET, AUDIO = KINDS["image"], KINDS["target"], KINDS["audio"]
#: The inverse of `KINDS`.
ITEMS: dict[int, str] = {kind: item for item, kind in KINDS.items()}
#: What a sample holds beside texts, by kind, as users are told.
UNREAD: dict[int, str] = {head.kind: head.what for head in HEADS.values()}
VIDEOS = "videos (data.video reads them)"
if len(ITEMS) < len(HEADS):
    raise SpecError(
        "Two modalities have the same number in the index",
        f"kinds: {', '.join(f'{item} {kind}' for item, kind in KINDS.items())}",
        "Give `kind` of the one that you added another value.",
    )

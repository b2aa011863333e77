"""From files to batches: sources → index → packing → ordering → preprocessing workers → batches.

Start at `slots.py` (what an ordering decides), then follow the data: `sources` reads tars, `index` keeps the
sizes, `packing` makes sequences, `ordering` (with `levelling` and `intervals`) gives them to replicas, `loader`
(with `reading`, `sequences`, `decoding`) prepares what a rank asks for. No torch here.
"""

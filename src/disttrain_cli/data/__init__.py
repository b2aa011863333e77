"""From files to batches: sources → index → packing → ordering → preprocessing workers → batches.

Start at `slots.py` (what an ordering decides), then follow the data: `sources` reads every form, `index` keeps the
sizes (or has them drawn by `distribution`), `packing` makes sequences, `ordering` (with `levelling` and `intervals`)
gives them to replicas, `loader` (with `reading`, `sequences`, `decoding`) prepares what a rank asks for. Planning needs
no more than `sizes` and the `loads` they bring. No torch here.
"""

"""From files to batches: sources → index → packing → ordering → preprocessing workers → batches.

Start at `slots.py` (what an ordering decides), then follow the data: `sources` reads every form,
`index` keeps the sizes (or has them drawn by `distribution`), `packing` makes sequences, `ordering`
gives them to replicas, `preparing` (with `reading`, `sequences`, `decoding`) answers requests for a
slot, here or in the workers of `serving`, and `loader` keeps a rank's next slots ready. Planning
needs no more than `sizes` and the `ordering.loads` they bring. No torch here.
"""

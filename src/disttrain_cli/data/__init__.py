"""Data pipeline: sources → index → packing → ordering → preprocessing workers → batches.

Start at `slots.py` (the result of an ordering), then follow the data: `sources` reads every
supported file format, `index` stores the sizes of all samples (or has them drawn by
`distribution`), `packing` packs samples into sequences, `ordering` assigns them to replicas,
`preparing` (with `reading`, `sequences`, `decoding`) answers requests for a slot, in the training
process or in the workers of `serving`, and `loader` prefetches a rank's next slots. Planning needs
only `sizes` and the `ordering.loads` that they bring. Nothing here imports torch.
"""

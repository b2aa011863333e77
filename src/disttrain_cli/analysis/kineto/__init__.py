"""Kineto/Chrome JSON of anyone's PyTorch job: read once as a stream, kept as a DuckDB file, then
asked in SQL.

Start with `analysis`. `splitting` finds whole events in chunks of a file, `events` decodes them,
`columns` turns them into rows, `ingest` fills the database, which `database` opens (from the cache
of `analysis.cache` where it was read before). `placing` gives files their rank, job and clock:
`ranks` finds the ranks that one file holds, `jobs` tells jobs apart. `kernels` tells communication
from compute by evidence. The measures are `queries/kineto/*.sql`; `losses` divides the time,
`verdict` names the cause. `shapes` counts FLOPs, `roofline` sets them beside the device, `path`
finds what a step had to wait for.
"""

"""Analysis of any PyTorch job's Kineto/Chrome JSON: streamed once into a DuckDB file, then queried.

Start with `analysis`. `splitting` finds complete events in chunks of a file, `events` decodes them,
`columns` turns them into rows, `ingest` fills the database, which `database` opens (from the cache
of `analysis.cache` if it exists there). `placing` gives files their rank, job and clock: `ranks`
finds the ranks that one file holds, `jobs` separates jobs. `kernels` distinguishes communication
from compute by names. The measures are `queries/kineto/*.sql`; `losses` divides the time, `verdict`
names the cause. `shapes` counts FLOPs, `roofline` compares them with the device, `path` finds a
step's critical path.
"""

"""Looking after a job, and recording it.

`supervise` is the launcher's care for its ranks: `pulse` is what each rank says it does, `hang`
finds who is waited for. `tracing` writes the rows that `analyze` reads, `trackers` and `watch` hand
figures to other tools.
"""

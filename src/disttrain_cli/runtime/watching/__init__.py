"""Monitoring and recording of a job.

`pulse` publishes the state of each rank, and `hang` finds the rank that blocks the others; the
launcher's `supervise` polls it. `tracing` writes the rows that `analyze` reads, `trackers`
pass metrics to other tools, and `watch` receives requests to stop.
"""

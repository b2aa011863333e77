"""Analysis of jobs that disttrain trained, from its own traces.

`database` opens Parquet segments in place, with the plan and the profile that the job ran with
(`files` finds them, `clocks` puts the hosts' times on one clock) and documents the views, `asking`
answers `--sql`; `operations`, `costing` and `recorded` compare prediction and measurement, `inside`
breaks operations down by torch's profiles, `chrome` writes steps as Chrome/Perfetto JSON.

`analysis` runs `queries/*.sql` and finds the causes in the step's `graph`; `remedies` estimates
what would help; `limits` states the limits of the figures, `staleness` detects that the plan was
made for other data.
"""

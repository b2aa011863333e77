"""A job that this project trained: its own traces, read and judged.

`database` opens Parquet segments in place, beside the plan and the profile they were made by
(`files` finds them, `clocks` puts the hosts' times on one clock) and documents the views, `asking`
answers `--sql`; `operations`, `costing` and `recorded` set prediction and measurement side by side,
`inside` opens operations by torch's profiles, `chrome` writes steps as Chrome/Perfetto JSON.

`analysis` asks the questions of `queries/*.sql` and has the step judged by its `graph`; `remedies`
says what would help; `limits` what limits its figures, `staleness` when the plan is made for other
data.
"""

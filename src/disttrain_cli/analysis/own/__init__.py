"""This project's own traces: Parquet segments read in place, beside the plan and the profile they
were made by.

`database` opens them (`files` finds them, `clocks` puts the hosts' times on one clock) and
documents the views, `asking` answers `--sql`; `operations`, `costing` and `recorded` set prediction
and measurement side by side, `inside` opens operations by torch's profiles, `chrome` writes steps
as Chrome/Perfetto JSON.
"""

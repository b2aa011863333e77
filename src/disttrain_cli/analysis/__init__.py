"""From traces to a verdict: DuckDB over the Parquet segments, queries as `.sql` files, replay, advice, report.

Start with `analyze.analyze` (what the command calls). `database` opens the traces in place and documents the
views, `queries/` holds one question per file, `replay` runs a step again with delays removed, `verdict` names
the cause, `report` writes the HTML page, `timeline` writes Chrome/Perfetto JSON, `compare` sets two runs side
by side, `expressions` evaluates `--fail-if`. `operations` sets prediction and measurement side by side, `recorded`
simulates the recorded steps, `staleness` says when a plan is made for other data.
"""

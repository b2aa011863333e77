"""Trace analysis: from traces to a verdict, by DuckDB queries, replay, remedies and a report.

Start with `analyze.analyze` (what the command calls): `formats` detects the format of traces;
`job/` reads disttrain's, `kineto/` those of any PyTorch job, `study/` operations of other trainers,
and `flight/` dumps of PyTorch's flight recorder. `cache` keeps the databases built from traces and
the results. All traces end in a `result.summary.Analysis`. `queries/` has one SQL query per file,
`walk` replays a step without some of its delays, `losses` attributes the lost time to causes,
`what_if` follows the published study, `job/remedies/` estimates what would help, `verdict` names
the cause and `next_commands` the command to run next. `report/` writes the HTML page, `compare`
compares two runs, `expressions` evaluates `--fail-if`.
"""

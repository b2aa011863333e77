"""From traces to a verdict: DuckDB over them, queries as `.sql` files, replay, advice, report.

Start with `analyze.analyze` (what the command calls): `formats` finds out whose traces they are;
`job/` reads this project's, `kineto/` those of any PyTorch job, `study/` operations of other
trainers; `cache` keeps what was read once, `remembered` what was found. All end in a
`result.summary.Analysis`. `queries/` holds one question per file, `walk` replays a step with delays
removed, `losses` splits the lost time, `what_if` follows the published
study, `remedies/` says what would help, `verdict` names the cause and `next_commands` what to run.
`report/` writes the HTML page, `compare` sets two runs side by side, `expressions` evaluates
`--fail-if`.
"""

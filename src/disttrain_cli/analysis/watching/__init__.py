"""Verdicts on a running job, by the same engine as `analyze`.

`tail` reads new rows of its traces and holds the last steps, `looking` analyses these from time to
time and reports changes, `ending` detects the end of the job, `record` appends verdicts to a file
among the job's logs.
"""

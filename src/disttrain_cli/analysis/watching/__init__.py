"""Verdicts on a job that still runs, by the same engine as `analyze`.

`tail` reads what its traces grew by and holds the last steps, `looking` judges these now and then
and says what has changed, `ending` whether the job is over, `record` leaves verdicts beside the
job's logs.
"""

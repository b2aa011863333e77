"""A recorded run of this project's own, judged.

`analysis` asks the questions of `queries/*.sql` over the traces that `own` has open, sets
prediction and measurement side by side and has the step judged; `limits` says what limits its
figures, `staleness` when the plan is made for other data.
"""

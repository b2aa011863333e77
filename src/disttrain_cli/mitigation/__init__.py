"""Reaction to verdicts of `disttrain watch` while a job runs.

Start with `replanning.monitored_job`, in which training and rehearsals run: `monitor` runs
`disttrain watch` as a separate process, `replanning` makes plans without slow or lost devices.
`runtime.launching.supervise` restarts the ranks on such a plan. `learned` judges what a job has
learned when it ends.
"""

"""What is done about what `disttrain watch` finds while a job runs.

Start with `looking_after.looked_after`, which trains and rehearsals run in: `beside` watches from a
process of its own, `replanning` makes plans without what is slow or lost. Who looks after the
ranks, `runtime.launching.supervise`, starts them again on such a plan.
"""

"""Acting on what `disttrain watch` finds while a job runs.

Start with `looking_after.looked_after`, in which training and rehearsals run: `monitor` runs
`disttrain watch` as a process of its own, `replanning` makes plans without what is slow or lost.
`runtime.launching.supervise` starts the ranks again on such a plan. `learned` judges what a job has
learned when it ends.
"""

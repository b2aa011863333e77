"""Launch files for other machines, one module per scheduler.

`torchrun` (hosts by name), `slurm`, `jobset` (Kubernetes), `skypilot`. `startable` refuses jobs
that could not start before anything expensive is imported, `visible` lists the files that a job
references. `scripts` writes the job file and fills templates, `hosts` assigns ranks to hosts,
`cores` counts the cores of a rank, `serving` is the command of preprocessing nodes, `containers`
and `manifest` are shared by `jobset` and `skypilot`; `pod_patch` merges the run file's additions
into pods.
"""

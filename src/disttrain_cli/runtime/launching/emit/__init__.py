"""What starts the ranks on other machines, a file per scheduler: `torchrun` (hosts by name),
`slurm`, `jobset` (Kubernetes), `skypilot`.

`startable` refuses what could not start before anything expensive is imported, `visible` says which
files a job names. `scripts` writes the job file and fills templates, `hosts` says which rank runs
where, `cores` how many cores it gets, `serving` what preprocessing nodes run, `containers` and
`manifest` what the last two share; `pod_patch` merges the run file's additions into pods.
"""

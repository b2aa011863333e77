"""What starts the ranks on other machines, a file per scheduler: `torchrun` (hosts by name),
`slurm`, `jobset` (Kubernetes), `skypilot`.

`scripts` writes the job file and fills templates, `hosts` says which rank runs where, `cores` how
many cores it gets, `serving` what preprocessing nodes run, `containers` and `manifest` what the
last two share.
"""

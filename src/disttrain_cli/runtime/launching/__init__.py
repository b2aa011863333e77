"""Starting ranks and bringing them together.

`starts` prepares a run's folder, `launch` starts the ranks of one machine, `emit/` writes scripts
that start them on many (`begin` is what those run first, `agent` torchrun on each of them); `rank`
is the life of one process and `ending` how it ends when it fails. It joins the others by `join`:
`devices`, `fitness` and `descriptors` (what it has here), `meeting` (what each was given,
compared), `process` (groups).
"""

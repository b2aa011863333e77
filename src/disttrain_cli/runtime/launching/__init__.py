"""Starting ranks and bringing them together.

`starts` prepares a run's folder, `launch` starts the ranks of one machine, `emit/` writes scripts that start them on
many (`begin` is what those run first); `rank` is the life of one process, which joins the others by `join`, `process`
(devices and groups) and `meeting` (what each was given, compared).
"""

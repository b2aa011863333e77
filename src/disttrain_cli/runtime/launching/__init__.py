"""Start of ranks and their rendezvous.

`starts` prepares a run's folder, `launch` starts the ranks of one machine, `emit/` writes scripts
that start them on many (`begin` is the scripts' first command, `agent` is torchrun's process on
each host); `rank` is the main function of one process and `ending` its exit after a failure. `join`
connects a rank to the others: `devices`, `fitness` and `descriptors` (local resources), `meeting`
(rendezvous, and comparison of the ranks' inputs), `process` (process groups).
"""

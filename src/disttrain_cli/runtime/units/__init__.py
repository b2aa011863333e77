"""What travels between units, and over which communicators.

`grid` shows the stage graph to DeepSpeed, `communicators` says which ranks share one, `routes`
which rows cross a cut, `broker` moves them.
"""

"""Messages between units, and their communicators.

`grid` presents the stage graph to DeepSpeed, `communicators` determines the ranks that share one,
`routes` the rows that cross a cut, and `broker` moves them.
"""

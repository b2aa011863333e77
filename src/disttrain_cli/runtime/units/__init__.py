"""Messages between units, and their communicators.

`grid` holds a rank's process groups, `communicators` determines the ranks that share one,
`routes` the rows that cross a cut, and `broker` moves them.
"""

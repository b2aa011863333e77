"""Who is who, and what travels between units.

`topology` places every rank, `grid` shows the places to DeepSpeed, `routes` says which rows cross a cut, `broker`
moves them.
"""

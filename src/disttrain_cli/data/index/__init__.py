"""The sample index, read: sizes of every sample, as flat columns that ranks map into memory.

Nothing here knows how an index is made (`data.indexing.reading_shards`).
"""

"""The making of the sample index: shards read by processes or hosts, and their rows written."""

"""What a first look at a GPU must show, in at most nine minutes (see benchmarks/README.md)."""

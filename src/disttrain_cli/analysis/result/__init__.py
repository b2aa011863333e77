"""What an analysis says: the keys of `disttrain analyze --json`; `summary` has the whole of it."""

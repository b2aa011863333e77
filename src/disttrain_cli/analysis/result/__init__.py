"""Result of an analysis: the keys of `disttrain analyze --json`; `summary` has the top level."""

"""Property tests use the same examples on every run, so that a red test can be run again, and have no time limit."""

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")

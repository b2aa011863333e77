"""Remedies and their savings: single changes, each tried on the recorded steps.

Start with `remedies`. `replicas` replays the steps with more or fewer replicas of a unit,
`reordering` with their slots in another order, `replanning` runs the planner with this run's times.
"""

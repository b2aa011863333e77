"""Measurements of what the project claims, one file each; start with README.md. Ratios within one
run, no promises."""

"""Scripts that start the ranks on other machines: start at `scripts.py`; `hosts.py` says which rank
runs where."""

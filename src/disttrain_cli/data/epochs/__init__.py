"""The order of one epoch: which samples are drawn, which sequence each lies in, and how the
sequences follow each other.

`streams` draws samples of every source by its weight, `best_fit` packs them, and `making` keeps the
order in files that all processes open.
"""

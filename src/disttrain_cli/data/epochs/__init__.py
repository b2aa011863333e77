"""The order of one epoch: drawn samples, their packing into sequences, the sequences' order.

`streams` draws samples of every source by its weight, `best_fit` packs them, and `making` stores
the order in files that all processes map.
"""

"""Preprocessing on other machines: `disttrain data serve` and the ranks that pull from it, over
Arrow Flight.

`identity` says what both sides must share, `access` who may ask, `wire` how a slot travels.
`worker` answers requests in one process, `supervisor` keeps several of them alive; `connection`
asks one worker, `client` all of them. Nothing is pickled: requests are JSON, answers are Arrow
record batches of raw tensors.
"""

"""Remote preprocessing: `disttrain data serve` and the ranks that read from it, over Arrow Flight.

`identity` defines what both sides must share, `access` the permissions, `wire` the encoding of a
slot. `worker` answers requests in one process, `supervisor` restarts worker processes; `connection`
requests from one worker, `client` from all of them. Nothing is pickled: requests are JSON, answers
are Arrow record batches of raw tensors.
"""

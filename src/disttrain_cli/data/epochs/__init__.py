"""The order of one epoch: which samples are drawn, which sequence each lies in, and how the
sequences follow each other.

There are three orders, and a run keeps the one that it began with (`DataProfile.order`):

1. `windows`: samples are packed in blocks of 2,048, a bounded number of sequences open.
2. `histogram`: blocks of millions are packed at once, over how many samples have which length.
3. `streams`: packed as the second; every source has a stream of its own, and the weights of the
   sources may change from a step on.
"""

WINDOWS, HISTOGRAM, STREAMS = 1, 2, 3
NEWEST = STREAMS

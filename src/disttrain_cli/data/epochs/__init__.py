"""The order of one epoch: which samples are drawn, which sequence each lies in, and how the
sequences follow each other.

There are two orders, and a run keeps the one that it began with (`DataProfile.order`):

1. `windows`: samples are packed in blocks of 2,048, a bounded number of sequences open.
2. `histogram`: blocks of millions are packed at once, over how many samples have which length.
"""

WINDOWS, HISTOGRAM = 1, 2
NEWEST = HISTOGRAM

"""Bounds of the run file's numbers: values within them need bounded memory and seconds."""

MOST_GPUS = 65_536
MOST_SEQUENCES = 16_384  # of a step
MOST_STEPS = 10**9
MOST_S = 30 * 86_400.0
MOST_DRAWN = 4_000_000  # images and clips of a distribution

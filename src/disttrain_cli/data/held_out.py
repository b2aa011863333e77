"""Which samples are kept for evaluation: by a hash of their key, so that new shards leave the
choice as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.data.arrays import mix

if TYPE_CHECKING:
    import pyarrow as pa


def chosen(keys: pa.ChunkedArray, fraction: float) -> NDArray[np.bool_]:
    """[N] whether each sample is held out; about `fraction` of all are."""
    limit = np.uint64(int(fraction * 2.0**64) if fraction < 1 else 2**64 - 1)
    parts = [hashes(chunk) < limit for chunk in keys.chunks]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=bool)


def bytes_of(keys: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """(where each key begins [N + 1], bytes)."""
    import pyarrow as pa

    keys = keys.cast(pa.large_binary())
    _, offsets, content = keys.buffers()
    starts = np.frombuffer(offsets, dtype=np.int64)[keys.offset : keys.offset + len(keys) + 1]
    return starts, np.frombuffer(content or b"", dtype=np.uint8)


def hashes(keys: pa.Array) -> NDArray[np.uint64]:
    """[N] hash of every key: SplitMix64 over its length and its bytes, one place of all keys at a
    time."""
    starts, content = bytes_of(keys)
    bytes_ = content.astype(np.int64)
    lengths = np.diff(starts)
    state = mix(lengths)
    for index in range(int(lengths.max(initial=0))):
        longer = lengths > index
        state[longer] = mix(state[longer].view(np.int64), bytes_[starts[:-1][longer] + index])
    return state

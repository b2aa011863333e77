"""Choice of the samples held out for evaluation: by a hash of source, shard and key.

A key is unique only inside its shard ("row 0" of every Parquet file), so all three are hashed. The
choice in a shard depends neither on other shards nor on the source's folder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.data.arrays import mix

if TYPE_CHECKING:
    import pyarrow as pa

#: Masks of the first 0 to 8 bytes of a 64-bit word.
KEPT = np.array([(1 << 8 * count) - 1 for count in range(8)] + [-1], np.int64)


def chosen(
    keys: pa.ChunkedArray, source: int, shard: str, fraction: float, pieces: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Return a mask [N] of the held-out samples of a shard, about `fraction` of them.

    Args:
        source: index of the source in `data.sources`.
        shard: name of the shard, relative to the source.
        pieces: [N] True for a sample that may continue the document of the sample before it
            (`data.indexing.documents`): with the same key, it is held out with that sample.
    """
    import pyarrow as pa

    seed = int(mix(source, hashes(pa.array([shard])).view(np.int64))[0].view(np.int64))
    parts = [hashes(chunk, seed) for chunk in keys.chunks]
    of_keys = np.concatenate(parts) if parts else np.zeros(0, np.uint64)
    starts = np.ones(len(of_keys), dtype=bool)
    starts[1:] = ~pieces[1:] | (of_keys[1:] != of_keys[:-1])
    limit = np.uint64(int(fraction * 2.0**64) if fraction < 1 else 2**64 - 1)
    return (_distinct(of_keys[starts]) < limit)[np.cumsum(starts) - 1]


def bytes_of(keys: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Return (offset of each key [N + 1], bytes of all keys)."""
    import pyarrow as pa

    keys = keys.cast(pa.large_binary())
    _, offsets, content = keys.buffers()
    starts = np.frombuffer(offsets, dtype=np.int64)[keys.offset : keys.offset + len(keys) + 1]
    return starts, np.frombuffer(content or b"", dtype=np.uint8)


def hashes(keys: pa.Array, seed: int = 0) -> NDArray[np.uint64]:
    """Hash every key [N]: SplitMix64 over a seed, its length and its bytes, eight at a time."""
    starts, content = bytes_of(keys)
    first, lengths = starts[:-1], np.diff(starts)
    padded = np.append(content[: starts[-1]], np.zeros(8, np.uint8))
    words: NDArray[np.int64] = np.ndarray(len(padded) - 7, "<i8", padded, strides=(1,))
    state = mix(seed, lengths)
    for at in range(0, int(lengths.max(initial=0)), 8):
        longer = np.flatnonzero(lengths > at)
        left = np.clip(lengths[longer] - at, 0, 8)
        state[longer] = mix(state[longer].view(np.int64), words[first[longer] + at] & KEPT[left])
    return state


def _distinct(of_keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return sample hashes [N] from key hashes, made distinct for equal keys.

    Equal keys (a JSON may repeat an `id`) are hashed with the sample's number among them.
    """
    ordered = np.sort(of_keys)
    if (ordered[1:] != ordered[:-1]).all():
        return of_keys
    order = np.argsort(of_keys, kind="stable")
    ordered = of_keys[order]
    begins = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
    numbers = np.empty(len(of_keys), np.int64)
    numbers[order] = np.arange(len(of_keys)) - np.repeat(
        begins, np.diff(np.append(begins, len(of_keys)))
    )
    return np.where(numbers > 0, mix(of_keys.view(np.int64), numbers), of_keys)

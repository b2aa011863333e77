"""Arrays of index rows: the list columns of Parquet rows, concatenated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from disttrain_cli.data.arrays import starts_of
from disttrain_cli.data.slots import Ints
from disttrain_cli.spec.index import SAMPLE_SPECIALS, TEMPLATED, TEXT

if TYPE_CHECKING:
    import pyarrow as pa


def samples_of(rows: pa.Table) -> int:
    """Return the number of samples in rows; the pieces of a document count as one."""
    later = (flat(rows, "kinds") == TEXT) & (flat(rows, "widths") > 0)
    return len(rows) - int(later.sum())


def flat(rows: pa.Table, name: str) -> Ints:
    """Return the values of a list column, concatenated over all samples."""
    import pyarrow as pa
    import pyarrow.compute as pc

    values = pc.list_flatten(rows.column(name))
    values = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    return np.asarray(values.to_numpy(zero_copy_only=False), dtype=np.int64)


def numbers_of(columns: Mapping[str, Ints], films: bool) -> Ints:
    """Return the sizes in files' headers: [segments, 2], or [segments, 4] if there are videos."""
    names = ["widths", "heights", *(("frames", "rates") if films else ())]
    return np.stack([columns[name] for name in names], axis=1)


def specials_of(kinds: Ints, heights: Ints, start: Ints) -> Ints:
    """Return the number [N] of BOS and EOS tokens of each sample.

    It is 0 if a chat template rendered the sample.

    Args:
        start: [N + 1] first segment of each sample.
    """
    templated = starts_of(((kinds == TEXT) & (heights == TEMPLATED)).astype(np.int64))[start]
    return np.where(np.diff(templated) > 0, 0, SAMPLE_SPECIALS)


def counts_of(rows: pa.Table) -> Ints:
    """Return the number of segments of each sample."""
    import pyarrow.compute as pc

    return np.asarray(pc.list_value_length(rows.column("kinds")).to_numpy(), dtype=np.int64)

"""The index of a run: read, extended or made, whichever its data ask for."""

from __future__ import annotations

from collections.abc import Mapping

from disttrain_cli.data.index.index_checks import (
    State,
    check_bad,
    check_files,
    check_sources,
    checked_tokenizer,
    extended,
    list_shards,
    made_for,
    states_of,
)
from disttrain_cli.data.index.index_file import read_stored
from disttrain_cli.data.index.sample_index import Index, drawn_index, opened
from disttrain_cli.data.indexing.index_writing import stored_for, write_index
from disttrain_cli.data.sources import Skipped
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.progress import Progress, silent
from disttrain_cli.spec.runfile import Run


def open_index(run: Run, inputs: ModelInputs, progress: Progress = silent) -> Index:
    """Return the index of the run's data: drawn from its distribution, or read from its file.

    The file is built if there is none for this run file, and extended if shards were added.

    Raises:
        DataError: a source is missing or empty, has too many bad samples, or no text to train on.
        MismatchError: an indexed shard changed or is gone.
        SpecError: the tokenizer does not fit the model, or the images of the distribution do not
            fit its sequences.
    """
    if run.file.data.distribution is not None:
        return drawn_index(run.file.data.distribution, inputs)
    tokenizer = checked_tokenizer(run, inputs)
    listed = list_shards(run)
    shards = listed.shards
    stored = stored_for(run, inputs, tokenizer, shards)
    if stored and states_of(shards) == [State(*indexed[:4]) for indexed in stored.files]:
        expected = made_for(run, inputs, tokenizer)
        if extended(stored, expected) == expected:  # no source has another weight
            index = opened(run, inputs, stored, listed, progress)
            check_bad(run, index.sample_count, index.skipped)  # the limit may have changed
            return index
    write_index(run, inputs, tokenizer, shards, progress, stored)
    return opened(run, inputs, read_stored(run.dir.index), listed, progress)


def build_index(
    run: Run, inputs: ModelInputs, progress: Progress = silent, processes: int | None = None
) -> Index:
    """Read the sizes of every sample and write the index of the run atomically.

    Results of an interrupted pass or of other hosts (`read_share_of`) are reused. Samples that are
    broken or longer than a sequence are skipped, counted and named in `Index.skipped`; longer
    samples of text alone are cut into several.

    Args:
        processes: number of indexing processes (`reading_shards.in_order`).

    Raises:
        DataError: a source is missing or empty, more than `data.max_bad_fraction` of the samples
            are bad, or none has any text to train on.
        SpecError: the tokenizer does not fit the model, or the index cannot be written.
    """
    check_sources(run)
    tokenizer, listed = checked_tokenizer(run, inputs), list_shards(run)
    write_index(run, inputs, tokenizer, listed.shards, progress, processes=processes)
    return opened(run, inputs, read_stored(run.dir.index), listed, progress)


def leave_out(run: Run, inputs: ModelInputs, broken: Mapping[int, Skipped]) -> Index:
    """Write the index without these samples (row numbers); all other samples have been decoded.

    Raises:
        DataError: as `build_index`; the index is unchanged.
        MismatchError: a shard was added, removed or changed meanwhile.
    """
    tokenizer = checked_tokenizer(run, inputs)
    stored = read_stored(run.dir.index)
    listed = list_shards(run)
    check_files(stored, states_of(listed.shards), listed.shards)
    write_index(run, inputs, tokenizer, listed.shards, silent, stored, broken)
    return opened(run, inputs, read_stored(run.dir.index), listed)

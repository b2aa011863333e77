"""Every form of dataset is indexed, read again in any order by any thread, and trained where it
says so."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain_cli.data.epochs.mixture import Mixture
from disttrain_cli.data.index.sample_index import Index, read_index
from disttrain_cli.data.indexing.building import build_index
from disttrain_cli.data.packing import pack
from disttrain_cli.data.reading import ShardReader
from disttrain_cli.data.sequences import NOT_TRAINED, SequencePlan
from disttrain_cli.data.sources.tables import RowGroups
from disttrain_cli.data.tokenizer import ByteTokenizer
from disttrain_cli.errors import DataError
from disttrain_cli.spec.index import IMAGE, TEXT
from disttrain_cli.spec.runfile import Run
from tests.data.dataset import INPUTS, PROPERTY, interleaved, make_run, text, write_tar
from tests.data.sources.forms import ENDED, FORMS, Written, write_form


@pytest.fixture(scope="module", params=FORMS)
def read_form(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Run, Index, Written]:
    folder = tmp_path_factory.mktemp("forms")
    written = write_form(folder, request.param)
    run = make_run(folder, [written.source])
    return run, build_index(run, INPUTS), written


def contents(index: Index, reader: ShardReader, sample: int) -> list[tuple[int, Any, bool]]:
    """A sample as `Written.samples` has it, read through the index."""
    segments = range(index.segment_start[sample], index.segment_start[sample + 1])
    texts = iter(reader.texts(sample))
    eos = ByteTokenizer().eos
    return [
        (
            TEXT,
            bytes(ord(ENDED) if token == eos else token for token in next(texts)).decode(),
            bool(index.trained[s]),
        )
        if index.kinds[s] == TEXT
        else (int(index.kinds[s]), reader.file(sample, s), bool(index.trained[s]))
        for s in segments
    ]


def test_what_was_written_is_read(read_form: tuple[Run, Index, Written]) -> None:
    run, index, written = read_form
    assert not index.skipped and read_index(run, INPUTS).fingerprint == index.fingerprint
    reader = ShardReader(index, ByteTokenizer())
    assert [contents(index, reader, sample) for sample in range(len(index))] == written.samples


def test_in_any_order_by_many_threads(read_form: tuple[Run, Index, Written]) -> None:
    _, index, written = read_form
    reader = ShardReader(index, ByteTokenizer())
    order = np.random.default_rng(0).integers(0, len(index), size=200).tolist()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda sample: contents(index, reader, sample), order))
    assert found == [written.samples[sample] for sample in order]


def test_labels_are_the_trained_texts(read_form: tuple[Run, Index, Written]) -> None:
    run, index, written = read_form
    tokens, reader = ByteTokenizer(), ShardReader(index, ByteTokenizer())
    packing = pack(Mixture(index, run.file.train.seed), 0)
    for number in range(len(packing)):
        plan = SequencePlan(packing, number)
        ids, labels = plan.token_ids(tokens, reader.texts)
        learnt = labels[labels != NOT_TRAINED].tolist()
        own = [written.samples[sample] for sample in plan.samples]
        said = [
            [
                tokens.eos if byte == ord(ENDED) else byte
                for byte in "".join(
                    [*(value for kind, value, trained in sample if trained), ENDED]
                ).encode()
            ]
            for sample in own
        ]
        assert learnt == [token for sample in said for token in sample]
        assert len(learnt) == packing.label_tokens[number] and len(ids) == INPUTS.sequence_length


def test_a_shard_that_disappears_is_named(
    tmp_path: Path, read_form: tuple[Run, Index, Written]
) -> None:
    run, index, _ = read_form
    copy = make_run(tmp_path, [source.model_dump() for source in run.file.data.sources])
    shutil.copytree(run.folder, tmp_path, dirs_exist_ok=True)
    index = build_index(copy, INPUTS)
    name = Path(index.shards[0].path)
    name.unlink()
    reader = ShardReader(index, ByteTokenizer())
    for read in (
        lambda: reader.texts(0),
        lambda: reader.file(1, int(np.flatnonzero(index.kinds == IMAGE)[0])),
    ):
        with pytest.raises(DataError, match=name.name) as caught:
            read()
        assert "disttrain_cli.profile" in caught.value.next_step


@pytest.mark.slow
@given(
    st.lists(
        st.lists(st.tuples(st.booleans(), st.integers(0, 9)), min_size=1, max_size=4),
        min_size=1,
        max_size=8,
    )
)
@settings(PROPERTY, max_examples=15)
def test_the_index_counts_the_labels_that_sequences_have(
    samples: list[list[tuple[bool, int]]],
) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        files = [
            interleaved(f"{n}", *(text("x" * length) | {"loss": loss} for loss, length in sample))
            for n, sample in enumerate([*samples, [(True, 1)]])
        ]
        write_tar(Path(folder, "own", "a.tar"), files)
        run = make_run(Path(folder), [{"path": "own"}])
        index = build_index(run, INPUTS)
        assert index.label_tokens[:-1].tolist() == [
            sum(length for loss, length in sample if loss) + sample[-1][0] for sample in samples
        ]
        packing = pack(Mixture(index, 0), 0)
        reader = ShardReader(index, ByteTokenizer())
        for number in range(len(packing)):
            labels = SequencePlan(packing, number).token_ids(ByteTokenizer(), reader.texts)[1]
            assert (labels != NOT_TRAINED).sum() == packing.label_tokens[number]


def test_row_groups_are_kept_within_a_bound() -> None:
    import pyarrow as pa

    table = pa.table({"a": list(range(128))})
    cache = RowGroups(most_bytes=3 * table.nbytes)
    for key in range(5):
        cache.keep(key, table)
        cache.get(0)
    assert [key for key in range(5) if cache.get(key) is not None] == [0, 3, 4]
    small = RowGroups(most_bytes=1)
    small.keep("large", table)
    assert small.get("large") is not None  # the last one is kept, however large
    small.keep("next", table)
    assert small.get("large") is None

"""The data of a run: index, check, latents, order, and preprocessing workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from disttrain_cli.api.opening import Note, check_number, ignore, open_run, path_of
from disttrain_cli.calls import DEFAULT_RUN_FILE, argument, spelled
from disttrain_cli.errors import UsageError
from disttrain_cli.spec.progress import Progress, silent

if TYPE_CHECKING:
    from disttrain_cli.data.index.sample_index import Index
    from disttrain_cli.data.sources import Skipped
    from disttrain_cli.runtime.latents import Made
    from disttrain_cli.spec.inputs import ModelInputs
    from disttrain_cli.spec.runfile import Run


@dataclass(frozen=True)
class Indexed:
    """The number of usable samples, and the skipped ones."""

    samples: int
    skipped: int
    unread_files: list[str]
    path: Path


@dataclass(frozen=True)
class IndexedShare:
    """One host's share of the index."""

    share: str
    shards: int
    path: Path


@dataclass(frozen=True)
class Checked:
    """The usable samples, and the skipped ones."""

    samples: int
    decoded: int  # by this check
    found: int  # broken samples found by this check
    unread_keys: list[dict[str, int]]  # by source: samples by key that no reader reads
    path: Path
    lost: int  # number of skipped samples
    skipped: list[Skipped]
    unread_files: list[str]
    data: str  # fingerprint of the index, before this check


@dataclass(frozen=True)
class Encoded:
    """The latents of every generator, and the index of the images that they encode."""

    index: Index
    latents: list[Made]


@dataclass(frozen=True)
class EpochOrder:
    """The sequences of one epoch."""

    phase: int  # the step at which its phase of the data begins
    epoch: int
    first_sequence: int
    sequences: int


@dataclass(frozen=True)
class Ordered:
    """The epochs whose orders are stored, and their folder."""

    path: Path
    epochs: list[EpochOrder]


def _with_data(run: Run | Path | str) -> tuple[Run, ModelInputs]:
    """Return a run after checking its data sources, and the inputs of its model."""
    opened = open_run(run)
    from disttrain_cli.data.index.index_checks import check_sources
    from disttrain_cli.models.graph import describe

    check_sources(opened)
    return opened, describe(opened)


def data_index(run: Run | Path | str = DEFAULT_RUN_FILE, *, progress: Progress = silent) -> Indexed:
    """Build the sample index: read the sizes of all samples.

    Raises:
        As `data.indexing.building.open_index`.
    """
    opened, inputs = _with_data(run)
    from disttrain_cli.data.indexing.building import open_index
    from disttrain_cli.data.sources.samples import samples_lost

    index = open_index(opened, inputs, progress)
    return Indexed(len(index), samples_lost(index.skipped), index.unread_files, opened.dir.index)


def data_index_share(
    run: Run | Path | str = DEFAULT_RUN_FILE,
    *,
    number: int,
    hosts: int,
    progress: Progress = silent,
) -> IndexedShare:
    """Read one host's share of the shards; `data_index` or `profile` then merges all shares.

    Args:
        number: number of this host, from 0.
        hosts: number of hosts.

    Raises:
        UsageError: there is no such share; others as `data.indexing.index_writing.read_share_of`.
    """
    if not 0 <= number < hosts:
        raise UsageError(
            f"There is no share {number}/{hosts}",
            "allowed: K/N, for N hosts that are numbered from K = 0 to N - 1",
        )
    opened, inputs = _with_data(run)
    from disttrain_cli.data.indexing.index_writing import read_share_of
    from disttrain_cli.data.indexing.reading_shards import Share

    share = Share(number, hosts)
    shards = read_share_of(opened, inputs, share, progress)
    return IndexedShare(share.name, shards, opened.dir.partial_index)


def data_check(run: Run | Path | str = DEFAULT_RUN_FILE, *, progress: Progress = silent) -> Checked:
    """Decode every image and clip once, and exclude the samples that cannot be used.

    Raises:
        BadSamplesError: more is broken than `data.max_bad_fraction` allows; it lists all of them.
        Others as `data.indexing.building.open_index`.
    """
    opened, inputs = _with_data(run)
    from disttrain_cli.data.checking import find_broken, unchecked
    from disttrain_cli.data.indexing.building import leave_out, open_index
    from disttrain_cli.data.sources.samples import samples_lost

    index = open_index(opened, inputs, progress)
    decoded = len(unchecked(index))
    broken = find_broken(opened, index, progress)
    if decoded:
        leave_out(opened, inputs, broken)
    skipped = [*index.skipped, *broken.values()]
    return Checked(
        samples=len(index) - len(broken),
        decoded=decoded,
        found=len(broken),
        unread_keys=index.unread_keys,
        path=opened.dir.index,
        lost=samples_lost(skipped),
        skipped=skipped,
        unread_files=index.unread_files,
        data=index.fingerprint,
    )


def data_latents(
    run: Run | Path | str = DEFAULT_RUN_FILE, *, progress: Progress = silent, note: Note = ignore
) -> Encoded:
    """Encode the images to generate once, so that training runs no VAE.

    Raises:
        As `runtime.latents.make_latents`.
    """
    opened = open_run(run)
    from disttrain_cli.models.weights import starting_weights
    from disttrain_cli.runtime.latents import make_latents

    for sentence in starting_weights(opened):
        if "VAE" in sentence:
            note(sentence)
    return Encoded(*make_latents(opened, progress))


def data_order(
    run: Run | Path | str = DEFAULT_RUN_FILE, *, epochs: int = 1, progress: Progress = silent
) -> Ordered:
    """Compute the sample orders of the next epochs ahead of training.

    Args:
        epochs: number of epochs.

    Raises:
        As `data.indexing.building.open_index`.
    """
    check_number("epochs", epochs, 1)
    opened, inputs = _with_data(run)
    from disttrain_cli.data.epochs.mixture import Mixture, in_sequences
    from disttrain_cli.data.indexing.building import open_index
    from disttrain_cli.data.packing import SequenceStream
    from disttrain_cli.runtime.checkpoints.folder import begun
    from disttrain_cli.runtime.checkpoints.phases import phases_of

    train, before = opened.file.train, begun(opened.dir.checkpoints)
    batch, made = train.global_batch_size, list[EpochOrder]()
    index = open_index(opened, inputs, progress)
    phases, _ = phases_of(index, before)
    mixture = Mixture(index, train.seed, in_sequences(phases, batch))
    stream, at = SequenceStream(mixture, progress, keep=True), before.step * batch
    for _ in range(epochs):
        phase, epoch = stream.epoch_of(at)
        begin, at = stream.range_of(phase, epoch)
        made.append(EpochOrder(mixture.phases[phase].first // batch, epoch, begin, at - begin))
    return Ordered(opened.dir.orders, made)


def data_serve(
    run: Run | Path | str = DEFAULT_RUN_FILE,
    *,
    plan: Path | str | None = None,
    host: str = "127.0.0.1",
    port: int = 8815,
    processes: int = 1,
    tls_cert: Path | str | None = None,
    tls_key: Path | str | None = None,
    ready: Callable[[list[str], list[int]], None] | None = None,
    note: Note = ignore,
) -> None:
    """Serve prepared inputs to the ranks of a run, over Arrow Flight, until SIGTERM or SIGINT.

    Args:
        plan: file of the plan that is trained, instead of the run's own.
        host: address to listen on; addresses beyond loopback need TLS and `preprocess.token_file`.
        port: port of the first worker, with the next ports for the others; 0: any free ports.
        processes: worker processes, each with `preprocess.workers` decoding threads.
        tls_cert, tls_key: certificate and private key (PEM) of this host.
        ready: called with addresses and process ids when all workers serve.

    Raises:
        As `data.serving.supervisor`.
    """
    check_number("port", port, 0, 65_535)
    check_number("processes", processes, 1)
    opened = open_run(run)
    from disttrain_cli.data.serving.access import exposed
    from disttrain_cli.data.serving.process import Task
    from disttrain_cli.data.serving.supervisor import check_open, serve
    from disttrain_cli.spec.plan import read_plan

    chosen = path_of(plan) or opened.dir.plan
    certificate, key = (
        None if path is None else str(Path(path).resolve()) for path in (tls_cert, tls_key)
    )
    token = opened.file.preprocess.token_file
    check_open(host, token, certificate, key)
    secrets = {
        "preprocess.token_file": None if token is None else opened.resolve(token),
        spelled(argument("tls_key")): path_of(tls_key),
    }
    for sentence in exposed(secrets):
        note(sentence)
    read_plan(chosen)
    tasks = [
        Task(opened.source, str(chosen.resolve()), host, port and port + number, certificate, key)
        for number in range(processes)
    ]
    serve(tasks, ready or (lambda addresses, pids: None), note)

"""Reader of flight recorder dumps, one file per rank: JSON, or pickles restricted to plain values.

Format 2.x of torch's FlightRecorder (`torch/csrc/distributed/c10d/FlightRecorder*.hpp`). The rank
that wrote a file is only in its name, as its last number.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
import re
import resource
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from disttrain_cli.errors import DataError

#: Larger files are refused: a dump of 20,000 entries with stacks has some 30 MiB.
MOST_BYTES = 64 << 20
#: Limit on the memory of a pickle's values: a multiple of its bytes, plus a constant.
MOST_TIMES, SPARE_BYTES = 64, 64 << 20
#: The rank: the last number of a name, unless it has more digits, as a date has.
RANK = re.compile(r"(?<!\d)(\d{1,7})\D*$")
PICKLED = re.compile(rb"\x80[\x02-\x05]")
#: Every pickle of a dump has one of these within its first entry; its stack may be before it.
KEYS = (b"pg_config", b"collective_seq_id", b"comm_lib_version", b"nccl_version")
FIRST_ENTRY_BYTES = 2**20
GZIP = b"\x1f\x8b"


class Frame(Struct, frozen=True):
    """A line of Python on the stack; the innermost comes first."""

    name: str
    filename: str
    line: int


#: The entry that ends a group of coalesced operations; operations that torch itself coalesces have
#: names in lower case before it.
CLOSING = re.compile(r"([A-Z_]+_)?coalesced$")
#: A message: its direction, and the two ranks in the group.
MESSAGE = re.compile(r"(send|recv) (\d+)(->|<-)(\d+)$")


class Entry(Struct, frozen=True):
    """An operation that a rank has issued to a process group."""

    record_id: int
    process_group: tuple[str, str]  # name, description
    collective_seq_id: int
    profiling_name: str  # such as nccl:all_reduce, nccl:send 0->1
    state: str  # scheduled, started, completed
    input_sizes: list[list[int]]
    output_sizes: list[list[int]]
    input_dtypes: list[str] = []
    output_dtypes: list[str] = []
    retired: bool = False
    is_p2p: bool = False
    p2p_seq_id: int = 0
    time_created_ns: int = 0
    time_discovered_completed_ns: int | None = None
    frames: list[Frame] = []
    batch_size: int = 1  # operations issued as one; set here, not by torch

    @property
    def operation(self) -> str:
        """Operation without its backend: all_reduce, or send 0->1 with ranks in the group."""
        return self.profiling_name.partition(":")[2] or self.profiling_name

    @property
    def is_message(self) -> bool:
        """True for a send or receive, or for the entry that ends a batch of them."""
        return self.is_p2p or self.operation.partition(" ")[0] in ("send", "recv")

    @property
    def number(self) -> int:
        """Sequence number among the messages, or the collectives, of its group."""
        return self.p2p_seq_id if self.is_message else self.collective_seq_id

    @property
    def pending(self) -> bool:
        """True if it has not ended, as far as is known.

        Gloo's operations are never marked as completed, only as retired.
        """
        over_gloo = self.profiling_name.startswith("gloo:")
        return self.state != "completed" and not (over_gloo and self.retired)


class Config(Struct, frozen=True):
    """Configuration of a process group."""

    name: str = ""
    desc: str = ""
    ranks: str | list[int] = "[]"  # JSON


class Dump(Struct, frozen=True):
    """Dump of one rank."""

    version: str
    entries: list[Entry] = []
    pg_config: dict[str, Config] = {}


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler of plain values only; it refuses all names of classes and functions."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(
            f"it names {module[:40]}.{name[:40]}, which dumps never contain"
        )


def is_pickled_dump(text: bytes, more: Iterator[bytes]) -> bool:
    """Return True if a pickle that begins with `text` is a dump."""
    while len(text) < FIRST_ENTRY_BYTES and (chunk := next(more, b"")):
        text += chunk
    return PICKLED.match(text) is not None and any(key in text for key in KEYS)


def read_dumps(files: Sequence[Path]) -> tuple[dict[int, Dump], list[str]]:
    """Read the dumps by rank; also return what was left out.

    Raises:
        DataError: no dump can be read, or two are of one rank.
    """
    dumps: dict[int, Dump] = {}
    said: list[str] = []
    of_rank: dict[int, Path] = {}
    for file in files:
        rank = rank_of(file)
        if rank is None:
            said.append(
                f"{file.name} left out: its name contains no number that identifies the rank"
            )
            continue
        try:
            dump = _read(file)
        except (ValueError, OSError) as error:
            said.append(f"{file.name} left out: {error}")
            continue
        if rank in of_rank:
            raise DataError(
                f"Two dumps belong to rank {rank}",
                f"{of_rank[rank]}, {file}",
                "Pass only the dumps of one hang.",
            )
        of_rank[rank], dumps[rank] = file, with_states(dump)
    if not dumps:
        raise DataError(
            "No readable flight recorder dump here",
            "; ".join(said[:5]),
            "Pass the files that torch wrote when the job hung, such as nccl_trace_rank_0, or their"
            " folder.",
        )
    return dict(sorted(dumps.items())), said


def with_states(dump: Dump) -> Dump:
    """Return the dump in the order of its records, with the states that torch leaves out.

    Operations inside a coalescing group (`batch_isend_irecv`, `_coalescing_manager`) stay scheduled
    forever (pytorch/pytorch#137969): their state is that of the entry that ends the group. Messages
    each get it; collectives are merged into one, as they share a sequence number. Collectives of a
    group run in order, so one that is still scheduled before a completed one has completed.
    """
    groups: dict[tuple[str, str], list[Entry]] = {}
    ordered = sorted(dump.entries, key=lambda entry: entry.record_id)
    for entry in ordered:
        own = groups.setdefault(entry.process_group, [])
        own.append(entry)
        if CLOSING.match(entry.operation):
            _close(own)
            cut = own[-1].record_id == ordered[0].record_id > 0 and not own[-1].pending
            if cut and not MESSAGE.match(own[-1].operation):
                own.pop()  # some of its operations may have been dropped
    for own in groups.values():
        ran = False
        for index in reversed(range(len(own))):
            entry = own[index]
            if not entry.is_message:
                ran = ran or entry.state == "completed"
                if ran and entry.state == "scheduled":
                    own[index] = replace(entry, state="completed")
    entries = sorted(
        (entry for own in groups.values() for entry in own), key=lambda entry: entry.record_id
    )
    return replace(dump, entries=entries)


def _close(entries: list[Entry]) -> None:
    """Remove the last entry and copy its state to the operations of the group that it ends."""
    closing = entries.pop()
    first = len(entries)
    while first:
        entry, last = entries[first - 1], entries[-1]
        joined = (entry.is_message, entry.number) == (last.is_message, last.number)
        if entry.state != "scheduled" or not joined or not _ends(closing, entry):
            break
        first -= 1
    members = [
        replace(
            entry,
            state=closing.state,
            retired=closing.retired,
            time_discovered_completed_ns=closing.time_discovered_completed_ns,
            batch_size=len(entries) - first,
        )
        for entry in entries[first:]
    ]
    if members and not members[0].is_message:
        members = [_joined(members)]
    entries[first:] = members or [closing]


def _ends(closing: Entry, entry: Entry) -> bool:
    """Return True if `entry` is in the coalescing group that `closing` ends.

    Some versions of torch do not record that the group was one of messages.
    """
    if entry.is_message:
        return entry.p2p_seq_id == closing.p2p_seq_id
    return not closing.is_p2p and entry.collective_seq_id == closing.collective_seq_id


def _joined(entries: Sequence[Entry]) -> Entry:
    """Merge collectives that a rank issued as one into one entry."""
    names = dict.fromkeys(entry.operation for entry in entries)
    return replace(
        entries[0],
        profiling_name=f"{entries[0].profiling_name.partition(':')[0]}:{' + '.join(names)}",
        input_sizes=[sizes for entry in entries for sizes in entry.input_sizes],
        output_sizes=[sizes for entry in entries for sizes in entry.output_sizes],
        input_dtypes=[dtype for entry in entries for dtype in entry.input_dtypes],
        output_dtypes=[dtype for entry in entries for dtype in entry.output_dtypes],
    )


def rank_of(file: Path) -> int | None:
    """Return the rank in a file's name: its last number."""
    found = RANK.search(file.name)
    return None if found is None else int(found[1])


def _read(file: Path) -> Dump:
    """Read one dump; raise ValueError if the file is none."""
    with file.open("rb") as source:
        packed = source.peek(2).startswith(GZIP)
        try:
            content = (gzip.GzipFile(fileobj=source) if packed else source).read(MOST_BYTES + 1)
        except (EOFError, zlib.error) as error:
            raise ValueError(f"damaged: {error}") from None
    if len(content) > MOST_BYTES:
        raise ValueError(f"larger than {MOST_BYTES >> 20} MiB, more than any dump")
    if PICKLED.match(content):
        return _checked(_unpickled(content))
    try:
        return msgspec.json.decode(content, type=Dump)
    except msgspec.DecodeError as error:  # also raised for values of other types
        raise ValueError(f"not a dump: {error}") from None


def _unpickled(content: bytes) -> Any:
    try:
        with _at_most(MOST_TIMES * len(content) + SPARE_BYTES):
            return _PlainUnpickler(io.BytesIO(content)).load()
    except MemoryError:
        raise ValueError("it needs more memory than is available") from None
    except Exception as error:  # the unpickler can raise anything on arbitrary bytes
        raise ValueError(f"not a pickle of plain values: {str(error)[:120]}") from None


@contextmanager
def _at_most(more_bytes: int) -> Iterator[None]:
    """Limit the memory that the process may allocate inside the block; MemoryError beyond it.

    A few bytes of a pickle can request gigabytes (a large index into its memo). Without /proc,
    which reports the memory in use, there is no limit.
    """
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = pages * resource.getpagesize() + more_bytes
    if soft != resource.RLIM_INFINITY:
        wanted = min(wanted, soft)
    resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _checked(value: Any) -> Dump:
    """Convert plain values to a dump; only the fields of `Dump` are read, to their own depth."""
    try:
        return msgspec.convert(value, Dump)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ValueError(f"not a dump: {str(error)[:120]}") from None


def ranks_of(config: Config) -> tuple[int, ...]:
    """Return the ranks of a group that its configuration lists; empty if it lists none."""
    try:
        ranks = json.loads(config.ranks) if isinstance(config.ranks, str) else config.ranks
    except (ValueError, RecursionError):
        return ()
    plain = isinstance(ranks, list) and all(type(rank) is int and rank >= 0 for rank in ranks)
    return tuple(sorted({*ranks})) if plain else ()

"""Checks of an index before its use: tokenizer, run file, files on disk, share of bad samples."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import PurePath
from typing import Any, NamedTuple

from disttrain_cli.calls import call
from disttrain_cli.data.index.index_file import PROFILE, Stored, read_stored
from disttrain_cli.data.sources import Listing, Shard, Skipped, list_source, printable, shown
from disttrain_cli.data.sources.files import content_of, is_file, join, state_of
from disttrain_cli.data.sources.samples import largest_first, samples_lost, shown_skipped
from disttrain_cli.data.tokenizer import Tokenizer, read_tokenizer
from disttrain_cli.errors import DataError, DisttrainError, MismatchError, SpecError
from disttrain_cli.spec.files import fingerprint, identity
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.runfile.data import is_url

MEANT = (
    "Restore the data; if the change is intended, index all of it again:"
    f" {call('profile', reindex=True)}"
)
ADDED = f"Add the new shards with: {call('profile')}"
EVEN = 128  # vocabulary sizes that are a multiple of it are divisible by all usual TP sizes
MOST_NAMED = 8  # bad samples or changed shards that a message lists
#: Usable samples in a tar, in a JSON and in a table.
MEMBERS = (
    "A tar contains KEY.jpg or KEY.flac with KEY.txt or KEY.json, or KEY.json with `segments` and"
    " its files"
)
RECORDS = (
    'A record is {"text": …}, {"image": …, "text": …}, or {"conversations": [{"from": "human",'
    ' "value": …}, {"from": "gpt", "value": …}]}'
)
TABLE = (
    "A table has a column `text`, alone or with one of images, or a column of turns (`messages`);"
    " data.sources[].text names another one"
)
USABLE = {".json": RECORDS, ".parquet": TABLE, ".arrow": TABLE}


class BadSamplesError(DataError):
    """More samples are unusable than allowed; `skipped` has all of them."""

    def __init__(self, skipped: list[Skipped], what: str, why: str, next_step: str) -> None:
        super().__init__(what, why, next_step)
        self.skipped = skipped


class State(NamedTuple):
    """Properties of a shard that reveal a change."""

    source: int
    name: str
    size: int
    time: int | str  # of the last change in ns, or the version that a server reports


def checked_tokenizer(run: Run, inputs: ModelInputs) -> Tokenizer:
    """Read the run's tokenizer; SpecError if the model has fewer ids."""
    tokenizer = read_tokenizer(run)
    if tokenizer.vocabulary > inputs.vocabulary:
        beyond = range(inputs.vocabulary, tokenizer.vocabulary)
        named = [f"{text} is {one}" for one in beyond if (text := tokenizer.token(one)) is not None]
        reserved = len(beyond) - len(named)
        if reserved:
            named.append(f"{reserved} reserved for inputs and outputs of the model")
        shown = "; ".join([*named[:MOST_NAMED], *["…"] * (len(named) > MOST_NAMED)])
        raise SpecError(
            f"The tokenizer {run.file.data.tokenizer!r} does not fit the model",
            f"data.tokenizer has {tokenizer.vocabulary} ids with the special ones, "
            f"{inputs.llm} has a vocabulary of {inputs.vocabulary}: {shown}",
            "Add a row for each of them to the folder's embedding (in transformers:"
            " model.resize_token_embeddings), or remove them from its tokenizer."
            if run.file.model.folder is not None
            else f"Set model.modules.{inputs.llm}.config.vocab_size to at least"
            f" {tokenizer.vocabulary}; {-(-tokenizer.vocabulary // EVEN) * EVEN} is divisible by"
            " every TP size.",
        )
    return tokenizer


def check_sources(run: Run) -> None:
    """Raise DataError if there is no data to open: a distribution has sizes only."""
    if run.file.data.distribution is not None:
        raise DataError(
            "data.distribution has sizes only: there is nothing to train on",
            f"given: {run.file.data.distribution.name}, which replaces data when planning a"
            " cluster",
            "Set data.sources instead of data.distribution in the run file, and profile again:"
            f" {call('profile')}",
        )


def check_text(samples: int, label_tokens: int) -> None:
    """Raise DataError if no text of any sample is trained: the LLM would have nothing to learn."""
    if not label_tokens:
        raise DataError(
            "The dataset has no text to train on",
            f"{samples} samples have only images, or texts without loss: there is no token for the"
            " LLM to learn",
            "Add captions (KEY.txt) or text segments to the shards, or a source with text to"
            " data.sources.",
        )


class Listed(NamedTuple):
    """Shards of all sources in dataset order, with their source, and the files not read."""

    shards: list[tuple[int, Shard]]
    unread: list[str]


def evaluates_split(run: Run) -> bool:
    """Return True if evaluation uses the validation splits of the data's folders.

    That is so if evaluation is requested and no share of the samples is held out.
    """
    return run.file.train.asks_evaluation and not run.file.data.held_out


def list_shards(run: Run) -> Listed:
    """List the shards of the run's sources.

    Raises:
        DataError: a source is missing, or has no shards.
        MismatchError: the cause is that indexed shards of it are gone.
    """

    def opened(path: str) -> str:
        return path if is_url(path) else str(run.resolve(path))

    for number, source in enumerate(run.file.data.sources):
        if (
            source.images is not None
            and not is_url(source.images)
            and not run.resolve(source.images).is_dir()
        ):
            raise DataError(
                f"There is no folder of images at {shown(opened(source.images))}",
                f"given by data.sources[{number}].images: {shown(source.images)}",
                "Correct data.sources in the run file.",
            )
    listings = []
    for number, source in enumerate(run.file.data.sources):
        try:
            listing = list_source(
                opened(source.path),
                f"data.sources[{number}].path: {shown(source.path)}",
                None if source.images is None else opened(source.images),
                evaluates_split(run),
            )
        except DataError:
            _check_there(run, number, opened(source.path))
            raise
        listings.append(listing)
    listings = [_without_held_out(listing, listings) for listing in listings]
    of_all = list(zip(run.file.data.sources, listings, strict=True))
    return Listed(
        [
            (number, _with_text(shard, number, source.text))
            for number, (source, listing) in enumerate(of_all)
            for shard in listing.shards
        ],
        [f"{shown(source.path)}: {line}" for source, listing in of_all for line in listing.unread],
    )


def _check_there(run: Run, number: int, path: str) -> None:
    """Raise MismatchError if indexed shards of a source that cannot be listed are gone.

    Sources behind URLs are not checked: their servers report the failure.
    """
    if is_url(path):
        return
    try:
        stored = read_stored(run.dir.index)
    except DisttrainError:
        return
    source_path = run.file.data.sources[number].path
    if source_path not in [
        one["path"] for one in stored.inputs["data.sources"][number : number + 1]
    ]:
        return
    shards = [indexed.name for indexed in stored.files if indexed.source == number]
    alone = shards == [path.rpartition("/")[2]] and is_file(path)  # the source is a file
    gone = [] if alone else [name for name in shards if not is_file(join(path, name))]
    if gone:
        lines = [f"  {printable(name)}: gone" for name in gone[:MOST_NAMED]]
        more = f"\n  and {len(gone) - MOST_NAMED} more" if len(gone) > MOST_NAMED else ""
        raise MismatchError(
            f"Shards of {shown(source_path)} were removed after they were indexed",
            f"given by data.sources[{number}].path; index {stored.path}\n"
            + "\n".join(lines)
            + more,
            "Restore them. If this is intended, correct data.sources in the run file, and index,"
            f" profile and plan again: {call('profile', reindex=True)} && {call('plan')}",
        )


def _without_held_out(listing: Listing, of_all: Sequence[Listing]) -> Listing:
    """Mark as held out the shards of a source that are in the validation split of any source."""
    held = {_real(one.path) for other in of_all for one in other.shards if one.held_out}
    if not held:
        return listing
    also = [one for one in listing.shards if not one.held_out and _real(one.path) in held]
    if len(also) == sum(not one.held_out for one in listing.shards):
        raise DataError(
            f"{shown(also[0].path)} is used for evaluation and cannot be trained on",
            "it is in the validation split of another source, and its source has nothing else",
            "Remove it from data.sources, or set data.held_out, the share of the samples to"
            " evaluate on.",
        )
    return Listing(
        [one._replace(held_out=True) if one in also else one for one in listing.shards],
        [
            *listing.unread,
            *(
                f"held out: {printable(one.name)} (the validation split of another source)"
                for one in also
            ),
        ],
    )


def _real(path: str) -> str:
    return path if is_url(path) else os.path.realpath(path)


def _with_text(shard: Shard, source: int, text: str | None) -> Shard:
    """Set the column of texts that the run file names; DataError if the shard has no columns."""
    if text is None:
        return shard
    if shard.form not in ("parquet", "arrow"):
        raise DataError(
            f"{shown(shard.path)} has no columns",
            f"given by data.sources[{source}].text: {printable(text)}, which names a column of"
            " Parquet or Arrow files",
            f"Remove data.sources[{source}].text; {RECORDS[0].lower()}{RECORDS[1:]}.",
        )
    return shard._replace(text=text)


def shard_label(run: Run, shard: Shard) -> str:
    """Return a shard's name in messages: relative to the run file if it lies below its folder."""
    path = PurePath(shard.path)
    below = not is_url(shard.path) and path.is_relative_to(run.folder)
    return shown(str(path.relative_to(run.folder)) if below else shard.path)


def made_for(run: Run, inputs: ModelInputs, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return everything but the shards that an index depends on."""
    chat = {"chat template": tokenizer.chat.fingerprint} if tokenizer.chat else {}
    hashed = {"data.deduplicate": True} if run.file.data.deduplicate else {}
    return {
        **chat,
        **hashed,
        "validation split": evaluates_split(run),
        "model inputs": identity(inputs),
        "tokenizer": tokenizer.fingerprint,
        "data.sources": [
            source.model_dump(include={"path", "images", "text", "weight"})
            for source in run.file.data.sources
        ],
    }


def states_of(shards: list[tuple[int, Shard]]) -> list[State]:
    """Return the current state of every shard; DataError if one cannot be reached."""
    return [State(source, shard.name, *state_of(shard.path)) for source, shard in shards]


def check_same(stored: Stored, now: dict[str, Any]) -> None:
    """Raise MismatchError if an index was made for another model, tokenizer or list of sources."""
    changed = [name for name in now if stored.inputs.get(name) != now[name]]
    if changed:
        raise MismatchError(
            f"The sample index {stored.path} was built for a different run file",
            f"changed: {', '.join(changed)} (index {fingerprint(stored.inputs)}, now"
            f" {fingerprint(now)})",
            PROFILE,
        )


def extended(stored: Stored, now: dict[str, Any]) -> dict[str, Any]:
    """Return `now` (`made_for`) with an index's sources, if `now` extends them.

    Their weights may differ, and more sources may follow.
    """

    def places(sources: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
        return [(source["path"], source["images"], source.get("text")) for source in sources]

    before = stored.inputs["data.sources"]
    same = places(before) == places(now["data.sources"])[: len(before)]
    return now | {"data.sources": before} if same else now


def check_profiled_data(data_fingerprint: str, profile: Profile) -> None:
    """Raise MismatchError if an index is of other data than the profile."""
    if data_fingerprint != profile.fingerprints.data:
        raise MismatchError(
            "The dataset is not the one that was profiled",
            f"data of the profile: {profile.fingerprints.data}; of the index: {data_fingerprint}",
            f"Profile and plan again: {call('profile')} && {call('plan')}",
        )


def check_kept(stored: Stored, now: list[State], shards: list[tuple[int, Shard]]) -> None:
    """Raise MismatchError if an indexed shard changed or is gone.

    New shards, and copies with other times, are accepted.
    """
    _check_states(stored, _without_copies(stored, now, shards), MEANT, added=False)


def check_files(stored: Stored, now: list[State], shards: list[tuple[int, Shard]]) -> None:
    """Raise MismatchError if a shard was added, removed or changed; copies may have other times."""
    now = _without_copies(stored, now, shards)
    _check_states(stored, now, MEANT, added=False)
    _check_states(stored, now, ADDED, added=True)


def _without_copies(
    stored: Stored, now: list[State], shards: list[tuple[int, Shard]]
) -> list[State]:
    """Return the states, with the stored time for a shard of the same size and content."""
    known = {indexed[:2]: indexed for indexed in stored.files}

    def with_stored_time(state: State, shard: Shard) -> State:
        old = known.get(state[:2])
        copied = (
            old is not None
            and old.time != state.time
            and old.size == state.size
            and old.content
            and old.content == content_of(shard.path)
        )
        return state._replace(time=old.time) if old is not None and copied else state

    return [with_stored_time(state, shard) for state, (_, shard) in zip(now, shards, strict=True)]


def _check_states(stored: Stored, now: list[State], next_step: str, added: bool) -> None:
    before = [State(*indexed[:4]) for indexed in stored.files]
    old, new = ({state[:2]: state for state in states} for states in (before, now))
    changed = [
        key
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key) and (added or key in old)
    ]
    if not changed:
        return
    lines = [f"  {printable(key[1])}: {_change(old.get(key), new.get(key))}" for key in changed]
    more = f"\n  and {len(lines) - MOST_NAMED} more" if len(lines) > MOST_NAMED else ""
    raise MismatchError(
        "The dataset changed since it was indexed",
        f"index {stored.path}: files {fingerprint(before)}, now {fingerprint(now)}\n"
        + "\n".join(lines[:MOST_NAMED])
        + more,
        next_step,
    )


def _change(before: State | None, now: State | None) -> str:
    """Describe a shard's change."""
    if before is None or now is None:
        return "new" if before is None else "gone"
    return f"was {_shown_state(before)}, is {_shown_state(now)}"


def _shown_state(state: State) -> str:
    if isinstance(state.time, str):
        return f"{state.size} bytes, version {printable(state.time)}"
    written = datetime.fromtimestamp(state.time / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")
    return f"{state.size} bytes of {written}"


def check_bad(run: Run, good: int, skipped: list[Skipped]) -> None:
    """Raise BadSamplesError if no sample is left, or more are skipped than allowed.

    `data.max_bad_fraction` is the limit.
    """
    limit = run.file.data.max_bad_fraction
    lost, unknown = samples_lost(skipped), [one for one in skipped if one.samples is None]
    named = _named(skipped)
    if good and lost <= limit * (good + lost) and (not unknown or limit == 1):
        return
    if not good:
        forms = (form for suffix, form in USABLE.items() if any(suffix in s.shard for s in skipped))
        raise BadSamplesError(
            skipped,
            "The dataset has no usable sample",
            named or "its shards are empty",
            f"{next(forms, MEMBERS)}; an example: {call('init', 'DIR', sample_data=True)}",
        )
    if unknown:
        raise BadSamplesError(
            skipped,
            "Damaged or empty shards lose an unknown number of samples",
            _named(unknown),
            "Restore these files, or remove them from the folder. data.max_bad_fraction: 1 uses"
            " their readable part. A complete tar that merely lacks the end marker gets one with:"
            " truncate -s +1024 FILE",
        )
    by_shard = Counter[str]()
    for one in skipped:
        by_shard[one.shard] += samples_lost([one])
    shards = ", ".join(f"{shard} {count}" for shard, count in by_shard.most_common(4))
    raise BadSamplesError(
        skipped,
        f"{lost} of {good + lost} samples cannot be used, more than data.max_bad_fraction = {limit}"
        " allows",
        f"by shard: {shards}\n{named}",
        f"See all of them: {call('data_check')}. Repair the shards, or raise data.max_bad_fraction"
        " (long samples: data.sequence_length; to leave out shards on purpose, list the others one"
        " by one in data.sources).",
    )


def _named(skipped: Sequence[Skipped]) -> str:
    """Return the largest of them, a line each."""
    few = largest_first(skipped)[:MOST_NAMED]
    lines = [f"  {shown_skipped(one)}: {one.reason}" for one in few]
    more = len(skipped) - MOST_NAMED
    return "\n".join([*lines, f"  and {more} more"] if more > 0 else lines)

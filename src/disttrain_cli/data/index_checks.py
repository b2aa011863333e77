"""What an index must agree with before it is used: tokenizer, run file, files on disk, share of bad samples."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

from disttrain_cli.data.sources import Skipped, find_shards
from disttrain_cli.data.tokenizer import Tokenizer, read_tokenizer
from disttrain_cli.errors import DataError, MismatchError, SpecError
from disttrain_cli.spec.files import fingerprint
from disttrain_cli.spec.index import TEXT
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.runfile import Run

REINDEX = "Index the data again with: disttrain profile"
MOST_NAMED = 8  # bad samples or changed shards that a message lists


def checked_tokenizer(run: Run, inputs: ModelInputs) -> Tokenizer:
    """The run's tokenizer; SpecError where the model has fewer ids than it."""
    tokenizer = read_tokenizer(run)
    if tokenizer.vocabulary > inputs.vocabulary:
        raise SpecError(
            f"The tokenizer {run.file.data.tokenizer!r} does not fit the model",
            f"data.tokenizer has {tokenizer.vocabulary} ids with the special ones, "
            f"{inputs.llm} has a vocabulary of {inputs.vocabulary}",
            f"Set model.modules.{inputs.llm}.config.vocab_size to at least {tokenizer.vocabulary}.",
        )
    return tokenizer


def check_sources(run: Run) -> None:
    """DataError where there is no data to open: a distribution has sizes only."""
    if run.file.data.distribution is not None:
        raise DataError(
            "data.distribution has sizes only: there is nothing to train on",
            f"given: {run.file.data.distribution.name}, which stands in for data when a cluster is planned",
            "Give data.sources instead of data.distribution in the run file, and profile again: disttrain profile",
        )


def check_text(kinds: list[list[int]], tokens: list[list[int]]) -> None:
    """DataError where no segment of any sample has text: the LLM would have nothing to learn."""
    flat = zip(chain.from_iterable(kinds), chain.from_iterable(tokens), strict=True)
    if not any(kind == TEXT and count for kind, count in flat):
        raise DataError(
            "The dataset has no text",
            f"{len(kinds)} samples of images alone: there is nothing that the LLM could learn to write",
            "Add captions (KEY.txt) or text segments to the shards, or a source with text to data.sources.",
        )


def list_shards(run: Run) -> list[tuple[int, str, Path]]:
    """(source, name relative to it, path) of every shard, in dataset order."""
    return [
        (number, path.name, path)
        for number, source in enumerate(run.file.data.sources)
        for path in find_shards(run.resolve(source.path), f"data.sources[{number}].path: {source.path}")
    ]


def shard_label(run: Run, path: Path) -> str:
    """How messages name a shard: relative to the run file where it lies below it."""
    return str(path.relative_to(run.folder) if path.is_relative_to(run.folder) else path)


def made_for(run: Run, inputs: ModelInputs, tokenizer: Tokenizer) -> dict[str, Any]:
    """What an index depends on besides the shards."""
    return {
        "model inputs": inputs.model_dump(mode="json"),
        "tokenizer": tokenizer.fingerprint,
        "data.sources": [source.model_dump(mode="json") for source in run.file.data.sources],
    }


def file_states(shards: list[tuple[int, str, Path]]) -> list[list[Any]]:
    """[source, name, size, time] of every shard, by which a change is noticed."""
    return [[source, name, path.stat().st_size, path.stat().st_mtime_ns] for source, name, path in shards]


def check_same(path: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """MismatchError where an index was made for another model, tokenizer or list of sources."""
    changed = [name for name in now if before.get(name) != now[name]]
    if changed:
        raise MismatchError(
            f"The sample index {path} was made for another run file",
            f"changed: {', '.join(changed)} (index {fingerprint(before)}, now {fingerprint(now)})",
            REINDEX,
        )


def check_files(path: Path, before: list[list[Any]], now: list[list[Any]]) -> None:
    """MismatchError where a shard came, went or changed."""
    if before == now:
        return
    old, new = ({(state[0], state[1]): state[2:] for state in states} for states in (before, now))
    changed = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
    lines = [f"  {key[1]}: {_change(old.get(key), new.get(key))}" for key in changed]
    more = f"\n  and {len(lines) - MOST_NAMED} more" if len(lines) > MOST_NAMED else ""
    raise MismatchError(
        "The dataset changed since it was indexed",
        f"index {path}: files {fingerprint(before)}, now {fingerprint(now)}\n" + "\n".join(lines[:MOST_NAMED]) + more,
        REINDEX,
    )


def _change(before: list[int] | None, now: list[int] | None) -> str:
    """What happened to a shard, from its [size, time]."""
    if before is None or now is None:
        return "new" if before is None else "gone"
    return "written again" if before[0] == now[0] else f"was {before[0]} bytes, is {now[0]}"


def check_bad(run: Run, good: int, skipped: list[Skipped]) -> None:
    """DataError where no sample is left, or more were skipped than `data.max_bad_fraction` allows."""
    limit = run.file.data.max_bad_fraction
    shown = "\n".join(f"  {f'{s.shard}/{s.key}'.rstrip('/')}: {s.reason}" for s in skipped[:MOST_NAMED])
    if good and len(skipped) <= limit * (good + len(skipped)):
        return
    if not good:
        raise DataError(
            "The dataset has no usable sample",
            shown or "its tars are empty",
            "A tar holds KEY.jpg with KEY.txt or KEY.json, or KEY.json with `segments` and its images; "
            "an example: disttrain init DIR --sample-data",
        )
    shards = ", ".join(f"{shard} {count}" for shard, count in Counter(s.shard for s in skipped).most_common(4))
    raise DataError(
        f"{len(skipped)} of {good + len(skipped)} samples cannot be used, more than data.max_bad_fraction "
        f"= {limit} allows",
        f"by shard: {shards}\n{shown}",
        "Repair the shards, or raise data.max_bad_fraction (long samples: data.sequence_length).",
    )

"""Files of a source: its shards, and the files that are not read.

Splits are recognised as in the `datasets` library (its data_files patterns): by keywords in names
of folders or, if no folder has one, of files, between separators.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from disttrain_cli.calls import call
from disttrain_cli.data.modalities.registry import MEDIA
from disttrain_cli.data.sources.declared_splits import declared_splits
from disttrain_cli.data.sources.files import (
    is_file,
    is_folder,
    join,
    list_files,
    open_file,
    shown_url,
    without_query,
)
from disttrain_cli.data.sources.numbering import gaps
from disttrain_cli.data.sources.samples import Shard, printable
from disttrain_cli.data.sources.setting_aside import set_aside
from disttrain_cli.errors import DataError
from disttrain_cli.spec.runfile.data import is_url

FORMS = {
    ".tar": "tar",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".json": "llava",
    ".jsonl": "llava",
}
#: Formats whose files may be anywhere below a folder; those of others are directly in it.
BELOW = ("parquet", "arrow")
CAPTIONS = "metadata.jsonl"  # of an imagefolder: it may be in subfolders, too
PICTURES = (".jpg", ".jpeg", ".png", ".webp")
PACKED = (".gz", ".tgz", ".bz2", ".xz", ".zst", ".zip", ".lz4")
#: Files that Hugging Face and img2dataset write next to the data.
BESIDE = (
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    "state.json",
    "config.json",
)
TRAIN, VALIDATION, TEST = "train", "validation", "test"
KEYWORDS = {
    TRAIN: ("train", "training"),
    VALIDATION: ("validation", "valid", "val", "dev"),
    TEST: ("test", "testing", "eval", "evaluation"),
}
SEPARATOR = "[-._ 0-9]"
SPLITS = {
    split: re.compile(rf"(?:^|{SEPARATOR})(?:{'|'.join(words)})(?:{SEPARATOR}|$)", re.IGNORECASE)
    for split, words in KEYWORDS.items()
}
#: Files that records name or that describe the data; they are not reported as unread.
EXPECTED = {f".{suffix}" for media in MEDIA.values() for suffix in media.suffixes}
EXPECTED |= {*PICTURES, ".gif", ".bmp", ".tif", ".tiff", ".md"}
EXPECTED_NAMES = ("license", "readme", "notice", "_success", "_metadata", "_common_metadata")
#: A shard of a set; a folder may hold several sets.
NAMED_SET = re.compile(r"(?P<folder>.*/)?(?P<set>[^/]+)-\d{5}-of-\d{5}")
DESCRIBES = "another format, which describes the data"
HEAD_BYTES = 64  # of a JSON, which show if it may be a list of records
MOST_NAMED = 3  # files that a message lists


class Listing(NamedTuple):
    """Shards, and the files that are not read, a line for each reason."""

    shards: list[Shard]
    unread: list[str]


#: Creates the error of a folder that can be read in several ways: why, and the next step.
Ambiguous = Callable[[str, str], DataError]
#: Files that are not read, and why.
Unread = list[tuple[list[str], str]]


def list_source(
    path: str, field: str, images: str | None = None, validation: bool = False
) -> Listing:
    """List the shards of a source: the one file, or those of a folder, by name.

    In a folder with a train split, only that split is read. A folder with tars is read as tars; one
    with Parquet files anywhere below as Parquet; with Arrow files anywhere below as a Hugging Face
    dataset; else as conversations or texts (*.json, *.jsonl), or the captions of a Hugging Face
    imagefolder (metadata.jsonl anywhere below). If there is none of these, tars and JSONs in
    folders of splits (train/00000.tar) are read.

    Args:
        field: the run file's field that names the source.
        images: folder of the images that a JSON names, else that of the JSON.
        validation: list the shards of the validation split, too, as `Shard.held_out`.

    Raises:
        DataError: there is nothing at `path`, nothing readable in it, two formats of data, or
            splits without one to train on; or the URL cannot be reached.
    """
    hint = (
        "Correct data.sources in the run file, or write an example with:"
        f" {call('init', 'DIR', sample_data=True)}"
    )
    given = f"given by {printable(field)}"
    form = _form(without_query(path))
    # a web page that lists files counts as a folder
    if (form or not is_url(path)) and is_file(path):
        if form is None:
            raise DataError(
                f"The format of {shown(path)} is unknown",
                f"known: {', '.join(FORMS)}; {given}",
                hint,
            )
        folder, _, name = without_query(path).rpartition("/")
        return Listing([Shard(form, path, name, images or folder if form == "llava" else "")], [])
    if form and not is_folder(path):
        raise DataError(
            f"There is no file at {shown(path)}, or it cannot be reached",
            given,
            "Correct data.sources in the run file, or check the network.",
        )
    files, aside = set_aside(path, sorted(list_files(path)), _form)

    def ambiguous(why: str, next_step: str) -> DataError:
        what = f"The dataset {shown(path)} can be read in several ways"
        return DataError(what, f"{why}; {given}", next_step)

    for link in (name for names, _ in aside for name in names if name.endswith("/")):
        if any(map(_split, PurePosixPath(link).parts)):
            raise ambiguous(
                f"{printable(link)} is a link to a folder, which is not followed, and may be a"
                " split",
                "Use the target folder as the source, or move the files there.",
            )
    declared = _declared(path, files, ambiguous)
    if declared:
        others = [n for n in files if n not in declared and (own := _form(n)) and _counts(n, own)]
        aside.append((others, "not among the files of the splits that README.md declares"))
        files = [name for name in files if name not in others]

    def is_shard(name: str, form: str) -> bool:
        return name in declared if declared else _counts(name, form)

    forms = _forms(files, is_shard)
    if all(_is_mapping(path, name) for name in forms) and (below := _forms(files, _in_split)):
        forms, is_shard = below, _in_split
    if not forms and not is_url(path) and not is_folder(path):
        raise DataError(f"There is no dataset at {shown(path)}", given, hint)
    if not forms and any(name.lower().endswith(PICTURES) for name in files):
        raise DataError(
            f"The dataset {shown(path)} has images without texts",
            given,
            'Add metadata.jsonl to the folder, one line per image: {"file_name": "1.jpg", "text":'
            ' "…"}',
        )
    if not forms:
        known = ", ".join(f"*{suffix}" for suffix in FORMS)
        if any(_is_packed(name) for name in files):
            hint = "Decompress the files: samples are read in any order."
        elif any(map(_form, files)):
            hint = "Name the folder that contains the shards."
        raise DataError(
            (
                f"The dataset {shown(path)} is empty"
                if not files and not aside
                else f"The dataset {shown(path)} contains no shard"
            ),
            f"no {known} in it{''.join(f', but {printable(name)}' for name in files[:3])}"
            + "".join(f"; {_listed(names)}: {why}" for names, why in aside)
            + f"; {given}",
            hint,
        )

    packed = {
        name: form_of
        for name in filter(_is_packed, files)
        if (inner := _unpacked(name)) not in forms
        for form_of in _forms([inner], is_shard).values()
    }
    split_of = declared or _splits([*forms, *packed])
    chosen, notes = _chosen(path, files, forms, packed, split_of, validation, ambiguous)
    if not declared:
        _check_sets([name for name, held_out in chosen.items() if not held_out], ambiguous)
    shards = [
        Shard(
            forms[name],
            file := join(path, name),
            name,
            images or file.rpartition("/")[0] if forms[name] == "llava" else "",
            held_out=held_out,
        )
        for name, held_out in chosen.items()
    ]
    return Listing(shards, [*notes, *_not_read(aside)])


def _chosen(
    path: str,
    files: Sequence[str],
    forms: Mapping[str, str],
    packed: Mapping[str, str],
    split_of: Mapping[str, str | None],
    validation: bool,
    ambiguous: Ambiguous,
) -> tuple[dict[str, bool], list[str]]:
    """Return (shards, with True if they are held out; notes about the other files).

    Args:
        files: all files of the folder.
        forms: formats of those that may be shards.
        packed: formats of those that may be shards once they are unpacked.
    """
    train, held, unread, notes = _by_split([*forms, *packed], split_of, validation, ambiguous)
    chosen = dict[str, bool]()
    for names, held_out in ((train, False), (held, True)):
        own, others = _of_one_form(
            path, files, {n: forms[n] for n in names if n in forms}, ambiguous
        )
        chosen |= dict.fromkeys(own, held_out)
        unread.append((others, DESCRIBES))
    read = {forms[name] for name in chosen}
    for name in (*train, *held):
        if name in packed and (not chosen or packed[name] in read):
            raise ambiguous(
                f"{printable(name)} is compressed and cannot be read",
                "Decompress it, or move it to another folder.",
            )
    named = {*chosen, *(name for names, _ in unread for name in names)}
    rest = [name for name in files if name not in named and not _is_expected(name)]
    kinds = [_kind(name) for name in rest]
    for kind in dict.fromkeys(kinds):
        unread.append(([name for name, own in zip(rest, kinds, strict=True) if own == kind], kind))
    for own in (train, held):
        for gap in gaps([name for name in own if name in chosen]):
            if not gap.certain:
                notes.append(f"missing: {printable(gap.shown)} (a gap in the numbering)")
    return chosen, [*notes, *_not_read(unread)]


def _not_read(unread: Unread) -> list[str]:
    return [f"not read: {_listed(names)} ({why})" for names, why in unread if names]


def _by_split(
    names: Sequence[str], split_of: Mapping[str, str | None], validation: bool, ambiguous: Ambiguous
) -> tuple[list[str], list[str], Unread, list[str]]:
    """Return (files to train on, files held out, unread files, notes about the others), by split.

    Files of the validation split are held out if `validation` is set. A file without a split is
    unread if there is a train split, else it is trained on.
    """
    by_split: dict[str | None, list[str]] = {split: [] for split in (*SPLITS, None)}
    for name in names:
        by_split.setdefault(split_of[name], []).append(name)
    splits = [split for split in by_split if split and by_split[split]]
    if not splits:
        return [*names], [], [], []
    used = TRAIN if TRAIN in splits else None
    if not by_split[used]:
        if len(splits) == 1:
            return [*names], [], [], [f"trained on: the split {splits[0]}, the only one"]
        raise ambiguous(
            f"it contains the splits {' and '.join(splits)}, but none to train on",
            "Name the intended folder or files.",
        )
    held = by_split[VALIDATION] if validation else []
    unread = [
        (own, f"the split {split}" if split else "no split in its name, next to the split train")
        for split, own in by_split.items()
        if split != used and own is not held
    ]
    notes = [f"held out: {_listed(held)} (the split {VALIDATION})"] if held else []
    return by_split[used], held, unread, notes


def _declared(path: str, files: Sequence[str], ambiguous: Ambiguous) -> dict[str, str]:
    """Return the split of each file for which README.md declares one.

    Raises:
        DataError: the declared splits leave open which files to train on, or none of these exists.
    """
    configs = declared_splits(path, files)
    if not configs:
        return {}
    (splits, *others), next_step = configs.values(), "Name the intended folder or files."
    if others:
        raise ambiguous(f"its README.md declares the configs {_listed([*configs])}", next_step)
    to_train = [split for split in splits if _split(split) == TRAIN]
    train = to_train if len(to_train) == 1 else [one for one in to_train if one == TRAIN]
    train = train or ([*splits] if len(splits) == 1 else [])
    if not train or not any(map(_form, splits[train[0]])):
        none = f"no file of {printable(train[0])} is supported" if train else "no split to train on"
        raise ambiguous(
            f"its README.md declares the splits {_listed([*splits])}, and {none}", next_step
        )
    split_of = dict.fromkeys(splits[train[0]], TRAIN)
    for split, names in splits.items():
        for name in names:
            kind = _split(split)
            split_of.setdefault(name, kind if kind and kind != TRAIN else split)
    return split_of


def _check_sets(names: Sequence[str], ambiguous: Ambiguous) -> None:
    """Raise DataError if a folder has several sets of numbered shards.

    `datasets` takes such sets for splits: train_sft-00000-of-00002 and train_gen-00000-of-00001.
    """
    first = dict[str, re.Match[str]]()
    for one in filter(None, map(NAMED_SET.match, names)):
        other = first.setdefault(one["folder"] or "", one)
        if other["set"] != one["set"]:
            raise ambiguous(
                f"it contains several sets of shards, such as {printable(other.string)} and"
                f" {printable(one.string)}",
                "List the intended files as sources, or move each set to a separate folder.",
            )


def _splits(names: Sequence[str]) -> dict[str, str | None]:
    """Return the split of each file: by folders if any folder names one, else by file names."""
    of_folders = {
        name: next(filter(None, map(_split, PurePosixPath(name).parent.parts[::-1])), None)
        for name in names
    }
    if any(of_folders.values()):
        return of_folders
    return {name: _split(PurePosixPath(name).name) for name in names}


def _split(part: str) -> str | None:
    """Return the split that a part of a path names; of several the first."""
    return next((split for split, keyword in SPLITS.items() if keyword.search(part)), None)


def _of_one_form(
    path: str, files: Sequence[str], forms: Mapping[str, str], ambiguous: Ambiguous
) -> tuple[list[str], list[str]]:
    """Return (files of the first format that occurs, files of others that describe the data).

    Raises:
        DataError: files of other formats may be data, too.
    """
    form = next((form for form in FORMS.values() if form in forms.values()), None)
    own = [name for name in forms if forms[name] == form]
    others = [name for name in forms if forms[name] != form]
    for name in others:
        if not _describes(path, files, name, forms[name], own):
            raise ambiguous(
                f"it contains two formats of data, such as {printable(own[0])} and"
                f" {printable(name)}",
                "List the intended folders or files as separate sources, or move the others away.",
            )
    return own, others


def _describes(
    path: str, files: Sequence[str], name: str, form: str, shards: Sequence[str]
) -> bool:
    """Return True if a file of another format than the shards is no data.

    Such are img2dataset's table of each tar, tables below a folder of tars, a JSON that is a
    mapping, and captions of pictures that do not exist.
    """
    file = PurePosixPath(name)
    if form != "llava":
        of_tars = _form(shards[0]) == "tar"
        return of_tars and ("/" in name or str(file.with_suffix(".tar")) in shards)
    if file.name == CAPTIONS:
        return not any(one.lower().endswith(PICTURES) for one in files)
    return _is_mapping(path, name)


def _is_mapping(path: str, name: str) -> bool:
    """Return True if a file is a JSON without records: a mapping, or a list of texts or numbers."""
    if _suffix(name) != ".json":
        return False
    try:
        head = open_file(join(path, name)).read(0, HEAD_BYTES)
    except OSError:
        return False
    head = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    return head[:1] == b"{" or (head[:1] == b"[" and head[1:].lstrip()[:1] not in b"[{")


def _kind(name: str) -> str:
    """Return the reason why a file is not read that has no other reason."""
    if _is_packed(name):
        return "packed"
    if _form(name) and "/" not in name:
        return DESCRIBES
    return "in subfolders" if _form(name) else "no supported format"


def _is_expected(name: str) -> bool:
    if _suffix(name) in EXPECTED:
        return True
    file, form = name.rpartition("/")[2], _form(name)
    return file.lower().startswith(EXPECTED_NAMES) or (form is not None and _is_beside(file, form))


def _is_beside(file: str, form: str) -> bool:
    """Return True if Hugging Face or img2dataset write a file of that name next to the data."""
    if form == "arrow":
        return file.startswith("cache-")  # cached results of `datasets`
    return file in BESIDE or file.endswith("_stats.json")


def _forms(files: Sequence[str], is_shard: Callable[[str, str], bool]) -> dict[str, str]:
    """Return the formats of the files that may be shards."""
    return {name: form for name in files if (form := _form(name)) and is_shard(name, form)}


def _in_split(name: str, form: str) -> bool:
    """Return True if a file is below a split's folder: train/00000.tar."""
    file = PurePosixPath(name)
    return any(map(_split, file.parent.parts)) and not _is_beside(file.name, form)


def _counts(name: str, form: str) -> bool:
    """Return True if a file of a folder may be a shard."""
    file = PurePosixPath(name).name
    return (form in BELOW or file == CAPTIONS or "/" not in name) and not _is_beside(file, form)


def _form(name: str) -> str | None:
    return FORMS.get(_suffix(name))


def _suffix(name: str) -> str:
    """Return the lower-case suffix of a file, fast, as folders may hold millions."""
    file = name.rpartition("/")[2]
    dot = file.rfind(".")
    return file[dot:].lower() if dot > 0 else ""


def _is_packed(name: str) -> bool:
    return name.lower().endswith(PACKED)


def _unpacked(name: str) -> str:
    """Return the name of a packed file after unpacking."""
    file = PurePosixPath(name)
    return str(file.with_suffix(".tar" if file.suffix.lower() == ".tgz" else ""))


def _listed(names: Sequence[str]) -> str:
    """Return the first names, and the number of others."""
    more = len(names) - MOST_NAMED
    first = ", ".join(map(printable, names[:MOST_NAMED]))
    return f"{first} and {more:,} more" if more > 0 else first


def shown(path: str) -> str:
    """Return a path or URL as shown in messages."""
    return shown_url(path) if is_url(path) else printable(path)

"""The one output sink: results on stdout; chatter, progress and errors on stderr.

| flags            | stdout                          | stderr                     |
|------------------|---------------------------------|----------------------------|
| none             | text and tables                 | notes, progress, one hint  |
| `--json`         | one JSON document, nothing else | the same                   |
| `--quiet`        | the path that was written       | errors only                |
| `--json --quiet` | one JSON document, nothing else | errors only                |

Other subpackages never import this: they report through a callback (`spec.progress.Progress`) that
`progress` provides. Rich is imported only where a live bar is drawn, so that `disttrain --help`
starts quickly.
"""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pydantic import BaseModel

    from disttrain_cli.spec.progress import Progress

Row = TypeVar("Row")
PLAIN_LINE_EVERY_S = 5.0  # period of progress lines without a terminal
#: Terminal control characters, changes of writing direction and non-characters, which names from
#: files may contain.
_STEERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
_LINES = re.compile(r"[\t\n]")
NUMERIC = frozenset("0123456789+-–.,%×/ ")
#: Nearest ASCII characters to those of our tables, one for one so that columns stay aligned.
_ASCII = dict(zip("×→–−·÷µ…’≤≥√∞", "x>--*/u.'<>V8", strict=True))
MOST_WORD = 24  # columns are not narrowed below their longest word, up to this length


class OutputError(OSError):
    """Failure to write stdout: a full disk, or a reader that has closed the pipe."""


class Console:
    """Output of a command, by the flags the user gave."""

    def __init__(self, *, json_mode: bool = False, quiet: bool = False) -> None:
        self.json_mode = json_mode
        self.quiet = quiet

    def say(self, text: str = "") -> None:
        """Print text of the result, for people."""
        if not (self.json_mode or self.quiet):
            _write(plain(text))

    def answer(self, headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Print the requested table, for people and other programs, unless `--json` is given."""
        if not self.json_mode:
            _write(format_table(headers, rows, terminal_width()))

    def table(self, title: str, headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Print a table of the result, for people; nothing where there are no rows."""
        if rows:
            self.say(f"\n{title}\n{format_table(headers, rows, terminal_width())}")

    def grid(
        self,
        title: str,
        rows: Iterable[Row],
        columns: Sequence[tuple[str, Callable[[Row], object]]],
    ) -> None:
        """Print a `table` whose columns are headers and what they show of a row."""
        cells = [[cell(row) for _, cell in columns] for row in rows]
        self.table(title, [header for header, _ in columns], cells)

    def result(self, document: BaseModel | dict[str, Any], path: Path | str = "") -> None:
        """Print the result for programs: JSON with `--json`, the bare `path` with `--quiet`."""
        if self.json_mode:
            _write(_encodable(document))
        elif self.quiet and str(path):
            _write(path)

    def line(self, document: dict[str, Any]) -> None:
        """Print one of many results for programs immediately, as a line of JSON."""
        if self.json_mode:
            _write(json.dumps(document))
            sys.stdout.flush()

    def note(self, text: str) -> None:
        """Print one line of chatter."""
        if not self.quiet:
            print(plain(text), file=sys.stderr, flush=True)

    def hint(self, command: str) -> None:
        """Print the command to run next."""
        self.note(f"\nNext: {command}")

    def error(self, what: str, why: str = "", next_step: str = "", exit_code: int = 1) -> None:
        """Print an error's event, reason and next step.

        It goes to stderr, or with `--json` as the document to stdout.
        """
        if self.json_mode:
            fields = {"what": what, "why": why, "next": next_step, "exit_code": exit_code}
            _write(_encodable({"error": fields}))
            return
        print(plain(f"Error: {what}"), file=sys.stderr)
        if why:
            print("\n".join(f"  {plain(line)}" for line in why.splitlines()), file=sys.stderr)
        if next_step:
            print(plain(f"Next: {next_step}"), file=sys.stderr)

    @contextmanager
    def progress(self) -> Iterator[Progress]:
        """Provide a `Progress` callback.

        It draws a live bar on a terminal, prints occasional lines elsewhere, and is silent if
        quiet.
        """
        if self.quiet:
            yield lambda what, done, total: None
        elif sys.stderr.isatty():
            with _live_bar() as report:
                yield report
        else:
            yield _plain_lines(self)


def _write(text: object) -> None:
    try:
        print(text, file=sys.stdout)
    except OSError as error:
        raise OutputError(error.errno, error.strerror) from None


@contextmanager
def _live_bar() -> Iterator[Progress]:
    from rich.console import Console as RichConsole
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[pace]}", markup=False),
    )
    pace = _Pace()
    with Progress(*columns, console=RichConsole(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None, pace="")

        def report(what: str, done: float, total: int) -> None:
            left = pace.said(what, done, total)
            bar.update(task, description=what, completed=done, total=total or None, pace=left)

        yield report


def _plain_lines(console: Console) -> Progress:
    """Print a line when an operation starts, every few seconds while it runs, and at its end."""
    said_s, last_line, pace = 0.0, "", _Pace()

    def report(what: str, done: float, total: int) -> None:
        nonlocal said_s, last_line
        line = f"{what}  {int(done)}/{total}" if total else what
        line += f", {left}" if (left := pace.said(what, done, total)) else ""
        starts_or_ends = done == 0 or 0 < total <= done
        if line != last_line and (starts_or_ends or time.monotonic() - said_s > PLAIN_LINE_EVERY_S):
            said_s, last_line = time.monotonic(), line
            console.note(line)

    return report


class _Pace:
    """Rate and remaining time of an operation."""

    def __init__(self) -> None:
        self._what, self._first, self._since_s = "", 0.0, 0.0

    def said(self, what: str, done: float, total: int) -> str:
        """Return rate and remaining time of the operation `what`; empty while they are unknown."""
        if what != self._what:
            self._what, self._first, self._since_s = what, done, time.monotonic()
        took_s = time.monotonic() - self._since_s
        if took_s < PLAIN_LINE_EVERY_S or not self._first < done < total:
            return ""
        per_s = (done - self._first) / took_s
        rate = f"{per_s:.3g}/s" if per_s >= 1 else f"{60 * per_s:.3g}/min"
        left_s = round((total - done) / per_s)
        minutes, seconds = divmod(left_s, 60)
        hours, minutes = divmod(minutes, 60)
        left = f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"
        return f"{rate}, {left if left_s >= 60 else f'{left_s} s'} left"


def nearest_letters(error: UnicodeError) -> tuple[str, int]:
    """Replace characters that the stream's encoding lacks by the nearest ASCII ones, or "?".

    This is an error handler of codecs.
    """
    assert isinstance(error, UnicodeEncodeError)
    return "".join(
        _ASCII.get(letter, "?") for letter in error.object[error.start : error.end]
    ), error.end


def plain(text: str) -> str:
    """Replace terminal control characters in a text by "?", for names from untrusted files."""
    return _STEERS.sub("?", text)


def to_json(document: BaseModel | dict[str, Any], ascii_only: bool = False) -> str:
    """Return one JSON document; pydantic models may occur anywhere in it.

    Terminal control characters are escaped.
    """
    values = document if isinstance(document, dict) else document.model_dump(mode="json")
    try:
        text = json.dumps(
            values, indent=2, ensure_ascii=ascii_only, default=_plain_value, allow_nan=False
        )
    except ValueError:  # JSON has no NaN: the loss of a diverged run is null
        finite = json.loads(
            json.dumps(values, default=_plain_value), parse_constant=lambda name: None
        )
        text = json.dumps(finite, indent=2, ensure_ascii=ascii_only)
    return _STEERS.sub(lambda match: f"\\u{ord(match.group()):04x}", text)


def _encodable(document: BaseModel | dict[str, Any]) -> str:
    """Return the document in characters that stdout can encode."""
    text = to_json(document)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return to_json(document, ascii_only=True)
    return text


def _plain_value(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if hasattr(value, "item"):  # numpy scalars
        return value.item()
    return float(value) if isinstance(value, Decimal) else str(value)


def terminal_width() -> int | None:
    """Return the columns that a table may take; None if stdout is not a terminal.

    The COLUMNS variable takes precedence over the terminal.
    """
    columns = os.environ.get("COLUMNS", "")
    if columns.isascii() and columns.isdigit() and int(columns) > 0:
        return int(columns)
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None
    except (OSError, ValueError):
        return None


def format_table(
    headers: Sequence[str], rows: Sequence[Sequence[object]], width: int | None = None
) -> str:
    """Format columns as wide as their longest cell, two spaces apart.

    Columns of numbers are right-aligned. Within `width`, text and headers are wrapped, never
    numbers; columns that do not fit follow below, each part with the first column.
    """
    cells = [
        ["" if value is None else _LINES.sub(" ", plain(str(value))) for value in row]
        for row in rows
    ]
    headers = [_LINES.sub(" ", plain(header)) for header in headers]
    columns = [_Column(list(column)) for column in zip(headers, *cells, strict=True)]
    return "\n\n".join(_lines(part, width) for part in _parts(columns, width))


class _Column:
    """A column of a table: its cells, the header first."""

    def __init__(self, cells: list[str]) -> None:
        self.cells = cells
        self.numeric = all(set(cell) <= NUMERIC for cell in cells[1:]) and any(cells[1:])
        self.width = max(map(len, cells))
        words = [word for cell in (cells[:1] if self.numeric else cells) for word in cell.split()]
        numbers = map(len, cells[1:] if self.numeric else ())
        self.least = max(min(max(map(len, words), default=0), MOST_WORD), *numbers, 1)


def _parts(columns: list[_Column], width: int | None) -> list[list[_Column]]:
    """Partition the columns into parts that fit into the width, as far as possible."""
    parts = [columns[:1]]
    for column in columns[1:]:
        if (
            width is not None
            and len(parts[-1]) > 1
            and sum(each.least + 2 for each in parts[-1]) + column.least > width
        ):
            parts.append(columns[:1])
        parts[-1].append(column)
    return parts


def _lines(columns: list[_Column], width: int | None) -> str:
    """Format one part of a table."""
    widths = [column.width for column in columns]
    while width is not None and sum(widths) + 2 * (len(widths) - 1) > width:
        slack, index = max(
            (widths[index] - column.least, index) for index, column in enumerate(columns)
        )
        if slack <= 0:
            break
        widths[index] -= 1
    rows = [
        [
            textwrap.wrap(cell, wide) if len(cell) > wide else [cell]
            for cell, wide in zip(row, widths, strict=True)
        ]
        for row in zip(*(column.cells for column in columns), strict=True)
    ]
    rows.insert(1, [["-" * wide] for wide in widths])
    return "\n".join(
        "  ".join(
            part.rjust(wide) if column.numeric else part.ljust(wide)
            for part, wide, column in zip(line, widths, columns, strict=True)
        ).rstrip()
        for row in rows
        for line in zip_longest(*row, fillvalue="")
    )

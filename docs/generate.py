"""Write the generated part of the documentation, or check that it is up to date.

python docs/generate.py            write docs/api.md, docs/cli.md, docs/runfile.md, docs/traces.md
and docs/schema/
python docs/generate.py --check    exit with 1 and name the files that differ
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import json
import os
import sys
import textwrap
from pathlib import Path
from typing import Any

from disttrain_cli import api as functions
from disttrain_cli.analysis.views import View, documented_views
from disttrain_cli.app import command_names
from disttrain_cli.app import main as disttrain
from disttrain_cli.calls import Reader, call, read_by, spelled
from disttrain_cli.spec.runfile import RunFile
from disttrain_cli.spec.schemas import KINDS, schema_text
from disttrain_cli.spec.trace import OPERATIONS

DOCS = Path(__file__).parent
NOTICE = "<!-- Written by docs/generate.py; edit the code instead. -->"
# Typer and Rich read these when they draw the first page: the same page on every machine.
PLAIN = {
    "TERMINAL_WIDTH": "100",
    "COLUMNS": "100",
    "NO_COLOR": "1",
    "_TYPER_FORCE_DISABLE_TERMINAL": "1",
}
WIDTH = 120  # characters of a line of prose
FORCING = ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS")


def cli() -> str:
    """The CLI reference: `--help` of every command."""
    os.environ |= PLAIN
    for name in FORCING:
        os.environ.pop(name, None)
    names = ["", *command_names()]
    parts = ["# Command line reference", NOTICE]
    for name in names:
        words = [*name.split(), "--help"]
        parts += [f"## `{' '.join(['disttrain', *words[:-1]])}`", f"```text\n{_help(words)}\n```"]
    return _page(parts)


def _help(words: list[str]) -> str:
    page = io.StringIO()
    with contextlib.redirect_stdout(page), contextlib.suppress(SystemExit):
        disttrain(words)
    return "\n".join(line.rstrip() for line in page.getvalue().strip().splitlines())


def api() -> str:
    """The Python API: every function with its command, arguments and result."""
    parts = [
        "# Python API",
        NOTICE,
        (
            "Every command is a function, for notebooks and scripts. Functions read the same run"
            " file, leave the same files in `runs/NAME/` and raise the same errors as the commands,"
            " which call them. [examples/first_run.py](examples/first_run.py) goes from a preset"
            " to a sampled answer, in cells."
        ),
        "```python\n"
        "import disttrain_cli as dt\n\n"
        'costs = dt.profile("disttrain.yaml", device="cpu")\n'
        'best = dt.plan("disttrain.yaml", gpus=4, sensitivity=False)\n'
        'print(best.plan.predicted.expected_s, *best.explanation.sentences, sep="\\n")\n\n'
        'trained = dt.train("disttrain.yaml", steps=100)\n'
        "print(dt.analyze(trained.run_dir).analysis.verdict.headline)\n"
        'table = dt.sql("SELECT * FROM steps", trained.run_dir)  # pyarrow.Table\n'
        "```",
        (
            "A run file is passed as a path, as its folder, or as the result of `open_run`;"
            ' `open_run(path, "train.steps=100")` changes fields as `--set` does. Results are typed'
            " records, the objects that `--json` prints. `sql` returns an Arrow table:"
            " `.to_pandas()`, `.to_pylist()`, or `duckdb.sql` over the variable that holds it."
        ),
        (
            "Nothing is printed. Pass `progress(what, done, total)` to follow long operations,"
            " `note(sentence)` for notes to the user (a warning, where weights come from),"
            " and `on_step(figures)` to `train`. `help(dt.plan)` explains arguments and errors."
        ),
        (
            "All errors derive from `DisttrainError` and have `what`, `why` and `next_step`, which"
            " spell functions and arguments as their reader calls them:"
            " `disttrain_cli.train(resume=True)` in Python, `disttrain train --resume` on a"
            " command line. Fields of results named `command` or `next_command`, and notes, hold"
            " lines for a shell."
        ),
        (
            "`train`, `rehearse` and `data_serve` handle SIGINT and SIGTERM while they run (call"
            " them from the main thread). `train` starts a process per rank on this host; jobs on"
            " several hosts are started with the files of `emit`."
        ),
    ]
    before = read_by(Reader(shell=True))
    rows = ["| function | command | |", "|---|---|---|"]
    details = []
    for name in functions.__all__:
        function = getattr(functions, name)
        if not inspect.isfunction(function):
            continue
        about = inspect.cleandoc(function.__doc__ or "").split("\n\n")[0].replace("\n", " ")
        command = spelled(call(name, **WITH.get(name, {})))
        shown = f"`{command}`" if name not in ALONE else "–"
        rows.append(f"| [`{name}`](#{name}) | {shown} | {about} |")
        details += [f"## `{name}`", f"```python\n{_signature(name, function)}\n```"]
        result = getattr(sys.modules[function.__module__], str(_returned(function)), None)
        if dataclasses.is_dataclass(result):
            fields = ", ".join(f"`{field.name}`" for field in dataclasses.fields(result))
            details.append(f"Fields of `{_returned(function)}`: {fields}.")
    read_by(before)
    return _page([*parts, "\n".join(rows), *details])


#: What makes the command of a function, where its name alone does not.
WITH: dict[str, dict[str, object]] = {
    "calibrate": {"recorded": "RUN"},
    "compare_clusters": {"gpus": "N,M", "devices": "NAME"},
    "data_index_share": {"share": "K/N"},
    "emit": {"kind": "slurm"},
    "export": {"to": "DIR"},
    "holds": {"condition": "EXPR"},
    "sql": {"query": "QUERY"},
    "write_perfetto": {"file": "FILE"},
}
#: Functions that are part of every command.
ALONE = ("checked_plan", "open_run")


def _returned(function: Any) -> Any:
    return inspect.signature(function).return_annotation


def _signature(name: str, function: Any) -> str:
    """A function's head, an argument a line."""
    given = inspect.signature(function)
    lines, named = [], False
    for one in given.parameters.values():
        if one.kind is one.KEYWORD_ONLY and not named and not any("*" in line for line in lines):
            lines.append("*")
        named = one.kind is one.KEYWORD_ONLY
        default = "" if one.default is one.empty else f" = {_default(one.default)}"
        star = "*" if one.kind is one.VAR_POSITIONAL else ""
        lines.append(f"{star}{one.name}: {one.annotation}{default}")
    inner = "".join(f"    {line},\n" for line in lines)
    return (
        f"{name}(\n{inner}) -> {given.return_annotation}"
        if lines
        else f"{name}() -> {given.return_annotation}"
    )


def _default(value: Any) -> str:
    return (
        value.__name__
        if inspect.isfunction(value)
        else repr(str(value) if isinstance(value, Path) else value)
    )


def runfile() -> str:
    """The fields of the run file, one table per section."""
    schema = RunFile.model_json_schema()
    parts = [
        "# The run file",
        NOTICE,
        (
            "`disttrain.yaml` contains all of a user's decisions about a run. Unknown keys are"
            " errors. `disttrain schema` prints the same as a JSON Schema, for editors"
            " ([schema/runfile.schema.json](schema/runfile.schema.json)). `--set KEY=VALUE`"
            " changes a field for one command: `--set train.steps=100`, `--set"
            " data.sources.0.weight=2`. `true` and `no` are"
            " not numbers, nor is `1:30` (90 in YAML)."
        ),
        *_section("Top level", schema, schema["$defs"]),
    ]
    for name, definition in schema["$defs"].items():
        parts += _section(name, definition, schema["$defs"])
    return _page(parts)


def traces() -> str:
    """The views that `disttrain analyze --sql` can ask."""
    parts = [
        "# Traces and `--sql`",
        NOTICE,
        (
            "`disttrain train` writes `runs/NAME/traces/`: one folder of Parquet segments per rank"
            " with a row for every operation, the steps as rank 0 reported them, and `job.json`"
            " with the plan and the profile. A segment is written atomically, so a crash loses at"
            " most the open one. Any Parquet reader reads them. Traces grow with every step, and"
            " all are kept unless [`train.keep_trace_steps`](runfile.md) sets the number of newest"
            " steps to keep: a segment whose last step is older is deleted when the next one of its"
            " folder is written, and `disttrain analyze` and `disttrain watch` report the first"
            " step with traces. The rows of `steps/` and `logs/`, one per step, are never deleted."
        ),
        (
            "`disttrain train --profile-steps A:B` adds torch's profile of those steps,"
            " `traces/kineto/`: a Kineto file per rank in which every operation is annotated."
            " `disttrain analyze` breaks down its time."
        ),
        (
            "`disttrain analyze --sql QUERY` runs one SELECT over the views below. It is read-only,"
            " no other file can be reached, and no extension loaded; an answer of more than"
            " 1,000,000 rows is refused. The view `columns` contains the tables below."
        ),
    ]
    parts += _views(documented_views("own"), "")
    parts += [
        "Operations of a row: " + ", ".join(f"`{operation}`" for operation in OPERATIONS) + ".",
        (
            "On a CPU a row has the time of the host. A GPU runs behind its host, and a row has the"
            " times at which the GPU's stream reached the row's beginning and end, by events that"
            " are read later: a `forward` lasts as long as its kernels with the gaps between them,"
            " a `receive_*` or `wait` as long as the stream waited, a `load` as long as the stream"
            " was idle until data arrived, the copy to the device included (the host may have"
            " waited longer: `data_wait_s` of a step). Rows of a rank do not overlap. A step lasts"
            " until its `step` row ends, which is after its host reported it. Rows of work that the"
            " GPU has not finished when a step's rows are written are written with the next step."
        ),
        (
            "If messages overlap with passes (`overlap` of a plan), `reduce` is the exposed part of"
            " the reduction after the last pass, `step` ends before weights are gathered, and the"
            " first `forward` of a step may include waiting for them. In a rehearsal `step` ends"
            " when the norm is known, and the exposed part of optimizer and gathering is a `wait`"
            " before the first `forward`."
        ),
        (
            "`weights` (deferred weight gradients) has a row per slot and module, as a backward"
            " has. Those remaining after a step's last backward are computed layer by layer over"
            " all of their slots. Each of their rows is as long as the computation for its slot and"
            " module took, and they are listed one after the other in the order of the slots: their"
            " lengths are measured, but not the times of their boundaries."
        ),
        "For Kineto or Chrome JSON of any PyTorch job, the same option queries these views:",
        *_views(documented_views("kineto"), "Kineto: "),
        "For operation-level Parquet:",
        *_views(documented_views("study"), "Operation-level: "),
    ]
    return _page(parts)


def _page(parts: list[str]) -> str:
    """Join the parts of a page; long paragraphs are wrapped, tables, headings and code are not."""
    blocks = [
        [part] if part.startswith(("#", "<", "|", "```")) else map(_wrapped, part.split("\n\n"))
        for part in parts
    ]
    return "\n\n".join(text for block in blocks for text in block) + "\n"


def _wrapped(paragraph: str) -> str:
    if max(map(len, paragraph.splitlines())) <= WIDTH:
        return paragraph
    return textwrap.fill(paragraph, WIDTH, break_long_words=False, break_on_hyphens=False)


def _views(views: dict[str, View], of: str) -> list[str]:
    parts = []
    for name, view in views.items():
        rows = [f"| `{column}` | {meaning} |" for column, meaning in view.columns.items()]
        parts += [
            f"## {of}`{name}`",
            view.about,
            "\n".join(["| column | meaning |", "|---|---|", *rows]),
        ]
    return parts


def _section(name: str, definition: dict[str, Any], definitions: dict[str, Any]) -> list[str]:
    rows = ["| field | type | default | meaning |", "|---|---|---|---|"]
    for field, about in definition["properties"].items():
        default = "required" if field in definition.get("required", []) else "its defaults"
        if "default" in about:
            default = f"`{json.dumps(about['default'])}`"
        rows.append(f"| `{field}` | {_type(about)} | {default} | {about.get('description', '')} |")
    return [
        f"## {name}",
        *([definition["description"]] if "description" in definition else []),
        "\n".join(rows),
    ]


def _type(about: dict[str, Any]) -> str:
    """A JSON Schema type in a few words."""
    if "$ref" in about:
        name = about["$ref"].rsplit("/", 1)[-1]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in about:
        return " or ".join(_type(option) for option in about["anyOf"])
    if "enum" in about or "const" in about:
        return ", ".join(f"`{value}`" for value in about.get("enum", [about.get("const")]))
    if about.get("type") == "array":
        inner = about.get("items") or (about.get("prefixItems") or [{}])[0]
        return f"list of {_type(inner)}"
    if about.get("type") == "object" and isinstance(about.get("additionalProperties"), dict):
        return f"mapping of name to {_type(about['additionalProperties'])}"
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = [f"{sign} {about[key]}" for key, sign in signs.items() if key in about]
    return " ".join([about.get("type", "any"), *limits])


def pages() -> dict[Path, str]:
    """Every generated file with its content."""
    found = {
        DOCS / "api.md": api(),
        DOCS / "cli.md": cli(),
        DOCS / "runfile.md": runfile(),
        DOCS / "traces.md": traces(),
    }
    for name in KINDS:
        found[DOCS / "schema" / f"{name}.schema.json"] = schema_text(name)
    return found


def main() -> int:
    found = pages()
    stale = [
        path
        for path, text in found.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(
                f"{path.relative_to(DOCS.parent)} is out of date; write it with: make docs",
                file=sys.stderr,
            )
        return 1 if stale else 0
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(found[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

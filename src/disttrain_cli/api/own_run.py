"""Run file for a user's own model and data, with sizes and steps derived from them."""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

import yaml

from disttrain_cli.calls import argument, call, spelled
from disttrain_cli.errors import DataError, SpecError, UsageError
from disttrain_cli.spec.progress import Progress

if TYPE_CHECKING:
    from disttrain_cli.data.index.sample_index import Index
    from disttrain_cli.spec.runfile import Run

TEXT = Template("""\
# Written by `disttrain init` from $about.
# Every field: disttrain schema, docs/runfile.md; a wrong or unknown one is reported by its path.
version: 1
name: $name  # artefacts go to runs/$name/ beside this file

model:
$model

data:
  sources:
    - {path: $data}
$tokenizer$video\
  sequence_length: $length  # tokens of one packed sequence; the longest sample has $longest
  held_out: $held_out  # share of the samples that are never trained on

cluster:
  nodes: 1
  gpus_per_node: $devices  # on a CPU, processes that share its cores; the planner may use fewer
  device: auto  # CUDA where there is one, else the CPU

train:
  global_batch_size: $batch  # packed sequences per optimizer step
  epochs: $epochs  # passes over the data: about $steps steps
  precision: $precision  # bf16 on GPUs that have it
  zero_stage: 1  # optimizer states are split over the replicas of a unit
  optimizer: {lr: $rate, warmup_steps: $warmup, schedule: cosine}
  gradient_clipping: 1.0
  seed: 0

samples:
  answers: $answers  # $about_answers
""")
ANSWERS = "held-out conversations whose last answer the model writes when training ends"
EPOCHS, BATCH = 3, 8
UPDATES = 10  # optimizer steps per pass over the data, where a smaller batch allows as many
SHORTEST, LONGEST = 256, 32_768  # limits of the chosen sequence length, in tokens
RATE, RATE_WIDTH = 2e-5, 4096  # usual for fine-tuning at 7B; narrower models learn at larger rates


@dataclass(frozen=True)
class OwnRun:
    """The text of a run file, and counts of the data."""

    text: str
    samples: int
    skipped: int
    notes: list[str]


def own_run(folder: Path, model: str, data: str, devices: int, progress: Progress) -> OwnRun:
    """Return the text of a run file in `folder` that trains a model on data.

    Args:
        model: folder of a published vision-language model or an LLM, or its name on Hugging Face.
        data: file or folder of samples, or its URL.
        devices: GPUs of this machine; 0 = none.

    Raises:
        UsageError: one of them is empty.
        SpecError: the model is of no known family, its weights cannot be read, or it has no module
            for something in the data.
        DataError: the data cannot be read, or hold too many samples that cannot be used.
    """
    from disttrain_cli.models.weights import starting_weights
    from disttrain_cli.spec.files import parse_json
    from disttrain_cli.spec.hub import is_name, snapshot
    from disttrain_cli.spec.index import UNREAD, VIDEOS

    for name, given in (("model", model), ("data", data)):
        if not given:
            raise UsageError(f"{argument(name)} is empty", "", "Give a path or a name.")
    named = is_name(model, Path.cwd())
    path = snapshot(model, argument("model")).path if named else Path(model).resolve()
    config = parse_json(
        path / "config.json", "model configuration", f"Correct {argument('model')}."
    )
    fields = _model_fields(path, config)
    url = "://" in data
    if not (url or Path(data).exists()):
        raise DataError(f"There is no data at {data}", next_step=f"Correct {argument('data')}.")
    # a temporary folder, so that the run's folder stays empty until its file is written
    with tempfile.TemporaryDirectory() as scratch:
        given = model if named else str(path)
        values = {
            "name": _quoted(_name(folder)),
            "about": f"{_quoted(model)} and {_quoted(data)}",
            "data": _quoted(data) if url else _quoted(str(Path(data).resolve())),
            "devices": devices or min(2, os.cpu_count() or 1),
            "precision": "bf16" if devices else "fp32",
            "video": "",
        }
        run, index = _index(Path(scratch), fields, given, values, progress)
        if VIDEOS in index.unread and run.published and run.published.family.video:
            values["video"] = "  video: {}  # read with the settings of the model's processor\n"
            run, index = _index(Path(scratch), fields, given, values, progress)
        starting_weights(run)
        for what, count in index.unread.items():
            if what in (*UNREAD.values(), VIDEOS):
                raise SpecError(
                    f"{model} has no module for {count:,} {what} in {data}",
                    f"its modules: {', '.join(run.file.model.order)}",
                    "Name a model that has one, or data without them; or write the run file by hand"
                    " (docs/runfile.md), which then leaves them out.",
                )
        chosen = _sizes(run, index, devices)
    if not url:
        values["data"] = _quoted(_beside(Path(data), folder))
    given = model if named else _beside(path, folder)
    text = TEXT.substitute(values | chosen | _filled(fields, given))
    lost = spelled(
        f"{len(index.skipped):,} samples cannot be used: {call('data_check')} lists them"
    )
    return OwnRun(text, len(index), len(index.skipped), [lost] if index.skipped else [])


def _model_fields(path: Path, config: object) -> Template:
    """Return the section `model` for a published family or a single LLM; SpecError for others."""
    from disttrain_cli.models.architectures import architectures
    from disttrain_cli.spec.families.folder import family_of
    from disttrain_cli.spec.families.library import library_classes
    from disttrain_cli.spec.families.table import FAMILIES
    from disttrain_cli.spec.suggestions import closest

    kind = str(config.get("model_type")) if isinstance(config, dict) else ""
    if isinstance(config, dict) and family_of(config) is not None:
        return Template(
            "  folder: $folder\n"
            "  # trained: [projectors, llm]  # to leave the vision tower as it is"
        )
    llms = [name for name, one in architectures().items() if one.kind == "llm"]
    if kind in llms:
        return Template("  modules:\n    llm: {kind: llm, folder: $folder}")
    raise SpecError(
        f"{path} is not of a family that can be trained as a whole: model_type {kind!r}",
        f"known: {', '.join(FAMILIES)}, and {len(llms) + len(library_classes())} families of the"
        f" installed transformers{closest(kind, [*llms, *FAMILIES, *library_classes()])}",
        f"Name one that {call('models')} lists, or put modules together by hand:"
        " docs/howto/own-vlm.md",
    )


def _filled(fields: Template, folder: str) -> dict[str, str]:
    """Return the template values that name the model's folder."""
    alone = "modules:" in fields.template  # a single LLM, whose tokenizer must be named
    return {
        "model": fields.substitute(folder=_quoted(folder)),
        "tokenizer": f"  tokenizer: {_quoted(folder)}\n" if alone else "",
    }


def _index(
    scratch: Path, fields: Template, folder: str, values: dict[str, object], progress: Progress
) -> tuple[Run, Index]:
    """Index all samples, with sequences as long as the model allows."""
    from disttrain_cli.data.indexing.building import build_index
    from disttrain_cli.models.architectures import read_configs
    from disttrain_cli.models.graph import describe
    from disttrain_cli.spec.runfile import read_run

    guess = {
        "length": SHORTEST, "longest": 0, "held_out": 0.0, "batch": 1, "steps": 1, "epochs": 1,
        "rate": RATE, "warmup": 0, "answers": 0, "about_answers": ANSWERS,
    }  # fmt: skip
    file = scratch / "disttrain.yaml"
    file.write_text(TEXT.substitute(guess | values | _filled(fields, folder)), encoding="utf-8")
    (llm,) = (one for one in read_configs(read_run(file)).values() if one.kind == "llm")
    most = min(LONGEST, int(getattr(llm.config, "max_position_embeddings", LONGEST)))
    run = read_run(file, f"data.sequence_length={max(16, most)}")
    return run, build_index(run, describe(run), progress)


def _sizes(run: Run, index: Index, devices: int) -> dict[str, object]:
    """Choose sequence length, batch size and learning rate for these samples."""
    from disttrain_cli.models.architectures import read_configs

    lengths = index.lengths
    most, longest = run.file.data.sequence_length, int(lengths.max())
    length = min(most, max(SHORTEST, 1 << (longest - 1).bit_length()))
    asks = bool((index.own_texts & ~index.trained).any())  # else there are no questions
    held_out = next((share for share in (0.05, 0.1) if share * len(index) >= 5), 0.0)
    sequences = max(1, round(float(lengths.sum()) * (1 - held_out) / length))
    batch = max(devices, min(BATCH, 1 << (sequences // UPDATES).bit_length() >> 1), 1)
    steps = max(1, -(-EPOCHS * sequences // batch))
    (llm,) = (one for one in read_configs(run).values() if one.kind == "llm")
    rate = RATE * max(1.0, RATE_WIDTH / int(getattr(llm.config, "hidden_size", RATE_WIDTH)))
    return {
        "length": length,
        "longest": f"{longest:,}",
        "held_out": held_out,
        "batch": batch,
        "steps": f"{steps:,}",
        "epochs": EPOCHS,
        "rate": f"{rate:.0e}".replace("e", ".0e", 1),
        "warmup": steps // 20,
        "about_answers": ANSWERS,
        "answers": 20 if held_out and asks else 0,
    }


def _name(folder: Path) -> str:
    """Return a run's name, from its folder's."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).strip("-._")[:100] or "run"


def _beside(path: Path, folder: Path) -> str:
    """Return a path as a run file in `folder` names it.

    It is relative where both lie in the working folder.
    """
    here = Path.cwd()
    inside = path.resolve().is_relative_to(here) and folder.resolve().is_relative_to(here)
    return os.path.relpath(path.resolve(), folder.resolve()) if inside else str(path.resolve())


def _quoted(text: str) -> str:
    """Return a text as a one-line YAML scalar that is valid inside braces, too."""
    if re.fullmatch(r"[A-Za-z0-9_./@-]+", text) and yaml.safe_load(f"[{text}]") == [text]:
        return text
    return yaml.safe_dump(text, default_style='"', allow_unicode=True, width=1 << 20).strip()

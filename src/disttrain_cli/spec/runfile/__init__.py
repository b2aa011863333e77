"""The run file `disttrain.yaml`: all user settings of a run.

Every field has one sentence and a unit.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PrivateAttr, model_validator

from disttrain_cli.calls import call
from disttrain_cli.errors import SpecError
from disttrain_cli.spec import hub
from disttrain_cli.spec.families.folder import PublishedFolder, read_folder
from disttrain_cli.spec.files import Strict, fingerprint, parse_yaml, validate
from disttrain_cli.spec.forms import Form
from disttrain_cli.spec.progress import Progress, silent
from disttrain_cli.spec.rundir import RunDir
from disttrain_cli.spec.runfile.cluster import ClusterSpec
from disttrain_cli.spec.runfile.data import DataSpec
from disttrain_cli.spec.runfile.model import MONOLITH, PROJECTORS, ModelSpec, unit_name
from disttrain_cli.spec.runfile.preprocess import PreprocessSpec
from disttrain_cli.spec.runfile.published import fetched, with_folder
from disttrain_cli.spec.runfile.rehearse import RehearseSpec
from disttrain_cli.spec.runfile.samples import SampleSpec
from disttrain_cli.spec.runfile.train import TrainSpec
from disttrain_cli.spec.settings import with_settings


class RunFile(Strict):
    """The complete run file."""

    version: Literal[1] = Field(1, description="Version of this format.")
    name: Annotated[
        str, Form(r"^[A-Za-z0-9][A-Za-z0-9._-]*$", "letters, digits, . _ and -, not a sign first")
    ] = Field(
        max_length=100,
        description="Name of the run's folder under runs/, of at most 100 characters.",
    )
    model: ModelSpec = Field(description="Modules, their connections, and which are trained.")
    data: DataSpec = Field(description="Samples, and their packing into sequences.")
    cluster: ClusterSpec = Field(
        default_factory=ClusterSpec, description="Machines, links, and the launch of ranks."
    )
    train: TrainSpec = Field(description="Steps, batch, optimizer, checkpoints, evaluation.")
    preprocess: PreprocessSpec = Field(
        default_factory=PreprocessSpec, description="Processes that prepare the ranks' inputs."
    )
    samples: SampleSpec = Field(
        default_factory=SampleSpec,
        description="Images and texts that the model generates when training ends.",
    )
    rehearse: RehearseSpec = Field(
        default_factory=RehearseSpec, description="Emulated devices: `disttrain train --rehearse`."
    )

    @model_validator(mode="after")
    def _known_optimizer_modules(self) -> RunFile:
        allowed = [*self.model.modules, PROJECTORS]
        unknown = [name for name in self.train.optimizer.modules if name not in allowed]
        if unknown:
            raise ValueError(
                f"train.optimizer.modules: no such module: {', '.join(unknown)}; allowed:"
                f" {', '.join(allowed)}"
            )
        return self

    @model_validator(mode="after")
    def _known_units(self) -> RunFile:
        names = list(self.model.modules)
        groups = itertools.combinations(range(len(names) + 1), 2)
        allowed = dict.fromkeys(
            [*names, *(unit_name(names[first:stop], len(names)) for first, stop in groups)]
        )
        unknown = [
            fault.unit
            for fault in self.rehearse.faults
            if fault.unit is not None and fault.unit not in allowed
        ]
        if unknown:
            raise ValueError(
                f"rehearse.faults: no plan has this unit: {', '.join(unknown)}; units are named"
                f" after their modules ({', '.join(names)}), several joined by +, and {MONOLITH}"
                " holds every module"
            )
        return self

    @model_validator(mode="after")
    def _replans_whole_gpus(self) -> RunFile:
        if self.cluster.ranks_per_gpu > 1 and self.train.on_straggler == "replan":
            raise ValueError(
                "train.on_straggler: replan with cluster.ranks_per_gpu; allowed: without, as a"
                " GPU that ranks share cannot be left out"
            )
        return self

    @model_validator(mode="after")
    def _known_nodes(self) -> RunFile:
        for what, nodes in (
            ("faults", [fault.node for fault in self.rehearse.faults]),
            ("lost", [lost.node for lost in self.rehearse.lost]),
        ):
            for number, node in enumerate(nodes):
                if node is not None and node >= self.cluster.nodes:
                    raise ValueError(
                        f"rehearse.{what}[{number}].node: the cluster has no node {node}; its"
                        f" {self.cluster.nodes} (cluster.nodes) are numbered from 0"
                    )
        return self

    @model_validator(mode="after")
    def _averaged_and_evaluated(self) -> RunFile:
        unknown = (
            [name for name in self.train.ema.modules if name not in self.model.modules]
            if self.train.ema
            else []
        )
        if unknown:
            raise ValueError(
                f"train.ema.modules: no such module: {', '.join(unknown)}; allowed: "
                f"{', '.join(self.model.modules)}"
            )
        if self.train.asks_evaluation and self.data.distribution is not None:
            raise ValueError(
                "train.evaluation needs data.sources: a distribution has no samples to evaluate on"
            )
        if self.train.epochs is not None and self.data.curriculum:
            raise ValueError(
                "train.epochs cannot be combined with data.curriculum, whose phases begin at"
                " steps: an epoch would differ from phase to phase; set train.steps"
            )
        return self

    #: Sizes in bytes of the initial weight files, by module and file; set when the file is read.
    _weights: dict[str, dict[str, int]] = PrivateAttr(default_factory=dict)
    #: Folders of the models named by their names on Hugging Face; set at the same time.
    _named: dict[str, Path] = PrivateAttr(default_factory=dict)

    def check_owners(self, owners: Collection[str]) -> None:
        """Reject names under which nothing is trained.

        Args:
            owners: names under which the model has weights that can be trained: modules, and
                "projectors".

        Raises:
            SpecError: another name is in `model.trained` or `train.optimizer.modules`.
        """
        there = [name for name in (*self.model.order, PROJECTORS) if name in owners]
        for field, names in (
            ("model.trained", self.model.trained or ()),
            ("train.optimizer.modules", self.train.optimizer.modules),
        ):
            for name in names:
                if name not in owners:
                    raise SpecError(
                        f"{field}: {name} has no weights that can be trained in this model",
                        f"names that have some: {', '.join(there)}",
                        f"Remove {name} from {field}.",
                    )

    def model_fingerprint(self) -> str:
        """Return a hash of the settings that checkpoints and profiles of the model depend on.

        It includes the initial weights.
        """
        return fingerprint(
            {
                "modules": {n: m.model_dump(mode="json") for n, m in self.model.modules.items()},
                **({"weights": self._weights} if self._weights else {}),
                **({"folder": self.model.folder} if self.model.folder else {}),
                "projector_hidden": self.model.projector_hidden,
                "sequence_length": self.data.sequence_length,
                "max_image_pixels": self.data.max_image_pixels,
                "precision": self.train.precision,
            }
        )

    def cluster_fingerprint(self) -> str:
        """Return a hash of the machines that a plan depends on, without launch settings."""
        return fingerprint(self.cluster.figures())


class Run(Strict):
    """Run file with the path from which it was read."""

    path: Path
    file: RunFile
    settings: tuple[str, ...] = ()  # arguments of `read_run`

    @property
    def source(self) -> tuple[str, ...]:
        """Arguments of `read_run` in another process."""
        return str(self.path.resolve()), *self.settings

    @property
    def folder(self) -> Path:
        """Folder of the run file; relative paths in it start here."""
        return self.path.resolve().parent

    @property
    def dir(self) -> RunDir:
        """The run's own folder."""
        return RunDir(self.folder / "runs" / self.file.name)

    @property
    def published(self) -> PublishedFolder | None:
        """Whole published model that this one is made from, if any."""
        folder = self.file.model.folder
        return None if folder is None else read_folder(self.resolve(folder))

    def resolve(self, path: str) -> Path:
        """Return a path of the run file as an absolute one."""
        return self.file._named.get(path) or (self.folder / path).resolve()

    @property
    def revisions(self) -> dict[str, str]:
        """Commits of the models named by their names on Hugging Face."""
        found = {given: hub.snapshot_of(path) for given, path in self.file._named.items()}
        return {given: one.commit for given, one in found.items() if one is not None}

    def fetch_weights(self, progress: Progress = silent) -> None:
        """Download weights of models named by Hugging Face names to this host; raise SpecError."""
        for spec in self.file.model.modules.values():
            if spec.folder is not None and spec.pretrained:
                hub.fetch_weights(self.resolve(spec.folder), progress)


def read_run(path: Path | str, *settings: str) -> Run:
    """Read and check a run file.

    Args:
        settings: KEY=VALUE each (`spec.settings`), as if the file were edited; of `train.steps` and
            `train.epochs` the one that is set replaces the other.

    Raises:
        SpecError: it is missing, not YAML, or has wrong fields (each named by its path); its
            `model.folder` holds no model of a known family.
        UsageError: a setting is wrong.
    """
    path = Path(path)
    value = parse_yaml(
        path, "run file", f"Write one with: {call('init', 'DIR', preset='tiny', sample_data=True)}"
    )
    value, changed = with_settings(value, settings)
    for one, other in (("steps", "epochs"), ("epochs", "steps")):
        is_set = ("train", one) in changed and value["train"][one] is not None
        if is_set and ("train", other) not in changed:
            value["train"].pop(other, None)
    named = fetched(value, path.resolve().parent)
    value = with_folder(value, path.resolve().parent, named)
    file = validate(RunFile, value, path, "run file", changed=changed)
    run = Run(path=path, file=file, settings=settings)
    run.file._named.update(named)
    run.file._weights.update(_weight_files(run))
    if run.file.train.epochs is not None:
        with suppress(OSError, ValueError, LookupError, TypeError):  # not profiled, or unusable
            profile = json.loads(run.dir.profile.read_bytes())
            run.file.train.count_epochs(int(profile["data"]["sequences"]))
    return run


def _weight_files(run: Run) -> dict[str, dict[str, int]]:
    """Return names and sizes of the initial weight files of modules."""
    weights = {}
    for name, spec in run.file.model.modules.items():
        folders = [
            run.resolve(given)
            for given in (spec.folder, spec.vae_folder, spec.lora and spec.lora.folder)
            if given and spec.pretrained
        ]
        files = {name: size for folder in folders for name, size in _sizes(folder)}
        if files:
            weights[name] = files
    return weights


def _sizes(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield names and sizes of a folder's weight files; for a Hugging Face name only its commit."""
    if (found := hub.snapshot_of(folder)) is not None:
        yield f"{found.name}@{found.commit}", 0
        return
    for path in sorted(folder.glob("*.safetensors")):
        yield f"{folder.name}/{path.name}", path.stat().st_size

"""Checks of the files that an emitted job references: they exist, and the nodes see them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from disttrain_cli.calls import argument
from disttrain_cli.errors import SpecError
from disttrain_cli.spec import hub
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.runfile.data import is_url

#: Folders that hosts usually do not share.
HOSTS_OWN = ("/tmp", "/var/tmp", "/dev/shm", "/run")


def named_files(run: Run) -> dict[str, Path]:
    """Return data, models and tokenizer on this host, by the run-file fields that name them."""
    model = run.file.model
    given: dict[str, str | None] = {}
    for number, source in enumerate(run.file.data.sources):
        given[f"data.sources[{number}].path"] = source.path
        given[f"data.sources[{number}].images"] = source.images
    hosted: dict[str, str | None] = {"model.folder": model.folder, "model.adapter": model.adapter}
    for name, spec in model.modules.items():
        at = f"model.modules.{name}"
        hosted |= {f"{at}.folder": spec.folder, f"{at}.vae_folder": spec.vae_folder}
        hosted[f"{at}.lora.folder"] = spec.lora.folder if spec.lora else None
    if run.file.data.tokenizer != "bytes":
        hosted["data.tokenizer"] = run.file.data.tokenizer
    # modules of a published folder repeat its path, which is listed once
    for field, path in hosted.items():
        if path and path not in given.values() and not hub.is_name(path, run.folder):
            given[field] = path
    return {field: run.resolve(path) for field, path in given.items() if path and not is_url(path)}


def protecting_files(run: Run, serving: bool) -> dict[str, Path]:
    """Return the TLS files and token that ranks and this job's preprocessing nodes read.

    Paths that contain a node's name are left out.
    """
    spec = run.file.preprocess
    if not (serving or spec.addresses):
        return {}
    given = {"tls_ca": spec.tls_ca, "token_file": spec.token_file}
    if serving:
        given |= {"tls_cert": spec.tls_cert, "tls_key": spec.tls_key}
    return {
        f"preprocess.{name}": run.resolve(path)
        for name, path in given.items()
        if path and "{host}" not in path
    }


def check_there(files: Mapping[str, Path]) -> None:
    """Raise SpecError if a field names a file or folder that does not exist."""
    for field, path in files.items():
        if not os.path.exists(path):  # False, too, where a folder denies access
            home = "~ stands for no folder here. " if "~" in path.parts else ""
            raise SpecError(
                f"{field}: there is nothing at {path}",
                "the job's nodes read it under this name",
                f"{home}Name what is there, or mount it here as the nodes do.",
            )


def unshared(files: Mapping[str, Path]) -> list[str]:
    """Return a warning about files that other hosts probably lack, if there are any."""
    own = [
        f"{field} ({path})"
        for field, path in {"the environment of Python": Path(sys.prefix), **files}.items()
        if any(path.is_relative_to(folder) for folder in HOSTS_OWN)
    ]
    if not own:
        return []
    return [
        f"Note: every host usually has its own {', '.join(HOSTS_OWN)}, where other nodes would"
        f" not find {', '.join(own)}. Put the run on a file system that all nodes share."
    ]


def check_mounted(run: Run, mount: str, files: Sequence[Path], field: str) -> None:
    """Raise SpecError if a file of the run is outside the volume that containers mount."""
    outside = [
        str(path.resolve())
        for path in (run.path, run.dir.root, *files, *named_files(run).values())
        if not path.resolve().is_relative_to(mount)
    ]
    if outside:
        raise SpecError(
            f"Containers would not find {outside[0]}",
            f"{field}: {mount} is all that they mount",
            "Mount the volume here under the path that it has there, put the run file, runs/, the"
            f" plan, {argument('out')}, data and models on it, and emit from there.",
        )


def downloads(run: Run, pod_patch: str = "") -> list[str]:
    """Return a note on models by name that containers have no cache for, if there are any.

    Args:
        pod_patch: additions to pods, which may set such a cache.
    """
    if not run.revisions or "HF_HOME" in pod_patch or "HF_HUB_CACHE" in pod_patch:
        return []
    return [
        f"Note: containers have no cache of Hugging Face, so each downloads"
        f" {', '.join(run.revisions)}. Name folders on the volume, or set HF_HOME to one there"
        " (with Kubernetes as env in cluster.kubernetes.pod_patch)."
    ]

"""Properties that a worker and a rank must share to prepare the same bytes.

They are compared before any request.
"""

from __future__ import annotations

from importlib import metadata

from disttrain_cli import __version__
from disttrain_cli.calls import call
from disttrain_cli.data.index.sample_index import Index
from disttrain_cli.data.latents import described
from disttrain_cli.errors import MismatchError
from disttrain_cli.spec.files import fingerprint
from disttrain_cli.spec.plan import Layout
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.runfile import Run

PROTOCOL = 3
IDENTITY_ACTION = "identity"  # requests the worker's identity
DECODERS = ("opencv-python-headless", "simplejpeg")

#: Versions and fingerprints by name.
Identity = dict[str, str]


def identity_of(run: Run, layout: Layout, index: Index, profile: Profile | None) -> Identity:
    """Return everything that the bytes of a slot depend on, besides the request.

    Raises:
        DataError, MismatchError: latents are not prepared, or not for this run
            (`data.latents.described`).
    """
    train, latents = run.file.train, described(run, index)
    return {
        "program": f"{__version__}, protocol {PROTOCOL}",
        "decoders": ", ".join(f"{name} {_version(name)}" for name in DECODERS),
        "data": index.fingerprint,
        "model inputs": index.inputs.fingerprint(),
        "plan": fingerprint(layout),
        "profile": fingerprint(profile),
        "cluster": run.file.cluster_fingerprint(),  # the ordering depends on its memory and nodes
        "ordering": f"{train.ordering}, seed {train.seed}",
        "latents": fingerprint({name: one.model_dump() for name, one in latents.items()}),
        "train.steps": str(train.total_steps),  # a worker answers no later steps
    }


def check_same(address: str, theirs: Identity, ours: Identity) -> None:
    """Raise MismatchError if a worker would prepare other bytes; it names both sides' values."""
    names = [name for name in sorted({*theirs, *ours}) if theirs.get(name) != ours.get(name)]
    if names:
        lines = [
            f"{name}: {theirs.get(name, 'none')} at the worker, {ours.get(name, 'none')} here"
            for name in names
        ]
        raise MismatchError(
            f"The preprocessing worker {address} does not belong to this run",
            "\n".join(lines),
            f"Restart it with this run's files, program and data: {call('data_serve')}",
        )


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "none"

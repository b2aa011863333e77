"""`disttrain data`: index, check, latents and order of the data, and preprocessing workers."""

from __future__ import annotations

import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from disttrain_cli.api import (
    data_check,
    data_index,
    data_index_share,
    data_latents,
    data_order,
    data_serve,
    open_run,
)
from disttrain_cli.commands.common import (
    DEFAULT_RUN_FILE,
    JsonFlag,
    QuietFlag,
    RunFileArgument,
    SetOption,
    next_command,
)
from disttrain_cli.console import Console
from disttrain_cli.errors import MismatchError, SpecError, UsageError

if TYPE_CHECKING:
    from disttrain_cli.data.sources import Skipped
    from disttrain_cli.spec.inputs import ModelInputs
    from disttrain_cli.spec.runfile import Run

SERVE_EPILOG = """Examples:

$ disttrain data serve
$ disttrain data serve demo/disttrain.yaml --processes 4
$ disttrain data serve --host 0.0.0.0 --processes 32 --tls-cert node.pem --tls-key node.key
$ disttrain data serve --json --quiet > workers.json

Needs the run file, its profile, plan, index and data, but no GPU. The process serves until SIGTERM
or Ctrl-C, and restarts workers that end. On addresses other than loopback it needs a certificate
and preprocess.token_file in the run file. With --json one document is printed as soon as all
workers serve.
"""

INDEX_EPILOG = """Examples:

$ disttrain data index
$ disttrain data index --share 0/4
$ srun sh -c 'disttrain data index --share $SLURM_PROCID/$SLURM_NTASKS'

Builds the sample index, or reads new shards into it, as disttrain profile does, on all cores of
this machine. With --share K/N, for K from 0 to N - 1 on N hosts at once that see the run's folder,
each host reads its share of the shards; disttrain profile, or this command without --share, then
joins them and reads the remaining shards. After an interruption all of these commands resume.
"""

CHECK_EPILOG = """Examples:

$ disttrain data check
$ disttrain data check demo/disttrain.yaml --json --quiet > skipped.json

Indexes the data as disttrain profile does, then decodes every image and clip that was not decoded
by an earlier check, on all cores of this machine. Samples that cannot be used are listed with their
reasons and left out of the index; above data.max_bad_fraction the index is not changed, and the
exit code is 1.
"""

LATENTS_EPILOG = """Examples:

$ disttrain data latents
$ disttrain data latents demo/disttrain.yaml --json --quiet > latents.json

For generators with cached_latents in the run file: encodes every image to generate with the
generator's VAE, on the GPU if there is one, else on all cores, and stores mean and log-variance in
the run's folder. An interrupted call is resumed; new shards are added. Above data.max_bad_fraction
it ends with exit code 1.
"""

ORDER_EPILOG = """Examples:

$ disttrain data order
$ disttrain data order demo/disttrain.yaml --epochs 3

Training computes the order of an epoch in the first process that needs it, while the others wait.
This command computes it ahead of time: for the epoch in which training starts or resumes, and for
those after it, or of the next phase of data.curriculum if it begins earlier. Existing orders are
not computed again.
"""

app = typer.Typer()


@app.callback(invoke_without_command=True)
def root(context: typer.Context) -> None:
    """Prepare the data of a run on CPU machines."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command("serve", epilog=SERVE_EPILOG)
def serve(
    run_file: RunFileArgument = DEFAULT_RUN_FILE,
    plan: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plan to train, instead of the run's.")
    ] = None,
    host: Annotated[str, typer.Option(metavar="HOST", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(
            min=0,
            max=65535,
            metavar="PORT",
            help="Port of the first worker, followed by the next ones; 0: any free ports.",
        ),
    ] = 8815,
    processes: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="Worker processes, each with preprocess.workers decoding threads.",
        ),
    ] = 1,
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Certificate (PEM) of this host.")
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Private key of the certificate (PEM).")
    ] = None,
    settings: SetOption = None,
    json_mode: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Serve prepared inputs to the ranks of a run, over Arrow Flight."""
    console = Console(json_mode=json_mode, quiet=quiet)
    opened = open_run(run_file, *settings or ())

    def ready(addresses: list[str], pids: list[int]) -> None:
        console.result(
            {"run": opened.file.name, "addresses": addresses, "processes": pids},
            "\n".join(addresses),
        )
        console.say("Serving. Put into the run file of the training:\n\npreprocess:\n  addresses:")
        for address in addresses:
            console.say(f"    - {address}")
        sys.stdout.flush()

    data_serve(
        opened,
        plan=plan,
        host=host,
        port=port,
        processes=processes,
        tls_cert=tls_cert,
        tls_key=tls_key,
        ready=ready,
        note=console.note,
    )


@app.command("index", epilog=INDEX_EPILOG)
def index(
    run_file: RunFileArgument = DEFAULT_RUN_FILE,
    share: Annotated[
        str | None,
        typer.Option(
            metavar="K/N",
            help="Only read the share of host K of N, from 0; do not join the shares.",
        ),
    ] = None,
    settings: SetOption = None,
    json_mode: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Build the sample index, on one host or several: read the sizes of all samples."""
    console = Console(json_mode=json_mode, quiet=quiet)
    parts = None if share is None else _share(share)
    opened = open_run(run_file, *settings or ())
    if parts is not None:
        with console.progress() as progress:
            one = data_index_share(opened, number=parts[0], hosts=parts[1], progress=progress)
        console.result(asdict(one) | {"path": str(one.path)}, one.path)
        console.say(f"Share {one.share}: {one.shards:,} shards, or parts of large ones, are read")
        console.hint(next_command("profile", run_file))
        return
    with console.progress() as progress:
        built = data_index(opened, progress=progress)
    console.result(asdict(built) | {"path": str(built.path)}, built.path)
    _say_unread(console, built.unread_files)
    console.say(f"{built.samples:,} samples can be used, {built.skipped:,} are left out")
    console.hint(next_command("profile", run_file))


def _share(text: str) -> tuple[int, int]:
    """Parse K/N; raises UsageError if the text has another form."""
    number, _, hosts = text.partition("/")
    if not re.fullmatch(r"\d{1,6}/\d{1,6}", text, re.ASCII) or int(number) >= int(hosts):
        raise UsageError(
            f"There is no share {text!r}",
            "allowed: K/N, for N hosts that are numbered from K = 0 to N - 1",
            "disttrain data index --help",
        )
    return int(number), int(hosts)


@app.command("check", epilog=CHECK_EPILOG)
def check(
    run_file: RunFileArgument = DEFAULT_RUN_FILE,
    settings: SetOption = None,
    json_mode: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Decode every image and clip once, and exclude the samples that cannot be used."""
    console = Console(json_mode=json_mode, quiet=quiet)
    opened = open_run(run_file, *settings or ())
    from disttrain_cli.data.index.index_checks import BadSamplesError
    from disttrain_cli.data.unread_keys import described

    try:
        with console.progress() as progress:
            checked = data_check(opened, progress=progress)
    except BadSamplesError as error:
        _show(console, error.skipped)
        raise
    _show(console, checked.skipped)
    console.result(
        asdict(checked)
        | {"path": str(checked.path), "skipped": [one._asdict() for one in checked.skipped]},
        checked.path,
    )
    _say_unread(console, checked.unread_files)
    console.say(
        f"{checked.samples:,} samples can be used, {checked.lost:,} are left out; "
        f"{checked.decoded:,} with images or clips were decoded now"
    )
    for line in described(checked.unread_keys):
        console.say(line)
    after = "profile" if checked.found else _after(opened, checked.data)
    console.hint(next_command(after, run_file))


@app.command("latents", epilog=LATENTS_EPILOG)
def latents(
    run_file: RunFileArgument = DEFAULT_RUN_FILE,
    settings: SetOption = None,
    json_mode: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Encode the images to generate once, so that training runs no VAE."""
    console = Console(json_mode=json_mode, quiet=quiet)
    opened = open_run(run_file, *settings or ())
    with console.progress() as progress:
        encoded = data_latents(opened, progress=progress, note=console.note)
    index, by_module = encoded.index, encoded.latents
    _show(console, [one for of in by_module for one in of.broken])
    console.result(
        {
            "data": index.fingerprint,
            "latents": [
                of._asdict()
                | {"path": str(of.path), "broken": [one._asdict() for one in of.broken]}
                for of in by_module
            ],
        },
        "\n".join(str(of.path) for of in by_module),
    )
    for of in by_module:
        console.say(
            f"{of.module}: latents of {of.images:,} images, {of.image_bytes:,} bytes each;"
            f" {of.encoded:,} were encoded now, {len(of.broken):,} of all cannot be decoded"
        )
    console.hint(next_command(_after(opened, index.fingerprint, index.inputs), run_file))


@app.command("order", epilog=ORDER_EPILOG)
def order(
    run_file: RunFileArgument = DEFAULT_RUN_FILE,
    epochs: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of epochs, from the next one.")
    ] = 1,
    settings: SetOption = None,
    json_mode: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Compute the sample orders of the next epochs ahead of training."""
    console = Console(json_mode=json_mode, quiet=quiet)
    opened = open_run(run_file, *settings or ())
    with console.progress() as progress:
        orders = data_order(opened, epochs=epochs, progress=progress)
    console.result(asdict(orders) | {"path": str(orders.path)}, orders.path)
    for one in orders.epochs:
        of_phase = f" from step {one.phase:,} on" if opened.file.data.curriculum else ""
        console.say(f"Epoch {one.epoch}{of_phase}: {one.sequences:,} sequences")


def _after(run: Run, data: str, inputs: ModelInputs | None = None) -> str:
    """Return the command to run next: `profile` again if model or data have changed.

    Args:
        data: fingerprint of the index.
        inputs: of the model, where they may have changed, too.
    """
    from disttrain_cli.spec.profile import profile_of

    try:
        profile = profile_of(run)
    except (SpecError, MismatchError):  # none, an unreadable one, or another processor's
        return "profile"
    made_for, have = profile.fingerprints, (run.file.model_fingerprint(), data)
    fits = (made_for.model, made_for.data) == have and inputs in (None, profile.inputs)
    return "plan" if fits and not run.dir.plan.is_file() else "train" if fits else "profile"


def _show(console: Console, skipped: list[Skipped]) -> None:
    from disttrain_cli.data.sources.samples import shown_skipped

    if skipped:
        console.grid(
            "Samples that cannot be used",
            skipped,
            [
                ("sample or shard", lambda one: shown_skipped(one)),
                ("samples", lambda one: "unknown" if one.samples is None else f"{one.samples:,}"),
                ("reason", lambda one: one.reason),
            ],
        )


def _say_unread(console: Console, files: list[str]) -> None:
    for line in files:
        console.say(line)

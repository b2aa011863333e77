"""The commands as functions, for notebooks and scripts; `docs/api.md` lists them.

The commands call these functions, so both read the same run file, write the same files in
`runs/NAME/` and raise the same errors (`errors.DisttrainError`), whose hints are spelled as Python
calls here and as command lines there. Nothing is printed: `progress` is called during long
operations, `note` with a sentence that a user should know.
"""

from disttrain_cli.api.analysing import (
    analyze,
    explain_hang,
    holds,
    look,
    sql,
    watch,
    write_perfetto,
)
from disttrain_cli.api.data import (
    data_check,
    data_index,
    data_index_share,
    data_latents,
    data_order,
    data_serve,
)
from disttrain_cli.api.measuring import calibrate, profile
from disttrain_cli.api.opening import open_run
from disttrain_cli.api.outputs import export, sample
from disttrain_cli.api.planning import checked_plan, compare_clusters, plan
from disttrain_cli.api.ranks import dry_run, dry_run_steps
from disttrain_cli.api.starting import doctor, init, models, schema
from disttrain_cli.api.training import emit, preflight, rehearse, train
from disttrain_cli.errors import DisttrainError

__all__ = [
    "DisttrainError",
    "analyze",
    "calibrate",
    "checked_plan",
    "compare_clusters",
    "data_check",
    "data_index",
    "data_index_share",
    "data_latents",
    "data_order",
    "data_serve",
    "doctor",
    "dry_run",
    "dry_run_steps",
    "emit",
    "explain_hang",
    "export",
    "holds",
    "init",
    "look",
    "models",
    "open_run",
    "plan",
    "preflight",
    "profile",
    "rehearse",
    "sample",
    "schema",
    "sql",
    "train",
    "watch",
    "write_perfetto",
]

"""One module per subcommand: parse, call the API, render. No logic.

Each module has `run` (the command, registered by `app.py`) and `EPILOG` (its examples). Other
subpackages are imported inside `run`, so that `--help` stays quick and `plan` and `analyze` never
load torch. Start at `plan.py`.
"""

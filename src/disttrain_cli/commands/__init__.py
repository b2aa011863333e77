"""One file per subcommand: parse, call one room, render. No logic.

Each file has `run` (the command, registered by `app.py`) and `EPILOG` (its examples). Rooms are
imported inside `run`, so that `--help` stays quick and `plan` and `analyze` never load torch. Start
at `plan.py`.
"""

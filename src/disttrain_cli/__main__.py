"""`python -m disttrain_cli`: the same as the console script."""

from disttrain_cli.app import main

main()

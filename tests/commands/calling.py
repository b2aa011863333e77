"""Command lines that are run in this process."""

import pytest

from disttrain_cli.app import main


def call(words, capsys):
    """Exit code, stdout and stderr of one command line."""
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    shown = capsys.readouterr()
    return left.value.code, shown.out, shown.err

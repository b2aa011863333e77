"""The console script, and `python -m disttrain_cli`.

Ctrl-C is handled from the start, also while the rest of the program is imported, and so is the
SIGTERM by which schedulers end `disttrain train`.
"""

import signal
import sys
from types import FrameType
from typing import NoReturn


def main() -> None:
    """Run the command line."""
    try:
        if sys.argv[1:2] == ["train"]:  # others may be inside one long call of a library
            signal.signal(signal.SIGTERM, _terminate)
        from disttrain_cli.app import main as run

        run()
    except KeyboardInterrupt:
        _end("Interrupted", "Ctrl-C (SIGINT)", 130)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    """Handle SIGTERM until `commands.train` does."""
    _end("Terminated", "SIGTERM", 143)


def _end(what: str, why: str, code: int) -> NoReturn:
    """Report the end as `Console.error` does, which may not be imported yet."""
    if "--json" in sys.argv:
        print(f'{{"error": {{"what": "{what}", "why": "{why}", "next": "", "exit_code": {code}}}}}')
    else:
        print(f"Error: {what}\n  {why}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()

"""The console script, and `python -m disttrain_cli`.

Interrupts are handled from the start, also while the rest of the program is imported.
"""

import sys


def main() -> None:
    """Run the command line."""
    try:
        from disttrain_cli.app import main as run

        run()
    except KeyboardInterrupt:
        if "--json" in sys.argv:
            print(
                '{"error": {"what": "Interrupted", "why": "Ctrl-C (SIGINT)", "next": "", '
                '"exit_code": 130}}'
            )
        else:
            print("Error: Interrupted\n  Ctrl-C (SIGINT)", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()

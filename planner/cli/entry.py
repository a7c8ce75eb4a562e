"""The script `plan`. The commands take a moment to import; Ctrl-C in that moment ends the script as it does later."""

import sys


def main() -> None:
    """Import the commands, and run the one that was given."""
    try:
        from planner.cli.main import main as run
    except KeyboardInterrupt:
        sys.stderr.write("plan: interrupted\n")
        sys.exit(130)
    run()

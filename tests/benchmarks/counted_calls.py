"""Runs `plan` with the words that are given, and prints how many Python functions it has called: `counted_calls.py
--model llama70b -q ...`. Imports count, functions in C do not. A number that does not depend on what else the machine
does; profiling takes twice the time, so seconds are measured apart."""

import cProfile
import sys


def main() -> None:
    """Print the number."""
    sys.argv[0] = "plan"
    profile = cProfile.Profile(builtins=False)
    profile.enable()
    try:
        from planner.cli.main import main as plan

        plan()
    except SystemExit as end:
        if end.code:
            raise
    profile.disable()
    print(sum(entry.callcount for entry in profile.getstats()))


if __name__ == "__main__":
    main()

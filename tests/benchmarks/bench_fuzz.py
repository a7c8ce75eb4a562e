"""Mutants of every file that others write: what reading them ends with, reader by reader.

Valid files are made wrong in all sorts of ways (`tests/fuzz`), the same ones each time, and read as commands read them.
Right are the exit codes 0, 2 and 3; 1 stands for a check that failed; 70 is a fault of ours. Some of those that are read
go through the whole command as well. A process of its own has a limit of memory, so that none takes the machine down.
"""

import contextlib
import io
import os
import resource
import tempfile
from collections import Counter
from pathlib import Path

from timing import extent

from tests.fuzz.mutants import mutant
from tests.fuzz.readers import ENDLESS, GOOD, Reader, command_of, readers, run_of
from tests.traced_once import traced_once

MUTANTS = {"quick": 500, "usual": 5000, "full": 50_000}
COMMANDS = {"quick": 0, "usual": 4, "full": 40}
"""Whole commands for each reader."""
MEMORY = 8 * 2**30
SHOWN = 12
COLUMNS = {"0": (0,), "1": (1,), "2": (2,), "3": (3,), "70": (70,), "endless": (ENDLESS,)}


def main() -> None:
    """Print a table of readers and exit codes, and the faults."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    everyone, faults, totals = readers(), [], Counter[int]()
    each, rest = divmod(MUTANTS[extent()], len(everyone))
    print(f"{'reader':20}{'mutants':>8}" + "".join(f"{name:>8}" for name in (*COLUMNS, "other")))
    with tempfile.TemporaryDirectory() as folder, traced_once(), _quietly():
        for number, reader in enumerate(everyone):
            codes = _tried(reader, each + (number < rest), Path(folder), faults)
            _print(reader.name, codes)
            totals += codes
    _print("all", totals)
    for fault in faults[:SHOWN]:
        print(fault)
    if faults:
        raise SystemExit(f"{len(faults)} mutants ended with a fault")


def _tried(reader: Reader, count: int, folder: Path, faults: list[str]) -> Counter[int]:
    codes, commands = Counter[int](), COMMANDS[extent()]
    others = [one.seeds[0] for one in readers() if one is not reader]
    here = Path(tempfile.mkdtemp(dir=folder))
    for number in range(count):
        content = mutant(reader.format, reader.seeds, others, reader.name, number)
        code, said = run_of(reader, content, here)
        if code == 0 and reader.argv is not None and commands:
            commands -= 1
            code, said = command_of(reader, content, here)
        codes[code] += 1
        if code not in GOOD:
            faults.append(f"{reader.name} {number}: {said}")
    return codes


@contextlib.contextmanager
def _quietly():
    """What commands print is not shown; what this file prints is."""
    shown = os.dup(1)
    global _shown
    _shown = os.fdopen(shown, "w")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


if __name__ == "__main__":
    main()

"""Mutants of every file that others write: what reading them ends with, reader by reader.

Valid files are made wrong in all sorts of ways (`tests/fuzz`), the same ones each time, and read as commands read them.
Right are the exit codes 0, 2 and 3; 1 is of a check that failed, 70 of a fault of ours. Of those that are read some go
through the whole command, too. Memory is limited, so that none takes the machine down.
"""

import contextlib
import io
import resource
import sys
import tempfile
from collections import Counter
from pathlib import Path

from timing import extent

from tests.fuzz.mutants import mutant
from tests.fuzz.readers import ENDLESS, GOOD, Reader, command_of, readers, run_of
from tests.traced_once import traced_once

MUTANTS = {"quick": 500, "usual": 5000, "full": 50_000}
COMMANDS = {"quick": 0, "usual": 8, "full": 80}
"""Whole commands of each reader."""
MEMORY = 8 * 2**30
COLUMNS = (*GOOD, 1, 70, ENDLESS)


def main() -> None:
    """Print a table of readers and exit codes, and the faults."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    everyone, faults, total = readers(), list[str](), Counter[int]()
    each, rest = divmod(MUTANTS[extent()], len(everyone))
    words = ("endless" if code == ENDLESS else f"exit {code}" for code in COLUMNS)
    print(f"{'reader':20}{'mutants':>9}" + "".join(f"{word:>9}" for word in words))
    with tempfile.TemporaryDirectory() as folder, traced_once():
        for number, reader in enumerate(everyone):
            codes = _tried(reader, each + (number < rest), Path(folder), faults)
            _print(reader.name, codes)
            total += codes
    _print("all", total)
    sys.exit("\n".join(faults) or None)


def _print(name: str, codes: Counter[int]) -> None:
    print(f"{name:20}{codes.total():>9}" + "".join(f"{codes[code]:>9}" for code in COLUMNS), flush=True)


def _tried(reader: Reader, count: int, folder: Path, faults: list[str]) -> Counter[int]:
    """Exit codes of the first mutants of a reader."""
    codes, commands = Counter[int](), COMMANDS[extent()]
    others = [one.seeds[0] for one in readers() if one is not reader]
    here = Path(tempfile.mkdtemp(dir=folder))
    for number in range(count):
        content = mutant(reader.format, reader.seeds, others, reader.name, number)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            code, said = run_of(reader, content, here)
            if code == 0 and reader.argv is not None and commands:
                commands -= 1
                code, said = command_of(reader, content, here)
        codes[code] += 1
        if code not in GOOD:
            faults.append(f"{reader.name} {number}: exit {code}: {said}")
    return codes


if __name__ == "__main__":
    main()

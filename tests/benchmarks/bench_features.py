"""What is asked of a planner, row by row, tried by running it: `make bench ONLY=features`.

    yes      all evidence of the row that was tried is good
    partly   some of it is
    no       none of it is
    -        nothing of it was tried to this extent

Rows and their evidence are in `features.py`. Every verdict is what commands and tests said just now: a command of a row
is called, its exit code and its output looked at, and a test is run by pytest. Extents: "quick" calls the commands that
start no processes; "usual" all commands, and the tests of the default list; "full" the thorough and exhaustive tests as
well. Where only some rows are asked for, commands of others that write what these read are called first.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from features import ROWS, Command, Row, Test

ROOT = Path(__file__).resolve().parents[2]
LISTS = {"usual": "not thorough and not exhaustive", "full": ""}
"""Which tests an extent runs, in the words of pytest; "quick" runs none."""
LONGEST = 300.0
"""Seconds of a command; longer is no evidence."""
WRITING = ("-o", "--save", "--measure")
"""Options whose value is what a command writes."""
_SHOWN = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What became of one piece of evidence: None where it was not tried, and why in a few words."""

    what: str
    good: bool | None
    why: str = ""

    def text(self) -> str:
        mark = {True: "ok", False: "FAILS", None: "not tried"}[self.good]
        return f"      {mark:<10}{self.what}" + (f"\n                {self.why}" if self.why else "")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--extent", choices=("quick", "usual", "full"), default="usual")
    parser.add_argument("--rows", default="", help="only these, as in 1,5-9")
    asked = parser.parse_args()
    wanted = [row for row in ROWS if not asked.rows or row.number in numbers_of(asked.rows)]
    tests = {} if asked.extent == "quick" else tested(wanted, LISTS[asked.extent])
    verdicts: dict[str, list[int]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        for command in needed(wanted):
            called(command, Path(folder), asked.extent)
        for row in wanted:
            found = [
                called(one, Path(folder), asked.extent) if isinstance(one, Command) else found_of(one, tests)
                for one in row.evidence
            ]
            verdict = verdict_of(found)
            verdicts[verdict].append(row.number)
            print(f"{row.number:3d}  {verdict:<7} {row.what}", flush=True)
            for one in found:
                print(one.text(), flush=True)
    print()
    for verdict in ("yes", "partly", "no", "-"):
        print(f"{verdict:<7} {len(verdicts[verdict]):3d}  {', '.join(map(str, verdicts[verdict]))}")


def numbers_of(text: str) -> set[int]:
    """`1,5-9`."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def needed(wanted: Sequence[Row]) -> list[Command]:
    """Commands of other rows that write what commands of these rows read, directly or by way of each other."""
    others = [one for row in ROWS if row not in wanted for one in row.evidence if isinstance(one, Command)]
    words = {word for row in wanted for one in row.evidence if isinstance(one, Command) for word in paths_of(one)}
    found: list[Command] = []
    for one in reversed(others):
        if words & written_by(one):
            words |= paths_of(one)
            found.append(one)
    return found[::-1]


def paths_of(command: Command) -> set[str]:
    """Words of a command, and the folders of those that are paths: what it may read."""
    words = shlex.split(command.words)
    return {*words, *(word.partition("/")[0] for word in words)}


def written_by(command: Command) -> set[str]:
    """Files and folders that a command writes."""
    words = shlex.split(command.words)
    return {word for option, word in pairwise(words) if option in WRITING}


def verdict_of(found: Iterable[Found]) -> str:
    """What the evidence that was tried says together."""
    tried = [one.good for one in found if one.good is not None]
    return "-" if not tried else "yes" if all(tried) else "partly" if any(tried) else "no"


def called(command: Command, folder: Path, extent: str) -> Found:
    """Call a command in a process of its own, and hold its output against what it has to say."""
    what = f"plan {command.words}"[:_SHOWN]
    if command.runs and extent == "quick":
        return Found(what=what, good=None)
    words = shlex.split(command.words.replace("{data}", str(ROOT / "tests" / "data")))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    began = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "planner.cli.main", *words], cwd=folder, env=environment, text=True,
            capture_output=True, timeout=LONGEST, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Found(what=what, good=False, why=f"not done in {LONGEST:g} s")
    seconds = f"{time.perf_counter() - began:.1f} s"
    if done.returncode != command.code:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:] or [""]
        return Found(what=what, good=False, why=f"exit code {done.returncode}: {last[0][: 2 * _SHOWN]}")
    missing = [pattern for pattern in command.says if not re.search(pattern, done.stdout)]
    if missing:
        return Found(what=what, good=False, why=f"does not say {missing[0]!r}")
    return Found(what=what, good=True, why=seconds)


_RAN = (0, 1, 5)
"""Exit codes of pytest: all passed, some failed, nothing was chosen."""
Results = Mapping[str, Mapping[str, tuple[int, str]]]
"""By file and function: how many cases passed, and the first that did not."""


def tested(rows: Sequence[Row], which: str) -> Results:
    """Run all tests of some rows in one process of pytest."""
    nodes = sorted({one.node for row in rows for one in row.evidence if isinstance(one, Test) and exists(one.node)})
    if not nodes:
        return {}
    paths = [f"tests/{node.removesuffix('::*')}" for node in nodes]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", f"--junitxml={report}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, "-m", which, *paths], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=False
        )
        if done.returncode not in _RAN:
            raise RuntimeError(f"pytest ended with {done.returncode}: {' '.join(paths)}")
        return results_of(report)


def results_of(report: Path) -> Results:
    """What a report of pytest says of every function."""
    found: dict[str, dict[str, tuple[int, str]]] = defaultdict(dict)
    for case in ElementTree.parse(report).iter("testcase") if report.is_file() else ():
        path = case.get("classname", "").removeprefix("tests.").replace(".", "/") + ".py"
        function = case.get("name", "").partition("[")[0]
        passed, fault = found[path].get(function, (0, ""))
        failed = next((one for one in case if one.tag in ("failure", "error")), None)
        skipped = any(one.tag == "skipped" for one in case)
        if failed is not None:
            fault = fault or (failed.get("message") or "failed").splitlines()[0][: 2 * _SHOWN]
        found[path][function] = (passed + (failed is None and not skipped), fault)
    return found


def exists(node: str) -> bool:
    """Whether there is such a test: pytest runs nothing at all where one is misspelt."""
    path, _, function = node.partition("::")
    file = ROOT / "tests" / path
    return file.is_file() and (function == "*" or re.search(rf"^def {function}\(", file.read_text(), re.M) is not None)


def found_of(one: Test, tests: Results) -> Found:
    """What a test said; nothing where the extent leaves it out."""
    path, _, function = one.node.partition("::")
    what = f"tests/{one.node.removesuffix('::*')}"
    if not exists(one.node):
        return Found(what=what, good=False, why="there is no such test")
    results = tests.get(path, {})
    own = list(results.values()) if function == "*" else [results[function]] if function in results else []
    fault = next((fault for _, fault in own if fault), "")
    if fault:
        return Found(what=what, good=False, why=fault)
    passed = sum(count for count, _ in own)
    return Found(what=what, good=True, why=f"{passed} passed") if passed else Found(what=what, good=None)


if __name__ == "__main__":
    main()

"""Whatever is in a file that others wrote, reading it ends, and never with a fault of ours."""

from pathlib import Path

import pytest

from tests.fuzz.found import FOUND
from tests.fuzz.mutants import mutant
from tests.fuzz.readers import GOOD, Reader, readers, run_of

MUTANTS = 500
"""Of all readers together; `make bench ONLY=fuzz` has ten times as many, and whole commands."""

READERS = readers()
EACH = -(-MUTANTS // len(READERS))


@pytest.mark.cases(16)
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_what_is_valid_is_read(reader: Reader, tmp_path: Path) -> None:
    for seed in reader.seeds:
        assert run_of(reader, seed, tmp_path) == (0, "")


@pytest.mark.cases(16)
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_no_mutant_ends_with_a_fault(reader: Reader, tmp_path: Path) -> None:
    others = [one.seeds[0] for one in READERS if one is not reader]
    faults = []
    for number in range(EACH):
        code, said = run_of(reader, mutant(reader.format, reader.seeds, others, reader.name, number), tmp_path)
        if code not in GOOD:
            faults.append(f"{number}: {code}: {said}")
    assert faults == []


@pytest.mark.parametrize("reader", [one for one in READERS if one.name in FOUND], ids=lambda reader: reader.name)
def test_what_was_found_once_ends_well(reader: Reader, tmp_path: Path) -> None:
    assert FOUND.keys() <= {one.name for one in READERS}
    for content in FOUND[reader.name]:
        assert run_of(reader, content, tmp_path)[0] in GOOD, content

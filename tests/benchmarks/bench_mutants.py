"""Seeded faults: which of them the tests catch, and by which list.

Forty faults, each one changed operator, sign, bound, axis, term or name, over search, prices, prediction, executor,
checkpoints, files and the command line. Each is applied alone to a copy of the sources, and the tests run there until
one fails: those that are nearest to the fault first, then all of `make test`, then the thorough list.

    quick     the nearest tests of both lists; what they catch, and by which test, stands in docs/faults.md
    usual     all of `make test` and the nearest thorough tests for what is not caught yet
    full      all of both

`MUTANTS_OF=REVISION` takes sources and tests from a commit, and `MUTANTS_FROM` and `MUTANTS_TO` some of the faults.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from timing import extent

ROOT = Path(__file__).resolve().parents[2]
USUAL, THOROUGH = "not thorough and not exhaustive", "thorough and not exhaustive"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A text that stands once in a file, and what takes its place."""

    area: str
    path: str
    before: str
    after: str


def mutants(area: str, path: str, *changes: tuple[str, str]) -> list[Mutant]:
    return [Mutant(area=area, path=path, before=before, after=after) for before, after in changes]


MUTANTS = [
    *mutants(
        "search",
        "planner/strategy_search/decomposition/division.py",
        ("if best is None or found.seconds < best.seconds:", "if best is None:"),
    ),
    *mutants(
        "search",
        "planner/strategy_search/decomposition/stage_filling.py",
        ("least = other.busy < self.busy,", "least = other.busy > self.busy,"),
        ("over = held + all_fast - capacity", "over = all_fast - capacity"),
    ),
    *mutants(
        "search",
        "planner/strategy_search/exploration/best_first.py",
        ("while self.frontier.least < self.found.cutoff:", "while 1.2 * self.frontier.least < self.found.cutoff:"),
    ),
    *mutants(
        "search",
        "planner/strategy_search/decomposition/setting.py",
        ("return self.micro_batches - (1 / self.chunks if", "return self.micro_batches + (1 / self.chunks if"),
    ),
    *mutants(
        "prices",
        "costmodels/collectives.py",
        ("share = passes * (group.size - 1) / group.size", "share = passes * (group.size + 1) / group.size"),
        (
            "return _setup(group, index) + 2 * _tree_depth(group, index), load",
            "return _setup(group, index) + _tree_depth(group, index), load",
        ),
    ),
    *mutants(
        "prices",
        "costmodels/kernels/matmul.py",
        ("flops: Quantity = 2.0 * m * n * k * batch", "flops: Quantity = 2.0 * m * n * n * batch"),
    ),
    *mutants(
        "prices",
        "costmodels/kernels/attention.py",
        (
            "(rows * columns + np.maximum(rows, columns)) / 2 if shape.causal",
            "(rows * columns + np.maximum(rows, columns)) if shape.causal",
        ),
    ),
    *mutants(
        "prices",
        "costmodels/memory.py",
        ("state=master + moment * moments)", "state=moment * moments)"),
        ("(3 * gradient if variant.clipped else 0)", "0"),
    ),
    *mutants(
        "prediction",
        "costmodels/pipelines/timeline.py",
        (
            "running = max(computation, overlapped) if overlap.inside",
            "running = min(computation, overlapped) if overlap.inside",
        ),
        ('elif turn.kind != "input_gradient":', 'elif turn.kind == "input_gradient":'),
    ),
    *mutants(
        "prediction",
        "costmodels/pipelines/orders.py",
        ("warm_up = min(stages - stage - 1 + slices - 1,", "warm_up = min(stages - stage + slices - 1,"),
    ),
    *mutants(
        "prediction",
        "planner/plan/prediction/walk/operator_visit.py",
        ("inner.backward + (inner.forward if repeats else 0)", "inner.backward + inner.forward"),
    ),
    *mutants(
        "prediction",
        "planner/plan/prediction/walk/rank_walk.py",
        ('cost.memory["transient"] += once.flat', "pass"),
    ),
    *mutants(
        "prediction",
        "planner/plan/prediction/memory/forward.py",
        (
            "self._set_out(range(number + 1, len(self.tensors.segments)))",
            "self._set_out(range(number + 2, len(self.tensors.segments)))",
        ),
    ),
    *mutants(
        "prediction",
        "planner/plan/prediction/step.py",
        ("return reductions + rank.optimizer + rank.weight_gather", "return reductions + rank.optimizer"),
    ),
    *mutants(
        "executor",
        "planner/sharding/redistribute.py",
        (
            "_KIND = np.array([[-1, 5, 4], [2, -1, 1], [0, 6, 3]])",
            "_KIND = np.array([[-1, 5, 4], [2, -1, 2], [0, 6, 3]])",
        ),
    ),
    *mutants(
        "executor",
        "runtime/comm/collectives.py",
        ("joined = ((part.movedim(0, dim).flatten", "joined = ((part.flip(0).movedim(0, dim).flatten"),
    ),
    *mutants(
        "executor",
        "runtime/comm/redistribute.py",
        (
            "return torch.cat([*chunks[0::2], *reversed(chunks[1::2])], dim=dim)",
            "return torch.cat([*chunks[0::2], *chunks[1::2]], dim=dim)",
        ),
    ),
    *mutants(
        "executor",
        "runtime/comm/collectives.py",
        (
            "return [part.movedim(0, dim).contiguous() for part, dim in zip(_parts(own, shapes), dims, strict=True)]",
            "return [part.contiguous() for part in _parts(own, shapes)]",
        ),
        (
            "partial(dist.all_reduce, flat, operation, group)",
            "partial(dist.all_reduce, flat, dist.ReduceOp.MAX, group)",
        ),
    ),
    *mutants(
        "executor",
        "runtime/update/reduction.py",
        (
            "found.update(zip(bucket.names, flight.land(), strict=True))",
            "found.update(zip(bucket.names, reversed(list(flight.land())), strict=True))",
        ),
    ),
    *mutants("executor", "runtime/parameters/shards.py", ("self.gradient += gradient", "self.gradient = gradient")),
    *mutants(
        "executor",
        "runtime/update/norms.py",
        ("share = (most / (norm + _EPSILON)).clamp(max=1.0)", "share = most / (norm + _EPSILON)"),
    ),
    *mutants(
        "executor",
        "runtime/step/pipeline.py",
        ("part = totals[turn.micro_batch // turns], loss / losses", "part = totals[turn.micro_batch // turns], loss"),
    ),
    *mutants(
        "checkpoints",
        "planner/sharding/even_cut.py",
        ("min(place * length, size), min((place + 1) * length, size)", "place * length, (place + 1) * length"),
    ),
    *mutants(
        "checkpoints",
        "runtime/checkpoint/regions.py",
        (
            "starts = (mine - theirs for mine, theirs in zip(self.offset, other.offset, strict=True))",
            "starts = (mine for mine, _ in zip(self.offset, other.offset, strict=True))",
        ),
    ),
    *mutants("checkpoints", "runtime/checkpoint/tensor_files.py", ("if found != file.checksum:", "if False:")),
    *mutants("checkpoints", "runtime/checkpoint/manifest.py", ('if _digest(content) != found["digest"]:', "if False:")),
    *mutants(
        "checkpoints", "runtime/run_folder/owned.py", ("return None if ours(mark) else f", "return None if True else f")
    ),
    *mutants("files", "planner/plan/writing.py", ("os.chmod(temporary, 0o666 & ~umask)", "os.chmod(temporary, 0o600)")),
    *mutants(
        "files",
        "hardware_profiles/foreign.py",
        ("if key in found:", "if False:"),
        ("if isinstance(value, int) and not -_WORD <= value < _WORD:", "if False:"),
    ),
    *mutants("files", "planner/export/files/arguments.py", ("shlex.quote(_text(value))", "_text(value)")),
    *mutants("command line", "planner/report/html/page.py", ("autoescape=True,", "autoescape=False,")),
    *mutants(
        "command line",
        "hardware_profiles/foreign.py",
        ('c if c.isprintable() or c in keep else c.encode("unicode_escape").decode()', "c"),
    ),
    *mutants(
        "command line",
        "planner/cli/printing.py",
        ('run = f"run it with: plan run {shlex.quote(str(first))}', 'run = f"run it with: plan run {first}'),
    ),
    *mutants("command line", "planner/cli/values.py", ('"gb": 10**9', '"gb": 2**30')),
]

NEAREST = {
    "search": (
        "tests/contract/test_search_contract.py",
        "tests/unit/search",
        "tests/contract/test_recursive.py",
        "tests/property/test_search.py",
    ),
    "prices": (
        "tests/unit/costmodels",
        "tests/unit/pricing",
        "tests/property/test_cost_laws.py",
        "tests/property/test_kernel_laws.py",
        "tests/validation",
        "tests/golden",
    ),
    "prediction": (
        "tests/unit/costmodels",
        "tests/unit/plan",
        "tests/property/test_timeline.py",
        "tests/contract/test_predicted_is_kept.py",
        "tests/contract/test_audit.py",
        "tests/contract/test_audit_of_block_gathers.py",
        "tests/contract/test_gathers_ahead.py",
        "tests/golden",
        "tests/unit/search",
        "tests/distributed/test_schedules.py",
    ),
    "executor": (
        "tests/distributed/test_redistribute.py",
        "tests/distributed/test_updates.py",
        "tests/distributed/test_training.py",
        "tests/distributed/test_parity.py",
        "tests/distributed/test_context.py",
        "tests/unit/runtime",
    ),
    "checkpoints": ("tests/unit/sharding", "tests/unit/runtime", "tests/distributed/test_saving.py"),
    "files": (
        "tests/unit/plan/test_file.py",
        "tests/unit/hardware_profiles",
        "tests/unit/export",
        "tests/unit/test_limits.py",
        "tests/fuzz",
        "tests/unit/cli/test_names_in_files.py",
    ),
    "command line": ("tests/unit/hardware_profiles", "tests/unit/report", "tests/unit/cli"),
}


def main() -> None:
    """Print each fault and who caught it, and how many each list caught."""
    revision = os.environ.get("MUTANTS_OF")
    first, last = int(os.environ.get("MUTANTS_FROM", 0)), int(os.environ.get("MUTANTS_TO", len(MUTANTS)))
    caught = {"make test": 0, "thorough": 0}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "sources"
        _copy(copy, revision)
        for number, one in enumerate(MUTANTS[first:last], start=first):
            path = copy / one.path
            text = path.read_text(encoding="utf-8")
            if text.count(one.before) != 1:
                sys.exit(f"{one.path}: {one.before!r} stands there {text.count(one.before)} times, and not once")
            path.write_text(text.replace(one.before, one.after), encoding="utf-8")
            started = time.perf_counter()
            tried = ((word, _failed(copy, arguments)) for word, arguments in _stages(one))
            found, test = next(((word, test) for word, test in tried if test), ("none", ""))
            path.write_text(text, encoding="utf-8")
            caught[found] = caught.get(found, 0) + 1
            seconds = time.perf_counter() - started
            print(f"{number:>3} {one.area:13}{found:11}{seconds:>5.0f} s  {one.path}: {one.before[:60]}", flush=True)
            print(f"{test:>{20 + len(test)}}", flush=True)
    print(f"{len(MUTANTS[first:last])} faults: " + ", ".join(f"{word} {count}" for word, count in caught.items()))


def _copy(to: Path, revision: str | None) -> None:
    """The sources that git knows of, as they are here or at a revision."""
    if revision is None:
        names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "cf", f"{to}.tar", "--null", "-T", "-"], cwd=ROOT, input=names, check=True)
    else:
        subprocess.run(["git", "archive", "-o", f"{to}.tar", revision], cwd=ROOT, check=True)
    to.mkdir()
    subprocess.run(["tar", "xf", f"{to}.tar", "-C", to], check=True)


def _stages(one: Mutant) -> list[tuple[str, list[str]]]:
    near = [*NEAREST[one.area]]
    stages = [("make test", [*near, "-m", USUAL])]
    if extent() != "quick":
        stages.append(("make test", ["-m", USUAL]))
    stages.append(("thorough", [*near, "-m", THOROUGH]))
    if extent() == "full":
        stages.append(("thorough", ["-m", THOROUGH]))
    return stages


def _failed(copy: Path, arguments: list[str]) -> str:
    """The first test that fails there, "" where none does; the tests of a folder that is not there are none."""
    given = [word for word in arguments if not word.startswith("tests/") or (copy / word).exists()]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "2", "--dist", "loadfile", *given]
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1, 2):
        sys.exit(done.stdout[-3000:] + done.stderr[-3000:])
    named = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return "" if done.returncode == 0 else named[1] if named else "(not named)"


if __name__ == "__main__":
    main()

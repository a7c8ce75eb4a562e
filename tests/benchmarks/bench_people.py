"""Is the plan that the search finds ever worse, by our own estimate, than the configuration that people really ran?

Every published run (data/training_runs.csv) is entered by hand; the search is asked once for each job.
`found / entered` above 1 is a failure of the search. `entered / measured` is for information, how good our estimate is:
all details that the planner does not model, and all mistakes of the sources, are in it.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from people import Job, Run, load_runs, planned, space_of
from timing import extent

from planner.errors import InfeasibleError, PlannerError

T = TypeVar("T")

WORSE = 1 + 1e-9  # sums in another order differ by less

# How many jobs of a source, and how many runs of a job, spread evenly.
SAMPLES: dict[str, tuple[int | None, int | None]] = {"quick": (1, 2), "usual": (5, 6), "full": (None, None)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entered:
    """One run beside what the search found for its job; None where no plan fits by our model of memory."""

    run: Run
    seconds: float | None
    found: float | None
    problem: str = ""

    @property
    def ratio(self) -> float | None:
        """Found / entered."""
        return self.found / self.seconds if self.found and self.seconds else None


def spread(items: Sequence[T], count: int | None) -> list[T]:
    """So many of the items, evenly."""
    if count is None or len(items) <= count:
        return list(items)
    return [items[(2 * place + 1) * len(items) // (2 * count)] for place in range(count)]


def sampled(runs: Iterable[Run]) -> list[tuple[Job, tuple[Run, ...]]]:
    """Jobs with their runs, as many of them as were asked for."""
    jobs_wanted, runs_wanted = SAMPLES[extent()]
    sources: dict[str, dict[Job, list[Run]]] = {}
    for run in runs:
        sources.setdefault(run.source, {}).setdefault(run.job, []).append(run)
    chosen = []
    for jobs in sources.values():
        for job, all_of_job in spread(list(jobs.items()), jobs_wanted):
            chosen.append((job, tuple(spread(all_of_job, runs_wanted))))
    return chosen


def entered(job: Job, runs: tuple[Run, ...]) -> list[Entered]:
    """All runs of a job, priced."""
    found, problem = _priced(job, None, runs)
    done = []
    for run in runs:
        seconds, own = _priced(job, run, runs)
        done.append(Entered(run=run, seconds=seconds, found=found, problem=own or problem))
    return done


def _priced(job: Job, run: Run | None, runs: tuple[Run, ...]) -> tuple[float | None, str]:
    try:
        return planned(job, space_of(runs) if run is None else run.pinned).plans[0].seconds, ""
    except InfeasibleError:
        return None, "does not fit by our model of memory"
    except PlannerError as error:
        return None, "not in our space: " + str(error).split(":")[0]


def table(results: Sequence[Entered]) -> None:
    """Ratios of every source."""
    print(f"{'source':<15}{'runs':>6}{'priced':>8}{'found / entered':>26}{'entered / measured':>27}")
    print(f"{'':<29}{'least   median     most':>26}{'least   median     most':>27}")
    for source in dict.fromkeys(result.run.source for result in results):
        own = [result for result in results if result.run.source == source]
        ratios = [result.ratio for result in own if result.ratio is not None]
        measured = [r.seconds / r.run.step_seconds for r in own if r.seconds and r.run.step_seconds]
        print(f"{source:<15}{len(own):>6}{len(ratios):>8}  {_spread(ratios):>24}   {_spread(measured):>24}")


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "-"
    ordered = sorted(values)
    return f"{ordered[0]:>7.3f}{ordered[len(ordered) // 2]:>9.3f}{ordered[-1]:>9.3f}"


def main() -> int:
    """Print the table; the exit status is 1 where the search did worse than people."""
    runs = load_runs()
    results: list[Entered] = []
    chosen = sampled(runs)
    for job, own in sorted(chosen, key=lambda item: str(item[0].model)):
        results += entered(job, own)
    print(f"{len(results)} of {len(runs)} published configurations, {len(chosen)} of {len({r.job for r in runs})} jobs")
    table(results)
    problems = Counter(result.problem for result in results if result.ratio is None)
    for problem, count in problems.most_common():
        names = [result.run.id for result in results if result.ratio is None and result.problem == problem]
        shown = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
        print(f"{count} left out: {problem} ({shown})")
    worse = [result for result in results if result.ratio is not None and result.ratio > WORSE]
    for result in worse:
        print(f"WORSE {result.ratio:.6f}: {result.run.id} {result.run.name} {result.run.job} {result.run.pinned}")
    print(f"found is worse than {len(worse)} of {sum(r.ratio is not None for r in results)} entered configurations")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())

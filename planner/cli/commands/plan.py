"""The main command: trace, search, report, write."""

import contextlib
import gc
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from planner.cli.answer import Answer, shown_plans
from planner.cli.engine_cost import cost_of, possible
from planner.cli.limiting import is_whole_process, within_limits
from planner.cli.modes import applied
from planner.cli.options import Options
from planner.cli.output import answer_content, write_json
from planner.cli.printing import print_answer
from planner.cli.requesting import check, request_of, retracing
from planner.cli.searching import Found, find, telling

if TYPE_CHECKING:
    from planner.report.console import PlainConsole


def print_version() -> None:
    """The version of the planner."""
    from planner.plan.plan import PLANNER_VERSION

    sys.stdout.write(f"plan {PLANNER_VERSION}\n")


def make_plan(options: Options) -> None:
    """Plan, report and write the plan file."""
    started = time.perf_counter()
    console = progress_console(options)
    with undisturbed():
        options = applied(options)
        check(options)
        check_output(options)
        with within_limits(options), telling(options.verbose):
            request = request_of(options, console)
            found = find(request, console, pareto=options.pareto, retrace=retracing(options, request))
            free = possible(request, console) if request.space is not None else None
            cost = None if free is None else cost_of(request, found.best.bound, free)
        seconds = time.perf_counter() - started
        files = write_plans(options, found)
    show(Answer(options=options, request=request, found=found, files=files, seconds=seconds, engine=cost))


def show(answer: Answer) -> None:
    """Show an answer in the requested form."""
    if answer.options.as_json:
        write_json("plan", answer_content(answer))
    elif answer.options.speaks:
        print_answer(answer)


def progress_console(options: Options) -> "PlainConsole":
    """The console for progress: stderr on a terminal, unless nobody reads it."""
    from planner.report.console import PlainConsole

    return PlainConsole(file=sys.stderr, quiet=not (options.speaks and sys.stderr.isatty()))


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Turn off the cyclic garbage collector, which finds nothing in a short run with many long-lived objects. If the
    process does nothing else, these objects live to its end, and later collections skip them too."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_whole_process():
            gc.freeze()
        if enabled:
            gc.enable()


def check_output(options: Options) -> None:
    """Raise PlanFileError before the search if the plan file could not be written, or would overwrite a config, profile
    or cluster that the search reads."""
    from planner.plan.writing import check_place

    if options.output:
        model = (options.model or "").partition("+")[0]
        check_place(Path(options.output), (model, f"{model}/config.json", options.hardware, options.cluster))


def write_plans(options: Options, found: Found) -> tuple[Path, ...]:
    """Write the best plan; with --write-all the others too."""
    from planner.plan.file import save_plan

    plans = [ranked.plan for ranked in shown_plans(options, found)]
    first = Path(options.output or _default_name(plans[0].model.reference, plans[0].cluster.devices))
    files = [first]
    if options.write_all:
        files += [first.with_name(f"{first.stem}-{number}{first.suffix}") for number in range(2, len(plans) + 1)]
    for plan, path in zip(plans, files, strict=False):
        save_plan(plan, path)
    return tuple(files)


def _default_name(model: str, devices: int) -> str:
    stem = re.sub(r"[^\w]+", "-", model).strip("-")
    return f"{stem}-{devices}.json"

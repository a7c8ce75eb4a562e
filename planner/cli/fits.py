"""`plan profiles NAME --fit`: the fitted numbers of a machine, how well they fit, and how far off training runs are."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hardware_profiles import Cluster, FitError, Parameter, RunError
    from planner.report.console import PlainConsole

_NO_TABLE = "No times of this machine's kernels are at hand: its numbers are of other machines, or assumed (see above)."
_NO_RUN = "No training run on this machine was compared with the model."


def fit_content(cluster: "Cluster") -> dict[str, Any]:
    """What `--json` prints of it."""
    from hardware_profiles import fitted_parameters

    errors, runs = _recorded(cluster)
    return {
        "parameters": [asdict(one) for one in fitted_parameters(cluster)],
        "fit_errors": [asdict(one) for one in errors],
        "run_errors": None if runs is None else asdict(runs),
    }


def print_fit(cluster: "Cluster") -> None:
    """Three tables for people."""
    from hardware_profiles import fitted_parameters
    from planner.report.console import PlainConsole

    console = PlainConsole(soft_wrap=True)
    errors, runs = _recorded(cluster)
    console.print(f"{cluster.name}: {cluster.device.name}")
    _print_parameters(console, fitted_parameters(cluster))
    _print_errors(console, errors)
    _print_runs(console, runs)


def _recorded(cluster: "Cluster") -> "tuple[tuple[FitError, ...], RunError | None]":
    """The recorded fit of a packaged profile; nothing for a user's profile, even under the same name."""
    from hardware_profiles import FitError, RunError, load_profile, profile_names, recorded

    name = cluster.name
    if name not in profile_names() or load_profile(name) != cluster:
        return (), None
    errors = tuple(one for one in recorded(FitError) if one.profile == name)
    return errors, next((one for one in recorded(RunError) if one.profile == name), None)


def _print_parameters(console: "PlainConsole", parameters: "tuple[Parameter, ...]") -> None:
    """Each part is named once. Sources are listed once below, because many numbers share one."""
    from hardware_profiles.parameters import SHARE

    sources: dict[str, int] = {}
    lines = [("part", "number", "value", "kind", "what")]
    part = ""
    for one in parameters:
        number = sources.setdefault(one.source, len(sources) + 1)
        shown, part = "" if one.part == part else one.part, one.part
        value = f"{one.value:g}" if one.unit == SHARE else f"{one.value:g} {one.unit}"
        lines.append((shown, one.name, value, f"{one.kind} [{number}]", one.meaning))
    _print_columns(console, "Fitted numbers", lines)
    console.print()
    for source, number in sources.items():
        console.print(f"[{number}] {source}")


def _print_errors(console: "PlainConsole", errors: "tuple[FitError, ...]") -> None:
    if not errors:
        console.print(f"\n{_NO_TABLE}")
        return
    lines = [("part", "rows", "mean error", "bias", "recorded", "times")]
    for one in errors:
        shares = (f"{one.mean_absolute:.1%}", f"{one.bias:+.1%}")
        lines.append((one.part, str(one.rows), *shares, one.date, one.source))
    title = "These numbers beside measured times (predicted / measured - 1; kernels of 5 µs or more)"
    _print_columns(console, title, lines)


def _print_runs(console: "PlainConsole", runs: "RunError | None") -> None:
    if runs is None:
        console.print(f"\n{_NO_RUN}")
        return
    lines = [("of", "rows", "mean error", "bias", "median tau", "recorded", "runs")]
    for what, rows, mean, bias, tau in (
        ("step time", runs.timed, runs.mean_absolute, runs.bias, runs.median_tau),
        ("peak memory", runs.with_memory, runs.memory_mean_absolute, runs.memory_bias, None),
    ):
        cells = (_known(mean, "{:.1%}"), _known(bias, "{:+.1%}"), _known(tau, "{:.2f}"))
        lines.append((what, str(rows), *cells, runs.date, runs.runs))
    title = f"The whole model beside {runs.rows} published training runs (predicted / measured - 1)"
    _print_columns(console, title, lines)


def _print_columns(console: "PlainConsole", title: str, lines: Sequence[tuple[str, ...]]) -> None:
    """Lines of cells under a title. Lines are never wrapped, also on a narrow terminal."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    console.print(f"\n{title}")
    for cells in lines:
        console.print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())


def _known(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)

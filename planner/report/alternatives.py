"""The cost of other choices, for people."""

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group, RenderableType

from planner.plan.compare.alternatives import Priced, Subject
from planner.plan.compare.explanation import Explanation, Outcome, Sensitivity
from planner.plan.plan import Prediction
from planner.report.console import styled
from planner.report.differences import signed_bytes, signed_seconds
from planner.report.table import table_of
from planner.report.units import bytes_text, percent_text, seconds_text

_LONGEST = Sensitivity(name="sequence length", change="", kept="", searched=None, devices=1, tokens=None)
_WITH_RATES = 2 * (16 + 11) + 5 + 3 * 2
"""Width of a line without the name that leaves room for tokens per second."""

_SHOWN = 20
"""Maximum number of choices shown of one operator or parameter; the others are counted."""


def alternatives_table(
    subject: Subject, rule: str, found: Sequence[Priced], around: Mapping[str, Outcome]
) -> RenderableType:
    """Every choice for an operator or parameter, with its cost relative to the chosen one. `around` has the best plan
    with each choice, as far as that was searched."""
    kind = "stored as weight/gradient/state" if subject.parameter else f"split as {rule}"
    alike = f", and {len(subject.twins) - 1} like it" if len(subject.twins) > 1 else ""
    columns = ("", "all else unchanged", "memory", *(("searched around it", "memory") if around else ()), "")
    table = table_of("", *columns)
    for column in table.columns[1:-1]:
        column.justify = "right"
    chosen = next(one for one in found if one.chosen)
    for one in found[:_SHOWN]:
        cells: list[RenderableType] = [_mark(one), *_change(one.seconds, one.peak, chosen)]
        if around:
            best = around.get(one.choice)
            cells += _change(best.step_seconds, best.peak_bytes, chosen) if isinstance(best, Prediction) else ("", "")
        table.add_row(*cells, _fate(one, around.get(one.choice)))
    if len(found) > _SHOWN:
        table.add_row(f"and {len(found) - _SHOWN} more")
    return Group(styled("\n", (subject.name, "bold"), f"{alike}: {kind}"), table)


def _mark(one: Priced) -> RenderableType:
    return styled((one.choice, "bold")) if one.chosen else one.choice


def _change(seconds: float | None, peak: float | None, chosen: Priced) -> tuple[str, str]:
    if seconds is None or peak is None or chosen.seconds is None or chosen.peak is None:
        return "", ""
    return signed_seconds(seconds - chosen.seconds), signed_bytes(peak - chosen.peak)


def _fate(one: Priced, around: Outcome | None) -> str:
    words = ["chosen"] if one.chosen else []
    if one.seconds is None:
        words.append("not possible here")
    elif not one.fits:
        words.append("does not fit")
    if isinstance(around, str):
        words.append("nor anything around it" if words else "nothing fits around it")
    return "; ".join(words)


class SensitivityLines:
    """Lines on how the step time changes when one input changes, one line at a time as results arrive. `known` has the
    first result and all names; `width` is that of the terminal."""

    def __init__(self, known: Sequence[Sensitivity], width: int) -> None:
        self._first = known[0]
        self._name = max(len(row.name) for row in (*known, _LONGEST))
        self._rates = width >= self._name + _WITH_RATES

    @property
    def head(self) -> RenderableType:
        """The heading of the lines."""
        rate = "tokens/s" if self._first.tokens is not None else "samples/s"
        line = self._line("", "", ("this plan kept", rate), ("searched again", rate))
        return Group(styled("\n", ("What if", "bold")), styled((line, "dim")))

    def line(self, row: Sensitivity) -> RenderableType:
        """One line."""
        if not row.change:  # the base of the comparison
            self._first = row
        kept, best = _cells(row, row.kept, self._first.kept), _cells(row, row.searched, self._first.searched)
        why = row.kept if isinstance(row.kept, str) else row.searched if isinstance(row.searched, str) else ""
        return styled(f"{self._line(row.name, row.change, kept, best)}  {why}".rstrip())

    def _line(self, name: str, change: str, *found: tuple[str, str]) -> str:
        cells = [f"{seconds:>16}" + (f"{rate:>11}" if self._rates else "") for seconds, rate in found]
        return "  ".join((name.ljust(self._name), change.ljust(5), *cells)).rstrip()


def _cells(row: Sensitivity, found: Outcome | None, base: Outcome | None) -> tuple[str, str]:
    """Step time with its change, and throughput per device."""
    if not isinstance(found, Prediction):
        return "" if found is None else "-", ""
    rate = found.samples_per_second * (row.tokens or 1) / row.devices
    change = ""
    if isinstance(base, Prediction) and row.change:
        more = found.step_seconds / base.step_seconds - 1
        change = f" ({'+' if more > 0 else '-' if more < 0 else ''}{percent_text(abs(more))})"
    return f"{seconds_text(found.step_seconds)}{change}", f"{rate:,.4g}" if rate < 1000 else f"{rate:,.0f}"


ABOUT = (
    "This plan kept: the same choices, with more or fewer micro-batches, or a longer or shorter data-parallel axis."
    " Searched again: nothing fixed, until the gap is at most 1%. With pipelines, the gap is about the objective; steps"
    " are within a few percent of it, so rows may differ by that much for no other reason."
)
"""The text below the table of sensitivities."""


def binding_lines(found: Explanation, rows: Sequence[Sensitivity]) -> Iterator[str]:
    """The limits of the plan: the resource that takes most of the step, memory, links, launches."""
    share = dict(found.shares)[found.largest] / found.step_seconds
    yield f"Most of the step is {found.largest}, {percent_text(share)}."
    free = max(0.0, found.free_bytes)
    where = f" at pipeline rank {found.fullest} of {found.ranks}" if found.ranks > 1 else ""
    yield f"{bytes_text(free)} are free on the fullest device{where}."
    for row in rows:
        saved = _saved(row.kept, rows[0].kept)
        faster = row.name.startswith(("bandwidth", "launches")) and row.change in ("x 2", "/ 2")
        if faster and saved > 0:
            part = percent_text(saved / found.step_seconds)
            yield f"With {row.name} {row.change} this plan takes {seconds_text(saved)} less ({part})."


def memory_line(rows: Sequence[Sensitivity]) -> str:
    """Whether memory binds: the time that the best plan saves with 10% more memory; empty if that was not searched."""
    more = next((row for row in rows if row.name == "memory" and row.change.startswith("+")), None)
    if more is None or not isinstance(more.searched, Prediction):
        return ""
    saved = _saved(more.searched, rows[0].searched)
    if saved <= 0:
        return "Memory does not bind: with 10% more memory, no plan more than 1% faster was found."
    return f"Memory binds: with 10% more memory, the best plan takes {seconds_text(saved)} less."


def _saved(found: Outcome | None, base: Outcome | None) -> float:
    both = isinstance(found, Prediction) and isinstance(base, Prediction)
    return base.step_seconds - found.step_seconds if both else 0.0  # type: ignore[union-attr]

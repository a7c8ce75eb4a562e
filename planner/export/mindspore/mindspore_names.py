"""Maps names of a MindSpore strategy file to names of the model."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from planner.export.mindspore.mindspore_files import Item, Row
from planner.graph.operator_graph import OperatorGraph

_PARTS = 2  # of a prefix


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """How names of the file become names of the model: remove a prefix, then add another one."""

    known: frozenset[str]
    aliases: Mapping[str, str]
    drop: str = ""
    add: str = ""

    @staticmethod
    def of(graph: OperatorGraph, items: Sequence[Item], rows: Sequence[Row]) -> "Names":
        """The prefixes with which most names of the file are names of the model, the shortest ones if several do."""
        aliases = {alias: p.name for p in graph.parameters for alias in (p.name, *p.aliases)}
        modules = {op.module for op in graph.operators}
        known = frozenset({*aliases, *modules, *(".".join(m.split(".")[:n]) for m in modules for n in range(4))})
        theirs = {*(row.name for row in rows), *(item.owner for item in items)}
        drops, adds = all_starts(theirs), all_starts(aliases)
        matches = Matches(known, theirs, drops, adds)
        drop, add = max(((drop, add) for drop in drops for add in adds), key=matches.count)
        return Names(known=known, aliases=aliases, drop=drop, add=add)

    def words(self) -> list[str]:
        """Notes on prefixes that differ."""
        found = [f"without '{self.drop}.'"] if self.drop else []
        found += [f"with '{self.add}.' before them"] if self.add else []
        return [f"names of the file are those of the model {' and '.join(found)}"] if found else []

    def of_model(self, name: str) -> str | None:
        """The model's name for a name of the file; None if it has none."""
        rest = name.removeprefix(f"{self.drop}.") if self.drop and name != self.drop else name
        rest = "" if self.drop and name == self.drop else rest
        found = ".".join(part for part in (self.add, rest) if part)
        return self.aliases.get(found, found) if found in self.known else None


class Matches:
    """Counts how many names of a file are the model's, for pairs of removed and added prefixes.

    Names are counted once without prefixes; each prefix then changes only the names that have it. So every name costs
    time once.
    """

    def __init__(self, known: Iterable[str], theirs: Iterable[str], drops: Sequence[str], adds: Sequence[str]) -> None:
        self._plain: Counter[str] = Counter()
        self._changed: Counter[tuple[str, str]] = Counter()
        adding: dict[str, list[str]] = {}
        for name in known:
            for add, rest in _parted(name, frozenset(adds)):
                adding.setdefault(rest, []).append(add)
        beginnings = frozenset(drops)
        for name in theirs:
            as_it_is = adding.get(name, ())
            self._plain.update(as_it_is)
            for drop, rest in _parted(name, beginnings):
                if drop:
                    self._changed.update((drop, add) for add in adding.get(rest, ()))
                    self._changed.subtract((drop, add) for add in as_it_is)

    def count(self, names: tuple[str, str]) -> int:
        """Matches with the first prefix removed and the second one added."""
        return self._plain[names[1]] + self._changed[names]


def _parted(name: str, beginnings: Collection[str]) -> Iterator[tuple[str, str]]:
    """The prefixes of a name, the empty one among them, each with the rest of the name."""
    yield "", name
    parts = name.split(".")
    for n in range(1, min(_PARTS, len(parts)) + 1):
        beginning = ".".join(parts[:n])
        if beginning and beginning in beginnings:
            yield beginning, ".".join(parts[n:])


def all_starts(names: Iterable[str]) -> list[str]:
    """The empty prefix and the prefixes of names, short ones first."""
    return sorted({"", *(start for name in names for start in _starts(name))}, key=lambda start: (len(start), start))


def _starts(name: str) -> list[str]:
    """`net` and `net.layers` of `net.layers.0.w1`."""
    parts = name.split(".")
    return [
        ".".join(parts[:n])
        for n in range(1, _PARTS + 1)
        if n <= len(parts) and not any(part.isdigit() for part in parts[:n])
    ]

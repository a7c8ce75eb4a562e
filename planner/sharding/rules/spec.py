"""The forms in which rules are written. Each spec is data; `build` turns it and the shapes of a call into a `Rule`.

    einsum.py   dims with roles: contractions, lookups, losses
    shapes.py   the rule follows from the shapes: elementwise, normalisation, reductions, operators made from nothing
    views.py    the same elements elsewhere: reshape, permute, slices, joins

No spec knows the name of an operator.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from planner.errors import RuleError
from planner.graph.call import Call, Typed
from planner.sharding.rule import Dims, Factor, FactorKind, Rule

_LEADING = ("b", "s", "t", "u", "w", "x")
Saves = tuple[tuple[int, tuple[int, ...]], ...]


class RuleSpec(ABC):
    """How to build the rule of a call."""

    @abstractmethod
    def build(self, call: Call) -> Rule:
        """The rule of one call. Raises RuleError where the shapes do not match the operator."""


class FactorTable:
    """Factors collected while a rule is built; a factor met again must have the same extent."""

    def __init__(self, op: str) -> None:
        self._op = op
        self._factors: dict[str, Factor] = {}

    def add(self, name: str, extent: int, kind: FactorKind = FactorKind.PARALLEL) -> int:
        known = self._factors.get(name)
        if known is None:
            self._factors[name] = Factor(name=name, extent=extent, kind=kind)
        elif known.extent != extent:
            raise RuleError(
                f"{self._op}: factor '{name}' has extent {known.extent} in one tensor and {extent} in another"
            )
        return list(self._factors).index(name)

    def add_unless_one(self, name: str, extent: int, kind: FactorKind = FactorKind.PARALLEL) -> tuple[int, ...]:
        """The factor alone; nothing where its extent is 1."""
        return (self.add(name, extent, kind),) if extent != 1 else ()

    def add_exchange(
        self,
        first: str,
        second: str,
        kind: FactorKind = FactorKind.EXCHANGE,
        name: str | None = None,
        reach: int = 0,
    ) -> int | None:
        """An exchange of two factors, named `first@second` unless said otherwise; nothing where one of them has extent
        1 and is no factor."""
        if first not in self._factors or second not in self._factors:
            return None
        parts = (list(self._factors).index(first), list(self._factors).index(second))
        name = name or f"{first}@{second}"
        self._factors[name] = Factor(name=name, extent=1, kind=kind, parts=parts, reach=reach)
        return list(self._factors).index(name)

    def set_kind(self, name: str, kind: FactorKind) -> None:
        self._factors[name] = Factor(name=name, extent=self._factors[name].extent, kind=kind)

    def freeze(self) -> tuple[Factor, ...]:
        return tuple(self._factors.values())


def dims_of(
    table: FactorTable, shape: Sequence[int], kind: FactorKind = FactorKind.PARALLEL, prefix: str = "d"
) -> Dims:
    """One factor per dim named d0, d1, ...; dims of extent 1 have none."""
    return tuple(
        (table.add(f"{prefix}{dim}", extent, kind),) if extent != 1 else () for dim, extent in enumerate(shape)
    )


def normal_dim(dim: int, rank: int) -> int:
    """A dim counted from the front."""
    return dim + rank if dim < 0 else dim


def integers(value: Typed) -> tuple[int, ...]:
    """An int or a list of ints as a tuple."""
    if isinstance(value, int):
        return (value,)
    if isinstance(value, tuple) and all(isinstance(item, int) for item in value):
        return tuple(item for item in value if isinstance(item, int))
    raise RuleError(f"expected integers, found {value!r}")


def broadcast_dims(result: Dims, shape: Sequence[int], operand: Sequence[int], op: str) -> Dims:
    offset = len(shape) - len(operand)
    if offset < 0 or any(extent not in (1, shape[offset + dim]) for dim, extent in enumerate(operand)):
        raise RuleError(f"{op}: an operand of shape {tuple(operand)} does not broadcast to {tuple(shape)}")
    return tuple(result[offset + dim] if extent != 1 else () for dim, extent in enumerate(operand))


def leading_names(count: int) -> tuple[str, ...]:
    """Names for the leading dims that a pattern leaves open."""
    return _LEADING[:count] if count <= len(_LEADING) else tuple(f"b{i}" for i in range(count))


def present(saves: Saves, count: int) -> Saves:
    """`saves` of a call with `count` tensor operands: a number in the place of a tensor is not kept, and has no
    gradient that would need anything kept."""
    found = ((i, tuple(j for j in js if j < count)) for i, js in saves if i < count)
    return tuple((i, js) for i, js in found if js)

"""The problem that every solver solves, and the only place where a choice is priced.

Every variable picks one of its candidates. A candidate costs time and memory, and so does every pair of candidates of
two variables that an edge joins:

    a ───── b ───── c          time      = sum over nodes and edges
    │       │                  memory    = sum over nodes and edges
    d       e                  transient = maximum over nodes: they live for a moment, one after the other
                               peak      = memory + transient, which must not exceed the limit

An infinite time forbids a candidate or a pair. The numbers already include multiplicities, such as those of repeated
blocks. Nothing here knows what a variable stands for.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Status = Literal["optimal", "feasible", "infeasible", "cutoff", "unknown"]

# A peak that exceeds the limit by this relative amount still fits: sums in different orders differ by less.
FEASIBILITY_TOLERANCE = 1e-9

# A choice within this relative distance of the proved bound is called optimal, for the same reason.
OPTIMALITY_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Variable:
    """One decision: the cost of each of its K candidates.

    Attributes:
        name: for messages.
        time: (K,) seconds; infinite if the candidate is forbidden.
        memory: (K,) bytes that stay.
        transient: (K,) bytes that live for a moment; only the largest of all variables counts.
    """

    name: str
    time: Array
    memory: Array
    transient: Array

    def __post_init__(self) -> None:
        where = f"variable '{self.name}'"
        time = _costs(self.time, where=f"time of {where}")
        object.__setattr__(self, "time", time)
        if time.ndim != 1 or not time.size:
            raise ValueError(f"time of {where} has shape {time.shape}; one number for each of at least one candidate")
        for field in ("memory", "transient"):
            values = _bytes(getattr(self, field), shape=time.shape, where=f"{field} of {where}")
            object.__setattr__(self, field, values)
        if self.transient.min() < 0:
            raise ValueError(f"transient of {where} is {self.transient.min()}; it cannot be negative")

    @property
    def size(self) -> int:
        """The number of candidates."""
        return self.time.size


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Edge:
    """The additional cost of pairs of candidates of two variables.

    Attributes:
        first, second: positions of the variables, first < second.
        time: (K_first, K_second) seconds; infinite if the pair is forbidden.
        memory: (K_first, K_second) bytes that stay.
    """

    first: int
    second: int
    time: Array
    memory: Array

    def __post_init__(self) -> None:
        where = f"edge {self.first}-{self.second}"
        if not 0 <= self.first < self.second:
            raise ValueError(f"{where}: needs 0 <= first < second; swap the ends and transpose the tables")
        time = _costs(self.time, where=f"time of {where}")
        object.__setattr__(self, "time", time)
        object.__setattr__(self, "memory", _bytes(self.memory, shape=time.shape, where=f"memory of {where}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The cost of a choice: seconds, bytes, and whether it is allowed and fits."""

    time: float
    memory: float
    transient: float
    peak: float
    feasible: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """Variables, the edges between them (several may join the same pair), and the limit of the peak in bytes."""

    variables: tuple[Variable, ...]
    edges: tuple[Edge, ...] = ()
    memory_limit: float = math.inf

    def __post_init__(self) -> None:
        if not self.variables:
            raise ValueError("a problem needs at least one variable")
        if math.isnan(self.memory_limit):
            raise ValueError("memory_limit is nan; leave it infinite where there is no limit")
        sizes = self.sizes
        for edge in self.edges:
            if edge.second >= len(sizes):
                raise ValueError(f"edge {edge.first}-{edge.second}: there are only {len(sizes)} variables")
            if edge.time.shape != (expected := (sizes[edge.first], sizes[edge.second])):
                names = f"'{self.variables[edge.first].name}' and '{self.variables[edge.second].name}'"
                raise ValueError(
                    f"edge between {names} has shape {edge.time.shape}, their candidates ask for {expected}"
                )

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of candidates of each variable."""
        return tuple([variable.time.size for variable in self.variables])

    @property
    def capacity(self) -> float:
        """The largest peak that counts as fitting: the limit plus the tolerance."""
        return self.memory_limit + FEASIBILITY_TOLERANCE * abs(self.memory_limit)

    def evaluate(self, choice: Sequence[int]) -> Evaluation:
        """Price a choice: one candidate per variable, by position. Sums are rounded once, so their order does not
        matter."""
        if len(choice) != len(self.variables):
            raise ValueError(f"the choice has {len(choice)} entries for {len(self.variables)} variables")
        for variable, candidate in zip(self.variables, choice, strict=True):
            if not 0 <= candidate < variable.time.size:
                raise ValueError(f"variable '{variable.name}' has {variable.size} candidates, asked for {candidate}")
        nodes = list(zip(self.variables, choice, strict=True))
        pairs = [(edge, (choice[edge.first], choice[edge.second])) for edge in self.edges]
        times = [variable.time.item(k) for variable, k in nodes]
        times += [edge.time.item(cell) for edge, cell in pairs]
        memories = [variable.memory.item(k) for variable, k in nodes]
        memories += [edge.memory.item(cell) for edge, cell in pairs]
        time, memory = math.fsum(times), math.fsum(memories)
        transient = max(variable.transient.item(k) for variable, k in nodes)
        peak = memory + transient
        fits = peak <= self.capacity and time < math.inf
        return Evaluation(time=time, memory=memory, transient=transient, peak=peak, feasible=fits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """What a solver found and proved.

    Attributes:
        status: "optimal": `choice` fits and nothing that fits is faster (within OPTIMALITY_TOLERANCE). "feasible":
            `choice` fits; `gap` says how much faster another one might be. "infeasible": nothing fits. "cutoff":
            nothing that fits is faster than the upper bound of the caller. "unknown": the solver gave up without a
            choice or a proof.
        choice: a candidate per variable; None unless optimal or feasible.
        evaluation: `problem.evaluate(choice)`, or None.
        bound: every choice that fits takes at least this time; infinite if infeasible.
        least_memory: if infeasible, the exact smallest peak of any allowed choice; infinite if no choice is allowed at
            all. None otherwise.
        statistics: facts about the search, by name, for people.
    """

    status: Status
    choice: tuple[int, ...] | None = None
    evaluation: Evaluation | None = None
    bound: float = -math.inf
    least_memory: float | None = None
    statistics: tuple[tuple[str, float], ...] = ()

    @property
    def gap(self) -> float:
        """How far the time may be above the best possible one, relative to the time; infinite without a choice."""
        if self.evaluation is None:
            return math.inf
        time = self.evaluation.time
        if time <= self.bound:
            return 0.0
        return (time - self.bound) / abs(time) if time else math.inf


def _costs(values: ArrayLike, *, where: str) -> Array:
    """A table of times: numbers or plus infinity."""
    table = np.asarray(values, dtype=np.float64)
    least = table.min(initial=math.inf)  # nan if any entry is
    if math.isnan(least) or least == -math.inf:
        raise ValueError(f"{where} has an entry {least}; it must be a number, or inf where forbidden")
    return table


def _bytes(values: ArrayLike, *, shape: tuple[int, ...], where: str) -> Array:
    """A table of bytes with the shape of its table of times: finite numbers."""
    table = np.asarray(values, dtype=np.float64)
    if table.shape != shape:
        raise ValueError(f"{where} has shape {table.shape}, its time has {shape}")
    if not (math.isfinite(table.min(initial=0.0)) and math.isfinite(table.max(initial=0.0))):
        raise ValueError(f"{where} has an entry that is not finite")
    return table

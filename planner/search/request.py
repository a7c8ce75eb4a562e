"""What is asked of the search."""

from dataclasses import dataclass
from typing import Literal

from hardware_profiles import Cluster
from planner.graph.operator_graph import OperatorGraph
from planner.plan.plan import ModelReference
from planner.search.space import FREE, Pinned

ALGORITHMS = ("dynamic_programming", "recursive_programming", "sharding_propagation", "ilp", "exhaustive")
"""Searches that can be asked for; `exhaustive` is the oracle, for the smallest models."""

OBJECTIVES = ("time", "memory", "cost")
"""What a plan is best at: seconds of a step, bytes per device, device-seconds of a step."""

Objective = Literal["time", "memory", "cost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A strategy that the user has decided for the operators whose name matches.

    Attributes:
        pattern: operator names, with the wildcards of `fnmatch` (`*`, `?`, `[...]`).
        strategy: per mesh axis the name of a factor of the operator's rule, or "batch" or "sequence", "-" for none, or
            "*" for what the search finds; or, in `cuts`, how many pieces each dim of each operand is cut into.
    """

    pattern: str
    strategy: tuple[str, ...] = ()
    cuts: tuple[tuple[int, ...], ...] = ()

    def text(self) -> str:
        """As it is written on the command line."""
        cuts = "(" + ", ".join(f"({', '.join(map(str, dims))})" for dims in self.cuts) + ")"
        return f"{self.pattern}={','.join(self.strategy) if self.strategy else cuts}"


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """What to plan: a traced graph whose example inputs have `batch` samples, a cluster with its devices, the training
    step, and what is decided already.

    `top` best plans are kept, of different configurations. `time_limit` is in seconds; the best plan by then is
    returned with its gap. `memory_limit` lowers what a device may fill, in bytes. `prune` is for tests: without it
    every configuration is evaluated in full. `certify` asks an integer program what it makes of the best plans.
    """

    graph: OperatorGraph
    batch: int
    model: ModelReference
    cluster: Cluster
    global_batch: int
    precision: str = "bf16"
    optimizer: str = "adamw"
    algorithm: str = "dynamic_programming"
    pinned: Pinned = FREE
    shards: tuple[Shard, ...] = ()
    objective: Objective = "time"
    top: int = 1
    time_limit: float | None = None
    memory_limit: float | None = None
    prune: bool = True
    certify: bool = False

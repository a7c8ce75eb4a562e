"""What is asked of the search."""

from dataclasses import dataclass

from hardware_profiles import Cluster
from planner.graph.operator_graph import OperatorGraph
from planner.plan.plan import ModelReference
from planner.search.space import FREE, Pinned

ALGORITHMS = ("dynamic_programming",)
"""Searches that can be asked for; `exhaustive` is the oracle of the tests."""


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """What to plan:

    a traced graph whose example inputs have `batch` samples, a cluster with its devices, and the training step.
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
    prune: bool = True

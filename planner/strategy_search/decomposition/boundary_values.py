"""What crosses the boundary between blocks, for every state of it: values from one stage to the next, and what is kept
of them.

An array has an axis for each variable of the boundary, of the size of its candidates.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from hardware_profiles import Cluster, Group, Machine, MixedCluster, links_of_ranks
from planner.plan.prediction.walk.stage_cost import holders_of, transfer_seconds
from planner.strategy_search.decomposition.chain import Crossing
from planner.strategy_search.request.template import Key
from planner.strategy_search.tables.cost_table import CostTables

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class BoundaryValues:
    """Values for the states of a boundary: `shape` has the number of candidates of each of its variables; pieces choose
    those in `relaxed` for themselves. The devices of a stage are `cluster`, those of all stages `machine`."""

    tables: CostTables
    cluster: Cluster
    machine: Machine
    stages: int
    boundary: tuple[Key, ...]
    shape: tuple[int, ...]
    relaxed: tuple[int, ...]

    def crossing(self) -> Crossing:
        """Bytes and seconds of the values that cross from one stage to the next."""
        template = self.tables.template
        if self.stages == 1:
            return no_crossing(self.of_states(self.nothing()))
        graded = template.graph.differentiable
        known = graded if len(template.held) == 1 else ()  # with several kinds, not all blocks keep it when recomputed
        passing = [name for name in template.passing if name in known]
        staying = [name for name in template.passing if name not in known]
        over = cache(self._over)
        (forward, backward), (forward_around, backward_around) = (
            over(self.links(*ranks)) for ranks in ((0, 1), (0, self.stages - 1))
        )
        mixed = isinstance(self.machine, MixedCluster)
        between = [over(self.links(rank, rank + 1)) for rank in range(self.stages - 1 if mixed else 0)]
        return Crossing(
            nbytes=self._received([name for name in template.carried if name in graded]),
            passing=self._received(passing),
            staying=self._received([*staying, *(name for name in template.carried if name not in graded)]),
            forward=forward,
            backward=backward,
            forward_around=forward_around,
            backward_around=backward_around,
            between=tuple(between),
        )

    def handed(self) -> Array:
        """Bytes of the outputs of a block that the next one keeps unchanged, for each state of the boundary."""
        template = self.tables.template
        found = self.nothing()
        for name in template.carried:
            if share := template.kept_of(name, by_rest=False):
                found = found + share * self.along(template.graph.producer[name], self.tables.result_bytes[name])
        return self.of_states(found)

    def ending(self) -> Array:
        """Bytes of its outputs that the last block keeps in addition to what others keep, for each state; may be
        negative."""
        template = self.tables.template
        found = self.nothing()
        for name in template.carried:
            more = template.kept_of(name, by_rest=True) - template.kept_of(name, by_rest=False)
            if more:
                found = found + more * self.along(template.graph.producer[name], self.tables.result_bytes[name])
        return self.of_states(found)

    def links(self, one: int, other: int) -> tuple[Group, ...]:
        """The links between two pipeline ranks."""
        return links_of_ranks(self.machine, one, other, self.stages, self.tables.mesh.size)

    def nothing(self) -> Array:
        """Zeros for the states of the boundary, to which values `along` its axes are added."""
        return np.zeros([1] * len(self.boundary))

    def along(self, key: Key, values: Array) -> Array:
        """Values of the candidates of a maker or a parameter, along its axis of the boundary; the least, if pieces
        choose for themselves."""
        shape = [1] * len(self.boundary)
        if key in self.relaxed:
            return np.full(shape, values.min())
        shape[self.boundary.index(key)] = values.size
        return values.reshape(shape)

    def of_states(self, values: Array) -> Array:
        """Values for every state of the boundary; a view that takes the memory of the given axes only."""
        return np.broadcast_to(values, self.shape)

    def _received(self, names: Sequence[str]) -> Array:
        """Bytes of these values for each state of the boundary."""
        found = self.nothing()
        for name in names:
            found = found + self.along(self.tables.template.graph.producer[name], self.tables.result_bytes[name])
        return self.of_states(found)

    def _over(self, links: tuple[Group, ...]) -> tuple[Array, Array]:
        """Seconds for the values that cross, and for their gradients, over some links, for each state of the
        boundary."""
        graph, template = self.tables.template.graph, self.tables.template
        forward = backward = self.nothing()
        for name in (*template.carried, *template.crossing):
            tensor, software, mesh = graph.types[name], self.cluster.software, self.tables.mesh
            seconds = [
                transfer_seconds(n, links, software, holders_of(n, tensor, mesh, self.cluster))
                for n in self.tables.result_bytes[name].tolist()
            ]
            one = self.along(graph.producer[name], np.array(seconds))
            forward = forward + one
            backward = backward + (one if name in graph.differentiable else 0.0)
        return self.of_states(forward), self.of_states(backward)


def no_crossing(none: Array) -> Crossing:
    """The crossing of a single stage."""
    return Crossing(
        nbytes=none, passing=none, staying=none, forward=none, backward=none, forward_around=none, backward_around=none
    )

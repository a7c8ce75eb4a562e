"""The families of a request, and what bounds their configurations before any is evaluated."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from planner.errors import RequestError
from planner.strategy_search.engine.engine import Engine
from planner.strategy_search.engine.families import all_configurations, families_of, family_of
from planner.strategy_search.engine.family import Family, least_share
from planner.strategy_search.engine.regions import MANY, Regions
from planner.strategy_search.request.refusals import no_configuration
from planner.strategy_search.request.space import Configuration


class Families:
    """The configurations of a request that are `among` those of interest, by family. `bounds`: lower bounds that a
    search of the same request with free axes has proved.

    Attributes:
        space: all configurations; empty until `list_all`.
        total: how many of them the search considers.
        all: the families of the search; without those whose parameters do not fit, if there are many.
        regions: bounds for many families at once, if there are many.
        with_any_memory: for members of opened families, bounds that hold however much memory there is; empty if the
            search began with bounds, or has `regions`.
    """

    def __init__(
        self,
        engine: Engine,
        among: Callable[[Configuration], bool] = lambda _: True,
        bounds: Mapping[Configuration, float] = MappingProxyType({}),
    ) -> None:
        self.engine, self.request = engine, engine.request
        self.space: list[Configuration] = []
        self.total = 0
        self.all: list[tuple[Configuration, ...]] = []
        self.regions: Regions | None = None
        self.with_any_memory: dict[Configuration, float] = {}
        self._among, self._proved_before = among, bounds
        self._plain: dict[object, dict[int, Configuration]] = {}  # one stage on each rank: by family, micro-batches
        self._usual: dict[int, tuple[Configuration, ...]] = {}  # usual members, by id

    def list_all(self) -> None:
        """List the configurations and their families. Raises RequestError if there are none."""
        self.space = list(filter(self._among, all_configurations(self.engine)))
        if not self.space:
            raise RequestError(no_configuration(self.request, self.engine.template))
        self.total = len(self.space)
        self.all = families_of(self.space)
        self._plain = {
            members[0].family: {c.micro_batches: c for c in members if c.virtual_stages == 1} for members in self.all
        }
        bounded_together = self.request.alternatives and self.request.prune and len(self.engine.groups) == 1
        if bounded_together and len(self.all) >= MANY:
            self.regions = Regions(engine=self.engine, families=self.all)
            self.all = [members for members in self.all if self.regions.fits(members[0])] or self.all

    def with_one_stage(self, configuration: Configuration) -> Configuration:
        """The same configuration with one stage on each rank."""
        return self._plain[configuration.family][configuration.micro_batches]

    def waits_for_plain(self, configuration: Configuration) -> bool:
        """Whether a configuration has virtual stages whose number the user left open, and so waits until the same
        configuration with one stage on each rank is done."""
        c = configuration
        return (
            c.virtual_stages > 1
            and self.request.pinned.virtual_stages is None
            and c.micro_batches in self._plain.get(c.family, ())
        )

    def is_apart(self, configuration: Configuration) -> bool:
        """Whether virtual stages hold unequal numbers of blocks and the user left their number open. They are tried
        when their family is opened, and the bound of the search does not cover them."""
        return configuration.uneven and self.waits_for_plain(configuration)

    def usual(self, members: tuple[Configuration, ...]) -> tuple[Configuration, ...]:
        """The members of a family that decide when it is opened: those whose virtual stages do not hold unequal blocks,
        if any."""
        if id(members) not in self._usual:
            self._usual[id(members)] = tuple(c for c in members if not self.is_apart(c)) or members
        return self._usual[id(members)]

    def bound_before(self, configuration: Configuration) -> float:
        """A lower bound on the step time by the work alone, and by a search with free axes of the same request. The
        latter holds because axes with one purpose each leave operators fewer strategies on the same mesh."""
        by_work, c = self.engine.bound(configuration), configuration
        if not self._proved_before or len(c.mesh) > 2 or c.decided is not None or "ring" in c.roles:
            return by_work
        return max(by_work, self._proved_before.get(replace(c, roles=(), zigzag=False), 0.0))

    def bound_in_family(self, configuration: Configuration, usual: float) -> float:
        """A lower bound on the step time of a member of a family whose usual members have the bound `usual`. Unequal
        virtual stages take at least a share of what their configuration with one stage on each rank takes."""
        if not self.is_apart(configuration):
            return usual
        return max(least_share(configuration) * usual, self.bound_before(configuration))

    def bound_of_all(self, members: tuple[Configuration, ...]) -> float:
        """A lower bound on the step time of the usual members of a family."""
        return min(map(self.bound_before, self.usual(members)))

    def bounds_of_each(
        self, members: tuple[Configuration, ...], floor: float, cutoff: float
    ) -> tuple[Family | None, list[float]]:
        """The family of these members, and for each the bound that the largest micro-batch proves; no family if it
        proves nothing. `floor` is the bound of the usual members. Members whose bounds reach the `cutoff` get no better
        ones."""
        family = family_of(self.engine, members) if self.request.prune else None
        floors = [max(self.bound_in_family(c, floor), self.bound_before(c)) for c in members]
        bounds = floors if family is None else family.step_seconds(members, floors, cutoff)
        if self.regions is None and not self._proved_before:
            self.with_any_memory.update(zip(members, bounds, strict=True))
        return family, bounds

"""The cost tables of configurations, and the pieces that are cut from them. The last ones that were asked for are
kept."""

import math
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TypeAlias
from weakref import WeakValueDictionary

from hardware_profiles import Cluster, Machine, MixedCluster, of_one_kind, parts_of
from planner.pricing import Paths
from planner.pricing.bucket_size import sized
from planner.sharding.mesh import build_mesh
from planner.sharding.rescale import rescale_batch
from planner.sharding.update import EACH, Update
from planner.strategy_search.decomposition.chain import Chain
from planner.strategy_search.decomposition.cutting import cut
from planner.strategy_search.decomposition.heterogeneous_pipeline import HeterogeneousPipeline
from planner.strategy_search.decomposition.lagrangian import Multipliers
from planner.strategy_search.decomposition.setting import setting_of
from planner.strategy_search.engine.block_times import BlockTimes, ExpertTimes
from planner.strategy_search.engine.exchange_overlap import may_exchange_under_work
from planner.strategy_search.engine.outcome import Agreed
from planner.strategy_search.engine.propagation import propagated
from planner.strategy_search.request.constraints import decided_of
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import Configuration
from planner.strategy_search.request.template import Key, Template
from planner.strategy_search.tables.cost_table import CostTables
from planner.strategy_search.tables.table_builder import TableBuilder

KEPT = 4
"""For this many configurations, those asked for last, a store keeps all pieces and what prices of memory have
found."""

_PIECES = 2**26
"""Bytes of pieces that are kept beside those, for the configurations asked for last."""

MOST_STATES = 2**16
"""Number of states of the boundary beyond which each piece chooses layouts of values that every block reads."""

_TABLES = 2**27
"""Bytes of cost tables that are kept, for the configurations asked for last."""

Tables: TypeAlias = tuple[CostTables, ...]
"""The cost tables of a configuration, for every group of devices in the order of the pipeline."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Kept:
    """Cost tables and what was made of them: pieces, by way to gather weights and ways to run blocks, and their prices
    of memory for several numbers of virtual stages."""

    tables: Tables
    pieces: dict[object, HeterogeneousPipeline] = field(default_factory=dict)
    multipliers: dict[object, list[Multipliers]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes that the pieces take."""
        return sum(one.nbytes for one in self.pieces.values())


@dataclass(kw_only=True, eq=False)
class Built:
    """Everything that depends neither on the memory nor on the number of micro-batches. `builders` are kept by mesh,
    `scaled` templates by samples of a micro-batch, and cost `tables` by configuration, with the bytes that they take.
    `alike` holds, for the kept tables, one of each set that computes alike: stages of ZeRO differ in parameters only.
    `regions` and `experts` hold the seconds by which many configurations are bounded, `paths` the paths between
    layouts, by the properties of a mesh that they depend on."""

    builders: dict[object, TableBuilder] = field(default_factory=dict)
    scaled: dict[int, Template] = field(default_factory=dict)
    tables: OrderedDict[object, Tables] = field(default_factory=OrderedDict)
    alike: WeakValueDictionary[object, CostTables] = field(default_factory=WeakValueDictionary)
    nbytes: int = 0
    regions: dict[object, BlockTimes] = field(default_factory=dict)
    experts: dict[object, dict[int, ExpertTimes]] = field(default_factory=dict)
    paths: dict[object, Paths] = field(default_factory=dict)

    @property
    def anew(self) -> "Built":
        """Only the parts that do not depend on what may overlap."""
        return Built(scaled=self.scaled, paths=self.paths)

    @property
    def with_other_offload(self) -> "Built":
        """Only the parts that do not depend on what is offloaded: operators, and what is sent between them."""
        return Built(scaled=self.scaled, paths=self.paths, alike=self.alike)

    def keep(self, key: object, tables: Tables) -> None:
        """Keep these tables, and as many others as fit, those asked for last."""
        self.tables[key] = tables
        self.nbytes += sum(one.nbytes for one in tables)
        while self.nbytes > _TABLES and len(self.tables) > 1:
            _, others = self.tables.popitem(last=False)
            self.nbytes -= sum(one.nbytes for one in others)


@dataclass(kw_only=True, eq=False)
class PieceStore:
    """Builds and keeps the tables and pieces of configurations. `waits`, `capped`, `apart` and `paired` as for
    `Engine`; `gathers` are the ways to gather weights, `capacities` the bytes of a device of each group. `overlapped`:
    collectives of tensor parallelism may overlap with its matrix products. `spreads`: the user's decisions are spread
    by propagation."""

    request: SearchRequest
    template: Template
    built: Built
    gathers: tuple[str, ...]
    groups: tuple[Cluster, ...]
    capacities: tuple[float, ...]
    overlapped: bool
    spreads: bool
    waits: bool
    capped: bool
    apart: bool
    paired: bool

    def __post_init__(self) -> None:
        self._kept: OrderedDict[object, _Kept] = OrderedDict()

    def tables(self, configuration: Configuration) -> Tables:
        """The cost tables of a configuration, for every group of devices in the order of the pipeline."""
        return self._known(configuration).tables

    def pieces(self, configuration: Configuration, gathers: str, agreed: Agreed = ()) -> HeterogeneousPipeline:
        """The pieces of a configuration for a way to gather weights, with the stored layouts and strategies on which
        they `agreed`. Pieces are kept as long as the tables."""
        known = self._known(configuration)
        key = (*self._running(configuration, gathers), agreed)
        if key not in known.pieces:
            own = self._spread(configuration, gathers) if self.spreads else known.tables
            own = tuple(one.launched_apart for one in own) if self.apart else own
            known.pieces[key] = self.cut_from(configuration, own, gathers, agreed=dict(agreed))
            self._make_room()
        return known.pieces[key]

    def multipliers(self, configuration: Configuration, gathers: str, agreed: Agreed = ()) -> list[Multipliers]:
        """The prices of memory of those pieces, which all numbers of virtual stages share."""
        key = (*self._running(configuration, gathers), agreed)
        return self._known(configuration).multipliers.setdefault(key, [])

    def cut_from(
        self,
        configuration: Configuration,
        tables: Tables,
        gathers: str,
        free: Collection[int] = (),
        like: Sequence[Chain] | None = None,
        agreed: Mapping[Key, int] = MappingProxyType({}),
    ) -> HeterogeneousPipeline:
        """Pieces cut from the tables of every group of devices, in the order of the pipeline. `like` are the chains of
        the same tables with weights gathered otherwise, `agreed` gives the candidates of some weights and
        operators."""
        machine, ranks = ordered_machine(self.request, configuration), configuration.pipeline
        offload = self.request.offload_under(gathers)
        chains = tuple(
            cut(
                own,
                group,
                recomputation=configuration.under(self.request.pinned).recomputation,
                stages=ranks,
                free=free,
                activations=offload.activations,
                saved=offload.saved,
                gathers=gathers,
                kept=configuration.under(self.request.pinned).kept,
                machine=machine,
                early=not self.waits,
                like=other,
                agreed=agreed,
                most_states=MOST_STATES,
            )
            for own, group, other in zip(
                tables, parts_of(machine), (None,) * len(tables) if like is None else like, strict=True
            )
        )
        kinds, capacities = (0,) * ranks, self.capacities
        if isinstance(machine, MixedCluster):
            kinds = tuple(machine.group_of_rank(rank, ranks) for rank in range(ranks))
            capacities = tuple(self.capacities[at] for at in configuration.order)
        return HeterogeneousPipeline(chains=chains, kinds=kinds, capacities=capacities)

    def builder(self, configuration: Configuration, group: Cluster) -> TableBuilder:
        """The table builder for the mesh of a configuration on a group of devices; it keeps what it has priced."""
        request, update = self.request, self.update_of(configuration)
        key = (group, configuration.mesh, configuration.zigzag_axes, update, request.alltoall)
        if key not in self.built.builders:
            mesh = build_mesh(
                request.cluster, configuration.mesh, zigzag=configuration.zigzag_axes, alltoall=request.decided_alltoall
            )
            gradients = self.template.gradient_bytes(update) if self.capped else math.inf
            sizes = [sized(update, mesh, one, gradients) for one in self.groups]
            self.built.builders[key] = TableBuilder(
                mesh=mesh,
                cluster=group,
                precision=request.precision,
                optimizer=request.optimizer,
                update=max(sizes, key=lambda update: update.bucket_size),
                offload=request.offload,
                gradients=gradients,
                together=self.gathers != (EACH,),
                ahead=True,
                overlapped=self.overlapped,
                exchanged=may_exchange_under_work(request.pinned, request.cluster),
                paired=self.paired,
                fp8=request.fp8,
                alike=len(self.groups) > 1,
                paths=self.built.paths.setdefault(mesh.routing, {}),
            )
        return self.built.builders[key]

    def update_of(self, configuration: Configuration) -> Update:
        """How gradients are handled: as in the request, or as the training engine does at this configuration's stage of
        ZeRO."""
        request, decided = self.request, configuration.decided
        if request.space is None or decided is None:
            return request.update
        in_fp8 = request.fp8.gathered
        return request.space.update(request.update, decided.zero or 0, request.precision, in_fp8=in_fp8)

    def template_of(self, micro_batches: int) -> Template:
        """The template with the batch of one micro-batch."""
        return self.scaled_to(self.request.padded_batch // micro_batches)

    def scaled_to(self, part: int) -> Template:
        """The template with this many samples."""
        scaled = self.built.scaled
        if part not in scaled:
            graph = rescale_batch(self.template.graph, self.request.prepared_batch, part)
            scaled[part] = replace(self.template, graph=graph)
        return scaled[part]

    def keep(self, configuration: Configuration, tables: Tables) -> None:
        """Keep these tables for a configuration, whatever others could be built for it."""
        key = configuration.priced_alike, self._part(configuration)
        self._kept[key] = _Kept(tables=tables)
        self._kept.move_to_end(key)
        self._make_room()

    def _known(self, configuration: Configuration) -> _Kept:
        """What is kept for a configuration, and for all that differ from it in their virtual stages."""
        key = (configuration.priced_alike, self._part(configuration))
        if key not in self._kept:
            if key not in self.built.tables:
                template = self.template_of(configuration.micro_batches)
                restriction = decided_of(self.request, configuration, template)
                groups = parts_of(ordered_machine(self.request, configuration))
                alike = (configuration.computed_alike, self._part(configuration))
                tables = tuple(
                    self.builder(configuration, one).build(template, restriction, self.built.alike.get((place, *alike)))
                    for place, one in enumerate(groups)
                )
                self.built.alike.update({(place, *alike): one for place, one in enumerate(tables)})
                self.built.keep(key, tables)
            self.built.tables.move_to_end(key)
            self.keep(configuration, self.built.tables[key])
        self._kept.move_to_end(key)
        for other in list(self._kept.values())[:-KEPT]:
            other.multipliers.clear()
        return self._kept[key]

    def _make_room(self) -> None:
        """Keep the `KEPT` configurations asked for last. For others whose tables are kept, keep up to `_PIECES` bytes
        of pieces."""
        others, nbytes = list(self._kept.items())[:-KEPT], 0
        for key, kept in reversed(others):
            nbytes += kept.nbytes
            if nbytes > _PIECES or key not in self.built.tables:
                del self._kept[key]

    def _running(self, configuration: Configuration, gathers: str) -> tuple[object, ...]:
        """The choices in which pieces that are cut from the same tables differ."""
        pinned = configuration.under(self.request.pinned)
        return gathers, pinned.recomputation, pinned.kept

    def _spread(self, configuration: Configuration, gathers: str) -> Tables:
        """The tables with the strategies to which the user's decisions spread (see `propagation`)."""
        request, setting = self.request, setting_of(configuration, self.capacities[0])
        cluster = of_one_kind(request.cluster, "propagation of decisions")
        (tables,) = self.tables(configuration)
        fixed = propagated(tables, setting, cluster, request.pinned.recomputation, MOST_STATES)
        if fixed is None:
            return (tables,)
        return (self.builder(configuration, cluster).build(tables.template, fixed),)

    def _part(self, configuration: Configuration) -> int:
        """Samples of a micro-batch, over all devices of a stage."""
        return self.request.padded_batch // configuration.micro_batches


def ordered_machine(request: SearchRequest, configuration: Configuration) -> Machine:
    """The machine, with its groups in the order of the pipeline."""
    cluster = request.cluster
    return cluster.ordered(configuration.order) if isinstance(cluster, MixedCluster) else cluster

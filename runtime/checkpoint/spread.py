"""How the state of a plan is spread over its ranks: each tensor's layout, the ranks that hold it, and the writers.

    model.norm.weight                        a parameter, in the layout of its weight
    optimizer/exp_avg/model.norm.weight      an optimizer state of it, in the layout of the state
    optimizer/master/model.norm.weight       its float32 master weight, where the model's is narrow; the same layout
    previous/model.norm.weight               the weight of one update ago ("pipedream_2bw"), in the weight's layout
    fp8/model.up.weight                      amax history for delayed scaling, on all ranks that have the weight
    own.weight@3                             a parameter that each device has for itself: the one of place 3 of a stage
    model.mean                               any other name: a buffer, whole on all ranks
    tables.0.weight                          a table off the devices: rows in their order, an equal share per rank
    optimizer/exp_avg/tables.0.weight        ... each rank reads its share from where the rows are, and writes it there

All of it follows from the plan, so every rank computes the same without communication. The ranks that hold a cell share
the writing: cells are assigned from the largest to the smallest, each to the holder with the fewest bytes to write so
far (Graham 1969, longest processing time first: at most 4/3 of the best).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from planner.graph.fp8 import delayed_scales
from planner.graph.placed import tables_outside
from planner.plan.binding.bind import BoundPlan
from planner.plan.layout.parameter_owners import Owner, owners_of
from planner.plan.layout.stage_cut import cut_stage
from planner.sharding.even_cut import piece_length
from planner.sharding.layout import Layout, cuts, replicated, whole_shape
from planner.sharding.matrices import optimizer_of
from planner.sharding.mesh import Mesh
from runtime.checkpoint.fused import saved_cut
from runtime.checkpoint.manifest import SavedCut, SavedTensor
from runtime.checkpoint.regions import Region, cell_number, cell_region, most_cells
from runtime.checkpoint.state_names import (
    MASTER,
    SCALES,
    kept_name,
    own_name,
    previous_name,
    read_name,
    saved_name,
    scales_name,
)
from runtime.checkpoint.tensor_files import dtype_name, dtype_of
from runtime.optimizers.narrow import kept_dtype, wide_dtype
from runtime.optimizers.optimizers import MOMENTS

TABLE_PARTS: Mapping[str, str] = {"exp_avg": "first", "exp_avg_sq": "second"}
"""The optimizer states of tables off the devices: from the kinds in checkpoints to the names in the table
optimizers."""
STALE = "pipedream_2bw"
"""The schedule whose next step needs the weights of one update ago."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A tensor of a plan's state: its whole shape, its layout over the mesh of a stage, and the pipeline ranks that
    hold it. If not all places of the mesh hold it: `only` is the one place that does, or `owners` has, for each of
    these stages, the places that do (`planner.plan.layout.parameter_owners`). A table off the devices is held by no
    rank: its rows are divided into `shares`, which the first places of the mesh read and write. For a padded weight
    `padded` is the shape that is cut over devices: each cell has only the part of its piece that is in the model, which
    may be empty. `cut` says that the tensor is a part of a weight of the module."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: Layout
    stages: tuple[int, ...]
    only: int | None = None
    owners: tuple[frozenset[int], ...] | None = None
    shares: int | None = None
    padded: tuple[int, ...] | None = None
    cut: SavedCut | None = None

    def lengths(self, mesh: Mesh) -> tuple[int, ...] | None:
        """Lengths of its cells on each dim; None where it is cut evenly."""
        own = tuple(map(piece_length, self.shape, self.cuts(mesh)))
        found = own if self.padded is None else tuple(map(piece_length, self.padded, self.cuts(mesh)))
        return None if found == own else found

    def of_cell(self, mesh: Mesh, number: int) -> Region:
        """The region of a cell."""
        return cell_region(self.shape, self.cuts(mesh), number, self.lengths(mesh))

    def cuts(self, mesh: Mesh) -> tuple[int, ...]:
        """The number of cells on each dim."""
        if self.shares is not None:
            return (self.shares, *(1 for _ in self.shape[1:]))
        return cuts(len(self.shape), self.layout, mesh.sizes)

    def cell(self, mesh: Mesh, place: int) -> int:
        """Number of the cell that the device at a place of the mesh holds, if it holds any."""
        if self.shares is not None:
            return place
        return cell_number(len(self.shape), self.layout, mesh.sizes, mesh.coordinate(place))

    def region(self, mesh: Mesh, place: int) -> Region:
        """The region that the device at a place of the mesh holds."""
        return self.of_cell(mesh, self.cell(mesh, place))

    def held_at(self, stage: int, place: int) -> bool:
        """Whether the rank at a place of the mesh of a stage holds a cell of it."""
        if stage not in self.stages or self.only not in (None, place):
            return False
        if self.owners is not None and place not in self.owners[self.stages.index(stage)]:
            return False
        return self.shares is None or place < self.shares

    def cell_of(self, mesh: Mesh, rank: int) -> int | None:
        """Number of the cell that a rank holds; None where it has nothing of it."""
        stage, place = divmod(rank, mesh.size)
        return self.cell(mesh, place) if self.held_at(stage, place) else None

    def cell_bytes(self, mesh: Mesh) -> int:
        """Bytes of each of its cells."""
        return self.of_cell(mesh, 0).elements * dtype_of(self.dtype).itemsize

    def saved(self, mesh: Mesh, files: Sequence[int]) -> SavedTensor:
        """Its entry in a manifest."""
        cuts, lengths = self.cuts(mesh), self.lengths(mesh)
        return SavedTensor(
            shape=self.shape, dtype=self.dtype, cuts=cuts, files=tuple(files), lengths=lengths, cut=self.cut
        )


@dataclass(frozen=True, kw_only=True)
class StateOfPlan:
    """Which tensors the state of a bound plan has, and where they are."""

    bound: BoundPlan

    @cached_property
    def homes(self) -> Mapping[str, tuple[int, ...]]:
        """The pipeline ranks that hold each parameter: the ranks that use it; the first rank holds unused
        parameters."""
        bound = self.bound
        found: dict[str, set[int]] = {name: set() for name in bound.graph.parameter_names}
        for stage in range(len(bound.plan.stages)):
            for name in cut_stage(bound, stage).parameters:
                found[name].add(bound.plan.rank_of(stage))
        return {name: tuple(sorted(stages)) or (0,) for name, stages in found.items()}

    def tensors(
        self, moments: Sequence[str], updates: int, buffers: Mapping[str, tuple[tuple[int, ...], str, tuple[int, ...]]]
    ) -> list[Spread]:
        """All tensors of the state after a number of updates, for an optimizer that keeps these `moments`; `buffers`
        has the shape, dtype and pipeline ranks of each buffer."""
        found = list(self._weights())
        if self.bound.plan.training.update.master_weights:
            narrow = {name: wide for name, wide in self._wide.items() if wide != self.bound.whole.types[name].dtype}
            found += self._kept(MASTER, narrow)
        if updates:
            for kind in moments:
                found += self._kept(kind, {name: one for name, one in self._moments.items() if self._keeps(name, kind)})
            if self.bound.plan.schedule == STALE:
                found += [replace(spread, name=previous_name(spread.name)) for spread in self._weights()]
        found += [self._of(saved_name(name), *buffer) for name, buffer in buffers.items()]
        found += self._scales()
        return found + list(self._tables(moments, updates))

    def _scales(self) -> Iterator[Spread]:
        """The amax histories of delayed scaling."""
        graph, whole = self.bound.graph, replicated(len(self.bound.plan.mesh.axes))
        for name, scales in delayed_scales(graph.operators, graph.types).items():
            dtype = "float64" if graph.types[name].dtype == "float64" else "float32"
            shape = (*scales, self.bound.plan.training.fp8.history)
            stages = self.homes[name]
            yield Spread(name=scales_name(saved_name(name)), shape=shape, dtype=dtype, layout=whole, stages=stages)

    def _tables(self, moments: Sequence[str], updates: int) -> Iterator[Spread]:
        """Tables off the devices, and their optimizer states. The table of a narrow model is wide there."""
        mesh, whole = self.bound.plan.mesh, replicated(len(self.bound.plan.mesh.axes))
        kept = [kind for kind in moments if kind in TABLE_PARTS]
        for table in tables_outside(self.bound.whole):
            wide = dtype_name(wide_dtype(dtype_of(table.dtype)))
            saved = saved_name(table.name)
            names = {saved: table.dtype}
            if wide != table.dtype:
                names[kept_name(MASTER, saved)] = wide
            if updates and table.trainable:
                names |= {kept_name(kind, saved): wide for kind in kept}
            shares = most_cells(table.rows, mesh.size)
            for name, dtype in names.items():
                shape = (table.rows, table.width)
                yield Spread(name=name, shape=shape, dtype=dtype, layout=whole, stages=(0,), shares=shares)

    @cached_property
    def _wide(self) -> Mapping[str, str]:
        """The dtype in which each parameter is updated."""
        types = self.bound.whole.types
        names = sorted(self.bound.graph.parameter_names)
        return {name: dtype_name(wide_dtype(dtype_of(types[name].dtype))) for name in names}

    @cached_property
    def _moments(self) -> Mapping[str, str]:
        """The dtype in which the moments of each parameter are kept."""
        word, types = self.bound.plan.training.update.moment_dtype, self.bound.whole.types
        return {name: dtype_name(kept_dtype(word, dtype_of(types[name].dtype))) for name in self._wide}

    def _weights(self) -> Iterator[Spread]:
        """All parameters; a parameter that each device has for itself appears once per device."""
        for parameter in self.bound.graph.parameters:
            whole = self.bound.whole
            for name in self._copies(parameter.name):
                yield self._of(name, whole.own_shape(parameter.name), whole.types[parameter.name].dtype)

    def _copies(self, name: str) -> list[str]:
        saved = saved_name(name)
        if not self.bound.plan.training.update.is_local(name):
            return [saved]
        return [own_name(saved, place) for place in range(self.bound.plan.mesh.size)]

    def _keeps(self, name: str, kind: str) -> bool:
        """Whether the optimizer keeps a state of this kind for a parameter."""
        return kind in MOMENTS[optimizer_of(self.bound.graph, self.bound.plan.training.optimizer, name)]

    def _kept(self, kind: str, dtypes: Mapping[str, str]) -> Iterator[Spread]:
        """The optimizer states of this kind, one for every trainable parameter that has a dtype in `dtypes`."""
        for parameter in self.bound.graph.parameters:
            if parameter.trainable and parameter.name in dtypes:
                shape = self.bound.whole.own_shape(parameter.name)
                for name in self._copies(parameter.name):
                    yield self._of(kept_name(kind, name), shape, dtypes[parameter.name])

    def _of(self, name: str, shape: tuple[int, ...], dtype: str, stages: tuple[int, ...] = ()) -> Spread:
        """Any tensor of a state, by its name; `stages` are the pipeline ranks that hold a buffer."""
        kept = read_name(name)
        stored = self.bound.parameters.get(kept.tensor)
        if stored is None:
            whole = replicated(len(self.bound.plan.mesh.axes))
            return Spread(name=name, shape=shape, dtype=dtype, layout=whole, stages=stages)
        layout, stages = stored.state if kept.of_optimizer else stored.weight, self.homes[kept.tensor]
        owners = self._owners_of(kept.tensor) if kept.of_optimizer else None
        cut = whole_shape(self.bound.whole.types[kept.tensor].shape, layout, self.bound.plan.mesh.sizes)
        return Spread(
            name=name,
            shape=shape,
            dtype=dtype,
            layout=layout,
            stages=stages,
            only=kept.place,
            owners=owners,
            padded=None if cut == shape else cut,
            cut=saved_cut(name, self.bound.graph.cuts),
        )

    def _owners_of(self, parameter: str) -> tuple[frozenset[int], ...] | None:
        """The places of the mesh that own the state of a parameter, for each of its stages; None where all replicas
        have it."""
        stages = self.homes[parameter]
        if parameter not in self._owners[stages[0]]:
            return None
        mesh = self.bound.plan.mesh
        return tuple(_places_of(self._owners[stage][parameter], mesh) for stage in stages)

    @cached_property
    def _owners(self) -> Sequence[Mapping[str, Owner]]:
        """The owners of states that are sharded as whole tensors, on each pipeline rank."""
        held: list[list[str]] = [[] for _ in range(self.bound.plan.pipeline)]
        for name, stages in self.homes.items():
            for stage in stages:
                held[stage].append(name)
        return [owners_of(self.bound, names) for names in held]


def between_places(name: str, here: Collection[str], there: Collection[str]) -> bool:
    """Whether a tensor exists for a table on the devices or off them, but not in both places: the momentum of dense
    SGD, or a master weight. `here` and `there` are the tables off the devices under two plans."""
    kept = read_name(name)
    if kept.kind == SCALES:
        return True
    return kept.of_optimizer and kept.kind not in TABLE_PARTS and (kept.tensor in here) != (kept.tensor in there)


def writers(spreads: Sequence[Spread], mesh: Mesh, stages: int) -> dict[str, tuple[int, ...]]:
    """For every tensor the ranks that write its cells, cell by cell; all ranks compute the same.

    O(T D log T) for T tensors and D devices.
    """
    load = [0] * (stages * mesh.size)
    found = {}
    for spread, cells in holders(sorted(spreads, key=lambda spread: (-spread.cell_bytes(mesh), spread.name)), mesh):
        size = spread.cell_bytes(mesh)
        chosen = []
        for ranks in cells:
            rank = min(ranks, key=lambda rank: (load[rank], rank))
            load[rank] += size
            chosen.append(rank)
        found[spread.name] = tuple(chosen)
    return found


def holders(spreads: Iterable[Spread], mesh: Mesh) -> Iterator[tuple[Spread, list[list[int]]]]:
    """Every tensor with the ranks that hold it, cell by cell; each layout is computed once."""
    known: dict[tuple[int, Layout, int | None], list[list[int]]] = {}
    for spread in spreads:
        key = (len(spread.shape), spread.layout, spread.shares)
        if key not in known:
            known[key] = _places(spread, mesh)
        yield (
            spread,
            [
                [stage * mesh.size + place for stage in spread.stages for place in _own(spread, stage, places)]
                for places in known[key]
            ],
        )


def _own(spread: Spread, stage: int, places: list[int]) -> list[int]:
    """The places, among some of a stage, that hold a tensor."""
    if spread.owners is not None:
        return [place for place in places if spread.held_at(stage, place)]
    return places if spread.only is None else [spread.only]


@lru_cache(maxsize=4096)
def _places_of(owner: Owner, mesh: Mesh) -> frozenset[int]:
    return frozenset(place for place in range(mesh.size) if owner.at(mesh.coordinate(place)))


def _places(spread: Spread, mesh: Mesh) -> list[list[int]]:
    """The places of the mesh that hold each cell of a layout."""
    cells: dict[int, list[int]] = {}
    for place in range(mesh.size if spread.shares is None else spread.shares):
        cells.setdefault(spread.cell(mesh, place), []).append(place)
    return [cells[number] for number in range(len(cells))]

"""A plan's tables off the devices, for the operators of one rank.

    plan: tables.0.weight is on the host       ranks divide it over the memory of their hosts    (`HostTables`)
          tables.1.weight is on servers        this rank is a worker of the servers              (`TableClient`)

An operator gets the rows of its ids and looks them up on the device. Gradients of the rows are summed over the
micro-batches, and pushed once per step. Ranks on an axis that does not cut the ids look up the same ids and have the
same gradients: only the first of them pushes.

Rows are updated by torch's SparseAdam under a plan with adamw, by SGD without momentum under sgd; neither decays
weights or moments of untouched rows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from planner.errors import ModelError, RequestError
from planner.graph.operator_graph import Operator
from planner.graph.placed import PLACES, OutsideTable, tables_outside
from planner.plan.binding.bind import BoundOperator, BoundPlan
from planner.plan.prediction.charges import Phase
from planner.plan.prediction.host_link import gives_back
from runtime.comm.device_mesh import RankMesh
from runtime.optimizers.optimizers import OptimizerSettings
from runtime.servers.addresses import Addresses
from runtime.servers.client import TableClient
from runtime.servers.host_tables import HostTables
from runtime.servers.served import RowSource, ServedTables
from runtime.servers.sparse_optimizers import SparseOptimizer
from runtime.servers.tables import Ids, Table
from runtime.tables.imagined import ImaginedTables
from runtime.waiting import waiting_for

_SPARSE = {"adamw": "adam", "sgd": "sgd"}
_BAGS = ("sum", "mean", "max")

Crossed = Callable[[Phase, str, int], None]
"""Called with rows that cross the link between host and device: the pass, the operator, the bytes."""


class PlacedTables:
    """Tables by location. The ranks of the first stage reach them; those of other stages know only their names.
    Building it, and every method except `look_up`, is collective over the ranks of a stage; `look_up` is too, for
    tables on the host. `crossed` is called for all rows that cross the link between host and device. `imagined` is for
    an imitated step, which has no rows."""

    def __init__(
        self,
        module: nn.Module,
        bound: BoundPlan,
        place: RankMesh,
        settings: OptimizerSettings,
        servers: Addresses | None = None,
        imagined: bool = False,
    ) -> None:
        self.crossed: Crossed | None = None
        self._served: dict[str, ServedTables] = {}
        outside = tables_outside(bound.whole)
        self._where = {table.name: table.where for table in outside}
        self._group: dist.ProcessGroup | None = None
        self._imagined = ImaginedTables(outside) if imagined else None
        if imagined or not outside:
            return
        _check_servers(outside, servers)
        group = place.known.of([list(range(place.mesh.size))], "tables") if place.mesh.size > 1 else None
        if place.stage != 0:
            return
        self._group = group
        rule = sparse_optimizer(bound.plan.training.optimizer, settings)
        weights = dict(module.named_parameters(remove_duplicate=False))
        for where in PLACES:
            tables = {table.name: _table(table, weights, rule) for table in outside if table.where == where}
            wide = {name: getattr(torch, table.dtype) for name, table in tables.items()}
            values = {name: weights[name].detach().to(wide[name]).cpu().numpy() for name in tables}
            if where == "host" and tables:
                host = HostTables(tables.values(), values, self._group, place.device, place.rank)
                self._served[where] = ServedTables(host, scale=1.0)
            elif tables:
                assert servers is not None
                client = TableClient(servers, tables.values(), worker=place.rank, workers=place.mesh.size)
                client.begin(values)
                self._served[where] = ServedTables(client, scale=1.0)

    @property
    def names(self) -> tuple[str, ...]:
        """The tables off the devices, in any stage."""
        return tuple(self._where)

    def all(self) -> tuple[ServedTables, ...]:
        """The tables, one entry per location."""
        return tuple(self._served.values())

    def host_bytes(self) -> int:
        """Bytes of tables, and of their optimizer states, in the memory of this rank's host."""
        tables = [served.client for served in self._served.values()]
        return sum(one.nbytes for one in tables if isinstance(one, HostTables))

    def look_up(self, bound: BoundOperator, place: RankMesh, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The result of a look-up of these ids, on their device."""
        words = _words(bound.operator)
        served = self._imagined or self._served[self._where[str(words["table"])]]
        trained, name = bool(words["trainable"]), bound.operator.name
        rows_UH, places = served.rows(
            str(words["table"]),
            ids,
            pushes=trained and gives_back(bound, place.mesh, place.rank),
            trained=trained,
            moved=lambda back, nbytes: self._cross(name, back, nbytes),
        )
        padding = None if self._imagined is not None else _padding(words, ids, places)
        if words["bag"]:
            found = F.embedding_bag(places, rows_UH, mode=_BAGS[words.get("mode", 0)], padding_idx=padding)
        else:
            found = F.embedding(places, rows_UH, padding)
        return found.to(dtype)

    def step(self, learning_rate: float) -> None:
        """Push the gradients of the step."""
        for served in self._served.values():
            served.step(learning_rate)

    def forget(self) -> None:
        """Drop the gradients of a step that is not made."""
        for served in self._served.values():
            served.forget()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Look-ups inside of this context are not part of the step."""
        with ExitStack() as stack:
            for served in self._served.values():
                stack.enter_context(served.aside())
            yield

    def whole(self) -> dict[str, torch.Tensor]:
        """All tables that this rank reaches, whole, by name."""
        return {name: self._served[where].whole(name) for name, where in self._where.items() if where in self._served}

    def read(self, name: str, part: str, ids: Ids) -> torch.Tensor:
        """Rows of a part of a table, (ids, width), each id once, after the last step; every rank gives its own ids,
        possibly none."""
        return torch.from_numpy(self._of(name).read(name, part, ids))

    def restart(self, steps: int) -> None:
        """Continue after `steps` steps with other contents: `write` gives them next, then `ready` is called. Optimizer
        states that are not written start anew."""
        self.forget()
        self._meet()
        for served in self._served.values():
            served.client.restart(steps)
        self._meet()

    def write(self, name: str, part: str, ids: Ids, values: torch.Tensor) -> None:
        """Set the contents of rows of a part of a table, in the form of `read`."""
        tables = self._of(name)
        tables.write(name, part, ids, values.to(getattr(torch, tables.tables[name].dtype)).numpy())

    def ready(self) -> None:
        """Declare that all tables have their contents."""
        self._meet()
        for served in self._served.values():
            served.client.ready()
        self._meet()

    def _cross(self, operator: str, back: bool, nbytes: int) -> None:
        if self.crossed is not None:
            again = torch._C._current_autograd_node() is not None
            self.crossed("backward" if back else "recomputation" if again else "forward", operator, nbytes)

    def _of(self, name: str) -> RowSource:
        return self._served[self._where[name]].client

    def _meet(self) -> None:
        if self._group is not None:
            waiting_for(dist.barrier, self._group)

    def close(self) -> None:
        for served in self._served.values():
            served.close()


def sparse_optimizer(name: str, settings: OptimizerSettings) -> SparseOptimizer:
    """The row optimizer for a plan with the optimizer `name`. Raises RequestError where there is no equivalent."""
    if name not in _SPARSE:
        raise RequestError(
            f"optimizer '{name}' takes norms of whole weights, which tables outside of the devices have not; plan with"
            f" --optimizer {' or '.join(_SPARSE)}"
        )
    return SparseOptimizer(
        name=_SPARSE[name], learning_rate=settings.learning_rate, betas=settings.betas, epsilon=settings.epsilon
    )


def _words(op: Operator) -> dict[str, Any]:
    return dict(op.keywords)


def _table(table: OutsideTable, weights: Mapping[str, torch.Tensor], rule: SparseOptimizer) -> Table:
    name = table.name
    if weights[name].is_meta:
        raise ModelError(
            f"table '{name}' is on the meta device and has no values; build the module on a real device to run it"
        )
    wide = "float64" if weights[name].dtype == torch.float64 else "float32"
    return Table(name=name, rows=table.rows, width=table.width, optimizer=rule, dtype=wide)


def _check_servers(outside: Sequence[OutsideTable], servers: Addresses | None) -> None:
    served = [table.name for table in outside if table.where == "servers"]
    if served and servers is None:
        raise RequestError(
            f"the plan has table '{served[0]}' on servers: start them with python -m"
            " runtime.servers FOLDER --servers N, and say where they are: parallelize(..., servers=Addresses(...))"
        )


def _padding(words: Mapping[str, Any], ids: torch.Tensor, places: torch.Tensor) -> int | None:
    """The position among the rows of the padding id, which is not trained."""
    padding = words.get("padding_idx")
    if padding is None or padding < 0:
        return None
    here = places[ids == padding]
    return int(here[0]) if here.numel() else None

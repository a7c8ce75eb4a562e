"""Embeddings of a torch model whose rows are on servers.

    forward     ids ──unique──> rows that this step has not pulled yet ──pull──> leaf (U H) ──look up──> vectors
    backward    the gradient of the leaf: one vector for every row, summed over its occurrences
    step        sums over all look-ups of the step ──push──>

A row is pulled once per step, and pushed once, however many look-ups it occurs in.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from planner.errors import RequestError, did_you_mean
from planner.matching import matches
from runtime.servers.addresses import Addresses
from runtime.servers.client import TableClient
from runtime.servers.connection import PATIENCE
from runtime.servers.shard import summed
from runtime.servers.sparse_optimizers import SparseOptimizer
from runtime.servers.tables import Ids, Table

Array = np.ndarray[Any, Any]


class _Pulled:
    """The rows of one table that this step has pulled, in ascending order, and the gradients so far."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.ids: Ids = np.zeros(0, np.int64)
        self.rows: Array = np.zeros((0, table.width), table.dtype)
        self.gradients: list[tuple[Ids, Array]] = []

    def missing(self, ids: Ids) -> Ids:
        return np.setdiff1d(ids, self.ids, assume_unique=True)

    def add(self, ids: Ids, rows: Array) -> None:
        every = np.concatenate([self.ids, ids])
        order = np.argsort(every)
        self.ids, self.rows = every[order], np.concatenate([self.rows, rows])[order]

    def of(self, ids: Ids) -> Array:
        return self.rows[np.searchsorted(self.ids, ids)]


class RowSource(Protocol):
    """A source of rows. If it is `collective`, all workers ask it for the same tables, also for no rows."""

    collective: bool
    workers: int

    @property
    def tables(self) -> Mapping[str, Table]: ...

    def pull(self, ids: Mapping[str, Ids]) -> dict[str, Array]: ...

    def push(self, gradients: Mapping[str, tuple[Ids, Array]], learning_rate: float | None = None) -> None: ...

    def whole(self, name: str) -> Array: ...

    def read(self, name: str, part: str, ids: Ids) -> Array: ...

    def restart(self, step: int) -> None: ...

    def write(self, name: str, part: str, ids: Ids, values: Array) -> None: ...

    def ready(self) -> None: ...

    def close(self) -> None: ...


Moved = Callable[[bool, int], None]
"""Called with rows that cross the link between host and device: whether they go back, as gradients, and their bytes."""


def leaf_of(
    rows: torch.Tensor, *, trained: bool, push: Callable[[torch.Tensor], None] | None, moved: Moved
) -> torch.Tensor:
    """Rows on the device, as an autograd leaf; `push` takes their gradients, if given."""
    moved(False, rows.nbytes)
    rows.requires_grad_(trained and torch.is_grad_enabled())
    if rows.requires_grad and push is not None:

        def back(gradient: torch.Tensor) -> None:
            moved(True, gradient.nbytes)
            push(gradient)

        rows.register_hook(back)  # type: ignore[no-untyped-call]
    return rows


class ServedTables:
    """The tables of a client, for torch. Gradients are multiplied by `scale` before they are pushed: the sum over
    workers of the gradients of their mean losses, divided by the number of workers, is the gradient of the mean over
    all."""

    def __init__(self, client: RowSource, scale: float | None = None) -> None:
        self.client = client
        self._scale = 1.0 / client.workers if scale is None else scale
        self._pulled = {name: _Pulled(table) for name, table in client.tables.items()}

    def prefetch(self, ids: Mapping[str, torch.Tensor]) -> None:
        """Pull all rows that the next look-ups of these tables will touch, in one message to every server."""
        self._pull({name: torch.unique(one).cpu().numpy() for name, one in ids.items()})

    def rows(
        self,
        name: str,
        ids: torch.Tensor,
        *,
        trained: bool = True,
        pushes: bool = True,
        moved: Moved = lambda back, nbytes: None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows for these ids, U H, on the device of the ids, and the index of every id among them. If `trained`,
        the gradients of the rows are pushed at the end of the step, if this worker `pushes` them."""
        unique, inverse = torch.unique(ids, return_inverse=True)
        wanted: Ids = unique.cpu().numpy()
        self._pull({name: wanted})
        pulled = self._pulled[name]
        keep = pulled.gradients.append
        push = (lambda gradient: keep((wanted, gradient.cpu().numpy()))) if pushes else None
        rows = torch.from_numpy(pulled.of(wanted)).to(ids.device)
        return leaf_of(rows, trained=trained, push=push, moved=moved), inverse

    def step(self, learning_rate: float | None = None) -> None:
        """Push the gradients of this worker's step. The next step pulls its rows again."""
        found = {}
        for name, pulled in self._pulled.items():
            ids, gradient = summed(pulled.gradients, pulled.table)
            found[name] = (ids, (gradient * self._scale).astype(pulled.table.dtype, copy=False))
        self.client.push(found, learning_rate)
        self.forget()

    def forget(self) -> None:
        """Drop pulled rows, and the gradients of a step that will not be made."""
        self._pulled = {name: _Pulled(table) for name, table in self.client.tables.items()}

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Look-ups inside of this context are not part of the step: their rows are dropped, the step's state is
        kept."""
        pulled = self._pulled
        self.forget()
        try:
            yield
        finally:
            self._pulled = pulled

    def whole(self, name: str) -> torch.Tensor:
        """All rows of a table, with the updates that a look-up would see."""
        return torch.from_numpy(self.client.whole(name))

    def close(self) -> None:
        self.client.close()

    def _pull(self, ids: Mapping[str, Ids]) -> None:
        missing = {name: self._pulled[name].missing(one) for name, one in ids.items()}
        missing = {name: one for name, one in missing.items() if len(one) or self.client.collective}
        for name, rows in self.client.pull(missing).items() if missing else ():
            self._pulled[name].add(missing[name], rows)


class ParameterServerEmbedding(nn.Module):
    """Replaces a torch Embedding or EmbeddingBag (`like`) whose table is on servers. It has no parameter. Rows of a
    frozen table get no gradients."""

    def __init__(self, tables: ServedTables, name: str, like: nn.Embedding | nn.EmbeddingBag) -> None:
        super().__init__()
        self._tables, self.name = tables, name
        self._bag = _bag_of(like)
        self._padding = like.padding_idx
        self._trained = like.weight.requires_grad

    def forward(
        self, ids: torch.Tensor, offsets: torch.Tensor | None = None, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        rows_UH, places = self._tables.rows(self.name, ids, trained=self._trained)
        padding = None
        if self._padding is not None and bool((here := places[ids == self._padding]).numel()):
            padding = int(here[0])
        if self._bag is None:
            return F.embedding(places, rows_UH, padding)
        return F.embedding_bag(
            places, rows_UH, offsets, per_sample_weights=per_sample_weights, padding_idx=padding, **self._bag
        )

    def extra_repr(self) -> str:
        table = self._tables.client.tables[self.name]
        return f"{self.name}: {table.rows}, {table.width}, on servers"


def attach(
    module: nn.Module,
    addresses: Addresses,
    *,
    worker: int = 0,
    workers: int = 1,
    tables: Sequence[str] = ("*",),
    optimizer: SparseOptimizer | None = None,
    staleness: int | None = None,
    partition: str = "hashed",
    shares: Sequence[float] = (),
    patience: float = PATIENCE,
) -> ServedTables:
    """Move tables of a model to servers: every Embedding and EmbeddingBag whose name matches one of `tables` looks its
    rows up there from now on, and its weight is removed from the module. Every worker calls it. Worker 0's values are
    the tables' initial values, unless the servers have trained them already.

    Raises RequestError for a pattern that matches no embedding, an embedding that cannot be served, and requests that
    the servers refuse.
    """
    chosen = _chosen(module, tables)
    made = [
        Table(
            name=name,
            rows=one.num_embeddings,
            width=one.embedding_dim,
            optimizer=optimizer or SparseOptimizer(),
            dtype=str(one.weight.dtype).removeprefix("torch."),
            partition=partition,
            shares=tuple(shares),
        )
        for name, one in chosen.items()
    ]
    client = TableClient(addresses, made, worker=worker, workers=workers, staleness=staleness, patience=patience)
    values = {name: one.weight.detach().cpu().numpy() for name, one in chosen.items()} if worker == 0 else None
    try:
        client.begin(values)
    except BaseException:
        client.close()
        raise
    served = ServedTables(client)
    for name, one in chosen.items():
        parent, _, last = name.rpartition(".")
        setattr(module.get_submodule(parent), last, ParameterServerEmbedding(served, name, one))
    return served


def _chosen(module: nn.Module, patterns: Iterable[str]) -> dict[str, nn.Embedding | nn.EmbeddingBag]:
    every = {name: one for name, one in module.named_modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag)}
    found: dict[str, nn.Embedding | nn.EmbeddingBag] = {}
    for pattern in patterns:
        matching = {name: one for name, one in every.items() if matches(name, pattern)}
        if not matching:
            hint = did_you_mean(pattern, every, f"there are: {', '.join(every) or 'none'}")
            raise RequestError(f"no embedding of the model matches '{pattern}'; {hint}")
        found |= matching
    for name, one in found.items():
        if one.max_norm is not None or one.scale_grad_by_freq:
            raise RequestError(
                f"embedding '{name}' has max_norm or scale_grad_by_freq, which look at the whole table or batch; a"
                " table"
                " on servers has neither"
            )
        uses = [key for key, weight in module.named_parameters(remove_duplicate=False) if weight is one.weight]
        if len(uses) > 1:
            raise RequestError(
                f"{' and '.join(uses)} are one tensor, and only look-ups may read a table on servers; leave it on the"
                " device"
            )
    return found


def _bag_of(like: nn.Embedding | nn.EmbeddingBag) -> dict[str, Any] | None:
    if isinstance(like, nn.Embedding):
        return None
    return {"mode": like.mode, "include_last_offset": like.include_last_offset}

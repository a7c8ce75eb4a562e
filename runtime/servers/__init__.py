"""Parameter servers: embedding tables that no device holds, in separate processes.

    with Fleet(Path("run/servers"), 2) as fleet:                          # two servers on this machine
        tables = attach(model, fleet.addresses, worker=0, workers=4)  # its embeddings now look up rows there
        loss = model(batch); loss.backward()
        tables.step()                                                 # pushes the gradients of touched rows

A server needs no torch: it uses only numpy and sockets, and starts in a fraction of a second. torch's RPC could carry
the same messages, but its groups do not readmit a member that was killed, and its calls are pickled code.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.servers.addresses import Addresses
    from runtime.servers.client import TableClient
    from runtime.servers.fleet import Fleet
    from runtime.servers.served import ParameterServerEmbedding, ServedTables, attach
    from runtime.servers.sparse_optimizers import SparseOptimizer
    from runtime.servers.tables import Table

__all__ = [
    "Addresses",
    "Fleet",
    "ParameterServerEmbedding",
    "ServedTables",
    "SparseOptimizer",
    "Table",
    "TableClient",
    "attach",
]

_HOMES = {
    "Addresses": "addresses",
    "Fleet": "fleet",
    "ParameterServerEmbedding": "served",
    "ServedTables": "served",
    "SparseOptimizer": "sparse_optimizers",
    "Table": "tables",
    "TableClient": "client",
    "attach": "served",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'runtime.servers' has no attribute '{name}'")
    return getattr(importlib.import_module(f"runtime.servers.{_HOMES[name]}"), name)

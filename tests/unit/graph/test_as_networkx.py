"""The operator graph as networkx has it."""

import networkx as nx

from tests.distributed import plans


def test_nodes_are_operators_and_edges_are_values() -> None:
    graph = plans.traced("llama")
    found = graph.to_networkx()
    assert list(found) == [op.name for op in graph.operators]
    assert nx.is_directed_acyclic_graph(found)
    for reader in graph.operators:
        read = {
            (name, graph.operators[graph.producer[name]].name) for name in reader.operands if name in graph.producer
        }
        assert {(key, maker) for maker, _, key in found.in_edges(reader.name, keys=True)} == read
        assert found.nodes[reader.name]["op"] == reader.op
    value = next(iter(found.edges(keys=True, data="type")))
    assert value[3] == graph.types[value[2]]
    assert graph.live == nx.ancestors(found, graph.operators[graph.producer[graph.loss]].name) | {
        graph.operators[graph.producer[graph.loss]].name
    }

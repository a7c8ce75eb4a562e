"""The share of a value's bytes that software keeps, if it does not keep the value as it is.

    norm ──> identity ──> q, k, v        products in fp8 keep the fp8 copies that they multiply: 1/2 of a value
                     └──> gate           in 16 bits, in addition to the value if something else keeps it;
    attention ──> view ──> product       0 if the view is the tensor that attention keeps, too;
                                         each product keeps its own copy (PaddlePaddle's c_identity): 3, also for a
                                         fused product of queries, keys and values;
                                         the output of a norm is recomputed in the backward pass: 0

Everything that counts the memory of a plan uses these shares: the prediction for the values of the whole graph, the
search for those of the template. There, a value that leaves a block is read by the next block, or by the operators
after the last."""

from collections.abc import Collection, Mapping, Sequence

from hardware_profiles import Software
from planner.graph.blocks import IDENTITY
from planner.graph.operator_graph import DTYPE_BYTES, OperatorGraph
from planner.sharding.rules import rule_of

FP8_OF_16_BITS = 0.5
_FP8 = 1  # bytes per element


def kept_by(graph: OperatorGraph, saved: Sequence[frozenset[int]]) -> dict[str, list[int]]:
    """For each value, the operators that keep it as an operand (`Liveness.saved`)."""
    found: dict[str, list[int]] = {}
    for at, positions in enumerate(saved):
        for index in positions:
            found.setdefault(graph.operators[at].operands[index], []).append(at)
    return found


def products_of(graph: OperatorGraph) -> frozenset[int]:
    """Matrix products with a weight; software that computes in fp8 casts their operands."""
    return frozenset(
        at
        for at, op in enumerate(graph.operators)
        if rule_of(graph, op).op_class == "matmul" and not graph.parameter_names.isdisjoint(op.operands)
    )


def keeps_heads_once(software: Software) -> bool:
    """Whether the product behind fused attention reads the tensor that attention has made and kept."""
    return software.views_heads and software.attention != "unfused"


def copied_shares(graph: OperatorGraph, software: Software) -> dict[int, float]:
    """The share that each product with a weight keeps of its operand, for software that does not keep it as it is: none
    if attention has kept it. With `Software.copies_inputs` each product keeps a copy, and a fused product keeps one for
    each of its parts."""
    if software.keeps_fp8:
        return dict.fromkeys(products_of(graph), FP8_OF_16_BITS)
    if keeps_heads_once(software):
        return {at: 0.0 for at in products_of(graph) if _attended(graph, graph.operators[at].operands[0])}
    return {at: float(_parts(graph, at)) for at in products_of(graph)} if software.copies_inputs else {}


def _parts(graph: OperatorGraph, at: int) -> int:
    """The number of values into which the result of an operator is cut, as for queries, keys and values made
    together."""
    results = [name for name in graph.operators[at].results if name is not None]
    while len(results) == 1:
        uses = graph.consumers.get(results[0], ())
        if len(uses) != 1 or rule_of(graph, graph.operators[uses[0]]).op_class != "view":
            return 1
        results = [name for name in graph.operators[uses[0]].results if name is not None]
    return len(results)


def kept_shares(graph: OperatorGraph, users: Mapping[str, Collection[int]], software: Software) -> dict[str, float]:
    """The share of its bytes that is kept of each value, given the operators that keep it; values that are missing are
    kept as they are."""
    remakes = "normalisation" in software.remakes
    copies = copied_shares(graph, software)
    if not (copies or remakes):
        return {}
    products, shares = frozenset(copies), {}
    for name, found in users.items():
        if remakes and _made_by_norm(graph, name):
            shares[name] = 0.0
        elif not products.isdisjoint(found):
            whole = _makers_own(graph, name) or any(at not in products for at in found)
            of_products = [copies[at] for at in found if at in products]
            fp8 = _FP8 / DTYPE_BYTES[graph.types[name].dtype]
            shares[name] = whole + (fp8 if software.keeps_fp8 else sum(of_products))
    return shares


def _made_by_norm(graph: OperatorGraph, name: str) -> bool:
    """Whether a value is the output of a norm, shared or not."""
    op = graph.operators[graph.producer[name]]
    if op.op == IDENTITY and op.operands[0] in graph.producer:
        op = graph.operators[graph.producer[op.operands[0]]]
    return rule_of(graph, op).op_class == "normalisation"


def _attended(graph: OperatorGraph, name: str) -> bool:
    """Whether a value is a view of the output of attention, and not that output itself."""
    at = first = graph.producer.get(name)
    while at is not None and rule_of(graph, graph.operators[at]).op_class == "view":
        at = graph.producer.get(graph.operators[at].operands[0])
    return at not in (None, first) and rule_of(graph, graph.operators[at]).op_class == "attention"


def _makers_own(graph: OperatorGraph, name: str) -> bool:
    """Whether the operator that makes a value keeps it for its own backward pass."""
    op = graph.operators[graph.producer[name]]
    results = [result for result in op.results if result is not None]
    return name in {results[index] for index in rule_of(graph, op).saved_results}

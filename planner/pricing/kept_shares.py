"""What software keeps of values otherwise than as they are, in shares of their bytes.

    norm ──> identity ──> q, k, v        products in fp8 keep the fp8 copies which they have multiplied: 1/2 of a value
                     └──> gate           in 16 bits, beside the value where something else keeps it;
    attention ──> view ──> product       where that is what attention has kept, too: 0;
                                         each product keeps a copy of its own (PaddlePaddle's c_identity): 3, of a
                                         product of queries, keys and values in one, too;
                                         what a norm has made is made again in the backward pass: 0

Whoever counts memory of a plan takes these shares: the judge of the values of the whole graph, the search of those of
the template, where a value that leaves a block has the readers of the next block, or of what follows the last.
"""

from collections.abc import Collection, Mapping, Sequence

from hardware_profiles import Software
from planner.graph.blocks import IDENTITY
from planner.graph.operator_graph import DTYPE_BYTES, OperatorGraph
from planner.sharding.rules import rule_of

FP8_OF_16_BITS = 0.5
_FP8 = 1  # bytes of an element


def kept_by(graph: OperatorGraph, saved: Sequence[frozenset[int]]) -> dict[str, list[int]]:
    """For each value that operators keep these operands of (`Liveness.saved`), the operators that do."""
    found: dict[str, list[int]] = {}
    for at, positions in enumerate(saved):
        for index in positions:
            found.setdefault(graph.operators[at].operands[index], []).append(at)
    return found


def products_of(graph: OperatorGraph) -> frozenset[int]:
    """Products with a weight, which software that computes in fp8 casts the operands of."""
    return frozenset(
        at
        for at, op in enumerate(graph.operators)
        if rule_of(graph, op).op_class == "matmul" and not graph.parameter_names.isdisjoint(op.operands)
    )


def keeps_heads_once(software: Software) -> bool:
    """Whether what fused attention has made and kept is what the product behind it reads."""
    return software.views_heads and software.attention != "unfused"


def copied_shares(graph: OperatorGraph, software: Software) -> dict[int, float]:
    """Of each product with a weight, of which software keeps otherwise than as it is what it has multiplied, the share
    that it keeps: none of what attention has kept. One that `Software.copies_inputs` copies for each product does so
    for each part of a fused one."""
    if software.keeps_fp8:
        return dict.fromkeys(products_of(graph), FP8_OF_16_BITS)
    if keeps_heads_once(software):
        return {at: 0.0 for at in products_of(graph) if _attended(graph, graph.operators[at].operands[0])}
    return {at: float(_parts(graph, at)) for at in products_of(graph)} if software.copies_inputs else {}


def _parts(graph: OperatorGraph, at: int) -> int:
    """Into how many values what an operator makes is cut, as queries, keys and values that are made together are."""
    results = [name for name in graph.operators[at].results if name is not None]
    while len(results) == 1:
        uses = graph.consumers.get(results[0], ())
        if len(uses) != 1 or rule_of(graph, graph.operators[uses[0]]).op_class != "view":
            return 1
        results = [name for name in graph.operators[uses[0]].results if name is not None]
    return len(results)


def kept_shares(graph: OperatorGraph, users: Mapping[str, Collection[int]], software: Software) -> dict[str, float]:
    """Of each value that these operators keep the share of its bytes; those that are left out are kept as they are."""
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
    """Whether a value is what a norm has made, shared or not."""
    op = graph.operators[graph.producer[name]]
    if op.op == IDENTITY and op.operands[0] in graph.producer:
        op = graph.operators[graph.producer[op.operands[0]]]
    return rule_of(graph, op).op_class == "normalisation"


def _attended(graph: OperatorGraph, name: str) -> bool:
    """Whether a value is a view of what attention has made, and not that itself."""
    at = first = graph.producer.get(name)
    while at is not None and rule_of(graph, graph.operators[at]).op_class == "view":
        at = graph.producer.get(graph.operators[at].operands[0])
    return at not in (None, first) and rule_of(graph, graph.operators[at]).op_class == "attention"


def _makers_own(graph: OperatorGraph, name: str) -> bool:
    """Whether the operator that makes a value keeps it for its own backward pass."""
    op = graph.operators[graph.producer[name]]
    results = [result for result in op.results if result is not None]
    return name in {results[index] for index in rule_of(graph, op).saved_results}

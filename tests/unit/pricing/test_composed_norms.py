"""RMS norms as chains of PyTorch operators, by hand."""

from dataclasses import replace

import pytest

from costmodels import operator_time
from hardware_profiles import PYTORCH
from planner.graph.call import Call
from planner.graph.operator_graph import TensorType
from planner.pricing import OperatorPrices, price_operator
from planner.pricing.kernels.composed_norms import KERNELS, RMS_NORM
from planner.sharding.mesh import build_mesh
from planner.sharding.rules import RULES
from tests.unit.search.cases import cluster_of

A100 = cluster_of("a100-80gb", 16)
QUIET = replace(A100, device=replace(A100.device, host_latency=0.0))
SAMPLES, TOKENS, HIDDEN = 2, 8192, 4096
ELEMENTS = SAMPLES * TOKENS * HIDDEN


def norm(op: str = RMS_NORM, dtype: str = "bfloat16", composed: bool = True) -> OperatorPrices:
    """Prices of a norm that is not cut, with gradients of its input and its weight."""
    own = [TensorType(shape=(HIDDEN,), dtype=dtype)]
    types = [TensorType(shape=(SAMPLES, TOKENS, HIDDEN), dtype=dtype), *own]
    weights = own * (2 if "layer" in op else 1)
    call = Call(op=op, arguments=(types[0], (HIDDEN,), *weights), keywords=(), results=(types[0],))
    cluster = QUIET.with_software(replace(PYTORCH, composed_norms=composed))
    operands = [types[0], *weights]
    mesh = build_mesh(cluster, (2, 8))
    rule = RULES[op].build(call)
    return price_operator(rule, [(None, None)], operands, types[:1], [True] * len(operands), mesh, cluster)


def test_a_chain_moves_36_bytes_of_an_element_forward_and_92_backward() -> None:
    prices = norm()
    for seconds, nbytes in ((prices.forward, 36), (prices.backward, 92)):
        moved = nbytes * ELEMENTS
        wanted = operator_time(op_class="elementwise", flops=0, bytes_moved=moved, dtype="bf16", device=QUIET.device)
        assert seconds[0] == pytest.approx(wanted)
    assert prices.saved_extra[0] - norm(composed=False).saved_extra[0] == 4 * ELEMENTS
    assert prices.forward[0] > 5 * norm(composed=False).forward[0]


@pytest.mark.parametrize(("op", "dtype"), [(RMS_NORM, "float32"), ("aten.layer_norm.default", "bfloat16")])
def test_fp32_and_layer_norms_are_one_kernel_all_the_same(op: str, dtype: str) -> None:
    one, other = norm(op, dtype), norm(op, dtype, composed=False)
    assert one.forward[0] == other.forward[0]
    assert one.backward[0] == other.backward[0]
    assert one.saved_extra[0] == other.saved_extra[0]


def test_the_host_launches_every_operator_of_a_chain() -> None:
    loud = replace(A100.device, host_latency=1e-3)
    cluster = replace(A100, device=loud).with_software(replace(PYTORCH, composed_norms=True))
    own = TensorType(shape=(HIDDEN,), dtype="bfloat16")
    like = TensorType(shape=(1, 1, HIDDEN), dtype="bfloat16")
    rule = RULES[RMS_NORM].build(Call(op=RMS_NORM, arguments=(like, (HIDDEN,), own), keywords=(), results=(like,)))
    mesh = build_mesh(cluster, (2, 8))
    prices = price_operator(rule, [(None, None)], [like, own], [like], [True, True], mesh, cluster)
    assert prices.forward[0] == pytest.approx(KERNELS * PYTORCH.host * 1e-3, rel=0.01)

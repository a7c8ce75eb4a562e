"""What a training stack changes in prices, by hand."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from costmodels import AttentionShape, attention_backward_time, attention_time, matmul_time, operator_time
from hardware_profiles import (
    PYTORCH,
    Cluster,
    Hidden,
    HiddenDropout,
    InvalidProfileError,
    Software,
    TopologyError,
    UnknownKeyError,
    load_profile,
    load_software,
    profile_names,
    software_names,
    stacks,
)
from planner.graph.call import Call
from planner.graph.operator_graph import TensorType
from planner.plan.binding.bind import prepare
from planner.plan.prediction.step import Launches, further_ahead
from planner.pricing import OperatorPrices, Pricers, price_operator, price_parameter
from planner.pricing.kernels.unfused_attention import UNFUSED_KERNELS
from planner.pricing.liveness import replays
from planner.pricing.message import Message, message_seconds
from planner.sharding.layout import parse_layout, replicated
from planner.sharding.mesh import build_mesh
from planner.sharding.rules import RULES
from planner.sharding.stored import StoredParameter
from planner.sharding.update import Update
from tests.refusals import refused
from tests.unit.search.cases import cluster_of, traced

A100 = cluster_of("a100-80gb", 16)
QUIET = replace(A100, device=replace(A100.device, host_latency=0.0))
WHOLE = (None, None)


def run_by(software: Software, cluster: Cluster = QUIET) -> Cluster:
    return cluster.with_software(software)


def priced(op: str, shapes: list[tuple[int, ...]], cluster: Cluster, *arguments: object) -> OperatorPrices:
    """Prices of an operator that is not cut; the last shape is that of the result."""
    types = [TensorType(shape=shape, dtype="float16") for shape in shapes]
    call = Call(op=op, arguments=(*types[:-1], *arguments), keywords=(), results=(types[-1],))  # type: ignore[arg-type]
    rule = RULES[op].build(call)
    mesh = build_mesh(cluster, (2, 8))
    return price_operator(rule, [WHOLE], types[:-1], types[-1:], [True] * (len(types) - 1), mesh, cluster)


def attention(cluster: Cluster, head: int = 64) -> OperatorPrices:
    shapes = [(2, 16, 512, head)] * 4
    return priced("aten.scaled_dot_product_attention.default", shapes, cluster, None, 0.0, True)


SHAPE = AttentionShape(batch=2, heads=16, key_heads=16, queries=512, keys=512, head_dim=64, value_dim=64, causal=True)


@pytest.mark.parametrize(("kernels", "times"), [("best", 1.0), ("sdpa", 1.0), ("flash2", 1.0), ("flash1", 2.0)])
def test_older_attention_kernels_take_their_time(kernels: str, times: float) -> None:
    prices = attention(run_by(replace(PYTORCH, attention=kernels)))  # type: ignore[arg-type]
    assert prices.forward[0] == pytest.approx(times * attention_time(SHAPE, "fp16", QUIET.device))
    assert prices.backward[0] == pytest.approx(times * attention_backward_time(SHAPE, "fp16", QUIET.device))


def test_attention_with_dropout_takes_its_time_longer() -> None:
    device = replace(QUIET.device, dropout=(1.25, 1.5))
    plain = attention(replace(QUIET, device=device, software=replace(PYTORCH, attention="best")))
    for kernels, forward, backward in (("best", 1.25, 1.5), ("flash2", 1.05, 1.05)):
        software = replace(PYTORCH, attention=kernels, drops_probabilities=True)  # type: ignore[arg-type]
        dropping = attention(replace(QUIET, device=device, software=software))
        assert dropping.forward == pytest.approx(forward * plain.forward)
        assert dropping.backward == pytest.approx(backward * plain.backward)


@pytest.mark.parametrize(("samples", "sums", "longer"), [(1, 4, 27 / 16), (27, 1, 1.0)])
def test_gradients_in_one_order_leave_units_idle(samples: int, sums: int, longer: float) -> None:
    """4 sums for each of 32 heads are 128 blocks on the 108 units of A100, and one for each of 864 is 8 on each."""
    shapes = [(samples, 32, 8192, 128)] * 4
    op = "aten.scaled_dot_product_attention.default"
    ordered, plain = (
        priced(op, shapes, run_by(replace(PYTORCH, attention="best", ordered=one)), None, 0.0, True)
        for one in (True, False)
    )
    assert ordered.forward == plain.forward
    cleared = (sums - 1) * 8 * samples * 32 * 8192 * 128
    reading = operator_time(op_class="elementwise", flops=0.0, bytes_moved=cleared, dtype="fp16", device=A100.device)
    assert ordered.backward - (reading if cleared else 0.0) == pytest.approx(longer * plain.backward, rel=1e-4)


@pytest.mark.parametrize(("kind", "forward"), [("fused", 1), ("apart", 5)])
def test_a_dropped_branch_has_a_mask(kind: HiddenDropout, forward: int) -> None:
    shapes, elements = [(4, 1024, 4096)] * 3, 4 * 1024 * 4096
    plain, dropped = (
        priced("aten.add.Tensor", shapes, run_by(replace(PYTORCH, hidden_dropout=one))) for one in ("none", kind)
    )
    device = QUIET.device
    byte = elements / (device.memory_bandwidth * device.efficiency("elementwise").bandwidth)
    launched = device.launch_latency * (kind == "apart")
    assert dropped.forward - plain.forward == pytest.approx(forward * byte + launched)
    assert dropped.backward - plain.backward == pytest.approx(byte + launched)
    assert dropped.saved_extra - plain.saved_extra == pytest.approx(elements)


def test_kernels_that_a_device_does_not_know_are_refused() -> None:
    ascend = run_by(replace(PYTORCH, attention="flash1"), cluster_of("ascend-910b-64gb", 16))
    with refused(UnknownKeyError, "flash1", "best", "unfused"):
        attention(ascend)


def test_unfused_attention_is_six_products_and_passes_over_scores() -> None:
    """2 x 16 heads, 512 x 512 scores, 64 wide, fp16."""
    prices = attention(run_by(replace(PYTORCH, attention="unfused", scores=2.0)))
    device, each, scores = QUIET.device, 32, 32 * 512 * 512

    def passed(nbytes: float) -> float:
        return operator_time(op_class="elementwise", flops=0.0, bytes_moved=nbytes, dtype="fp16", device=device)

    moved = 4 * each * 512 * 64  # heads are put together
    together = operator_time(op_class="copy", flops=0.0, bytes_moved=moved, dtype="fp16", device=device)
    forward = matmul_time(512, 512, 64, each, "fp16", device) + matmul_time(512, 64, 512, each, "fp16", device)
    forward = forward + together
    assert prices.forward[0] == pytest.approx(forward + passed(4 * scores) + passed(5 * scores))
    backward = 3 * matmul_time(512, 64, 512, each, "fp16", device) + matmul_time(512, 512, 64, each, "fp16", device)
    assert prices.backward[0] == pytest.approx(backward + together + passed(6 * scores) + passed(5 * scores))
    assert prices.saved_extra[0] == 5 * scores  # Korthikanti et al. 2022, section 4.1: 5 a s^2 b
    assert prices.forward[0] > attention_time(SHAPE, "fp16", device)
    without = attention(run_by(replace(PYTORCH, attention="unfused", scores=1.0)))
    assert without.saved_extra[0] == 2 * scores  # the softmax alone
    assert without.forward[0] == pytest.approx(forward + passed(4 * scores))
    slopes = attention(run_by(replace(PYTORCH, attention="unfused", scores=1.0, biased=True)))
    assert slopes.forward[0] == pytest.approx(without.forward[0] + passed(4 * scores))  # ALiBi: copied, and added to
    assert slopes.backward[0] == without.backward[0]
    apart = attention(run_by(replace(PYTORCH, attention="unfused", scores=2.0, masks_apart=True)))
    more = [apart.forward[0] - prices.forward[0], apart.backward[0] - prices.backward[0]]
    assert more == pytest.approx([passed(8 * scores)] * 2, rel=1e-3), "scaled and masked: read and written twice"


def test_attention_that_drops_probabilities_is_unfused_in_this_runtime() -> None:
    shapes = [(2, 16, 512, 64)] * 4
    name, scores = "aten.scaled_dot_product_attention.default", 32 * 512 * 512
    dropping = priced(name, shapes, run_by(PYTORCH), None, 0.1, True)
    unfused = attention(run_by(replace(PYTORCH, attention="unfused", scores=2.0)))
    for direction in ("forward", "backward", "saved_extra"):
        assert getattr(dropping, direction)[0] == getattr(unfused, direction)[0], direction
    fused = priced(name, shapes, run_by(PYTORCH, A100), None, 0.0, True)
    assert priced(name, shapes, run_by(PYTORCH, A100), None, 0.1, True).host[0] == UNFUSED_KERNELS * fused.host[0] > 0
    assert dropping.transient[0] - unfused.transient[0] == 2 * scores, "a gradient of probabilities, in 16 bits"
    assert priced(name, shapes, run_by(PYTORCH), None, 0.0, True).saved_extra[0] == 32 * 512 * 4  # log-sum-exp


def test_short_operators_wait_for_the_host() -> None:
    short, long = [(4, 8), (4, 8)], [(4096, 65536), (4096, 65536)]
    device = A100.device
    for times in (0.0, 1.0, 4.0):
        cluster = run_by(replace(PYTORCH, host=times), A100)
        small = priced("aten.gelu.default", short, cluster)
        assert small.forward[0] == max(device.launch_latency, times * device.host_latency) or times == 0.0
        assert small.backward[0] >= times * device.host_latency
        assert priced("aten.gelu.default", long, cluster).forward[0] == pytest.approx(
            priced("aten.gelu.default", long, QUIET).forward[0]
        )


def test_what_is_in_a_graph_is_launched_at_once() -> None:
    """All but experts in blocks whose attention is in one, and everything where the step is."""
    nemo = load_software("nemo")
    for graphs, launched in (("none", True), ("router", True), ("attention", False), ("step", False)):
        cluster = run_by(replace(nemo, graphs=graphs), A100)
        assert (priced("aten.gelu.default", [(4, 8), (4, 8)], cluster).host[0] > 0) == launched, graphs


def test_a_host_that_is_ahead_costs_what_it_takes_to_launch_all() -> None:
    launches = Launches()
    launches.add(ran=5.0, late=0.0, host=2.0)  # a long kernel, and under it two that are late by themselves
    launches.add(ran=2.0, late=1.5, host=2.0)
    launches.add(ran=2.0, late=1.5, host=2.0)
    assert launches.ahead == 3.0  # six of kernels, six of launches
    late = Launches()
    late.add(ran=2.0, late=1.5, host=2.0)
    assert late.ahead == 0.0


def test_a_host_launches_while_collectives_run() -> None:
    """Four of kernels that wait six for their launches, and a collective of five behind one of them."""
    launches = Launches()
    launches.add(ran=5.0, late=3.0, host=5.0)
    launches.add(ran=5.0, late=3.0, host=5.0, sent=5.0)
    assert launches.ahead == 5.0  # ten of launches are longer than four of kernels and five that are sent
    launches.add(ran=0.0, late=0.0, host=0.0, sent=20.0)
    assert launches.ahead == 6.0  # all that they wait, and no more


def test_a_host_launches_the_next_micro_batch_under_a_long_backward_pass() -> None:
    """A forward pass that waits two for the host, a backward pass that is five longer than its launches."""
    forward, backward = Launches(), Launches()
    forward.add(ran=6.0, late=4.0, host=4.0)
    backward.add(ran=10.0, late=0.0, host=5.0)
    assert (forward.ahead, backward.ahead) == (2.0, 0.0)
    assert further_ahead([forward, backward], 1) == 0.0
    assert further_ahead([forward, backward], 4) == pytest.approx(0.75)  # the first of four has none before it
    assert further_ahead([forward, forward], 4) == 0.0, "nothing is long enough to launch under"
    assert further_ahead([backward, backward], 4) == 0.0


def test_hosts_wait_for_the_counts_of_rows_where_no_capacity_sets_them() -> None:
    nemo = load_software("nemo")
    assert nemo.counts_rows
    assert not replace(nemo, drops_tokens=True).counts_rows
    assert not load_software("nemo-2606").counts_rows, "one kernel takes the rows of all experts"
    assert not PYTORCH.counts_rows


def test_heads_that_no_fused_softmax_takes_take_one_in_fp32() -> None:
    """Four heads, and six: of 2 samples each are 8, a multiple of 4, and 12; of one sample 6 are none."""

    def unfused(batch: int, heads: int, cluster: Cluster = QUIET) -> OperatorPrices:
        software = replace(PYTORCH, attention="unfused", softmax_heads=4)
        shapes = [(batch, heads, 512, 64)] * 4
        name = "aten.scaled_dot_product_attention.default"
        return priced(name, shapes, run_by(software, cluster), None, 0.0, True)

    fused, wide = unfused(2, 6), unfused(1, 6)
    assert wide.forward[0] > fused.forward[0]
    assert wide.backward[0] > fused.backward[0]
    assert unfused(1, 6, A100).host[0][0] == pytest.approx(11 / 7 * unfused(2, 6, A100).host[0][0])
    plain = attention(run_by(replace(PYTORCH, attention="unfused")))
    assert plain.forward[0] > unfused(2, 16).forward[0], "the fused one leaves out what causal attention masks"


def test_heads_of_odd_rows_are_multiplied_without_tensor_cores() -> None:
    """108 elements of 2 bytes are no multiple of 16 bytes, 104 and 112 are."""

    def unfused(size: int) -> OperatorPrices:
        shapes = [(1, 8, 2048, size)] * 4
        name = "aten.scaled_dot_product_attention.default"
        return priced(name, shapes, run_by(replace(PYTORCH, attention="unfused")), None, 0.0, True)

    odd, even = unfused(108), unfused(112)
    work = 2 * 2 * 8 * 2048 * 2048 * 108
    assert odd.forward[0] > work / QUIET.device.peak("fp32") > even.forward[0]
    assert odd.backward[0] > 2 * work / QUIET.device.peak("fp32") > even.backward[0]


def test_what_is_computed_again_is_launched_again() -> None:
    once, twice = (
        attention(run_by(replace(PYTORCH, recomputed_in_backward=names), A100)) for names in ((), ("attention",))
    )
    assert twice.forward[0] == once.forward[0]
    assert twice.backward[0] == once.backward[0] + once.forward[0]
    assert (once.host[1], twice.host[0], twice.host[1]) == (once.host[0], once.host[0], 2 * once.host[0])


def test_passes_multiply_the_traffic_of_elementwise_work_alone() -> None:
    eager = run_by(replace(PYTORCH, passes=2.0))
    shapes = [(4096, 65536), (4096, 65536)]
    one, two = (priced("aten.gelu.default", shapes, cluster) for cluster in (QUIET, eager))
    launch = QUIET.device.launch_latency
    assert two.forward[0] - launch == pytest.approx(2 * (one.forward[0] - launch))
    shapes = [(4096, 4096), (4096, 4096), (4096, 4096)]
    one, two = (priced("aten.linear.default", shapes, cluster) for cluster in (QUIET, eager))
    assert one.forward[0] == two.forward[0]


def test_rows_that_are_no_multiples_of_a_word_are_multiplied_slowly() -> None:
    def logits(vocabulary: int) -> float:
        shapes = [(2048, 1024), (vocabulary, 1024), (2048, vocabulary)]
        return float(priced("aten.linear.default", shapes, QUIET).forward[0])

    assert logits(50257) > 2 * logits(50304) > 0
    assert logits(50264) == pytest.approx(logits(50304), rel=0.01)

    def unfused(head: int) -> float:
        cluster = run_by(replace(PYTORCH, attention="unfused"))
        shapes = [(2, 12, 2048, head)] * 4
        return float(priced("aten.scaled_dot_product_attention.default", shapes, cluster, None, 0.0, True).backward[0])

    assert unfused(150) > 1.5 * unfused(152) > 0  # rows of 300 bytes, as in BLOOM's trials with 96 heads


def test_products_in_fp8_are_faster_and_the_rest_is_not() -> None:
    h100 = cluster_of("h100-80gb", 16)
    fp8 = run_by(replace(PYTORCH, products="fp8"), h100)
    shapes = [(8192, 8192)] * 3
    assert (
        priced("aten.linear.default", shapes, fp8).forward[0]
        < 0.7 * priced("aten.linear.default", shapes, h100).forward[0]
    )
    assert priced("aten.gelu.default", shapes[:2], fp8) is not None
    assert (
        priced("aten.gelu.default", shapes[:2], fp8).forward[0]
        == priced("aten.gelu.default", shapes[:2], h100).forward[0]
    )


def test_hidden_shares_are_not_paid_for() -> None:
    mesh = build_mesh(QUIET, (2, 8))
    tensor = TensorType(shape=(4096, 4096), dtype="float16")
    whole = replicated(2)
    cut = StoredParameter(weight=whole, gradient=whole, state=whole)
    hidden = run_by(replace(PYTORCH, hidden=Hidden(tensor=0.25, gathers=0.5, reductions=1.0)))
    plain, better = Pricers.of(mesh, QUIET), Pricers.of(mesh, hidden)
    pieces = parse_layout("S0,S0")
    for kind, share in (("activations", 0.75), ("parameters", 0.5), ("gradients", 0.0)):
        one, other = (getattr(pricers, kind).seconds(tensor, pieces, whole) for pricers in (plain, better))
        assert other == pytest.approx(share * one)
    assert price_parameter(tensor, True, [cut], "fp16", "adamw", better).accumulation[0] > 0
    fused = Pricers.of(mesh, run_by(replace(PYTORCH, accumulates=False)))
    assert price_parameter(tensor, True, [cut], "fp16", "adamw", fused).accumulation[0] == 0


def test_buckets_share_the_latency_of_one_message() -> None:
    mesh = build_mesh(QUIET, (2, 8))
    norm, matrix = (TensorType(shape=shape, dtype="float16") for shape in ((4096,), (16384, 16384)))
    pieces, whole = parse_layout("S0,S0"), replicated(2)
    alone, together = Pricers.of(mesh, QUIET), Pricers.of(mesh, run_by(replace(PYTORCH, bucket=1e7)))
    assert together.parameters.seconds(norm, pieces, whole) < 0.1 * alone.parameters.seconds(norm, pieces, whole)
    assert together.parameters.seconds(matrix, pieces, whole) == alone.parameters.seconds(matrix, pieces, whole)
    assert together.activations.seconds(norm, pieces, whole) == alone.activations.seconds(norm, pieces, whole)


def test_buckets_that_are_counted_in_parameters_grow_with_the_devices_and_the_dtype() -> None:
    """Megatron-Core: max(40000000, 1000000 * data-parallel size) parameters where reductions overlap, weights in 16
    bits, sums of gradients in fp32. NeMo: 128 Mi on any number of devices."""
    overlapped = replace(load_software("megatron"), hidden=Hidden(gathers=0.5, reductions=0.5))
    for software, devices, parameters in (
        (overlapped, 8, 40e6),
        (overlapped, 256, 256e6),
        (load_software("nemo"), 256, 128 * 2**20),
    ):
        cluster = run_by(software, cluster_of("h100-80gb", devices))
        pricers = Pricers.of(build_mesh(cluster, (devices,)), cluster, bare=True)
        for one, element, kind in ((pricers.sums, 4, "reduce_scatter"), (pricers.updated, 2, "all_gather")):
            bucket = message_seconds(Message(kind=kind, axis=0, nbytes=element * parameters), one.mesh, cluster)
            assert one.message_seconds(kind, 0, 1000.0) == pytest.approx(1000 / (element * parameters) * bucket)


def test_megatron_has_one_bucket_where_reductions_do_not_overlap() -> None:
    """bucket_size = None: of no part of a step's one message is there latency; in a micro-batch there are buckets."""
    alone = load_software("megatron")
    cluster = run_by(alone, cluster_of("h100-80gb", 256))
    pricers = Pricers.of(build_mesh(cluster, (256,)), cluster)
    small, large = (pricers.sums.message_seconds("all_reduce", 0, nbytes) for nbytes in (1e3, 1e12))
    assert small == pytest.approx(large / 1e9, rel=1e-3)
    assert pricers.gradients.message_seconds("all_reduce", 0, 1e3) > 1.05 * large / 1e9
    sized = Pricers.of(pricers.sums.mesh, cluster, Update(buckets=2**20))
    assert sized.sums.message_seconds("all_reduce", 0, 1e3) > 2 * small, "a plan decides buckets before the software"
    assert [load_software(name).one_bucket for name in ("megatron-2021", "mindspeed", "nemo", "deepspeed")] == [
        True,
        True,
        False,
        False,
    ]


def test_bare_prices_have_the_buckets_of_what_overlaps() -> None:
    cluster = run_by(load_software("nemo"), cluster_of("h100-80gb", 256))
    mesh, hidden = build_mesh(cluster, (256,)), cluster.software.hidden
    plain, bare = Pricers.of(mesh, cluster), Pricers.of(mesh, cluster, bare=True)
    for kind, one, other, share in (
        ("all_gather", plain.updated, bare.updated, hidden.gathers),
        ("reduce_scatter", plain.sums, bare.sums, hidden.reductions),
    ):
        seconds = other.message_seconds(kind, 0, 1e6)
        assert one.message_seconds(kind, 0, 1e6) == pytest.approx((1 - share) * seconds)


def test_a_stack_file_says_its_buckets_in_one_way() -> None:
    text = (Path(stacks.__file__).parent / "stacks" / "megatron.toml").read_text(encoding="utf-8")
    mib = 'bucket_mib = { value = 100, source = "a guess", kind = "assumed" }\n'
    lines = text.splitlines(keepends=True)
    without = "".join(line for line in lines if not line.startswith("bucket_parameters"))
    both = without.replace("[hidden]", mib + "\n[hidden]", 1)
    for wrong, reason in ((text.replace("ahead", mib + "ahead", 1), "either"), (without, "either"), (both, "beside")):
        with pytest.raises(InvalidProfileError, match=reason):
            stacks.parse_stack(wrong.encode(), "mine.toml")


@pytest.mark.parametrize("devices", [8, 512, 4096])
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
def test_no_message_takes_less_than_the_shares_of_what_goes_in_it(devices: int, kind: str) -> None:
    """Tensors of a block, of which some go together, each cut by other axes: shares of the longest message that they
    may be in come to less than theirs, and to just that where all go, uncut or cut alike."""
    draw, cluster = random.Random(devices), cluster_of("h100-80gb", devices)
    mesh = build_mesh(cluster, (devices,))
    for power in range(10, 38, 3):
        tensors = [draw.uniform(0.1, 1) * 2.0**power for _ in range(5)]
        longest = (sum(tensors), sum(tensors))
        together = Pricers.of(mesh, cluster, Update(buckets="none", gathers="block"), longest).parameters
        sent = [nbytes / draw.choice((1, 2, 8)) for nbytes in tensors]
        for number in range(1, 6):
            group = draw.sample(range(5), number)
            message = Message(kind=kind, axis=0, nbytes=sum(sent[at] for at in group))
            shares = [together.sent_seconds(kind, 0, sent[at], tensors[at]) for at in group]
            assert 0 < sum(shares) <= message_seconds(message, mesh, cluster) * (1 + 1e-12)
        every = sum(together.sent_seconds(kind, 0, nbytes) for nbytes in tensors)
        whole = message_seconds(Message(kind=kind, axis=0, nbytes=longest[0]), mesh, cluster)
        assert every == pytest.approx(whole)
        quarter = sum(together.sent_seconds(kind, 0, nbytes / 4, nbytes) for nbytes in tensors)
        alike = message_seconds(Message(kind=kind, axis=0, nbytes=longest[0] / 4), mesh, cluster)
        assert quarter == pytest.approx(alike), "cut alike they are a shorter message"


@pytest.mark.parametrize("profile", profile_names())
def test_copies_of_what_goes_together_take_less_than_a_message_of_its_own(profile: str) -> None:
    """So weights that come ahead of their block never take longer than such as are gathered one by one."""
    for devices in (2, 8, 64):
        try:
            cluster = load_profile(profile).with_devices(devices)
        except TopologyError:
            continue
        mesh = build_mesh(cluster, (devices,))
        together, alone = (Pricers.of(mesh, cluster, Update(buckets="none", gathers=way)) for way in ("block", "each"))
        for nbytes in (2.0**power for power in range(10, 33, 2)):
            for there, kind in (("parameters", "all_gather"), ("gradients", "reduce_scatter")):
                packed, own = getattr(together, there), getattr(alone, there)
                copies = packed.message_seconds(kind, 0, nbytes) - packed.sent_seconds(kind, 0, nbytes)
                assert 0 < copies < own.message_seconds(kind, 0, nbytes)


def test_what_goes_by_itself_is_not_copied() -> None:
    """A message that is as long as a bucket, and what is gathered weight by weight."""
    cluster = cluster_of("h100-80gb", 8)
    pricers = Pricers.of(build_mesh(cluster, (8,)), cluster, Update(buckets=2**20))
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        short, long = (pricers.sums.message_seconds(kind, 0, nbytes) for nbytes in (2.0**19, 2.0**20))
        assert short > pricers.sums.sent_seconds(kind, 0, 2.0**19)
        assert long == pricers.sums.sent_seconds(kind, 0, 2.0**20)
        assert pricers.parameters.message_seconds(kind, 0, 2.0**19) == pricers.parameters.sent_seconds(kind, 0, 2.0**19)


def test_what_needs_no_message_is_not_copied() -> None:
    pricers = Pricers.of(
        build_mesh(cluster_of("h100-80gb", 8), (8, 1)), cluster_of("h100-80gb", 8), Update(buckets=2**20)
    )
    assert pricers.sums.message_seconds("reduce_scatter", 1, 2.0**10) == 0.0


def test_recomputation_to_the_end_of_a_block() -> None:
    prepared, blocks = prepare(traced("llama-2"))
    early = replays(prepared, blocks)[0]
    whole = replays(prepared, blocks, whole=True)[0]
    assert early.works < early.moves < whole.works == whole.moves == len(blocks.operators(0))


def test_weight_gradients_that_are_added_in_fp32_take_longer() -> None:
    shapes, b200 = [(4096, 4096)] * 3, cluster_of("b200-180gb", 16)
    plain, added = (
        priced("aten.linear.default", shapes, b200.with_software(replace(PYTORCH, accumulates=False, adds=adds)))
        for adds in (False, True)
    )
    assert added.forward[0] == plain.forward[0]
    assert 1.02 < added.backward[0] / plain.backward[0] < 1.05  # one product of two, at 0.94 of its rate


def test_attention_takes_what_the_trace_of_deepseek_v3_says() -> None:
    """FlashAttention-3 on H800, causal, 128 heads of 192 and 128, 4,096 tokens: 1.237 ms forward, 3.779 backward, and
    0.475 for what is before and behind it (github deepseek-ai/profile-data@ae7fc078, train.json)."""
    device = load_profile("h800-80gb").device
    shape = AttentionShape(
        batch=1, heads=128, key_heads=128, queries=4096, keys=4096, head_dim=192, value_dim=128, causal=True
    )
    assert attention_time(shape, "bf16", device) == pytest.approx(1.237e-3, rel=0.05)
    assert attention_backward_time(shape, "bf16", device) == pytest.approx(4.254e-3, rel=0.2)


def test_a_stack_file_says_what_is_made_again() -> None:
    stack = load_software("hai-llm")
    assert (stack.remakes, stack.stored.moment) == (("experts",), 2)
    others = [load_software(name) for name in software_names() if name != "hai-llm"]
    assert {(one.remakes, one.stored.moment) for one in others} == {((), 4)}
    text = (Path(stacks.__file__).parent / "stacks" / "hai-llm.toml").read_text(encoding="utf-8")
    with pytest.raises(InvalidProfileError, match="remakes"):
        stacks.parse_stack(text.replace('"experts"', '"routers"').encode(), "mine.toml")


def test_experts_in_blocks_of_fp8_take_what_the_trace_of_deepseek_v3_says() -> None:
    """Forward, 4 experts and 32,768 rows: rows put together 0.19 ms, products 1.86 and 1.04, activation and cast 0.14,
    sum of rows 0.32, means of four layers (train.json, as above). Scales of rows take another pass over them."""
    cluster = load_profile("h800-80gb").with_devices(16).with_software(load_software("hai-llm"))
    tokens, chosen, up = (1, 4096, 7168), (1, 4096, 8), (4, 2048, 7168)
    shapes = [tokens, chosen, chosen, up, up, (4, 7168, 2048), tokens]

    def forward(recipe: str) -> float:
        settings = (0, 1.0, False, 1, 1, recipe, False)
        return float(priced("planner.experts.default", shapes, cluster, *settings).forward[0])

    assert forward("blockwise") == pytest.approx(3.55e-3, rel=0.1)
    assert forward("tensorwise") > 1.3 * forward("blockwise")


@pytest.mark.parametrize(("profile", "faster"), [("b200-180gb", True), ("gb300-288gb", True), ("h100-80gb", False)])
def test_lines_of_32_are_faster_where_devices_multiply_them(profile: str, faster: bool) -> None:
    """Elsewhere operands are cast there and back, and multiplied as without fp8."""
    cluster, shapes = load_profile(profile).with_devices(16), [(1, 8192, 8192), (28672, 8192), (1, 8192, 28672)]
    lines = priced("planner.fp8_linear.mxfp8", shapes, cluster)
    wide = priced("aten.linear.default", shapes, cluster)
    assert bool(lines.forward[0] < wide.forward[0]) is faster
    assert bool(lines.backward[0] < wide.backward[0]) is faster
    rows = priced("planner.fp8_linear.rowwise", shapes, cluster)
    assert rows.forward[0] < wide.forward[0]


def test_current_scaling_finds_the_largest_element_of_each_operand_before_its_cast() -> None:
    """Forward of the input, backward of the gradient, 2 bytes read of each element; the input is cast in any case."""
    tokens, width, hidden = 4096, 8192, 2048
    shapes = [(1, tokens, hidden), (width, hidden), (1, tokens, width)]
    h100 = cluster_of("h100-80gb", 16)
    quiet = replace(h100, device=replace(h100.device, host_latency=0.0))
    fp8 = replace(PYTORCH, products="fp8", keeps_fp8=True, casts=0.2)
    delayed, current = (
        priced("aten.linear.default", shapes, run_by(replace(fp8, current_scaling=scaled), quiet))
        for scaled in (False, True)
    )
    largest = {
        columns: operator_time(
            op_class="elementwise", flops=0, bytes_moved=2 * tokens * columns, dtype="fp16", device=quiet.device
        )
        for columns in (hidden, width)
    }
    forward = matmul_time(tokens, width, hidden, 1, "fp8", quiet.device, converted=1.0)
    assert current.forward[0] == pytest.approx(forward + largest[hidden])
    assert current.forward[0] > delayed.forward[0]
    assert current.backward[0] - delayed.backward[0] == pytest.approx(largest[width])


def test_a_gathered_operand_is_cast_before_it_is_gathered() -> None:
    """Columns split over 8 devices: each casts an eighth of the input, and all of its part of the gradient; rows of the
    weight split: the other way round. Without sequence parallelism each casts all that it has."""
    tokens, width, hidden = 4096, 8192, 2048
    types = [
        TensorType(shape=shape, dtype="float16") for shape in ((1, tokens, hidden), (width, hidden), (1, tokens, width))
    ]
    call = Call(op="aten.linear.default", arguments=(types[0], types[1]), keywords=(), results=(types[2],))
    rule = RULES["aten.linear.default"].build(call)
    h100 = cluster_of("h100-80gb", 16)
    quiet = replace(h100, device=replace(h100.device, host_latency=0.0))
    fp8 = replace(PYTORCH, products="fp8", keeps_fp8=True, current_scaling=True, regathers=True)
    mesh = build_mesh(quiet, (2, 8))

    def forward(split: str, software: Software) -> float:
        strategy = (None, rule.index[split])
        prices = price_operator(rule, [strategy], types[:2], types[2:], [True, True], mesh, run_by(software, quiet))
        return float(prices.forward[0])

    def largest(elements: float) -> float:
        time = operator_time(
            op_class="elementwise", flops=0, bytes_moved=2 * elements, dtype="fp16", device=quiet.device
        )
        return float(time)

    columns = matmul_time(tokens, width / 8, hidden, 1, "fp8", quiet.device, converted=1 / 8)
    assert forward("o", fp8) == pytest.approx(columns + largest(tokens * hidden / 8))
    rows = matmul_time(tokens, width, hidden / 8, 1, "fp8", quiet.device, converted=1.0)
    assert forward("i", fp8) == pytest.approx(rows + largest(tokens * hidden / 8))
    assert forward("o", replace(fp8, regathers=False)) > forward("o", fp8)

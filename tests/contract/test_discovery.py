"""Rules found by trial, mostly of operators that no row of the table is about: what is found, and that it holds.

What is found is listed, so that it is noticed where less is found. That it holds is seen by the same execution on
simulated ranks as that of the rules in the table, which shares no code with the search: other values, other extents,
other meshes. A search through all cuts without the sieve shows that nothing is missed.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from planner.errors import RuleError
from planner.graph.call import Call
from planner.graph.operator_graph import WrittenRule
from planner.sharding.discover.factors import Found, find_factors
from planner.sharding.discover.factors import written as written_rule
from planner.sharding.discover.find import check_rule, rule_by_trial
from planner.sharding.discover.proof import fault
from planner.sharding.discover.trial import small_calls, working
from planner.sharding.legality import legal_strategies
from planner.sharding.rule import FactorKind, Rule
from planner.sharding.rules.written import build_written
from tests.contract.rule_calls import Example
from tests.contract.test_rules_by_execution import MESHES, check, mesh_of
from tests.distributed import unusual as unusual  # makes its operator known to torch
from tests.refusals import refused

GENERATOR = torch.Generator().manual_seed(0)


def floats(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


def positive(*shape: int) -> torch.Tensor:
    return floats(*shape).abs() + 0.5


def integers(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape, generator=GENERATOR)


def definite(*shape: int) -> torch.Tensor:
    a = floats(*shape)
    return a @ a.mT + shape[-1] * torch.eye(shape[-1], dtype=torch.float64)


def complexes(*shape: int) -> torch.Tensor:
    return torch.complex(floats(*shape), floats(*shape))


X = (4, 6, 12)
FOUND: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("aten.cdist.default", (floats(4, 6, 8), floats(4, 12, 8)), "d0 d1 x0d2, d0 d2 x1d2 -> d0 d1 d2"),
    ("aten.roll.default", (floats(*X), [1], [1]), "d0 x0d1 d1 -> d0 y0d1 d1"),
    ("aten.flip.default", (floats(*X), [0]), "x0d0 d0 d1 -> y0d0 d0 d1"),
    ("aten.tril.default", (floats(4, 12, 12), 1), "d0 x0d1 x0d2 -> d0 y0d1 y0d2"),
    ("aten.linalg_cross.default", (floats(4, 6, 3), floats(4, 6, 3)), "d0 d1 x0d2, d0 d1 x1d2 -> d0 d1 y0d2"),
    ("aten.logcumsumexp.default", (floats(*X), 1), "d0 x0d1 d1 -> d0 y0d1 d1"),
    ("aten.pixel_shuffle.default", (floats(4, 24, 2, 2), 2), "d0 (d1 4) d2 d3 -> d0 d1 (d2 2) (d3 2)"),
    ("aten.upsample_nearest2d.vec", (floats(4, 6, 2, 4), None, [2.0, 2.0]), "d0 d1 d2 d3 -> d0 d1 (d2 2) (d3 2)"),
    ("aten.upsample_nearest2d.default", (floats(4, 6, 8, 8), [16, 16]), "d0 d1 x0d2 x0d3 -> d0 d1 y0d2 y0d3"),
    ("aten.unfold.default", (floats(4, 6, 8), 2, 4, 2), "d0 d1 x0d2 -> d0 d1 y0d2 y0d3"),
    ("aten.glu.default", (floats(4, 6, 12), -1), "d0 d1 x0d2 -> d0 d1 y0d2"),
    ("aten.prelu.default", (floats(4, 6, 12), positive(6)), "d0 d1 d2, d1 -> d0 d1 d2"),
    ("aten.addcmul.default", (floats(*X), floats(*X), floats(12)), "d0 d1 d2, d0 d1 d2, d2 -> d0 d1 d2"),
    ("aten.lerp.Tensor", (floats(*X), floats(6, 1), floats(*X)), "d0 d1 d2, d1 1, d0 d1 d2 -> d0 d1 d2"),
    (
        "aten.baddbmm.default",
        (floats(4, 6, 2), floats(4, 6, 12), floats(4, 12, 2)),
        "d0 d1 d2, d0 d1 r0, d0 r0 d2 -> d0 d1 d2",
    ),
    (
        "aten.scatter_add.default",
        (floats(4, 6, 12), 1, integers(6, 4, 8, 12), floats(4, 8, 12)),
        "d0 x0d1 d1, d0 r0 d1, d0 r0 d1 -> d0 y0d1 d1",
    ),
    ("aten.gather.default", (floats(4, 6, 12), 1, integers(6, 4, 8, 12)), "d0 x0d1 d2, d0 d1 d2 -> d0 d1 d2"),
    ("aten.index_select.default", (floats(6, 12), 0, integers(6, 8)), "x0d0 d1, d0 -> d0 d1"),
    ("aten.sort.default", (floats(*X), -1), "d0 d1 x0d2 -> d0 d1 y0d2, d0 d1 y1d2"),
    ("aten.var_mean.correction", (floats(*X), [2]), "d0 d1 x0d2 -> d0 d1, d0 d1"),
    ("aten.linalg_inv.default", (definite(4, 6, 6),), "d0 x0d1 x0d2 -> d0 y0d1 y0d2"),
    ("aten.linalg_cholesky.default", (definite(4, 6, 6),), "d0 x0d1 x0d2 -> d0 y0d1 y0d2"),
    ("aten.linalg_solve.default", (definite(4, 6, 6), floats(4, 6, 2)), "d0 x0d1 x0d2, d0 x1d1 d1 -> d0 y0d1 d1"),
    ("aten.fft_rfft.default", (floats(4, 6, 8),), "d0 d1 x0d2 -> d0 d1 y0d2"),
    ("aten.complex.default", (floats(4, 6), floats(4, 6)), "d0 d1, d0 d1 -> d0 d1"),
    ("aten.view_as_real.default", (complexes(4, 6),), "d0 d1 -> d0 d1 y0d2"),
    ("aten.einsum.default", ("bij,bkj->bik", [floats(4, 6, 12), floats(4, 8, 12)]), "d0 d1 r0, d0 d2 r0 -> d0 d1 d2"),
    ("aten.outer.default", (floats(6), floats(12)), "d0, d1 -> d0 d1"),
    ("aten.dot.default", (floats(12), floats(12)), "r0, r0 -> "),
    ("aten.mse_loss.default", (floats(4, 6), floats(4, 6)), "r0 r1, r0 r1 -> "),
    ("aten.avg_pool2d.default", (floats(4, 6, 8, 8), [2, 2]), "d0 d1 (d2 2) (d3 2) -> d0 d1 d2 d3"),
    (
        "aten.conv1d.default",
        (floats(4, 6, 8), floats(12, 6, 3), floats(12)),
        "d0 r0 x0d2, d1 r0 x1d2, d1 -> d0 d1 y0d2",
    ),
    (
        "aten.bilinear.default",
        (floats(4, 6), floats(4, 8), floats(12, 6, 8), floats(12)),
        "d0 r0, d0 r1, d1 r0 r1, d1 -> d0 d1",
    ),
    ("aten.repeat.default", (floats(4, 6), [1, 3]), "d0 x0d1 -> d0 y0d1"),
    ("aten.zeros_like.default", (floats(4, 6),), "d0 d1 -> d0 d1"),
    ("tests.soft_clip.default", (floats(4, 6, 12), floats(12), 1.5), "d0 d1 d2, d2 -> d0 d1 d2"),
    # known to be whole: offsets of the classes, a window of indices, a label that means "none", a product of two loops
    ("aten.one_hot.default", (integers(6, 4, 2), 6), "d0 d1 -> d0 d1 y0d2"),
    ("aten.diagonal.default", (floats(4, 6, 6), 0, 1, 2), "d0 x0d1 x0d2 -> d0 y0d1"),
    ("aten.nll_loss_nd.default", (floats(12, 8), integers(8, 12)), "x0d0 x0d1, x1d0 -> "),
    ("aten.kron.default", (floats(4, 6), floats(2, 3)), "x0d0 x0d1, x1d0 x1d1 -> y0d0 y0d1"),
)
EXAMPLES = {op: (Example(op, args), text) for op, args, text in FOUND}
QUICK = {
    f"aten.{name}.default"
    for name in ("glu", "prelu", "baddbmm", "pixel_shuffle", "scatter_add", "mse_loss", "sort", "nll_loss_nd")
}
ALL = [pytest.param(op, marks=() if op in QUICK else pytest.mark.thorough) for op in EXAMPLES]


def expected_rule(op: str) -> Rule:
    """The rule of an example that is found, without a search."""
    example, text = EXAMPLES[op]
    names = {word.strip("(),") for word in text.split()}
    mean = ("r0", "r1") if op == "aten.mse_loss.default" else ()
    whole = tuple(sorted(name for name in names if name[:1] in ("x", "y")))
    return build_written(example.call(), WrittenRule(text=text, blocked=whole, mean=mean))


@pytest.mark.cases(5, 12)
@pytest.mark.slow
@pytest.mark.parametrize("op", ALL)
def test_what_is_found_recombines(op: str) -> None:
    example, text = EXAMPLES[op]
    found = rule_by_trial(example.call())
    assert found.text == text, found.reason
    rule = build_written(example.call(), found)
    assert (rule.factors, rule.mean_over) == (expected_rule(op).factors, expected_rule(op).mean_over)
    for sizes in MESHES:
        mesh = mesh_of(sizes)
        for strategy in legal_strategies(rule, mesh):
            check(example, rule, strategy, mesh)
    assert bool(found.reason) == all(factor.kind is FactorKind.BLOCKED for factor in rule.factors)


@pytest.mark.thorough
@pytest.mark.parametrize("op", [op for op, (example, _) in EXAMPLES.items() if len(example.tensors()) < 3])
def test_nothing_is_missed(op: str) -> None:
    """Every cut of every dim, alone and together, in two: those that recombine are parts of factors that are found."""
    example, _ = EXAMPLES[op]
    case = next(case for small in small_calls(example.call()) if (case := working(small)[0]) is not None)
    found = find_factors(case)
    for cut in all_cuts([t.dim() for t in case.operands], [t.dim() for t in case.results]):
        known = any(cut.operands == each.operands and cut.results == each.results for each in found)
        try:
            rule = build_written(case.call, written_rule((cut,), case))
        except RuleError:
            continue
        split = next((i for i, each in enumerate(rule.factors) if each.kind is not FactorKind.BLOCKED), None)
        if split is None or any(fault(case, rule, (split,), (n,)) for n in (2, 3)):
            continue
        dims = {(i, d) for i, d in enumerate(cut.operands) if d is not None}
        assert known or any(dims <= {(i, d) for i, d in enumerate(each.operands) if d is not None} for each in found), (
            f"{op}: {cut} is possible"
        )


def all_cuts(operands: list[int], results: list[int]) -> Iterator[Found]:
    for cut in itertools.product(*([None, *range(rank)] for rank in operands)):
        if any(dim is not None for dim in cut):
            for joined in itertools.product(*(range(rank) for rank in results)):
                yield Found(operands=cut, results=joined)
            yield Found(operands=cut, results=(None,) * len(results))


@pytest.mark.parametrize("op", ["aten.glu.default", "aten.mse_loss.default", "aten.scatter_add.default"])
def test_the_same_call_gets_the_same_rule(op: str) -> None:
    state = torch.get_rng_state()
    first = rule_by_trial(EXAMPLES[op][0].call())
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(5)
    assert rule_by_trial(EXAMPLES[op][0].call()) == first
    torch.set_rng_state(state)


@pytest.mark.thorough
@pytest.mark.slow
def test_what_autograd_keeps_is_asked_of_autograd() -> None:
    find = lambda op: rule_by_trial(EXAMPLES[op][0].call())  # noqa: E731
    assert find("aten.baddbmm.default").saves == ((1, (2,)), (2, (1,)))
    assert find("aten.scatter_add.default").saves == ((1, (2,)),)
    assert find("aten.sort.default").saved_results == (1,)
    assert find("tests.soft_clip.default").saves == ((0, (0, 1)), (1, (0, 1)))
    pooled = rule_by_trial(Example("aten.max_pool2d.default", (torch.randn(4, 6, 8, 8), [2, 2])).call())
    assert pooled.saved_extra == ((8.0, "d0 d1 d2 d3"),)  # where each maximum stood, as int64


def wide_band(rows: int) -> Call:
    return Example("aten.tril.default", (torch.randn(2, rows, rows), 40)).call()


@pytest.mark.parametrize("rows", [64, 600])
def test_numbers_among_the_arguments_stay_on_their_side_of_the_extents(rows: int) -> None:
    """In a matrix of 12 x 12 a band of 40 covers everything, and every dim would seem to be independent."""
    assert rule_by_trial(wide_band(rows)).text == "d0 x0d1 x0d2 -> d0 y0d1 y0d2"


@torch.library.custom_op("tests::far", mutates_args=())
def far(x: torch.Tensor) -> torch.Tensor:
    """Columns 200 to the right are added, which no argument says."""
    return x + torch.nn.functional.pad(x[:, 200:], (0, min(200, x.shape[1])))


def test_what_shows_at_the_true_extent_only_is_seen_there() -> None:
    assert rule_by_trial(Example("tests.far.default", (torch.randn(4, 512),)).call()).text == "d0 x0d1 -> d0 y0d1"


@torch.library.custom_op("tests::mean_of_some", mutates_args=())
def mean_of_some(x: torch.Tensor) -> torch.Tensor:
    """The mean of all elements but zeros."""
    return x.sum(1) / x.count_nonzero(1)


@pytest.mark.parametrize("op", ["aten.nanmean.default", "tests.mean_of_some.default"])
def test_a_mean_that_leaves_elements_out_is_not_split(op: str) -> None:
    """Pieces leave out different numbers of elements, so that the mean of their means is another one."""
    arguments = ([1],) if op.startswith("aten") else ()
    assert rule_by_trial(Example(op, (torch.randn(4, 6), *arguments)).call()).text == "d0 x0d1 -> d0"


@torch.library.custom_op("tests::groups", mutates_args=())
def groups(x: torch.Tensor) -> torch.Tensor:
    """Every four neighbours are sorted."""
    return x.view(-1, 4).sort().values.view(x.shape)


@torch.library.custom_op("tests::doubled_in_place", mutates_args=("x",))
def doubled_in_place(x: torch.Tensor) -> None:
    x *= 2


@torch.library.custom_op("tests::secretly_in_place", mutates_args=())
def secretly_in_place(x: torch.Tensor) -> torch.Tensor:
    x += 1
    return x * 2


@torch.library.custom_op("tests::broken", mutates_args=())
def broken(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("needs a device\nthat is not here")


@torch.library.custom_op("tests::without_backward", mutates_args=())
def without_backward(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_elements_that_must_stay_together_are_a_piece() -> None:
    found = rule_by_trial(call_of("tests.groups.default", torch.randn(6, 48)))
    assert found.text == "d0 (d1 4) -> d0 (d1 4)"


def test_an_operator_without_a_backward_pass_is_split_forward() -> None:
    assert rule_by_trial(call_of("tests.without_backward.default", torch.randn(4, 6))).text == "d0 d1 -> d0 d1"


def call_of(op: str, *args: Any) -> Call:
    tensors = tuple(arg for arg in args if isinstance(arg, torch.Tensor))
    typed = Example("aten.stack.default", (tensors,)).call().arguments[0]
    assert isinstance(typed, tuple)
    return Call(op=op, arguments=typed, keywords=(), results=typed[:1])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("op", "fact"),
    [
        ("tests.doubled_in_place.default", "in place"),
        ("tests.secretly_in_place.default", "in place"),
        ("aten.bernoulli.default", 0),
        ("aten.rand_like.default", 0),
    ],
)
def test_what_cannot_be_repeated_is_refused(op: str, fact: object) -> None:
    with refused(RuleError, op, fact):
        rule_by_trial(call_of(op, torch.rand(4, 6)))


@torch.library.custom_op("tests::of_labels", mutates_args=())
def of_labels(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Nothing but zeros where no label is 7, which nobody tries."""
    return torch.where(y == 7, x.softmax(-1), 0)


of_labels.register_autograd(lambda context, gradient: (torch.zeros_like(gradient), None))


def test_a_loss_of_signs_is_tried_with_signs() -> None:
    """With other targets it is 0 whatever the operands are, which recombines however they are cut."""
    found = rule_by_trial(
        Example("aten.cosine_embedding_loss.default", (floats(12, 8), floats(12, 8), floats(12))).call()
    )
    assert (found.text, found.mean) == ("r0 x0d1, r0 x1d1, r0 -> ", ("r0",))


def test_what_is_the_same_whatever_is_tried_proves_nothing() -> None:
    found = rule_by_trial(call_of("tests.of_labels.default", torch.randn(4, 6), torch.randn(4, 6)))
    assert "the same whatever the values" in found.reason
    assert set(found.blocked) == {"x0d0", "x0d1", "x1d0", "x1d1", "y0d0", "y0d1"}


def test_what_cannot_be_tried_is_whole_and_says_why() -> None:
    found = rule_by_trial(call_of("tests.broken.default", torch.randn(4, 6)))
    assert (found.text, found.blocked) == ("x0d0 x0d1 -> y0d0 y0d1", ("x0d0", "x0d1", "y0d0", "y0d1"))
    assert found.reason == "it could not be tried on small tensors: RuntimeError: needs a device"


def test_shapes_that_depend_on_values_are_whole() -> None:
    found = rule_by_trial(Example("aten.nonzero.default", (integers(2, 4, 6),)).call())
    assert found.reason
    assert not [f for f in built(found, integers(2, 4, 6)).factors if f.kind is not FactorKind.BLOCKED]


def built(found: Any, x: torch.Tensor) -> Rule:
    return build_written(Example("aten.nonzero.default", (x,)).call(), found)


def test_a_wrong_rule_does_not_pass() -> None:
    example, _ = EXAMPLES["aten.sort.default"]
    right = rule_by_trial(example.call())
    assert check_rule(example.call(), right) is None
    lie = type(right)(text="d0 d1 d2 -> d0 d1 d2, d0 d1 d2")
    assert "split in 2" in str(check_rule(example.call(), lie))

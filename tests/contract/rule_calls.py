"""Representative calls of every operator that has a rule, on small tensors: material for the contracts of rules."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from planner.graph.call import Call, Typed
from planner.graph.operator_graph import ROWS_FROM, STARTING, TorchConstant
from planner.graph.operators import causal_convolution as causal_convolution  # these make operators known to torch
from planner.graph.operators import delta_rule as delta_rule
from planner.graph.operators import index_scores as index_scores
from planner.graph.operators import rotary as rotary
from planner.graph.operators import selective_scan as selective_scan
from planner.graph.operators import state_space_scan as state_space_scan
from planner.graph.rewriting import gated_norm as gated_norm
from planner.graph.rewriting.masks import COMPOSED_ATTENTION, MASKED_ATTENTION
from planner.graph.rewriting.rotations import ROTARY
from planner.graph.torch_operators import resolve
from planner.graph.tracing.exported import tensor_type
from planner.models import composed_attention as composed_attention
from planner.models.experts import mixture as mixture
from planner.sharding.rule import Rule
from planner.sharding.rules import RULES


@dataclass(frozen=True)
class Example:
    """`op(*args, **kwargs)`; `label` tells the calls of one operator apart."""

    op: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""

    def __str__(self) -> str:
        shapes = "_".join("x".join(map(str, t.shape)) or "0d" for t in self.tensors())
        return "-".join(word for word in (self.op.removeprefix("aten."), shapes, self.label) if word)

    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in pytree.tree_leaves((self.args, dict(self.kwargs))) if isinstance(leaf, torch.Tensor)]

    def takes_gradients(self) -> list[bool]:
        """Whether the tensors are floating point, and none that autograd refuses a gradient."""
        tensors = self.tensors()
        without = 2 if self.op in WITHOUT_GRADIENT and self.label not in ("nothing kept", "kept", "mean", "sum") else 0
        return [t.is_floating_point() and at < len(tensors) - without for at, t in enumerate(tensors)]

    def run(self) -> tuple[torch.Tensor, ...]:
        return run(self.op, self.args, self.kwargs)

    def call(self) -> Call:
        return Call(
            op=self.op,
            arguments=tuple(_typed(argument) for argument in self.args),
            keywords=tuple((key, _typed(value)) for key, value in self.kwargs.items()),
            results=tuple(tensor_type(result.detach()) for result in self.run()),
        )

    def rule(self) -> Rule:
        return RULES[self.op].build(self.call())


WITHOUT_GRADIENT = (
    "aten._native_batch_norm_legit_functional.default",
    "aten._native_batch_norm_legit_no_training.default",
    "aten.batch_norm.default",
    "aten.binary_cross_entropy_with_logits.default",
)
"""Operators whose last two tensors take no gradient, where they are given: running statistics, weights of a loss."""


def run(op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    """The tensors that a call returns."""
    if op == "planner.update":
        return tuple(content.clone() for content in args[0])
    if op == "planner.embedding_bag":
        weight, indices, *offsets = args
        word = ("sum", "mean", "max")[kwargs["mode"]]
        return (F.embedding_bag(indices, weight, *offsets, **{**kwargs, "mode": word}),)
    if op == MASKED_ATTENTION:
        return (dense_attention(*args, **kwargs),)
    if op in ROWS_FROM.values():
        rows = _random(kwargs["rows"], kwargs["width"])
        return (F.embedding_bag(args[0], rows) if kwargs["bag"] else F.embedding(args[0], rows),)
    made = args[0].view_as(args[0]) if op in ("planner.identity", STARTING) else resolve(op)(*args, **kwargs)
    return tuple(made) if isinstance(made, tuple | list) else (made,)


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: torch.Tensor | None,
    seen: torch.Tensor | None,
    sinks: torch.Tensor | None = None,
    *,
    back: int | None,
    ahead: int | None,
    prefix: int,
    chunk: int | None = None,
    cap: float | None = None,
    **further: Any,
) -> torch.Tensor:
    """Attention with the mask of queries x keys that a kind stands for."""
    at = torch.arange(query.shape[2])
    shown = torch.ones(len(at), len(at), dtype=torch.bool)
    shown = shown if back is None else shown.triu(-back)
    shown = shown if ahead is None else shown.tril(ahead)
    shown = shown if chunk is None else shown & (at[:, None] // chunk == at // chunk)
    shown = (shown | (at < prefix))[None, None]
    if documents is not None:
        shown = shown & (documents[:, None, :, None] == documents[:, None, None, :])
    if seen is not None:
        shown = shown & (seen[:, None, None, :] != 0)
    if sinks is not None or cap is not None:
        return _with_sinks(query, key, value, shown, sinks, further.get("scale"), cap)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=shown, **further)


def _with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    shown: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float | None,
    cap: float | None,
) -> torch.Tensor:
    """A softmax over the capped scores and the sink of the head, without what the sink takes of it."""
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if cap is None else torch.tanh(scores / cap) * cap
    scores = scores.masked_fill(~shown, -torch.inf)
    if sinks is None:
        return torch.ops.aten._safe_softmax(scores, -1) @ value
    joined = torch.cat((scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)), dim=-1)
    return joined.softmax(-1)[..., :-1] @ value


def _typed(argument: Any) -> Typed:
    if isinstance(argument, torch.Tensor):
        return tensor_type(argument)
    if isinstance(argument, list | tuple):
        return tuple(_typed(item) for item in argument)
    if isinstance(argument, torch.dtype):
        return TorchConstant("dtype", str(argument).removeprefix("torch."))
    if isinstance(argument, torch.device):
        return TorchConstant("device", str(argument))
    return argument


def _random(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + 7 * len(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _positive(*shape: int) -> torch.Tensor:
    return _random(*shape).abs() + 0.5


def _integers(high: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(high + sum(shape))
    return torch.randint(high, shape, generator=generator)


def _mask(*shape: int) -> torch.Tensor:
    return _random(*shape) > 0


def examples() -> Iterator[Example]:
    """At least one call for each row of the table of rules."""
    groups = (
        *(_contractions, _masked_attention, _delta_rules, _state_spaces, _experts, _lookups, _picks),
        *(_elementwise, _masks_and_numbers, _views, _along, _reductions, _factories),
        *(_convolutions, _channels, _recurrent, _bags, _losses),
    )
    for group in groups:
        for op, *args in group():
            kwargs = args.pop() if args and isinstance(args[-1], dict) else {}
            label = args.pop(0) if args and isinstance(args[0], str) else ""
            name = op if op.startswith("planner.") else f"aten.{op}"
            yield Example(name, tuple(args), kwargs, label)


def _contractions() -> Iterator[tuple[Any, ...]]:
    x = _random(4, 2, 8)
    yield "linear.default", x, _random(4, 8)
    yield "linear.default", x, _random(4, 8), _random(4)
    yield "linear.default", _random(8), _random(4, 8), _random(4)
    yield "addmm.default", _random(6), _random(4, 8), _random(8, 6)
    yield "addmm.default", "a matrix", _random(4, 6), _random(4, 8), _random(8, 6)
    yield "addmm.default", "a row", _random(1, 6), _random(4, 8), _random(8, 6)
    yield "addmm.default", "a column", _random(4, 1), _random(4, 8), _random(8, 6)
    yield "addmm.default", "scaled", _random(6), _random(4, 8), _random(8, 6), {"beta": 0.5, "alpha": 2.0}
    yield "matmul.default", x, _random(8, 4)
    yield "matmul.default", _random(4, 6, 8), _random(4, 8, 2)
    yield "matmul.default", _random(2, 4, 6, 8), _random(4, 8, 2)
    yield "matmul.default", _random(2, 1, 6, 8), _random(4, 8, 2)
    yield "matmul.default", _random(8), _random(8)
    yield "matmul.default", _random(8), _random(4, 8, 2)
    yield "matmul.default", _random(4, 2, 8), _random(8)
    yield "mm.default", _random(4, 8), _random(8, 6)
    yield "bmm.default", _random(4, 6, 8), _random(4, 8, 2)
    yield "mv.default", _random(4, 8), _random(8)
    yield "dot.default", _random(8), _random(8)
    yield "baddbmm.default", _random(4, 1, 2), _random(4, 6, 8), _random(4, 8, 2)
    yield "baddbmm.default", "scaled", _random(2), _random(4, 6, 8), _random(4, 8, 2), {"beta": 0.5, "alpha": 2.0}
    yield "einsum.default", "experts", "bsh,ehf->bsef", [_random(4, 2, 8), _random(6, 8, 4)]
    yield "einsum.default", "heads", "bhqk, bkhd -> bqhd", [_random(2, 4, 6, 8), _random(2, 8, 4, 6)]
    yield "einsum.default", "any leading dims", "...i,oi->...o", [_random(4, 2, 8), _random(6, 8)]
    yield "einsum.default", "leading dims of one", "...i,...i->...", [_random(4, 2, 8), _random(8)]
    yield "einsum.default", "an extent of one", "ij,ij->i", [_random(4, 6), _random(4, 1)]
    yield "einsum.default", "a result unsaid", "ij,jk", [_random(4, 8), _random(8, 6)]
    yield "einsum.default", "nothing summed", "bld,dn->bldn", [_random(4, 2, 6), _random(6, 8)]
    yield "einsum.default", "one turned", "bij->jbi", [_random(4, 6, 8)]
    yield "einsum.default", "one summed", "bij->jb", [_random(4, 6, 8)]
    yield "einsum.default", "a diagonal", "bii->bi", [_random(4, 6, 6)]
    yield "einsum.default", "a trace and a product", "bii,bj->bj", [_random(4, 6, 6), _random(4, 8)]
    yield "conv2d.default", _random(4, 6, 8, 4), _random(4, 6, 2, 2), _random(4), [2, 2]
    yield "conv2d.default", "no bias", _random(4, 2, 5, 5), _random(6, 2, 3, 3), None, [1, 1], [1, 1]
    attention = "scaled_dot_product_attention.default"
    yield attention, _random(2, 4, 6, 8), _random(2, 4, 6, 8), _random(2, 4, 6, 8)
    yield attention, "causal", _random(2, 4, 6, 8), _random(2, 4, 6, 8), _random(2, 4, 6, 4), None, 0.0, True
    yield attention, _random(2, 4, 6, 8), _random(2, 4, 2, 8), _random(2, 4, 2, 8), {"scale": 0.1}
    grouped = {"is_causal": True, "enable_gqa": True}
    yield attention, "grouped", _random(2, 8, 6, 4), _random(2, 2, 6, 4), _random(2, 2, 6, 4), grouped
    yield attention, "one key head", _random(2, 4, 6, 4), _random(2, 1, 6, 4), _random(2, 1, 6, 4), grouped


def _masked_attention() -> Iterator[tuple[Any, ...]]:
    attention = "scaled_dot_product_attention.default"
    query, key = _random(2, 4, 6, 8), _random(2, 4, 2, 8)
    yield attention, "bias", query, key, key, _random(2, 4, 6, 2)
    yield attention, "bias of all samples", query, key, key, _random(1, 4, 6, 2), {"scale": 0.3}
    yield attention, "bias of all heads", query, key, key, _random(2, 1, 6, 2)
    yield attention, "bias without a batch", query, key, key, _random(4, 6, 2)
    yield attention, "bias of keys", query, key, key, {"attn_mask": _random(2, 1, 1, 2)}
    yield attention, "matrix", query, key, key, _random(6, 2)
    seen = _mask(2, 1, 1, 6)
    yield attention, "padding", query, query, query, seen.logical_or(torch.arange(6) == 0)
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    yield attention, "causal mask", query, query, query, causal.expand(2, 1, 6, 6).contiguous()
    grouped = _random(2, 2, 6, 8)
    yield attention, "grouped and a bias", query, grouped, grouped, _random(1, 4, 6, 6), {"enable_gqa": True}
    kinds, wide, narrow = {"back": 2, "ahead": 0, "prefix": 0}, _random(2, 8, 6, 4), _random(2, 2, 6, 4)
    documents, padding = torch.tensor([[0, 0, 0, 1, 1, 2], [4, 4, 4, 4, 5, 5]]), torch.tensor([[0, 1, 1, 1, 1, 1]] * 2)
    yield MASKED_ATTENTION, "window", query, query, query, None, None, kinds
    yield (
        MASKED_ATTENTION,
        "prefix and padding",
        query,
        query,
        query,
        None,
        padding,
        {**kinds, "prefix": 2, "back": None},
    )
    both = {"back": 1, "ahead": 3, "prefix": 0, "scale": 0.3, "enable_gqa": True}
    yield MASKED_ATTENTION, "documents, both ways", wide, narrow, narrow, documents, padding, both
    yield MASKED_ATTENTION, "sinks", query, query, query, None, None, _random(4), kinds
    yield MASKED_ATTENTION, "sinks of groups", wide, narrow, narrow, documents, None, _random(8), both
    yield MASKED_ATTENTION, "capped", wide, narrow, narrow, None, None, {**both, "cap": 0.5}
    hidden = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    yield COMPOSED_ATTENTION, "causal", query, query, query, _random(4), None, True
    yield COMPOSED_ATTENTION, "a mask", query, query, query, _random(4), hidden
    yield (
        COMPOSED_ATTENTION,
        "groups and numbers",
        wide,
        narrow,
        narrow,
        _random(8),
        torch.zeros(1, 8, 6, 6),
        False,
        0.3,
    )
    yield COMPOSED_ATTENTION, "capped", wide, narrow, narrow, None, hidden, {"cap": 0.5}
    yield COMPOSED_ATTENTION, "one head of keys", wide, narrow[:, :1], narrow[:, :1], _random(8), hidden[:1]


def _delta_rules() -> Iterator[tuple[Any, ...]]:
    rule, strengths = "planner.gated_delta_rule.default", _random(2, 6, 4).sigmoid()
    heads, values = _random(2, 6, 4, 3), _random(2, 6, 4, 2)
    yield rule, "grouped", _random(2, 6, 2, 3), _random(2, 6, 2, 3) / 2, values, -_positive(2, 6, 4), strengths, True, 4
    yield rule, "one head each", heads, heads / 3, values, -_positive(2, 6, 4), strengths
    yield rule, "channels that decay", heads, heads.flip(0), values, -_positive(2, 6, 4, 3), strengths, True, 4


def _state_spaces() -> Iterator[tuple[Any, ...]]:
    scan, each = "planner.state_space_scan.default", "planner.selective_scan.default"
    steps, decays, numbers = _random(2, 6, 4), -_positive(4), (_random(4), _random(4))
    few, settings = (_random(2, 6, 2, 3), _random(2, 6, 2, 3)), (True, 0.0, None, 4)
    yield scan, "groups", _random(2, 6, 4, 2), steps, decays, *few, *numbers, *settings
    own = _random(2, 6, 4, 3), _random(2, 6, 4, 3)
    yield scan, "each its own", _random(2, 6, 4, 2), steps.sigmoid(), decays, *own, None, None, False, 0.1, 0.6, 4
    yield scan, "one group", _random(2, 6, 4, 2), steps, decays, *(one[:, :, :1] for one in own), *numbers, *settings
    wide, read = _random(2, 4, 6), (_random(2, 3, 6), _random(2, 3, 6))
    gated = _random(4), _random(2, 4, 6), _random(4), True
    yield each, "gated", wide, _random(2, 4, 6), -_positive(4, 3), *read, *gated
    yield each, "plain", wide, _positive(2, 4, 6), -_positive(4, 3), *read, None, None, None, False
    yield "planner.causal_convolution.default", "gated", wide, _random(4, 3), _random(4), True
    yield "planner.causal_convolution.default", wide, _random(4, 3), None, False
    yield "planner.index_scores.default", _random(2, 4, 6, 3), _random(2, 8, 3), _random(2, 4, 6), 0.5
    norm = "planner.gated_rms_norm.default"
    yield norm, "silu", _random(4, 6, 8), _random(4, 6, 8), _random(8), 1e-3, True
    yield norm, "sigmoid", _random(4, 8), _random(4, 8), None, 1e-3, False
    heads, tables = _random(4, 2, 6, 8), (_random(6, 8), _random(6, 8))
    yield ROTARY, "halves", heads, *tables, False, False, 0, 8, False, None
    yield ROTARY, "neighbours", heads, _random(4, 1, 6, 4), _random(4, 1, 6, 4), True, True, 0, 8, True, None
    yield ROTARY, "neighbours to halves", heads, *tables, True, False, 0, 8, False, None
    yield ROTARY, "a part", heads, _random(4, 6, 4), _random(4, 6, 4), True, False, 3, 4, True, 1


def _experts() -> Iterator[tuple[Any, ...]]:
    weights = _random(4, 6, 8), _random(4, 6, 8), _random(4, 8, 6)
    tokens = _random(4, 4, 8), _positive(4, 4, 2)
    yield "planner.experts.default", *tokens, _integers(4, 4, 4, 2), *weights
    yield "planner.experts.default", "one gets all", *tokens, torch.full((4, 4, 2), 3), *weights
    yield "planner.experts.default", "capacity", *tokens, _integers(4, 4, 4, 2), *weights, 2
    bounded = {"gate_bias": _random(4, 6), "up_bias": _random(4, 6) + 0.3, "limit": 1.5, "slope": 1.7, "offset": 1.0}
    yield "planner.experts.default", "biases, bounded", *tokens, _integers(4, 4, 4, 2), *weights, bounded
    plain = None, *weights[1:]
    yield "planner.experts.default", "no gate", *tokens, _integers(4, 4, 4, 2), *plain, {"activation": "relu2"}
    biased = {"up_bias": _random(4, 6), "activation": "gelu_tanh"}
    yield "planner.experts.default", "no gate, a bias", *tokens, _integers(4, 4, 4, 2), *plain, biased
    few = _random(2, 4, 8), _positive(2, 4, 1), _integers(4, 2, 4, 1)
    yield "planner.experts.default", *few, *weights
    yield "planner.expert_loads.default", _integers(4, 4, 6, 2), 4
    yield "planner.expert_loads.default", _integers(1, 2, 4, 1), 1


def _lookups() -> Iterator[tuple[Any, ...]]:
    yield "embedding.default", _random(8, 4), _integers(8, 4, 6)
    yield "embedding.default", _random(8, 4), _integers(8, 4)
    yield "embedding.default", "padded", _random(8, 4), _integers(8, 4, 6), 2
    yield "layer_norm.default", _random(4, 2, 8), [8], _random(8), _random(8), 1e-5
    yield "layer_norm.default", "no bias", _random(4, 2, 8), [8], _random(8)
    yield "layer_norm.default", "no weight", _random(4, 2, 8), [8]
    yield "layer_norm.default", "two dims", _random(4, 2, 8), [2, 8]
    yield "layer_norm.default", "two dims", _random(4, 2, 8), [2, 8], _random(2, 8), _random(2, 8)
    yield "rms_norm.default", _random(4, 2, 8), [8], _random(8), 1e-5
    yield "rms_norm.default", "no weight", _random(4, 2, 8), [8]
    yield "rms_norm.default", "two dims", _random(4, 2, 8), [2, 8], _random(2, 8)
    labels = _integers(8, 12)
    yield "cross_entropy_loss.default", _random(12, 8), labels
    yield "cross_entropy_loss.default", "sum", _random(12, 8), labels, None, 2
    yield "cross_entropy_loss.default", "ignored", _random(12, 8), labels.where(labels != 3, -100)
    yield "cross_entropy_loss.default", "smoothed", _random(12, 8), labels, None, 1, -100, 0.1
    for op in ("softmax.int", "log_softmax.int"):
        yield op, _random(4, 6, 8), -1
        yield op, "middle", _random(4, 6, 8), 1
        yield op, "dtype", _random(4, 6, 8), 0, torch.float32


def _picks() -> Iterator[tuple[Any, ...]]:
    x = _random(4, 6, 8)
    yield "index.Tensor", "first", x, [_integers(4, 2, 6)]
    yield "index.Tensor", "middle", x, [None, _integers(6, 4)]
    yield "index.Tensor", "two together", x, [None, _integers(6, 4, 1), _integers(8, 6)]
    yield "index.Tensor", "two apart", x, [_integers(4, 4, 2), None, _integers(8, 2)]
    yield "index.Tensor", "mask by numbers", _mask(4, 6), [_integers(4, 4, 1, 1, 1), _integers(6, 1, 1, 1, 6)]
    yield "index_select.default", x, 1, _integers(6, 4)
    yield "index_select.default", "last", x, -1, _integers(8, 2)
    yield "gather.default", x, 1, _integers(6, 4, 2, 8)
    yield "gather.default", "fewer", x, -1, _integers(8, 2, 6, 4)
    yield "scatter.value", x, 1, _integers(6, 4, 2, 8), 1.0
    yield "scatter.value", "fewer", x, -1, _integers(8, 2, 6, 4), 0.5
    yield "scatter.value", "one place", _random(4, 1), 1, _integers(1, 4, 1), 1.0


def _masks_and_numbers() -> Iterator[tuple[Any, ...]]:
    x, y = _random(4, 6, 8), _random(4, 6, 8)
    for op in ("ge.Scalar", "le.Scalar"):
        yield op, _integers(3, 4, 6), 1
    for op in ("ne.Tensor", "lt.Tensor", "gt.Tensor", "bitwise_and.Tensor", "bitwise_or.Tensor", "bitwise_xor.Tensor"):
        yield op, _integers(3, 4, 6), _integers(3, 6)
    for op in ("__and__.Tensor", "__or__.Tensor", "__xor__.Tensor"):
        yield op, _mask(4, 1, 6), _mask(6, 1)
    for name in ("and", "or", "xor"):
        yield f"logical_{name}.default", _mask(4, 6), _mask(6)
    for op in ("logical_not.default", "bitwise_not.default"):
        yield op, _mask(4, 6)
    yield "rsub.Scalar", x, 1.0
    yield "rsub.Tensor", x, _random(8)
    yield "sub.Scalar", x, 2
    for name in ("floor", "ceil", "round", "sign", "isnan", "isinf", "elu", "erf", "hardswish", "leaky_relu"):
        yield f"{name}.default", x
    for name in ("mish", "softplus", "square", "expm1", "exp2", "log_sigmoid"):
        yield f"{name}.default", x
    for name in ("log1p", "log2", "reciprocal"):
        yield f"{name}.default", _positive(4, 6)
    yield "floor_divide.default", _integers(9, 4, 6), 2
    yield "div.Tensor_mode", x, _positive(8), {"rounding_mode": "floor"}
    yield "remainder.Scalar", _integers(9, 4, 6), 4
    yield "clamp.default", x, -0.5, 0.5
    yield "clamp.Tensor", x, _random(8) - 3, _random(6, 1) + 3
    yield "clamp_min.default", x, 0.0
    yield "clamp_max.default", x, 0.0
    for op in ("maximum.default", "minimum.default", "max.other", "min.other"):
        yield op, x, y
        yield op, x, _random(6, 1)
    yield "where.ScalarOther", _mask(4, 1, 8), _random(1, 6, 8), -1.0
    yield "where.ScalarSelf", _mask(4, 6, 8), -1.0, x
    yield "masked_fill.Tensor", x, _mask(6, 1), _random()
    for name in ("zeros_like", "ones_like"):
        yield f"{name}.default", x
    yield "full_like.default", x, 3.0
    yield "copy.default", _integers(3, 4, 6), _integers(3, 6)
    yield "to.device", x, torch.device("cpu"), torch.float32
    yield "lift_fresh_copy.default", x.detach()
    yield "expand_as.default", _random(6, 1), x
    yield "triu.default", _random(4, 6, 8), 1
    yield "tril.default", _random(6, 8)


def _elementwise() -> Iterator[tuple[Any, ...]]:
    x, y = _random(4, 6, 8), _random(4, 6, 8)
    yield "planner.identity", x
    yield STARTING, x
    for op in ("add.Tensor", "sub.Tensor", "mul.Tensor"):
        yield op, x, y
        yield op, x, _random(8)
        yield op, _random(4, 1, 8), _random(6, 1)
        yield op, x, 2.0
        yield op, x, _random()
    yield "add.Tensor", "alpha", x, y, {"alpha": 3.0}
    yield "div.Tensor", x, _positive(4, 6, 8)
    yield "div.Tensor", x, _positive(6, 1)
    for op in ("add.Scalar", "mul.Scalar", "div.Scalar", "pow.Tensor_Scalar"):
        yield op, _positive(4, 6), 3
    for op in ("log.default", "sqrt.default", "rsqrt.default"):
        yield op, _positive(4, 6)
    for op in ("neg", "abs", "cos", "sin", "silu", "gelu", "relu", "exp", "sigmoid", "tanh"):
        yield f"{op}.default", x
    yield "gelu.default", "tanh", x, {"approximate": "tanh"}
    yield "dropout.default", x, 0.0, True
    yield "dropout.default", "evaluation", x, 0.5, False
    yield "native_dropout.default", x, 0.0, True
    yield "native_dropout.default", "evaluation", x, 0.5, False
    yield "feature_dropout.default", x, 0.0, True
    yield "feature_dropout.default", "evaluation", x, 0.5, False
    yield "where.self", _mask(4, 6, 8), x, y
    yield "where.self", _mask(6, 1), x, _random()
    yield "masked_fill.Scalar", x, _mask(4, 6, 8), -1.0
    yield "masked_fill.Scalar", x, _mask(6, 1), -1.0
    for op in ("eq.Scalar", "ne.Scalar", "lt.Scalar", "gt.Scalar"):
        yield op, _integers(3, 4, 6), 1
    for op in ("eq.Tensor", "ge.Tensor", "le.Tensor"):
        yield op, _integers(3, 4, 6), _integers(3, 6)
    yield "to.dtype", x, torch.float32
    yield "to.dtype_layout", x, {"dtype": torch.float32}
    yield "_to_copy.default", x, {"dtype": torch.float32}
    for op in ("clone", "contiguous", "detach", "alias"):
        yield f"{op}.default", x
    yield "expand.default", _random(4, 1, 8), [4, 6, 8]
    yield "expand.default", "new dim", _random(6, 1), [4, -1, 8]
    yield "cumsum.default", x, 1
    yield "cumsum.default", "last", x, -1


def _views() -> Iterator[tuple[Any, ...]]:
    for op in ("view.default", "_unsafe_view.default", "reshape.default"):
        yield op, "merge", _random(4, 6, 8), [24, 8]
        yield op, "split", _random(4, 24), [4, 6, 4]
        yield op, "regroup", _random(4, 6, 8), [4, -1, 4, 2]
        yield op, "no refinement", _random(2, 6, 4), [2, 8, 3]
        yield op, "ones", _random(4, 1, 6, 1), [1, 4, 6]
        yield op, "flat", _random(4, 6, 2), [-1]
        yield op, "mixed", _random(2, 4, 6, 2), [8, 12]
        yield op, "interleaved", _random(8, 12), [4, 24]
    yield "flatten.using_ints", _random(4, 2, 6), 0, 1
    yield "flatten.using_ints", "last", _random(4, 2, 6), 1
    yield "unflatten.int", _random(4, 24), 1, [6, -1]
    yield "unflatten.int", _random(24, 4), 0, [2, 2, 6]
    yield "unsqueeze.default", _random(4, 6), 1
    yield "unsqueeze.default", "last", _random(4, 6), -1
    yield "squeeze.dim", _random(4, 1, 6), 1
    yield "squeeze.dim", _random(4, 6), 1
    yield "transpose.int", _random(4, 6, 8), 1, 2
    yield "transpose.int", "outer", _random(4, 6, 8), -3, -1
    yield "permute.default", _random(4, 6, 8), [2, 0, 1]
    yield "permute.default", "from the end", _random(4, 6, 8), [-1, 0, -2]
    yield "t.default", _random(4, 6)
    yield "t.default", _random(4)


def _along() -> Iterator[tuple[Any, ...]]:
    x = _random(4, 6, 8)
    yield "slice.Tensor", x, 1, 2, 4
    yield "slice.Tensor", "to the end", x, -1, 0, 9223372036854775807
    yield "slice.Tensor", "steps", x, 2, 0, 8, 2
    yield "slice.Tensor", "first dim", x
    yield "slice.Tensor", "whole", x, 1, 0, 6
    yield "narrow.default", x, 1, 2, 4
    yield "narrow.default", "whole", x, 1, 0, 6
    yield "select.int", x, 1, 3
    yield "select.int", "last", x, -1, -1
    yield "split.Tensor", x, 2, 1
    yield "split.Tensor", "whole", x, 8, 2
    yield "split_with_sizes.default", x, [2, 4], 1
    yield "split_with_sizes.default", "whole", x, [6], 1
    yield "chunk.default", x, 2, -1
    yield "chunk.default", "whole", x, 1, 0
    yield "unbind.int", x, 1
    yield "topk.default", x, 3
    yield "topk.default", "smallest of the first dim", x, 2, 0, False
    yield "topk.default", "all", x, x.shape[-1]
    yield "cat.default", [x, _random(4, 2, 8)], 1
    yield "cat.default", [x, x + 1, x + 2], -1
    yield "cat.default", "one", [x], 0
    yield "pad.default", x, [0, 1]
    yield "pad.default", "both sides", x, [0, 0, 2, 2], "constant", 1.0
    yield "constant_pad_nd.default", x, [1, 0, 0, 0], -1.0
    yield "diff.default", x, 1, -1
    yield "diff.default", "prepended", x, 1, 1, _random(4, 1, 8)
    yield "slice_scatter.default", x, _random(4, 4, 8), 1, 2, 6
    yield "slice_scatter.default", "whole", x, _random(4, 6, 8), 1
    yield "select_scatter.default", x, _random(4, 8), 1, 3
    yield "flip.default", x, [1]
    yield "roll.default", x, [2], [-1]
    yield "roll.default", "flat", x, [2]
    yield "repeat.default", _random(4, 6), [1, 2]
    yield "repeat.default", "new dim", _random(4, 1, 8), [2, 1, 6, 1]
    yield "repeat_interleave.self_int", x, 3, 1
    yield "repeat_interleave.self_int", "flat", x, 3
    yield "repeat_interleave.self_int", "spelled out", x, 3, 1, {"output_size": 18}
    yield "repeat_interleave.self_int", "flat, spelled out", x, 3, {"output_size": 576}
    yield "stack.default", [x, x + 1], 1
    yield "stack.default", "last", [x, x + 1], -1


def _reductions() -> Iterator[tuple[Any, ...]]:
    x = _random(4, 6, 8)
    for op in ("sum.default", "mean.default"):
        yield op, x
    for op in ("sum.dim_IntList", "mean.dim", "amax.default", "amin.default"):
        yield op, x, [1]
        yield op, "kept", x, [0, -1], True
    for op in ("amax.default", "amin.default"):
        yield op, "all", x
    yield "sum.dim_IntList", "all", x, None
    yield "mean.dim", "all", x, None
    yield "sum.default", "integers", _integers(5, 4, 6)


def _convolutions() -> Iterator[tuple[Any, ...]]:
    x, weight = _random(4, 4, 6, 6), _random(4, 4, 3, 3)
    for op in ("conv2d.default", "conv2d.padding"):
        yield op, x[:, :2], weight[:4, :2]
    yield "conv2d.default", "bias", x, weight, _random(4), [2, 2], [1, 1]
    yield "conv2d.default", "one sample", x[0], weight, _random(4)
    yield "conv2d.default", "dilated", x, weight, None, [1, 1], [2, 2], [2, 2]
    yield "conv2d.default", "groups", x, _random(8, 2, 3, 3), _random(8), [1, 1], [1, 1], [1, 1], 2
    yield "conv2d.default", "depthwise", x, _random(4, 1, 3, 3), None, [1, 1], [1, 1], [1, 1], 4
    yield "conv2d.padding", "same", x, _random(8, 2, 3, 3), None, [1, 1], "same", [1, 1], 2
    yield "conv1d.default", x[0], _random(8, 6, 3), _random(8)
    yield "conv1d.padding", x[0], _random(8, 6, 3), _random(8), [1], "same"
    yield "conv3d.default", _random(2, 4, 4, 4, 4), _random(4, 4, 2, 2, 2), _random(4)
    yield "conv3d.padding", _random(2, 4, 4, 4, 4), _random(4, 2, 2, 2, 2), _random(4), [1, 1, 1], "same", [1, 1, 1], 2
    spread = "conv_transpose2d.input"
    yield spread, x, _random(4, 6, 3, 3), _random(6), [2, 2], [1, 1], [1, 1]
    yield spread, "apart", x, _random(4, 6, 2, 2), None, [2, 2]
    yield spread, "apart in one dim", x, _random(4, 2, 1, 3), _random(2), [2, 1], [0, 1], [1, 0]
    yield spread, "one sample", x[0], _random(4, 6, 2, 2), _random(12), [1, 1], [0, 0], [0, 0], 2
    yield spread, "groups, dilated", x, _random(4, 4, 2, 3), _random(8), [1, 1], [0, 0], [0, 0], 2, [2, 3]
    yield spread, "depthwise", x, _random(4, 1, 3, 3), _random(4), [1, 1], [1, 1], [0, 0], 4
    yield "conv_transpose1d.default", x[0], _random(6, 8, 3), _random(8), [3]
    yield "conv_transpose3d.input", _random(2, 4, 4, 4, 4), _random(4, 2, 2, 2, 2), _random(2), [2, 2, 2]
    for op in ("max_pool2d.default", "max_pool2d_with_indices.default"):
        yield op, x, [3, 3], [2, 2], [1, 1]
        yield op, "one sample", x[0], [2, 2]
    yield "avg_pool2d.default", x, [2, 2]
    yield "avg_pool2d.default", "padded", x, [3, 3], [1, 1], [1, 1]
    yield "avg_pool2d.default", "padding not counted", x, [3, 3], [1, 1], [1, 1], False, False
    yield "adaptive_avg_pool2d.default", x, [1, 1]
    yield "adaptive_avg_pool2d.default", "three", x, [3, 3]
    yield "adaptive_avg_pool1d.default", x[0], [2]


def _channels() -> Iterator[tuple[Any, ...]]:
    x, affine, running = _random(4, 6, 2), (_random(6), _random(6) + 1), (_random(6), _positive(6))
    functional = "_native_batch_norm_legit_functional.default"
    yield functional, _random(4, 2, 2, 3), *(tensor[:2] for tensor in (*affine, *running)), True, 0.1, 1e-5
    yield functional, "flat", _random(4, 6), *affine, *running, True, 0.1, 1e-5
    yield functional, "no weight", x, None, None, *running, True, 0.1, 1e-5
    yield functional, "evaluation", x, *affine, *running, False, 0.1, 1e-5
    yield "_native_batch_norm_legit.no_stats", x, *affine, True, 0.1, 1e-5
    yield "_native_batch_norm_legit_no_training.default", x, *affine, *running, 0.1, 1e-5
    yield "batch_norm.default", "evaluation", x, *affine, *running, False, 0.1, 1e-5, False
    yield "batch_norm.default", "nothing kept", x, *affine, None, None, True, 0.1, 1e-5, False
    yield "group_norm.default", x, 3, *affine
    yield "group_norm.default", "one group", x, 1, *affine
    yield "group_norm.default", "no weight", x, 6
    yield "planner.update", [_random(6), _integers(9)]


def _recurrent() -> Iterator[tuple[Any, ...]]:
    """Samples, steps, inputs and hidden elements: 4, 3, 6, 5; of the projected ones 2."""
    x, state, wide = _random(4, 3, 6), _random(1, 4, 5), _random(2, 4, 5)
    for name, gates in (("lstm", 20), ("gru", 15), ("rnn_tanh", 5), ("rnn_relu", 5)):
        weights = [_random(gates, 6) / 3, _random(gates, 5) / 3, _random(gates), _random(gates)]
        starts = [state, state + 1] if name == "lstm" else state
        yield f"{name}.input", x, starts, weights, True, 1, 0.0, True, False, True
        yield f"{name}.input", "steps first", x.transpose(0, 1), starts, weights[:2], False, 1, 0.0, True, False, False
    weights = [_random(20, 6) / 3, _random(20, 5) / 3]
    yield "lstm.input", "both ways", x, [wide, wide - 1], weights * 2, False, 1, 0.0, True, True, True
    weights = [_random(20, 6) / 3, _random(20, 2) / 3, _random(20), _random(20), _random(2, 5)]
    yield "lstm.input", "projected", x, [_random(1, 4, 2), state], weights, True, 1, 0.0, True, False, True


def _bags() -> Iterator[tuple[Any, ...]]:
    for op in ROWS_FROM.values():
        words = {"table": "users", "rows": 12, "width": 8, "trainable": True}
        yield op, "", _integers(12, 8, 4), {**words, "bag": False}
        yield op, "bags", _integers(12, 8, 4), {**words, "bag": True}
    table, flat, offsets = _random(8, 4), _integers(8, 10), torch.tensor([0, 3, 3, 7])
    numbers, bags = _integers(8, 4, 3), "planner.embedding_bag"
    for mode, label in enumerate(("sum", "mean", "max")):
        yield bags, label, table, numbers, {"mode": mode}
        yield bags, f"{label} uneven", table, flat, offsets, {"mode": mode}
    yield bags, "weighted", table, numbers, {"mode": 0, "per_sample_weights": _random(4, 3)}
    yield bags, "weighted uneven", table, flat, offsets, {"mode": 0, "per_sample_weights": _random(10)}
    yield bags, "padded", table, numbers, {"mode": 1, "padding_idx": int(numbers[0, 0])}
    ends = torch.tensor([0, 3, 10])
    last = {"mode": 1, "padding_idx": int(flat[0]), "include_last_offset": True}
    yield bags, "padded uneven", table, flat, ends, last
    _random(4, 6, 8)


def _losses() -> Iterator[tuple[Any, ...]]:
    x, y, chances = _random(4, 6), _random(4, 6) + 1, _random(4, 6).softmax(-1)
    for reduction, label in enumerate(("kept", "mean", "sum")):
        yield "mse_loss.default", label, x, y, reduction
        yield "l1_loss.default", label, x, y, reduction
        yield "smooth_l1_loss.default", label, x, y, reduction, 0.5
        yield "huber_loss.default", label, x, y, reduction, 0.5
        yield "kl_div.default", label, x, chances, reduction
        yield "binary_cross_entropy_with_logits.default", label, x, chances, None, None, reduction
    yield "kl_div.default", "log target", x, y, 1, {"log_target": True}
    weights = _positive(4, 1), _positive(6)
    yield "binary_cross_entropy_with_logits.default", "weights", x, chances, *weights
    steps, lengths = torch.tensor([8, 6, 8, 4]), torch.tensor([3, 2, 1, 2])
    aligned = _random(8, 4, 6).log_softmax(-1), _integers(4, 4, 3) + 1, steps, lengths
    yield "planner.ctc_loss.default", *aligned, 0, False
    yield "planner.ctc_loss.default", "no infinities", *aligned[:2], steps.clamp_max(1), lengths, 0, True
    marks = _random(4, 6).argsort(1) < 4
    yield "planner.marked_ranks.default", marks, 4
    yield "planner.marked_places.default", marks, 4
    yield "planner.expected.default", _random(4, 6), torch.tensor([[1, 2]]).repeat(4, 1), [1, 2], "sizes"
    yield "planner.picked_rows.default", _random(4, 6, 8), _integers(6, 4, 12)
    labels = _integers(8, 12)
    yield "nll_loss_nd.default", _random(12, 8), labels
    yield "nll_loss_nd.default", "sum", _random(12, 8), labels, None, 2
    yield "nll_loss_nd.default", "ignored", _random(12, 8), labels.where(labels != 3, -100)
    yield "broadcast_tensors.default", [_random(4, 6), _random(6), _random(4, 1)]


def _factories() -> Iterator[tuple[Any, ...]]:
    yield "arange.default", 8
    yield "arange.start", 2, 8
    yield "arange.start_step", 2, 8, 2
    yield "zeros.default", [4, 6]
    yield "ones.default", [4, 6]
    yield "full.default", [4, 6], 3.0
    yield "scalar_tensor.default", 3.0
    yield "tril.default", _random(4, 4)
    yield "triu.default", _random(4, 4)
    yield "tril_indices.default", 4, 4, -1
    yield "triu_indices.default", 4, 4
    yield "eye.default", 4
    yield "eye.m", 4, 6
    yield "new_zeros.default", _random(4, 6), [4, 6]
    yield "new_ones.default", _random(4, 6), [], {"dtype": torch.bool}
    yield "new_full.default", _random(4), [4, 6], 3.0

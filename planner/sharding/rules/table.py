"""The rules themselves: one row per operator. To add an operator is to add a row.

Saved tensors follow the formulas of autograd (tools/autograd/derivatives.yaml of PyTorch 2.13). Attention follows
FlashAttention-2 (Dao 2023), whose backward pass computes the scores again: 3 d + 2 e of work for keys of d elements and
values of e, where the forward pass takes d + e; 2.5 times as much where both are equal. Attention that drops
probabilities is run unfused: scores in memory, nothing done twice, no half of them skipped.
"""

from collections.abc import Mapping
from dataclasses import replace

from planner.fp8_recipes import RECIPES
from planner.graph.fp8 import fp8_operator
from planner.graph.operator_graph import STARTING
from planner.graph.random_ops import CHANCES
from planner.graph.rewriting.contractions import EINSUM
from planner.graph.rewriting.indexers import INDEX_SCORES
from planner.graph.rewriting.masks import COMPOSED_ATTENTION, MASKED_ATTENTION
from planner.graph.rewriting.norms import GATED_NORM
from planner.graph.rewriting.recurrent import GATES, LSTM
from planner.graph.rewriting.rotations import ROTARY
from planner.graph.tracing.scans import CAUSAL_CONVOLUTION, DELTA_RULE, SELECTIVE_SCAN, STATE_SPACE
from planner.sharding.rules.channels import BatchNorm, GroupNorm
from planner.sharding.rules.composed_attention import ComposedAttention
from planner.sharding.rules.contraction import Contraction
from planner.sharding.rules.convolution import Convolution, Pool
from planner.sharding.rules.delta_rule import DeltaRule
from planner.sharding.rules.einsum import Einsum, InnerPattern, Matmul
from planner.sharding.rules.experts import Experts
from planner.sharding.rules.fp8 import Fp8Linear
from planner.sharding.rules.gated_norm import GatedNorm
from planner.sharding.rules.index_scores import IndexScores
from planner.sharding.rules.lookups import EmbeddingBag, OutsideRows
from planner.sharding.rules.losses import Ctc, PairLoss
from planner.sharding.rules.picks import Gather, Index, IndexSelect, ScatterValue
from planner.sharding.rules.recurrent import Recurrent
from planner.sharding.rules.rotary import Rotary
from planner.sharding.rules.shapes import Elementwise, Factory, Filled, Normalise, Reduce
from planner.sharding.rules.spec import RuleSpec
from planner.sharding.rules.state_space import SelectiveScan, StateSpaceScan
from planner.sharding.rules.views import AlongDim, Pad, Permute, RepeatEach, Reshape, Tile
from planner.sharding.rules.windows import WindowedAttention

_BOTH = ((0, (1,)), (1, (0,)))
_INPUT = ((0, (0,)),)
_PLAIN = Elementwise()
_IF_NEEDED = Elementwise(op_class="copy", passes=True)
_KEEPS_INPUT = Elementwise(work=4.0, saves=_INPUT)
_KEEPS_RESULT = Elementwise(work=4.0, saved_results=(0,))


def _with_scratch(plain: Elementwise, **counts: float) -> Mapping[str, Elementwise]:
    """Operators like a plain one, with the tensors that the formulas of their gradients make on the way."""
    return {f"aten.{name}.default": replace(plain, scratch=count) for name, count in counts.items()}


_COMPARED = Elementwise(saves=((0, (0, 1)), (1, (0, 1))), gradient_scratch=((0, 1, 2), (1, 1, 2)))
_VIEW = Reshape()
_LINEAR = Einsum(
    pattern="... i, o i, o -> ... o",
    op_class="matmul",
    work=((2.0, ""),),
    addends=(2,),
    deferred_weight_gradients=(1, 2),
    saves=_BOTH,
)
_ADDMM = Einsum(
    pattern="... o, b i, i o -> b o", op_class="matmul", work=((2.0, ""),), addends=(0,), saves=((1, (2,)), (2, (1,)))
)

_ATTENTION = Einsum(
    pattern="b (g r) q d, b g k d, b g k e -> b (g r) q e",
    op_class="attention",
    blocked="q k d e",
    heads=True,
    work=((2.0, "b g r q k d"), (2.0, "b g r q k e")),
    gradient_work=2 / 3,
    repeated_terms=(0,),
    causal_argument=(5, "is_causal"),
    mask_argument=(3, "attn_mask"),
    roles=(
        ("batch", "b"),
        ("heads", "g r"),
        ("key_heads", "g kv"),
        ("queries", "q"),
        ("keys", "k"),
        ("head_dim", "d"),
        ("value_dim", "e"),
    ),
    saves=((0, (0, 1, 2)), (1, (0, 1, 2)), (2, (0, 1, 2))),
    saved_results=(0,),
    saved_extra=((4.0, "b g r q"),),
    chance=CHANCES["aten.scaled_dot_product_attention.default"],
    unfused_extra=((1.0, "b g r q k"),),  # the mask
    unfused_elements=((2.0, "b g r q k"),),  # probabilities, and those that are left
    unfused_scratch=((1.0, "b g r q k"),),  # scores; a gradient of probabilities
    rings=(("k", "q"),),  # keys and values come round; backward once more, and their gradients behind them
    inner=tuple(
        pattern
        for piece in ("b g kv k d", "b g kv k e")
        for pattern in (
            InnerPattern(kind="send_recv", factor="k@q", factors=piece, forward=1, backward=1),
            InnerPattern(kind="send_recv", factor="k@q", factors=piece, backward=1, home=True, wide=True),
        )
    ),
    # the piece that is here and the next one, and gradients of a hop; sums that are sent, those that come
    inner_elements=((3.0, "b g kv k d"), (3.0, "b g kv k e"), (1.0, "b g r q d")),
    inner_wide=((2.0, "b g kv k d"), (2.0, "b g kv k e"), (1.0, "b g r q d")),
)

RULES: Mapping[str, RuleSpec] = {
    # contractions
    "aten.linear.default": replace(_LINEAR, folds=True),
    **{fp8_operator(name): Fp8Linear(plain=_LINEAR, recipe=recipe) for name, recipe in RECIPES.items()},
    "aten.addmm.default": _ADDMM,
    "aten.matmul.default": Matmul(folds=True),
    "aten.mm.default": Matmul(),
    "aten.bmm.default": Matmul(),
    "aten.mv.default": Matmul(),
    "aten.dot.default": Matmul(),
    "aten.baddbmm.default": Matmul(),
    EINSUM: Contraction(),
    "aten.scaled_dot_product_attention.default": _ATTENTION,
    MASKED_ATTENTION: WindowedAttention(
        plain=replace(
            _ATTENTION,
            pattern="b (g r) q d, b g k d, b g k e, b t, b t, (g r) -> b (g r) q e",
            positions=(0, 1, 2, 3, 4, 5),
            blocked="q k d e t",
            causal_argument=None,
            mask_argument=None,
            chance=None,
            addends=(3, 4, 5),  # the gradient of sinks is found beside those of queries, keys and values
            saves=tuple((operand, (0, 1, 2)) for operand in range(6)),
        )
    ),
    COMPOSED_ATTENTION: ComposedAttention(
        plain=replace(
            _ATTENTION,
            pattern="b (g r) q d, b g k d, b g k e, (g r) -> b (g r) q e",
            causal_argument=None,
            mask_argument=None,
            chance=None,
            rings=(),
            inner=(),
            inner_elements=(),
            inner_wide=(),
            addends=(3,),  # the gradient of sinks is found beside those of queries, keys and values
            saves=tuple((operand, (0, 1, 2, 3)) for operand in range(4)),
            saved_extra=(),
        )
    ),
    # lookups, normalisation, loss
    "aten.embedding.default": Einsum(
        pattern="v h, ... -> ... h", op_class="embedding", work=((1.0, "h"),), looked_up=(0,), saves=((1, (0,)),)
    ),
    "aten.index.Tensor": Index(),
    "aten.index_select.default": IndexSelect(),
    "aten.gather.default": Gather(),
    "aten.scatter.value": ScatterValue(),
    "aten.layer_norm.default": Normalise(work=8.0, saves=((0, (0, 1)), (1, (0,)), (2, (0, 1, 2))), statistics=2),
    "aten.rms_norm.default": Normalise(work=6.0, saves=((0, (0, 1)), (1, (0,))), statistics=1),
    GATED_NORM: GatedNorm(),
    ROTARY: Rotary(),
    "planner.experts.default": Experts(),
    "planner.expert_loads.default": Einsum(
        pattern="b s k -> b e", op_class="copy", blocked="k e", work=((1.0, "b s k"),)
    ),
    "planner.marked_ranks.default": Einsum(pattern="b s -> b t", op_class="copy", blocked="s t", work=((1.0, "b s"),)),
    "planner.marked_places.default": Einsum(pattern="b s -> b n", op_class="copy", blocked="s n", work=((1.0, "b s"),)),
    "planner.expected.default": Einsum(pattern="b x, b k -> b x", op_class="copy", blocked="k", work=((1.0, "x"),)),
    "planner.picked_rows.default": Einsum(
        pattern="b n h, b s -> b s h",
        op_class="copy",
        blocked="n",
        work=((1.0, "h"),),
        looked_up=(0,),
        saves=((1, (0,)),),
    ),
    "aten.cross_entropy_loss.default": Einsum(
        pattern="n v, n -> ",
        op_class="cross_entropy",
        combined="v",
        work=((6.0, ""),),
        saved_extra=((4.0, "n v"),),
        inner=(
            InnerPattern(kind="all_reduce", factor="v", factors="n", element_bytes=4, forward=3),
            InnerPattern(kind="all_reduce", factor="n", factors="", element_bytes=4, forward=1, only_mean=True),
        ),
        mean_argument=(3, "reduction"),
    ),
    # images
    "aten.conv1d.default": Convolution(spatial=1),
    "aten.conv1d.padding": Convolution(spatial=1),
    "aten.conv2d.default": Convolution(spatial=2),
    "aten.conv2d.padding": Convolution(spatial=2),
    "aten.conv3d.default": Convolution(spatial=3),
    "aten.conv3d.padding": Convolution(spatial=3),
    "aten.conv_transpose1d.default": Convolution(spatial=1, transposed=True),
    "aten.conv_transpose2d.input": Convolution(spatial=2, transposed=True),
    "aten.conv_transpose3d.input": Convolution(spatial=3, transposed=True),
    "aten.max_pool2d.default": Pool(saved_extra_bytes=8.0, slides="max"),  # where each largest element was
    "aten.max_pool2d_with_indices.default": Pool(saved_results=(1,)),
    "aten.avg_pool2d.default": Pool(slides="mean"),
    "aten.adaptive_avg_pool1d.default": Pool(spatial=1, adaptive=True),
    "aten.adaptive_avg_pool2d.default": Pool(adaptive=True),
    "aten.batch_norm.default": BatchNorm(training=5),
    "aten._native_batch_norm_legit_functional.default": BatchNorm(training=5),
    "aten._native_batch_norm_legit.no_stats": BatchNorm(training=3),
    "aten._native_batch_norm_legit_no_training.default": BatchNorm(training=None),
    "aten.group_norm.default": GroupNorm(),
    # sequences, step by step
    **{op: Recurrent(gates=gates, states=2 if op == LSTM else 1) for op, gates in GATES.items()},
    DELTA_RULE: DeltaRule(),
    STATE_SPACE: StateSpaceScan(),
    SELECTIVE_SCAN: SelectiveScan(),
    INDEX_SCORES: IndexScores(),
    CAUSAL_CONVOLUTION: Einsum(
        pattern="b d s, d k, d -> b d s",
        op_class="elementwise",
        blocked="s k",
        work=((2.0, "b d s k"),),
        saves=tuple((operand, (0, 1, 2)) for operand in range(3)),
        scratch_elements=((3.0, "b d s"),),  # with zeros in front, before SiLU, and the gradient of that
    ),
    # further lookups and losses
    "planner.embedding_bag": EmbeddingBag(),
    "planner.rows_from_host": OutsideRows(place="host"),
    "planner.rows_from_servers": OutsideRows(place="servers"),
    "planner.ctc_loss.default": Ctc(),
    "aten.mse_loss.default": PairLoss(),
    "aten.l1_loss.default": PairLoss(saves=(), saved_elements=1.0),  # the difference
    "aten.smooth_l1_loss.default": PairLoss(),
    "aten.huber_loss.default": PairLoss(),
    "aten.binary_cross_entropy_with_logits.default": PairLoss(
        work=8.0, reduction=4, saves=((0, (0, 1)), (1, (0,)), (2, (0, 1)), (3, (0, 1))), scratch=1.0
    ),
    "aten.kl_div.default": PairLoss(saves=((0, (1,)), (1, (0, 1))), scratch=1.0),
    "aten.nll_loss_nd.default": Einsum(
        pattern="n v, n -> ",
        op_class="cross_entropy",
        work=((1.0, "n"),),
        looked_up=(0,),
        saves=((0, (0,)), (1, (0,))),
        inner=(InnerPattern(kind="all_reduce", factor="n", factors="", element_bytes=4, forward=1, only_mean=True),),
        mean_argument=(2, "reduction"),
    ),
    "aten.softmax.int": Elementwise(
        op_class="normalisation", work=5.0, saved_results=(0,), blocked_dims=(1, "dim", -1)
    ),
    "aten.log_softmax.int": Elementwise(
        op_class="normalisation", work=5.0, saved_results=(0,), blocked_dims=(1, "dim", -1)
    ),
    # elementwise
    "planner.identity": Elementwise(op_class="view", work=0.0, broadcast=True),
    STARTING: Elementwise(op_class="view", work=0.0),
    "planner.update": Factory(op_class="view"),  # what buffers change to: whole everywhere
    "aten.add.Tensor": Elementwise(passes=True),
    "aten.add.Scalar": Elementwise(passes=True),
    "aten.sub.Tensor": Elementwise(handed=(0,)),
    "aten.neg.default": _PLAIN,
    "aten.mul.Tensor": Elementwise(saves=_BOTH),
    "aten.mul.Scalar": _PLAIN,
    "aten.div.Tensor": Elementwise(saves=((0, (1,)), (1, (0, 1))), gradient_scratch=((1, 3, 0),)),
    "aten.div.Scalar": _PLAIN,
    **_with_scratch(_KEEPS_INPUT, abs=1, cos=2, erf=4, log1p=1, log2=1, sin=1, square=2),
    **_with_scratch(_KEEPS_RESULT, exp2=1, expm1=1, reciprocal=2, rsqrt=2, sqrt=1),
    "aten.pow.Tensor_Scalar": replace(_KEEPS_INPUT, scratch=2.0),
    "aten.log.default": _KEEPS_INPUT,
    "aten.silu.default": _KEEPS_INPUT,
    "aten.gelu.default": Elementwise(work=8.0, saves=_INPUT),
    "aten.relu.default": _KEEPS_RESULT,
    "aten.exp.default": _KEEPS_RESULT,
    "aten.sigmoid.default": _KEEPS_RESULT,
    "aten.tanh.default": _KEEPS_RESULT,
    "aten.dropout.default": Elementwise(work=2.0, dropped_bytes=1.0, chance=CHANCES["aten.dropout.default"]),
    "aten.native_dropout.default": Elementwise(work=2.0, saved_results=(1,)),
    "aten.feature_dropout.default": Elementwise(work=2.0),  # one byte for each channel: as good as nothing
    "aten.where.self": Elementwise(saves=((0, (1, 2)),)),
    "aten.masked_fill.Scalar": Elementwise(saves=((1, (0,)),)),
    "aten.eq.Scalar": _PLAIN,
    "aten.ne.Scalar": _PLAIN,
    "aten.lt.Scalar": _PLAIN,
    "aten.gt.Scalar": _PLAIN,
    "aten.eq.Tensor": _PLAIN,
    "aten.ge.Tensor": _PLAIN,
    "aten.le.Tensor": _PLAIN,
    "aten.to.dtype": _IF_NEEDED,
    "aten.to.dtype_layout": _IF_NEEDED,
    "aten._to_copy.default": Elementwise(op_class="copy"),
    "aten.clone.default": Elementwise(op_class="copy"),
    "aten.contiguous.default": _IF_NEEDED,
    "aten.detach.default": Elementwise(op_class="view", work=0.0),
    "aten.alias.default": Elementwise(op_class="view", work=0.0),
    "aten.ge.Scalar": _PLAIN,
    "aten.le.Scalar": _PLAIN,
    "aten.ne.Tensor": _PLAIN,
    "aten.lt.Tensor": _PLAIN,
    "aten.gt.Tensor": _PLAIN,
    "aten.logical_and.default": _PLAIN,
    "aten.logical_or.default": _PLAIN,
    "aten.logical_xor.default": _PLAIN,
    "aten.logical_not.default": _PLAIN,
    "aten.bitwise_and.Tensor": _PLAIN,
    "aten.bitwise_or.Tensor": _PLAIN,
    "aten.bitwise_xor.Tensor": _PLAIN,
    "aten.bitwise_not.default": _PLAIN,
    "aten.__and__.Tensor": _PLAIN,
    "aten.__or__.Tensor": _PLAIN,
    "aten.__xor__.Tensor": _PLAIN,
    "aten.rsub.Scalar": _PLAIN,
    "aten.rsub.Tensor": Elementwise(handed=(1,)),
    "aten.sub.Scalar": _PLAIN,
    "aten.floor.default": _PLAIN,
    "aten.ceil.default": _PLAIN,
    "aten.round.default": _PLAIN,
    "aten.sign.default": _PLAIN,
    "aten.isnan.default": _PLAIN,
    "aten.isinf.default": _PLAIN,
    "aten.floor_divide.default": _PLAIN,
    "aten.div.Tensor_mode": _PLAIN,
    "aten.remainder.Scalar": _PLAIN,
    "aten.full_like.default": _PLAIN,
    "aten.zeros_like.default": _PLAIN,
    "aten.ones_like.default": _PLAIN,
    "aten.clamp.default": replace(_KEEPS_INPUT, gradient_scratch=((0, 0, 2),)),  # masks of both bounds
    "aten.clamp_min.default": replace(_KEEPS_INPUT, gradient_scratch=((0, 0, 1),)),
    "aten.clamp_max.default": replace(_KEEPS_INPUT, gradient_scratch=((0, 0, 1),)),
    "aten.elu.default": _KEEPS_INPUT,
    "aten.hardswish.default": _KEEPS_INPUT,
    "aten.leaky_relu.default": _KEEPS_INPUT,
    "aten.log_sigmoid.default": _KEEPS_INPUT,
    "aten.mish.default": _KEEPS_INPUT,
    "aten.softplus.default": _KEEPS_INPUT,
    "aten.maximum.default": _COMPARED,
    "aten.minimum.default": _COMPARED,
    "aten.max.other": _COMPARED,
    "aten.min.other": _COMPARED,
    "aten.where.ScalarOther": Elementwise(saves=((0, (1,)),)),
    "aten.where.ScalarSelf": Elementwise(saves=((0, (1,)),)),
    "aten.masked_fill.Tensor": Elementwise(saves=((1, (0, 2)),)),
    "aten.clamp.Tensor": Elementwise(saves=((0, (0, 1, 2)), (1, (0, 1, 2)), (2, (0, 1, 2)))),
    "aten.copy.default": Elementwise(op_class="copy"),
    "aten.to.device": Elementwise(op_class="copy"),
    "aten.lift_fresh_copy.default": Elementwise(op_class="copy"),
    "aten.expand_as.default": Elementwise(op_class="view", work=0.0),
    "aten.tril.default": Elementwise(op_class="copy", blocked_trailing=2),
    "aten.triu.default": Elementwise(op_class="copy", blocked_trailing=2),
    # views
    "aten.view.default": Reshape(copies=False),
    "aten._unsafe_view.default": _VIEW,
    "aten.reshape.default": _VIEW,
    "aten.flatten.using_ints": _VIEW,
    "aten.unflatten.int": _VIEW,
    "aten.unsqueeze.default": _VIEW,
    "aten.squeeze.dim": _VIEW,
    "aten.broadcast_tensors.default": Elementwise(op_class="view", work=0.0),
    "aten.expand.default": Elementwise(op_class="view", work=0.0, local_form="expand"),
    "aten.transpose.int": Permute(form="transpose"),
    "aten.permute.default": Permute(form="permute"),
    "aten.t.default": Permute(form="matrix"),
    # along a dim
    "aten.slice.Tensor": AlongDim(dim=(1, "dim", 0), op_class="view"),
    "aten.narrow.default": AlongDim(dim=(1, "dim", 0), op_class="view", spells_extent=True),
    "aten.select.int": AlongDim(dim=(1, "dim", 0), op_class="view", drops=True),
    "aten.split.Tensor": AlongDim(dim=(2, "dim", 0), op_class="view"),
    "aten.split_with_sizes.default": AlongDim(dim=(2, "dim", 0), op_class="view", spells_extent=True),
    "aten.chunk.default": AlongDim(dim=(2, "dim", 0), op_class="view"),
    "aten.unbind.int": AlongDim(dim=(1, "dim", 0), op_class="view", drops=True),
    "aten.topk.default": AlongDim(dim=(2, "dim", -1), saved_results=(1,), spells_extent=True),
    "aten.cat.default": AlongDim(dim=(1, "dim", 0)),
    "aten.stack.default": AlongDim(dim=(1, "dim", 0), adds=True),
    "aten.pad.default": Pad(),
    "aten.constant_pad_nd.default": Pad(),
    "aten.diff.default": AlongDim(dim=(2, "dim", -1), scratch=1.0),
    "aten.slice_scatter.default": AlongDim(dim=(2, "dim", 0)),
    "aten.select_scatter.default": AlongDim(dim=(2, "dim", 0), second_drops=True),
    "aten.flip.default": Elementwise(op_class="copy", blocked_dims=(1, "dims", 0)),
    "aten.roll.default": Elementwise(op_class="copy", blocked_dims=(2, "dims", None)),  # without dims the flat tensor
    "aten.repeat.default": Tile(),
    "aten.repeat_interleave.self_int": RepeatEach(),
    "aten.cumsum.default": Elementwise(blocked_dims=(1, "dim", 0), scratch=2.0),  # flipped, summed, flipped
    # reductions
    "aten.sum.default": Reduce(combine="sum"),
    "aten.sum.dim_IntList": Reduce(combine="sum"),
    "aten.mean.default": Reduce(combine="mean"),
    "aten.mean.dim": Reduce(combine="mean"),
    "aten.amax.default": Reduce(combine="blocked"),
    "aten.amin.default": Reduce(combine="blocked"),
    # made from nothing
    "aten.arange.default": Factory(local_form="counted"),
    "aten.arange.start": Factory(local_form="counted"),
    "aten.arange.start_step": Factory(local_form="counted"),
    "aten.scalar_tensor.default": Factory(),
    "aten.eye.default": Factory(),
    "aten.eye.m": Factory(),
    "aten.tril_indices.default": Factory(),
    "aten.triu_indices.default": Factory(),
    "aten.zeros.default": Filled(),
    "aten.ones.default": Filled(),
    "aten.full.default": Filled(),
    "aten.new_zeros.default": Filled(),
    "aten.new_ones.default": Filled(),
    "aten.new_full.default": Filled(),
}

"""Makes the unsharded module drop the same elements as the traced graph under any plan.

The module is called as its author wrote it. Its calls that drop elements are intercepted where PyTorch lets functions
be overridden, and matched in order with the operators of the graph that drop:

    graph     block0/dropout      block0/attention              block1/dropout ...
    module    F.dropout(x, 0.1)   F.scaled_dot_product_...      F.dropout(x, 0.1) ...

Recurrent modules drop between their layers, so these are computed one by one, as in the graph
(`planner.graph.rewriting.recurrent`). Calls of `rand` and `bernoulli` return numbers that give the same kept elements.
`nn.MultiheadAttention` drops inside of one PyTorch function: that function's code is run with this context's dropout
functions. Dropout inside of any other function cannot be intercepted; unmatched operators at the end reveal it.
"""

import functools
import math
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from planner.errors import ModelError
from planner.graph.operator_graph import Operator
from planner.graph.tracing.attention_dims import attention_of_four_dims
from runtime.ops.attention.with_dropout import attention_with_dropout
from runtime.ops.local.local_dropout import features_of
from runtime.ops.randomness import Draw, Region, drop, drop_probability, keep_mask, operator_code, whole_region

_WHOLE = frozenset({F.dropout, torch.dropout, torch.native_dropout})
_FEATURES = frozenset({F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout})

_RECURRENT = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})

_BERNOULLI = frozenset({torch.bernoulli, torch.Tensor.bernoulli, torch.Tensor.bernoulli_})

_WITHOUT_SAMPLES = {F.dropout1d: 2, F.dropout3d: 4}


class SameDropout(TorchFunctionMode):
    """A context in which the operators `dropping` of a graph, in their order, decide which elements are dropped. Enter
    it for one forward pass. Raises ModelError where the calls of the module do not match the graph."""

    def __init__(self, dropping: Sequence[Operator], draw: Draw) -> None:
        super().__init__()
        self._dropping = dropping
        self._draw = draw
        self._used = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _WHOLE:
            return self._drop(func, whole_region, *args, **kwargs)
        if func in _FEATURES:
            return self._drop(func, lambda shape: _features(func, shape), *args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return attention_of_four_dims(functools.partial(self._attention, func), *args, **kwargs)
        if func is F.multi_head_attention_forward:
            return self._inside(func)(*args, **kwargs)
        if func in (torch.rand, torch.rand_like):
            return self._kept_samples(func, *args, **kwargs)
        if func in _BERNOULLI:
            return self._bernoulli(func, *args, **kwargs)
        if func in _RECURRENT:
            return self._recurrent(func, *args, **kwargs)
        return func(*args, **kwargs)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        if error is None and self._used != len(self._dropping):
            raise ModelError(
                f"the module applied dropout {self._used} times, the traced graph {len(self._dropping)} times, first"
                f" unmatched '{self._dropping[self._used].name}': dropout inside of a function cannot use the same"
                " mask; compare without dropout, or not at all (--no-check)"
            )

    def _drop(
        self,
        function: Any,
        region: Callable[[tuple[int, ...]], Region],
        input: torch.Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
        **keywords: Any,
    ) -> Any:
        train = keywords.get("train", training)
        if not train or not p:
            return function(input, p, train)
        key = self._key(f"{function.__name__} with p = {p}", p)
        keep = keep_mask(key, region(tuple(input.shape)), p, input.device)
        keep = keep.view(keep.shape[-input.dim() :])  # a sample dim may have been added
        dropped = drop(input, keep, p)
        return (dropped, keep) if function is torch.native_dropout else dropped

    def _kept_samples(self, function: Any, *size: Any, **keywords: Any) -> torch.Tensor:
        """0 or 1 for each element, from which the module computes the same mask
        (`planner.graph.rewriting.kept_samples`)."""
        p = drop_probability(self._dropping[self._used]) if self._used < len(self._dropping) else 0.0
        if function is torch.rand:
            given = size[0] if size and isinstance(size[0], list | tuple) else size
            numbers = torch.empty(
                keywords.get("size", given), dtype=keywords.get("dtype"), device=keywords.get("device")
            )
        else:
            numbers = torch.empty_like(*size, **keywords)
        keep = keep_mask(self._key(function.__name__, p), whole_region(tuple(numbers.shape)), p, numbers.device)
        return numbers.copy_(keep.view(numbers.shape))

    def _bernoulli(self, function: Any, input: torch.Tensor, p: float = 0.5, *, generator: None = None) -> torch.Tensor:
        """0 or 1 for each element, 1 with the probability `p`; written to `input` where the function works in place.
        Tracing refuses a generator."""
        drops = 1.0 - p
        key = self._key(f"bernoulli with p = {p}", drops)
        keep = keep_mask(key, whole_region(tuple(input.shape)), drops, input.device)
        target = input if function is torch.Tensor.bernoulli_ else torch.empty_like(input)
        return target.copy_(keep.view(input.shape))

    def _attention(
        self,
        function: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if not dropout_p:
            given: torch.Tensor = function(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
            return given
        scores = whole_region((*query.shape[:-1], key.shape[-2]))
        keep = keep_mask(
            self._key(f"attention with dropout_p = {dropout_p}", dropout_p), scores, dropout_p, query.device
        )
        return attention_with_dropout(
            query, key, value, keep, dropout_p, attn_mask=attn_mask, is_causal=is_causal, scale=scale
        )

    def _inside(self, function: Any) -> FunctionType:
        """The same Python function, with its dropout intercepted: calls inside of an overridden function are not."""
        caught = {
            "has_torch_function": lambda tensors: False,
            "dropout": lambda *args, **kwargs: self._drop(F.dropout, whole_region, *args, **kwargs),
            "scaled_dot_product_attention": lambda *args, **kwargs: self._attention(
                F.scaled_dot_product_attention, *args, **kwargs
            ),
        }
        names = {**function.__globals__, **caught}
        same = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
        same.__kwdefaults__ = function.__kwdefaults__
        return same

    def _recurrent(
        self,
        function: Any,
        source: torch.Tensor,
        states: Any,
        parameters: Any,
        *rest: Any,
    ) -> Any:
        """A multi-layer recurrent module with dropout, layer by layer. For padded sequences `rest` is: has_biases,
        num_layers, dropout, train and more."""
        if isinstance(rest[0], list | tuple):  # packed sequences, whose second argument is the batch sizes
            if rest[3] and rest[4] and rest[2] > 1:
                raise ModelError(
                    f"{function.__name__} applies dropout to packed sequences between its layers, which no graph has:"
                    " pad sequences to one length, and mask the padding out of the loss (ignore_index, or a mask)"
                )
            return function(source, states, parameters, *rest)
        if not isinstance(parameters, list | tuple) or not rest[2] or not rest[3] or rest[1] == 1:
            return function(source, states, parameters, *rest)
        biases, layers, p, *how = rest
        several = isinstance(states, list | tuple)
        parts = [each.chunk(layers) for each in (states if several else (states,))]
        given, ends = len(parameters) // layers, []
        for layer in range(layers):
            if layer:
                keep = keep_mask(
                    self._key(f"{function.__name__} with dropout = {p}", p),
                    whole_region(tuple(source.shape)),
                    p,
                    source.device,
                )
                source = drop(source, keep, p)
            own = [part[layer].contiguous() for part in parts]
            weights = parameters[layer * given : (layer + 1) * given]
            source, *last = function(source, own if several else own[0], weights, biases, 1, 0.0, *how)
            ends.append(last)
        return source, *(torch.cat(each) for each in zip(*ends, strict=True))

    def _key(self, call: str, probability: float) -> int:
        if self._used >= len(self._dropping):
            raise ModelError(
                f"the module applies dropout by {call} after the {self._used} times that its traced graph does;"
                " compare without dropout, or not at all (--no-check)"
            )
        op = self._dropping[self._used]
        if not math.isclose(drop_probability(op), probability):  # in place the probability is 1 - (1 - p)
            raise ModelError(
                f"the module applies dropout by {call} where its traced graph has '{op.name}' with the probability"
                f" {drop_probability(op)}; compare without dropout, or not at all (--no-check)"
            )
        self._used += 1
        return self._draw.key(operator_code(op.name))


def _features(function: Any, shape: tuple[int, ...]) -> Region:
    """The region that feature dropout drops as wholes. Some functions take an input without a sample dim, and add
    it."""
    return features_of(whole_region((1, *shape) if len(shape) == _WITHOUT_SAMPLES.get(function) else shape))

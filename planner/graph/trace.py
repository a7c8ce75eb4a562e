"""From a PyTorch module to an operator graph.

`torch.export` runs the module's real Python code on tensors without storage. Its graph is taken over call by call:
linear, attention, norms and losses stay whole, which is the level at which people think about sharding. No weights
are allocated.

A model of 80 equal blocks is not traced 80 times. Blocks that are modules of one list, of one class, with equal
attributes and equal parameters are *alike*: the first is traced between two markers, the others only announce that
they were called, and with what:

    embed -> begin -> [ops of block 0] -> end -> repeat(1) -> repeat(2) -> ... -> head

Afterwards each announcement is replaced by a copy of the first block's operators. The code around the blocks runs
in full, so a block that is skipped, called twice, or given another argument is seen. Where anything differs
(attributes, argument types, a tensor that reaches a block other than as an argument or a parameter) this list of
blocks, or the whole model, is traced in full instead: slower, but never wrong.
"""

import contextlib
import functools
import io
import warnings
from collections.abc import Mapping, Sequence
from operator import getitem
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from planner.errors import ModelError
from planner.graph import torch_operators as torch_operators  # makes our operators known to torch
from planner.graph.expert_load import with_named_settings
from planner.graph.names import check_names
from planner.graph.operator_graph import (
    Operator,
    OperatorGraph,
)
from planner.graph.random_ops import CHANCES
from planner.graph.rewriting.bags import with_bags
from planner.graph.rewriting.contractions import with_pairs
from planner.graph.rewriting.filled import with_filled_joined
from planner.graph.rewriting.gated_norm import with_gated_norms
from planner.graph.rewriting.gradient_starts import with_gradient_starts
from planner.graph.rewriting.indexers import with_index_scores
from planner.graph.rewriting.joins import without_empty_joins
from planner.graph.rewriting.kept_samples import with_kept_samples
from planner.graph.rewriting.masks import with_mask_kinds
from planner.graph.rewriting.norms import with_norms
from planner.graph.rewriting.pieces import with_pieces_together
from planner.graph.rewriting.recurrent import with_recurrent_layers
from planner.graph.rewriting.rotations import with_rotary
from planner.graph.rewriting.unjoined import with_parts_unjoined
from planner.graph.rewriting.unread import without_unread, without_unread_constants
from planner.graph.rewriting.untrained import without_untrained
from planner.graph.tracing import repeats
from planner.graph.tracing.alike import NotAlikeError
from planner.graph.tracing.attention_dims import AttentionOfFourDims
from planner.graph.tracing.autocast import without_autocast
from planner.graph.tracing.caches import without_caches
from planner.graph.tracing.examples import samples_of
from planner.graph.tracing.exported import Reader, changes
from planner.graph.tracing.gradient_hooks import refuse_gradient_hooks
from planner.graph.tracing.gradients_off import GradientsOff, without_needless_detaches
from planner.graph.tracing.hidden_parameters import AskedForError
from planner.graph.tracing.known_values import KnownValues
from planner.graph.tracing.literals import LiteralsKept
from planner.graph.tracing.marked import MarkedRows
from planner.graph.tracing.ordered_sets import ordered_sets
from planner.graph.tracing.own_functions import own_functions_as_operators
from planner.graph.tracing.plain_questions import PlainQuestions
from planner.graph.tracing.quick_export import quick_export
from planner.graph.tracing.refusals import (
    draws,
    refusal,
    without_draws,
    written_lines,
)
from planner.graph.tracing.returned import checked_loss
from planner.graph.tracing.scans import scans_as_operators
from planner.graph.tracing.value_checks import without_asserted_numbers, without_value_checks
from planner.graph.tracing.whole_losses import WholeLosses
from planner.limits import interrupting

_OF_TORCH = ".*isinstance\\(treespec, LeafSpec\\).*"
warnings.filterwarnings("ignore", _OF_TORCH, FutureWarning)  # about its own code while it copies an export


def trace(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    full: bool = False,
    compared: bool = False,
) -> OperatorGraph:
    """The operator graph of `module(*args, **kwargs)`, whose result is the loss: a scalar, alone, first of a tuple,
    `.loss`, or "loss" in a dict.

    Tensors may be on the meta device or real; none is copied. `full` traces every repeated block by itself;
    `compared` treats blocks as alike that differ only in their number, because another trace has compared them. Raises
    ModelError where the module cannot be traced or does not return a scalar loss, LimitError where tracing takes more
    time or memory than the planner may.
    """
    with interrupting(f"tracing {type(module).__name__}"):
        check_names(module)
        refuse_gradient_hooks(module)
        return _traced(module, args, kwargs, full, compared=compared)


def asks_for_values(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> bool:
    """Whether a model that can be traced asks for values that its code makes itself. Comparing two or more samples
    shows which of these values belong to one sample, so the graph for one sample differs."""
    with interrupting(f"tracing {type(module).__name__}"):
        try:
            _traced(module, args, kwargs, full=False, answers=(False,))
        except ModelError:
            return True
    return False


def _traced(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    full: bool,
    answers: Sequence[bool] = (False, True),
    compared: bool = False,
) -> OperatorGraph:
    example_args, example_kwargs = _distinct((args, dict(kwargs or {})), module)
    samples, error = samples_of((example_args, example_kwargs)), ModelError()
    once = functools.partial(_alike_once, compared=compared)
    for graph_of in (_graph_of,) if full else (once, _graph_of):
        for asks in answers:  # with answers about values that the code makes itself, where it asks
            known = KnownValues(samples) if asks else None
            try:
                return graph_of(module, example_args, example_kwargs, known)
            except NotAlikeError:  # traced in full, where an error is that of the model itself
                break
            except ModelError as refused:
                error = refused
    raise error


def _alike_once(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], known: KnownValues | None, compared: bool
) -> OperatorGraph:
    """The graph with alike blocks traced once. If the blocks of a list turn out not to be alike, that list is
    traced in full. Raises NotAlikeError where there is a second such list, or no other list."""
    besides: str | None = None
    hide = True
    while True:
        with repeats.announce(module, known, besides, compared, hide) as announced:
            if not announced:
                raise NotAlikeError("no blocks are alike")
            try:
                return _graph_of(module, args, kwargs, known, announced)
            except AskedForError:
                hide = False
            except NotAlikeError as error:
                if error.block is None or besides is not None:
                    raise
                besides = error.block


def _distinct(arguments: Any, module: nn.Module) -> Any:
    """Fresh example tensors without data: export takes one tensor given twice for one input. They are on the device of
    the parameters: without data where some parameters are, though others may be on the host (`torch.Tensor(...)`)."""
    parameters = tuple(module.parameters())
    first = next((one for one in parameters if one.is_meta), parameters[0] if parameters else None)

    def fresh(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return torch.empty_strided(
            leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device if first is None else first.device
        )

    return pytree.tree_map(fresh, arguments)


def _graph_of(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    known: KnownValues | None,
    announced: Sequence[repeats.Run] = (),
) -> OperatorGraph:
    regions = GradientsOff()
    wrapped = _Loss(module, regions, announced)
    try:
        with (
            torch.no_grad(),
            ordered_sets(module),
            own_functions_as_operators(module),
            scans_as_operators(module),
            LiteralsKept(),
            WholeLosses(),
            MarkedRows(),
            AttentionOfFourDims(),
            without_autocast(),
            without_caches(module),
            without_value_checks(),
            regions,
            known or contextlib.nullcontext(),
            PlainQuestions(),
            contextlib.redirect_stderr(io.StringIO()),  # torch writes the graph there when it raises
            repeats.hidden(announced),
            quick_export(),
        ):
            exported = without_draws(module, lambda: torch.export.export(wrapped, args, kwargs, strict=False))
        without_asserted_numbers(exported.graph)
        written = written_lines(exported)
        targets = [node.target for node in exported.graph.nodes if node.op == "call_function"]
        in_place = any(_changes_operands(node) for node in exported.graph.nodes)
        if announced and not all(_changes_what_is_known(node, exported) for node in exported.graph.nodes):
            raise NotAlikeError("operators in place may change what a block was given")
        if in_place or not all(isinstance(target, torch._ops.OpOverload) or target is getitem for target in targets):
            with quick_export():
                exported = exported.run_decompositions({})
    except (NotAlikeError, ModelError):
        raise
    except Exception as error:
        raise refusal(module, error) from error
    read = with_named_settings(without_needless_detaches(Reader(module, exported, written).read()))
    read = with_kept_samples(read, lambda op: draws(module, op.op, op.module, op.at))
    read = with_parts_unjoined(with_pieces_together(read, samples_of((args, kwargs))))
    paired = with_pairs(with_recurrent_layers(with_bags(without_empty_joins(read))))
    flat = with_filled_joined(with_index_scores(with_gated_norms(with_norms(paired))))
    if announced:  # inputs of a block seemed to have gradients
        flat = without_needless_detaches(repeats.expand(flat, announced))
        repeats.check_compared(flat, announced)
    whole = with_rotary(with_mask_kinds(flat))  # now it is known which tables have gradients
    graph = without_untrained(without_unread(whole, whole.producer, _dropping))
    graph = with_gradient_starts(graph if known is None else without_unread_constants(graph))
    if graph.loss not in graph.differentiable:
        raise ModelError(
            f"the loss of {type(module).__name__} depends on no trainable parameter; nothing can be trained"
        )
    return _named(graph)


def _dropping(op: Operator) -> bool:
    """Whether an operator drops elements: the module itself drops them too, whether they are read or not, and is given
    the same choices in the order of its calls."""
    return op.op in CHANCES and CHANCES[op.op].of(op.arguments, dict(op.keywords)) > 0


_SECRETLY = frozenset({"aten.batch_norm.default", "aten.instance_norm.default"})
"""Operators that change the running statistics at position 3, if there are any, where the argument at position 5
(training) is true; their schema does not say so."""


def _changes_operands(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    secretly = str(node.target) in _SECRETLY and node.args[3] is not None and node.args[5] is True
    return secretly or bool(node.target._schema.is_mutable)


def _changes_what_is_known(node: fx.Node, exported: Any) -> bool:
    """Whether a node writes only to buffers of the model, and to tensors that another operator has made."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return True
    schema = node.target._schema.arguments
    written = [given for given, known in zip(node.args, schema, strict=False) if known.is_write]
    written += [node.kwargs[known.name] for known in schema if known.is_write and known.name in node.kwargs]
    buffers = exported.graph_signature.inputs_to_buffers
    return all(isinstance(value, fx.Node) and (value.name in buffers or _is_made(value)) for value in written)


def _is_made(node: fx.Node) -> bool:
    """Whether an operator of the model made the content of a tensor, and no part of it was given to the model."""
    source: Any = node
    while isinstance(source, fx.Node):
        source = source.args[0] if source.target is getitem else source  # one of several results
        if not isinstance(source.target, torch._ops.OpOverload):
            return False
        schema = source.target._schema
        if not any(returned.alias_info is not None for returned in schema.returns):
            return source.target.namespace == "aten" and str(source.target) not in CHANCES  # these may return operands
        source = source.args[0]
    return False


class _Loss(nn.Module):
    """Calls the model and picks the loss out of what it returns."""

    def __init__(self, model: nn.Module, regions: GradientsOff, announced: Sequence[repeats.Run]) -> None:
        super().__init__()
        self.model, self.regions, self.announced = model, regions, announced

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        held = dict(self.model.named_buffers())
        with self.regions.training(), repeats.model_runs(self.announced):
            result = self.model(*args, **kwargs)
        for name, buffer in self.model.named_buffers():
            if held.get(name) is not buffer:
                raise changes(self.model, name)
        return checked_loss(self.model, result)


def _named(graph: OperatorGraph) -> OperatorGraph:
    """Names that a person can read and that survive a change elsewhere: module path, operator, and a number where
    needed."""
    given = {*graph.inputs, *graph.parameter_names, *graph.buffers}
    given |= {name.rpartition("#")[0] for name in given}
    taken: dict[str, int] = {}
    renamed: dict[str, str] = {}
    names = []
    for op in graph.operators:
        base = op.op.split(".")[1]
        stem = f"{op.module}/{base}" if op.module else base
        name = ""
        while not name or name in given:
            taken[stem] = taken.get(stem, 0) + 1
            name = stem if taken[stem] == 1 else f"{stem}_{taken[stem]}"
        names.append(name)
        for index, result in enumerate(op.results):
            if result is not None:
                renamed[result] = name if len(op.results) == 1 else f"{name}#{index}"
    return repeats.rename(graph, names, renamed)

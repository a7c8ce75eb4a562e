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
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any, cast

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from planner.errors import ModelError
from planner.graph import causal_convolution as causal_convolution  # these make operators known to torch
from planner.graph import delta_rule as delta_rule
from planner.graph import index_scores as index_scores
from planner.graph import repeats
from planner.graph import rotary as rotary
from planner.graph import selective_scan as selective_scan
from planner.graph import stacked as stacked  # makes the operator known to torch
from planner.graph import state_space_scan as state_space_scan
from planner.graph.alike import NotAlikeError
from planner.graph.attention_dims import AttentionOfFourDims
from planner.graph.autocast import without_autocast
from planner.graph.bags import with_bags
from planner.graph.caches import without_caches
from planner.graph.constants import held_tensor
from planner.graph.contractions import with_pairs
from planner.graph.examples import samples_of
from planner.graph.expert_load import with_named_settings
from planner.graph.filled import with_filled_joined
from planner.graph.gated_norm import with_gated_norms
from planner.graph.gradient_hooks import refuse_gradient_hooks
from planner.graph.gradient_starts import with_gradient_starts
from planner.graph.gradients_off import GradientsOff, without_needless_detaches
from planner.graph.hidden_parameters import AskedForError
from planner.graph.indexers import with_index_scores
from planner.graph.joins import without_empty_joins
from planner.graph.kept_samples import DRAWN, with_kept_samples
from planner.graph.known_values import KnownValues
from planner.graph.literals import LiteralsKept
from planner.graph.marked import MarkedRows
from planner.graph.masks import COMPOSED_ATTENTION, with_mask_kinds
from planner.graph.names import check_names, free_name
from planner.graph.norms import with_norms
from planner.graph.operator_graph import (
    Argument,
    Operator,
    OperatorGraph,
    Parameter,
    TensorType,
    TorchConstant,
    ValueRef,
)
from planner.graph.ordered_sets import ordered_sets
from planner.graph.own_functions import NAMESPACE, own_functions_as_operators
from planner.graph.pieces import with_pieces_together
from planner.graph.plain_questions import PlainQuestions
from planner.graph.random_ops import CHANCES
from planner.graph.recurrent import GATES, with_recurrent_layers
from planner.graph.refusals import (
    changes_input,
    depends_on_content,
    draws,
    line_of,
    mixes_dtypes,
    reads_number,
    refusal,
    users_line,
    without_draws,
    written_lines,
)
from planner.graph.returned import checked_loss
from planner.graph.rotations import with_rotary
from planner.graph.scans import scans_as_operators
from planner.graph.unread import without_unread, without_unread_constants
from planner.graph.untrained import without_untrained
from planner.graph.updates import with_updates
from planner.graph.value_checks import without_asserted_numbers, without_value_checks
from planner.graph.whole_losses import WholeLosses
from planner.limits import interrupting

_NUMBERS = frozenset({"aten.item.default", "aten._local_scalar_dense.default"})
_SAME_VALUES = frozenset({"aten.contiguous.default"})
"""Left out: whether they copy depends on the device that attention is traced on, and the graph must not."""

_OF_SHAPE: Mapping[str, str] = {
    "aten.view_as.default": "aten.view.default",
    "aten.reshape_as.default": "aten.reshape.default",
}
"""Operators whose second operand only gives a shape."""

_ALSO_CALLED: Mapping[str, str] = {
    "aten.concat.default": "aten.cat.default",
    "aten.concatenate.default": "aten.cat.default",
}
"""Operators with several names."""

_UNSET: Mapping[str, str] = {
    "aten.empty.memory_format": "aten.zeros.default",
    "aten.empty_like.default": "aten.zeros_like.default",
    "aten.new_empty.default": "aten.new_zeros.default",
}
"""Tensors whose elements are set later are zeros until then: uninitialised content would differ between devices."""
_OF_TYPE: Mapping[str, str] = {
    "aten.new_zeros.default": "aten.zeros.default",
    "aten.new_ones.default": "aten.ones.default",
    "aten.new_full.default": "aten.full.default",
}
"""Operators whose first operand only gives a dtype and a device."""
_TYPE_AS, _TO_DTYPE = "aten.type_as.default", "aten.to.dtype"
_FROZEN_NORM, _BATCH_NORM = "aten._native_batch_norm_legit_no_training.default", "aten.batch_norm.default"
_IGNORED = frozenset({"aten._assert_tensor_metadata.default", "aten._assert_async.msg"})

_OF_ONE_DTYPE = frozenset(
    f"aten.{name}"
    for name in (
        "linear.default", "matmul.default", "mm.default", "mv.default", "addmm.default", "conv1d.default",
        "conv2d.default", "conv3d.default", "conv_transpose1d.default", "conv_transpose2d.input",
        "conv_transpose3d.input", "convolution.default", "lstm_cell.default", "gru_cell.default",
        "rnn_tanh_cell.default", "rnn_relu_cell.default",
    )
) | frozenset(GATES)  # fmt: skip
"""Operators that refuse operands of several dtypes, except where the operands have no data."""
_PLACING = frozenset({"aten.index_add.default", "aten.index_put.default"})
"""The same for floating operands only: the others are places."""
_NORMS = frozenset({"aten.layer_norm.default", "aten.group_norm.default"})
"""The same for an input that is wider than its weights."""

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
        ):
            exported = without_draws(module, lambda: torch.export.export(wrapped, args, kwargs, strict=False))
        without_asserted_numbers(exported.graph)
        written = written_lines(exported)
        targets = [node.target for node in exported.graph.nodes if node.op == "call_function"]
        in_place = any(_changes_operands(node) for node in exported.graph.nodes)
        if announced and not all(_changes_what_is_known(node, exported) for node in exported.graph.nodes):
            raise NotAlikeError("operators in place may change what a block was given")
        if in_place or not all(isinstance(target, torch._ops.OpOverload) or target is getitem for target in targets):
            exported = exported.run_decompositions({})
    except (NotAlikeError, ModelError):
        raise
    except Exception as error:
        raise refusal(module, error) from error
    read = with_named_settings(without_needless_detaches(_Reader(module, exported, written).read()))
    read = with_kept_samples(read, lambda op: draws(module, op.op, op.module, op.at))
    read = with_pieces_together(read, samples_of((args, kwargs)))
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
                raise _changes(self.model, name)
        return checked_loss(self.model, result)


def _changes(module: nn.Module, name: str, at: str = "") -> ModelError:
    return ModelError(
        f"{type(module).__name__} changes {name} in its forward pass{at}; inputs must stay as they are, and buffers"
        " (running statistics) are updated in place, by `add_`, `copy_` and the like"
    )


_OURS = "\0"
"""The prefix of results until they have their names: no name of the module begins so (`check_names`)."""


@dataclass
class _Reader:
    """Turns the nodes of an exported program into operators. Names are those of torch until `_named` replaces them."""

    module: nn.Module
    exported: Any
    written: Mapping[str, str]

    def read(self) -> OperatorGraph:
        signature = self.exported.graph_signature
        for name in signature.user_inputs_to_mutate.values():
            raise changes_input(self.module, name, self.written.get(name, ""))
        for name in signature.parameters_to_mutate.values():
            raise _changes(self.module, name.removeprefix("model."), self.written.get(name, ""))
        self.types: dict[str, TensorType] = {}
        self.names: dict[str, Argument] = {}
        self.operators: list[Operator] = []
        inputs: list[str] = []
        buffers: list[str] = []
        parameters = _parameters(self.module, self.types)
        places = {name: place for place, (name, _) in enumerate(self.module.named_buffers())}
        own = {*places, *(p.name for p in parameters)}
        canonical = {alias: p.name for p in parameters for alias in (p.name, *p.aliases)}
        weights = dict(signature.inputs_to_parameters)
        lifted = signature.inputs_to_lifted_tensor_constants
        kept = {**signature.inputs_to_buffers, **lifted}
        known = {name.removeprefix("model."): self.exported.constants.get(name) for name in lifted.values()}
        constants = {name: held_tensor(self.module, name, known) for name in known}
        for node in self.exported.graph.nodes:
            if node.op == "placeholder":
                target = weights.get(node.name)
                if target is not None:
                    self.names[node.name] = ValueRef(canonical[target.removeprefix("model.")])
                    continue
                value = node.meta["val"]
                if not isinstance(value, torch.Tensor):
                    continue
                held = kept.get(node.name)
                name = held.removeprefix("model.") if held else free_name(node.name, own)
                self.types[name] = tensor_type(value)
                self.names[node.name] = ValueRef(name)
                (buffers if held else inputs).append(name)
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                returned = [self._argument(argument) for argument in node.args[0]]
        *contents, loss = returned
        if not isinstance(loss, ValueRef):
            raise ModelError(
                f"the loss of {type(self.module).__name__} is the constant {loss!r}; nothing can be trained"
            )
        graph = OperatorGraph(
            types=self.types,
            inputs=tuple(inputs),
            parameters=parameters,
            buffers=tuple(sorted(buffers, key=lambda name: places.get(name, len(places)))),
            operators=tuple(self.operators),
            loss=loss.name,
            constants=constants,
        )
        changed_buffers = [name.removeprefix("model.") for name in signature.buffers_to_mutate.values()]
        return with_updates(graph, dict(zip(changed_buffers, contents, strict=True)))

    def _call(self, node: fx.Node) -> None:
        if node.target is getitem:
            source, index = node.args
            assert isinstance(source, fx.Node)
            assert isinstance(index, int)
            self.names[node.name] = ValueRef(f"{_OURS}{source.name}#{index}")
            return
        if not isinstance(node.target, torch._ops.OpOverload):
            raise ModelError(
                f"{type(self.module).__name__} uses {node.target}, which has no equivalent among PyTorch's operators"
            )
        op = str(node.target)
        if op in _IGNORED:
            return
        if op in _SAME_VALUES:
            self.names[node.name] = self._argument(node.args[0])
            return
        if op in _NUMBERS and node.users:
            raise reads_number(self.module, node)
        known = op in CHANCES or op in GATES or op in DRAWN
        if _draws(node) and (not known or node.kwargs.get("generator") is not None):
            raise draws(self.module, op, _module_path(node), line_of(node))
        arguments = tuple(self._argument(argument) for argument in node.args)
        if op == _TYPE_AS:  # only the dtype of the other tensor is read
            other = node.args[1]
            assert isinstance(other, fx.Node)
            op, arguments = _TO_DTYPE, (arguments[0], self._argument(other.meta["val"].dtype))
        op = _ALSO_CALLED.get(op, op)
        if op in _OF_SHAPE:  # only its shape is read
            op, arguments = _OF_SHAPE[op], (arguments[0], tuple(node.meta["val"].shape))
        keywords = tuple((key, self._argument(argument)) for key, argument in node.kwargs.items())
        self._check_dtypes(op, arguments, node)
        if op in _UNSET:
            op, keywords = _UNSET[op], tuple(pair for pair in keywords if pair[0] != "memory_format")
        value = node.meta["val"]
        if op in _OF_TYPE:
            said = {"dtype": self._argument(value.dtype), "device": self._argument(value.device)}
            op, arguments, keywords = _OF_TYPE[op], arguments[1:], tuple(said.items())
        results = value if isinstance(value, tuple | list) else (value,)
        if op == _FROZEN_NORM:  # it has no statistics of its own: the other results are empty on some devices
            op, arguments, results = _BATCH_NORM, (*arguments[:5], False, *arguments[5:], False), results[:1]
        many = isinstance(value, tuple | list)
        names = tuple(f"{_OURS}{node.name}#{i}" if many else _OURS + node.name for i in range(len(results)))
        for name, result in zip(names, results, strict=True):
            if isinstance(result, torch.Tensor):
                if not all(isinstance(extent, int) for extent in result.shape):
                    raise depends_on_content(self.module, op, tuple(result.shape), node)
                self.types[name] = _stored_type(node, result)
        if not many:
            self.names[node.name] = ValueRef(_OURS + node.name)
        self.operators.append(
            Operator(
                name=node.name,
                op=op,
                arguments=arguments,
                keywords=keywords,
                results=tuple(n if isinstance(r, torch.Tensor) else None for n, r in zip(names, results, strict=True)),
                module=_module_path(node),
                line=users_line(node),
            )
        )

    def _check_dtypes(self, op: str, arguments: tuple[Argument, ...], node: fx.Node) -> None:
        """Raise ModelError for operands of several dtypes, which tensors without data do not refuse."""
        if op not in _OF_ONE_DTYPE and op not in _PLACING and op not in _NORMS:
            return
        operands = [self.types[given.name] for given in pytree.tree_leaves(arguments) if isinstance(given, ValueRef)]
        if op in _NORMS:  # statistics and weights may be wider than the input
            mixed = any(operand.element_bytes < operands[0].element_bytes for operand in operands)
        elif op in _OF_ONE_DTYPE:
            mixed = len({operand.dtype for operand in operands}) > 1
        else:  # positions are integers
            mixed = len({operand.dtype for operand in operands if operand.floating}) > 1
        if mixed:
            raise mixes_dtypes(self.module, op, [operand.dtype for operand in operands], node)

    def _argument(self, argument: Any) -> Argument:
        if isinstance(argument, fx.Node):
            return self.names[argument.name]
        if isinstance(argument, list | tuple):
            return tuple(self._argument(item) for item in argument)
        if argument is None or isinstance(argument, bool | int | float | str):
            return argument
        kinds = {
            torch.dtype: "dtype",
            torch.device: "device",
            torch.layout: "layout",
            torch.memory_format: "memory_format",
        }
        for kind, name in kinds.items():
            if isinstance(argument, kind):
                return TorchConstant(name, str(argument).removeprefix("torch."))
        raise ModelError(
            f"{type(self.module).__name__}: an operator has the argument {argument!r}, which a plan cannot hold"
        )


def _draws(node: fx.Node) -> bool:
    """Whether a call draws random numbers: its operator does, and no argument says that this is no training."""
    assert isinstance(node.target, torch._ops.OpOverload)
    given = {argument.name: value for argument, value in zip(node.target._schema.arguments, node.args, strict=False)}
    trains = {"train": True, "training": True, **given, **node.kwargs}
    tagged = torch.Tag.nondeterministic_seeded in node.target.tags
    return tagged and trains["train"] is not False and trains["training"] is not False


_ATTENTION = frozenset({"aten.scaled_dot_product_attention.default", COMPOSED_ATTENTION})
_HEADS_APART = 4  # dims of attention with a dim for heads


def _stored_type(node: fx.Node, result: torch.Tensor) -> TensorType:
    """The type of a result as devices store it. Fused attention writes batch, sequence, heads and head dim in this
    order, whatever a trace without memory says, so that nothing is copied where heads are joined again."""
    found = tensor_type(result)
    if result.dim() != _HEADS_APART:
        return found
    if str(node.target) in _ATTENTION:
        return replace(found, contiguous=False)
    source = node.args[0] if node.args else None
    if node.target is torch.ops.aten.transpose.int and isinstance(source, fx.Node) and str(source.target) in _ATTENTION:
        return replace(found, contiguous={cast("int", dim) % _HEADS_APART for dim in node.args[1:3]} == {1, 2})
    return found


def tensor_type(tensor: torch.Tensor) -> TensorType:
    """Type of a tensor with a fixed shape."""
    return TensorType(
        shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."), contiguous=tensor.is_contiguous()
    )


def _parameters(module: nn.Module, types: dict[str, TensorType]) -> tuple[Parameter, ...]:
    """All parameters in the order of `named_parameters`, tied ones once under their first name. Raises ModelError for
    a parameter without elements: it could not be cut, nor a product with it priced."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, nn.Parameter] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        tensors[id(parameter)] = parameter
    found = []
    for key, aliases in names.items():
        parameter = tensors[key]
        if 0 in parameter.shape:
            raise ModelError(
                f"parameter '{aliases[0]}' of {type(module).__name__} has the shape {tuple(parameter.shape)} and so no"
                " elements, nothing that could be trained or divided; build the model without it"
            )
        if parameter.is_complex():
            raise ModelError(
                f"parameter '{aliases[0]}' of {type(module).__name__} is complex, for which there is no optimizer here;"
                " keep it as real numbers with a last dim of 2, and take torch.view_as_complex of it"
            )
        types[aliases[0]] = tensor_type(parameter.detach())
        found.append(Parameter(name=aliases[0], aliases=tuple(aliases[1:]), trainable=parameter.requires_grad))
    return tuple(found)


def _module_path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    return str(path).removeprefix("model").removeprefix(".")


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


def resolve(op: str) -> torch._ops.OpOverload:
    """The PyTorch operator named "namespace.name.overload". Raises ModelError for a name of anything else:
    `torch.ops` has methods too, such as the one that loads a library."""
    found: Any = functools.reduce(lambda at, name: getattr(at, name, None), op.split("."), cast("Any", torch.ops))
    if not isinstance(found, torch._ops.OpOverload):
        if op.startswith(f"{NAMESPACE}."):
            raise ModelError(
                f"'{op}' is an autograd.Function of the model's code, which is no part of a plan file and is known once"
                " the model is traced; give the model (--model package.module:factory, or planner.trace)"
            )
        raise ModelError(f"'{op}' is not the name of a PyTorch operator, as aten.linear.default is")
    return found

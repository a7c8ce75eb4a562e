"""From an exported graph to operators, call by call.

Calls that mean the same are written in one way: several names of an operator become one, an operand of which only the
shape or the dtype is read becomes that shape or dtype, and memory that is not set yet is zero.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any, cast

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from planner.errors import ModelError
from planner.graph.names import free_name
from planner.graph.operator_graph import (
    DTYPE_BYTES,
    Argument,
    Operator,
    OperatorGraph,
    Parameter,
    TensorType,
    TorchConstant,
    ValueRef,
)
from planner.graph.random_ops import CHANCES
from planner.graph.rewriting.kept_samples import DRAWN
from planner.graph.rewriting.masks import COMPOSED_ATTENTION
from planner.graph.rewriting.recurrent import GATES
from planner.graph.rewriting.updates import with_updates
from planner.graph.tracing.constants import held_tensor
from planner.graph.tracing.refusals import (
    changes_input,
    counts_rows,
    depends_on_content,
    draws,
    line_of,
    mixes_dtypes,
    reads_number,
    users_line,
)

_NUMBERS = frozenset({"aten.item.default", "aten._local_scalar_dense.default"})
_COUNTING, _COUNTED = frozenset({"aten.embedding.default", "aten.embedding_bag.padding_idx"}), 3
"""Embeddings, and the place of the argument by which they count rows in the batch (scale_grad_by_freq)."""
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

_OURS = "\0"
"""The prefix of results until they have their names: no name of the module begins so (`check_names`)."""


@dataclass
class Reader:
    """Turns the nodes of an exported program into operators. Names are those of torch until `trace` replaces them."""

    module: nn.Module
    exported: Any
    written: Mapping[str, str]

    def read(self) -> OperatorGraph:
        signature = self.exported.graph_signature
        for name in signature.user_inputs_to_mutate.values():
            raise changes_input(self.module, name, self.written.get(name, ""))
        for name in signature.parameters_to_mutate.values():
            raise changes(self.module, name.removeprefix("model."), self.written.get(name, ""))
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
        self._refuse(op, node)
        op, arguments, keywords = self._spelled(op, node)
        value = node.meta["val"]
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

    def _refuse(self, op: str, node: fx.Node) -> None:
        """Raise ModelError for a call that reads a number, counts over the batch, or draws random numbers in a way that
        a plan cannot hold."""
        if op in _NUMBERS and node.users:
            raise reads_number(self.module, node)
        if op in _COUNTING and True in (*node.args[_COUNTED : _COUNTED + 1], node.kwargs.get("scale_grad_by_freq")):
            raise counts_rows(self.module, node)
        known = op in CHANCES or op in GATES or op in DRAWN
        if _draws(node) and (not known or node.kwargs.get("generator") is not None):
            raise draws(self.module, op, _module_path(node), line_of(node))

    def _spelled(self, op: str, node: fx.Node) -> tuple[str, tuple[Argument, ...], tuple[tuple[str, Argument], ...]]:
        """The operator, arguments and keywords of a call, in the one spelling that rules know. Raises ModelError for
        operands of several dtypes."""
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
        if op in _OF_TYPE:
            said = {"dtype": self._argument(node.meta["val"].dtype), "device": self._argument(node.meta["val"].device)}
            op, arguments, keywords = _OF_TYPE[op], arguments[1:], tuple(said.items())
        return op, arguments, keywords

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
    """Type of a tensor with a fixed shape. Raises ModelError for a dtype that is not known here."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise ModelError(
            f"tensors of dtype {dtype} are not planned; those that are have {', '.join(sorted(DTYPE_BYTES))}"
        )
    return TensorType(shape=tuple(tensor.shape), dtype=dtype, contiguous=tensor.is_contiguous())


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


def changes(module: nn.Module, name: str, at: str = "") -> ModelError:
    return ModelError(
        f"{type(module).__name__} changes {name} in its forward pass{at}; inputs must stay as they are, and buffers"
        " (running statistics) are updated in place, by `add_`, `copy_` and the like"
    )

"""Messages for a model that cannot be traced: the line of the user's code that is the cause, and what to change.

Two causes raise no error, so they are watched for while the model is traced: random numbers of Python and numpy, one
draw of which would be frozen into the graph; and changes in place, whose lines are in the graph before it is made
functional. `own_functions.py` handles autograd functions of the user's.
"""

import contextlib
import linecache
import os
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import fx, nn

from planner.errors import ModelError
from planner.graph.random_ops import CHANCES

_HERE = Path(__file__).parents[1]
_ZOO = f"{_HERE.parent / 'models'}{os.sep}"
_NOT_USERS = (f"{Path(torch.__file__).parent}{os.sep}", f"{_HERE}{os.sep}", "<")

_BRANCH = "choose between tensors with torch.where, or decide by a Python value that is known before the call"
_LOOP = "loop a number of times that is fixed before the call"
_READ = "keep it a tensor (y / y.max() in place of y / y.max().item()), or compute it before the call"
_SHAPE = "keep the shape and hide elements with a mask: torch.where(mask, x, 0)"
_NUMPY = "use PyTorch's operators in place of numpy's"
_PACKED = "pad sequences to one length, and leave what is padded out of the loss (ignore_index, or a mask)"
_DEVICE = "make tensors on the device of an input: device=x.device"
_HOOK = "write the change as the backward of an autograd.Function"
_GRADIENT = "write the gradient out with operators, or leave it out: a plan takes gradients of the loss alone"
_FLEX = "call F.scaled_dot_product_attention with a mask that operators make; scores with a bias are such a mask"
_SPARSE = "keep it dense, with zeros or a mask, or look rows up with an embedding"
_WITHOUT_DATA = (
    "compute it with PyTorch's other operators, or make it an operator of yours by torch.library.custom_op with"
    " register_fake and register_autograd"
)
_DTYPE = "cast to that of the weights where they meet (x.to(self.weight.dtype)), or plan in fp32 (--precision fp32)"
_WIDER = "compute it in float32 (x.float()), or plan in fp32 (--precision fp32)"
_ALIGNED = "give it a row of padded targets for each sample, N S, and both lengths as tensors"
_MIXES = "mixes dtypes, which no autocast brings together in a plan"
_UNBUILT = "give layers their sizes (nn.Linear in place of nn.LazyLinear), or call the module once in the factory"
_SIZES = "give sizes that go together; module(*args), with what the factory returns, has to run in PyTorch first"
_RUNS = (
    "module(*args) has to run in PyTorch first; of a model that reads images too, the text model may do: a config.json"
    " with the content of its text_config, and the architecture of that model (Llama4ForCausalLM)"
)
_SPELLED = "write -1, or a size of the input (x.shape[0]), in the place of the number"
_OTHER = "the forward pass must not branch on tensor values or leave PyTorch operators"

_BY_LINE: tuple[tuple[str, str, str], ...] = (
    (r"^\s*(while|for)\b", "loops as often as the values of a tensor say", _LOOP),
    (r"^\s*(if|elif|assert)\b|\bif\b.*\belse\b", "branches on the values of a tensor", _BRANCH),
    (r"\b(int|float|bool)\(|\.item\(|\.tolist\(", "reads a number out of a tensor", _READ),
)
_BY_CALL: tuple[tuple[str, str, str], ...] = (
    (r"\b(pack|pad_packed|pack_padded)_sequence\b", "packs sequences by their lengths", _PACKED),
    (r"\bregister_(full_backward_|)(pre_|)hook\b", "changes gradients by a hook", _HOOK),
    (r"\b(autograd\.grad|backward)\(", "takes a gradient in its forward pass", _GRADIENT),
    (r"\bflex_attention\(", "calls FlexAttention", _FLEX),
    (r"\bto_sparse\b|\bsparse\w*\(|\bsparse\.", "makes a sparse tensor", _SPARSE),
)
_BY_MESSAGE: tuple[tuple[str, str, str], ...] = (
    (r"numpy", "leaves PyTorch", _NUMPY),
    (r"shape '.*' is invalid for input of size", "spells out a size", _SPELLED),
    (r"same reduction dim|must match|cannot be multiplied|to have \d+ channels", "mixes sizes", _SIZES),
    (r"broadcast a dimension|not in range|out of range", "mixes sizes", _SIZES),
    (
        r"expected scalar type|same dtype|Input type .* should be the same",
        _MIXES,
        _DTYPE,
    ),
    (r"object has no attribute", "reads an attribute that is not there", _RUNS),
    (r"expected to contain only concrete integers", "takes a shape from the values of a tensor", _SHAPE),
    (r"uninitialized parameter", "has a lazy parameter without a shape", _UNBUILT),
    (r"aten\._ctc_loss", "calls a CTC loss that cannot run without data", _ALIGNED),
    (r"Meta kernel|fake impl|^aten\.[\w.]+$", "calls an operator that cannot run without data", _WITHOUT_DATA),
    (r"[Uu]nsupported dtype (BFloat16|Half)", "computes what PyTorch has not in 16 bits", _WIDER),
    (r"different devices|device type|same device", "mixes tensors of different devices", _DEVICE),
)


_DATA = re.compile(r"fake tensor in the exported program constant.* attribute: (?:model\.)?([\w.]+)\.lifted_tensor")
_THROUGH_DATA = "clamp a copy where it is used (weight.clamp(-1, 1)), or change the weight after the step"


def refusal(module: nn.Module, error: Exception) -> ModelError:
    """The error for an error that export has raised."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    behind = _DATA.search(" ".join(lines))
    if behind is not None:
        return ModelError(
            f"{type(module).__name__} cannot be traced: '{behind.group(1)}' reads or changes a tensor past the trace,"
            f" as through .data, in its forward pass; {_THROUGH_DATA}"
        )
    what, place = lines[0] if lines else type(error).__name__, _user_frame(error)
    cause, remedy = _cause(error, what, place)
    said = f"{cause}: {what}" if cause else what
    at = f" (at {place[0]}:{place[1]})" if place else ""
    return ModelError(f"{type(module).__name__} cannot be traced: {said}{at}; {remedy}")


def _cause(error: Exception, what: str, place: tuple[str, int] | None) -> tuple[str, str]:
    line = linecache.getline(*place) if place else ""
    for text, known in ((line, _BY_CALL), (what, _BY_MESSAGE)):
        for pattern, cause, remedy in known:
            if re.search(pattern, text):
                return cause, remedy
    if "data-dependent" in str(error):
        for pattern, cause, remedy in _BY_LINE:
            if re.search(pattern, line):
                return cause, f"{remedy}; {_OTHER}"
    return "", _OTHER


def _user_frame(error: BaseException) -> tuple[str, int] | None:
    """File and line of the last call in the traceback that is outside of torch and this package: most likely the
    cause."""
    found = None
    trail = error.__traceback__
    while trail is not None:
        name = trail.tb_frame.f_code.co_filename
        if is_users(name):
            found = name, trail.tb_lineno
        trail = trail.tb_next
    return found


def is_users(file: str) -> bool:
    """Whether a file belongs neither to torch nor to this package."""
    return not file.startswith(_NOT_USERS)


def line_of(node: fx.Node) -> str:
    """The line of the user's code that made a node; empty where it is not known."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [f" (at {name}:{number})" for name, number in frames if is_users(name)]
    return own[-1] if own else ""


def users_line(node: fx.Node) -> str:
    """The line of the model's code that made a node, "file:number"; empty where it is not known, and for models of the
    zoo, which users need not change."""
    place = line_of(node).removeprefix(" (at ").removesuffix(")")
    return "" if place.startswith(_ZOO) else place


def reads_number(module: nn.Module, node: fx.Node) -> ModelError:
    """The error for a number read out of a tensor that ends up in the graph."""
    return ModelError(f"{type(module).__name__} reads a number out of a tensor{line_of(node)}; {_READ}")


def mixes_dtypes(module: nn.Module, op: str, dtypes: Sequence[str], node: fx.Node) -> ModelError:
    """The error for an operator that is called on operands of several dtypes."""
    found = " and ".join(dict.fromkeys(dtypes))
    return ModelError(
        f"{type(module).__name__} cannot be traced: {_MIXES}: {op} is called on {found}{line_of(node)}; {_DTYPE}"
    )


def draws(module: nn.Module, op: str, place: str, at: str) -> ModelError:
    """The error for an operator, called in a module `place`, that draws random numbers which plans cannot reproduce."""
    return ModelError(
        f"{type(module).__name__} draws random numbers by {op}{f' in {place}' if place else ''}{at}, which would differ"
        f" with the plan; only dropout ({', '.join(CHANCES)}), bernoulli_(p) and rand(...) < p with a number p between"
        " 0 and 1 and without a generator can be drawn alike on any number of devices: use one of these, or pass the"
        " numbers in as inputs"
    )


def changes_input(module: nn.Module, name: str, at: str) -> ModelError:
    """The error for an input that is changed in place."""
    return ModelError(
        f"{type(module).__name__} changes {name} in its forward pass{at}; an input must stay as it is, as other"
        " operators read it: change a copy, x = x.clone()"
    )


def counts_rows(module: nn.Module, node: fx.Node) -> ModelError:
    """The error for an embedding whose gradients depend on how often a row is in the batch."""
    return ModelError(
        f"{type(module).__name__}: an embedding scales gradients by how often a row is in the batch"
        f" (scale_grad_by_freq){line_of(node)}, and devices and micro-batches have parts of the batch; leave it out"
    )


def depends_on_content(module: nn.Module, op: str, shape: tuple[Any, ...], node: fx.Node) -> ModelError:
    """The error for a result whose shape depends on data."""
    return ModelError(
        f"{type(module).__name__}: the result of {op} has the shape {shape}, which depends on the content of a tensor"
        f"{line_of(node)}; {_SHAPE}"
    )


def written_lines(exported: Any) -> Mapping[str, str]:
    """Lines that change something in place, by the name of the changed input or buffer, also through views."""
    names = {**exported.graph_signature.inputs_to_buffers, **exported.graph_signature.inputs_to_parameters}
    found: dict[str, str] = {}
    for node in exported.graph.nodes:
        target = node.target
        if isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable and node.args:
            source = node.args[0]
            while isinstance(source, fx.Node) and source.op == "call_function" and source.args:
                source = source.args[0]
            if isinstance(source, fx.Node) and source.op == "placeholder":
                found.setdefault(names.get(source.name, source.name), line_of(node))
    return found


def without_draws(module: nn.Module, run: Callable[[], Any]) -> Any:
    """The result of `run`. Raises ModelError where it drew random numbers of Python; then it runs once more to find the
    line that draws."""
    state = random.getstate()
    result = run()
    if random.getstate() == state:
        return result
    random.setstate(state)
    with _drawing() as line:
        run()
    raise ModelError(
        f"{type(module).__name__} draws random numbers of Python in its forward pass{line()}; one draw would be frozen"
        " into the plan: compute all and choose with a tensor that is an input, or leave the choice out"
    )


@contextlib.contextmanager
def _drawing() -> Iterator[Callable[[], str]]:
    """While active, remembers the first line of the user's code that draws from a generator of Python."""
    first: list[str] = []

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call" and not first and isinstance(getattr(argument, "__self__", None), random.Random):
            user: FrameType | None = frame
            while user is not None and (
                not is_users(user.f_code.co_filename) or user.f_code.co_filename == random.__file__
            ):
                user = user.f_back
            if user is not None:
                first.append(f" (at {user.f_code.co_filename}:{user.f_lineno})")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield lambda: first[0] if first else ""
    finally:
        sys.setprofile(before)

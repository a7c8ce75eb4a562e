"""Records what a rank does: every collective it sends, every product it computes, every byte that is alive.

It sits below autograd, where PyTorch calls kernels and c10d. So it sees what is really called, not what the runtime
meant to call. Which operator a call belongs to: in the forward pass the executor says which operator it runs; in the
backward pass it is the running autograd node, which was marked when its operator created it:

    forward        observer: operator a     ─> a's kernels, a's collectives;  nodes created meanwhile are marked a
    backward       node marked a            ─> the same
    recomputation  observer inside a node   ─> the operator that is recomputed
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from hardware_profiles import Flops
from planner.errors import AuditError
from planner.graph.operators import ctc
from planner.graph.operators.causal_convolution import causal_convolution
from planner.graph.operators.delta_rule import gated_delta_rule
from planner.graph.operators.index_scores import index_scores
from planner.graph.operators.selective_scan import selective_scan
from planner.graph.operators.state_space_scan import state_space_scan
from planner.graph.rewriting.gated_norm import gated_rms_norm
from planner.plan.prediction.charges import A_BLOCK, Phase
from runtime.auditing.flops import FLOPS
from runtime.executor.live_tensors import LiveTensors
from runtime.observer import Observer

if TYPE_CHECKING:
    from runtime.executor.instruction import Instruction

_MARK = "operator"  # key of the metadata in which an autograd node stores its operator


class Sent(NamedTuple):
    """A collective as it was called: pass, operator ("" where none runs), kind, ranks of the group, bytes."""

    phase: Phase
    owner: str
    kind: str
    ranks: tuple[int, ...]
    nbytes: int


_KINDS = {  # the c10d operator: kind, position of the tensor whose bytes count, position of the group
    "c10d._allgather_base_.default": ("all_gather", 0, 2),
    "c10d._reduce_scatter_base_.default": ("reduce_scatter", 1, 2),
    "c10d.allreduce_.default": ("all_reduce", 0, 1),
    "c10d.alltoall_base_.default": ("all_to_all", 1, 2),
    "c10d.broadcast_.default": ("broadcast", 0, 1),
    "c10d.reduce_.default": ("reduce", 0, 1),
    "c10d.recv_.default": ("send_recv", 0, 1),
}
# our operators that are composed of PyTorch's, and what they are composed of, or create meanwhile
_COMPOSED: Mapping[str, Callable[..., Any]] = {
    ctc.CTC: ctc.sums,
    "planner.ctc_loss_backward.default": ctc.sums_backward,
    **gated_delta_rule.in_pieces,
    **state_space_scan.in_pieces,
    **selective_scan.in_pieces,
    **causal_convolution.in_pieces,
    **index_scores.in_pieces,
    **gated_rms_norm.in_pieces,
}
_ONTO = frozenset(
    f"aten.{name}"
    for name in ("add.Tensor", "scatter.src", "scatter_add.default", "index_add.default", "index_put.default")
)
"""What autograd does in place on tensors with data, if nothing else needs the first operand: it sums the gradients of
several uses, and writes one into zeros. For tensors without data it makes new tensors."""
_UNCOUNTED = frozenset({"c10d.send.default", "c10d.barrier.default"})  # the receiver records it; nothing is sent


class Ledger(TorchDispatchMode, Observer):
    """Enter it around a part of a training step; it observes the executor of that step."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent: Counter[Sent] = Counter()
        self.crossed: Counter[tuple[Phase, str, int]] = Counter()
        self.flops: defaultdict[tuple[Phase, str], Flops] = defaultdict(float)
        self.live = LiveTensors()
        self._operator: str | None = None
        self._op = ""
        self._updating = False
        self._adding_up = False
        self._gathering: Phase | None = None  # the pass of a block's gathers and reductions

    @contextmanager
    def operator(self, instruction: "Instruction") -> Iterator[None]:
        operator, before = instruction.bound.operator, (self._operator, self._op)
        self._operator, self._op = operator.name, operator.op
        try:
            yield
        finally:
            self._operator, self._op = before

    def results(self, instruction: "Instruction", results: Sequence[torch.Tensor]) -> None:
        """Mark the autograd nodes that the running operator has created."""
        self._mark(results)

    @contextmanager
    def gathering(self, phase: Phase) -> Iterator[None]:
        before, self._gathering = self._gathering, phase
        try:
            yield
        finally:
            self._gathering = before

    @contextmanager
    def adding_up(self) -> Iterator[None]:
        before, self._adding_up = self._adding_up, True
        try:
            yield
        finally:
            self._adding_up = before

    def resized(self, storage: torch.UntypedStorage) -> None:
        self.live.resized(storage)

    def cross(self, phase: Phase, operator: str, nbytes: int) -> None:
        """Record rows that cross the link between host and device."""
        self.crossed[phase, operator, nbytes] += 1

    def deferred_weight_gradients(self, instruction: "Instruction", start: torch.Tensor) -> None:
        self._mark([start])

    def _mark(self, results: Sequence[torch.Tensor]) -> None:
        waiting = [result.grad_fn for result in results if result.grad_fn is not None]
        while waiting:
            node: Any = waiting.pop()
            if _MARK not in node.metadata and not hasattr(node, "variable"):  # not a leaf's, which is everybody's
                node.metadata[_MARK] = self._operator
                waiting += [before for before, _ in node.next_functions if before is not None]

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Calls made meanwhile belong to the update at the end of the step, or to its preparation."""
        self._updating = True
        try:
            yield
        finally:
            self._updating = False

    def _now(self) -> tuple[Phase, str]:
        node: Any = torch._C._current_autograd_node()
        if self._updating:
            return "update", ""
        if self._adding_up:
            return "backward", ""
        if self._gathering is not None:
            return self._gathering, A_BLOCK
        if self._operator is not None:
            return "forward" if node is None else "recomputation", self._operator
        return ("forward", "") if node is None else ("backward", node.metadata.get(_MARK, ""))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        if name in _COMPOSED:
            with _Living(self.live):
                _COMPOSED[name](*args, **(kwargs or {}))
        try:
            results = function(*args, **(kwargs or {}))
        except (DynamicOutputShapeException, DataDependentOutputException) as error:
            raise AuditError(
                f"operator '{self._now()[1]}' calls {name}, whose result depends on the values of tensors. An audit has"
                " no values, so plans of this model cannot be audited"
            ) from error
        if function.namespace == "c10d":
            self._send(name, args)
        elif name in FLOPS:
            self.flops[self._now()] += FLOPS[name](args, results)
        if name in _ONTO and self._in_place():
            self.live.add_instead(results, args[0])
        else:
            _count(self.live, results)
        return results

    def _in_place(self) -> bool:
        """Whether the running code is an autograd node of PyTorch's own, or the sum with the bias of a linear layer."""
        node: Any = torch._C._current_autograd_node()
        if self._operator is not None:
            return self._op == "aten.linear.default"
        return node is not None and not isinstance(node, torch.autograd.function.BackwardCFunction)

    def _send(self, name: str, args: Any) -> None:
        if name in _UNCOUNTED:
            return
        if name not in _KINDS:
            raise AuditError(f"the runtime calls {name}, whose communication volume the audit does not know")
        kind, tensor, group = _KINDS[name]
        nbytes = sum(each.nbytes for each in pytree.tree_leaves(args[tensor]))
        if kind == "all_to_all":  # with uneven pieces a rank may receive more than it sends
            nbytes = max(nbytes, args[0].nbytes)
        ranks = tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(args[group])))
        self.sent[Sent(*self._now(), kind, ranks, nbytes)] += 1


class _Living(TorchDispatchMode):
    """Counts the live memory while an operator is computed, and nothing else of it."""

    def __init__(self, live: LiveTensors) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = live

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        _count(self.live, results)
        return results


def _count(live: LiveTensors, results: Any) -> None:
    """Count the memory of all tensors that an operator has created."""
    for result in pytree.tree_leaves(results):
        if isinstance(result, torch.Tensor):
            live.add(result)

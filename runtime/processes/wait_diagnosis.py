"""Where a rank waits, read from the frames of its threads while they wait: nothing is recorded during the run.

    Pipeline.run     turn: backward of micro-batch 3 ──┐
    _Redistribute    ctx: gradient of which operand ───┼─▶  "waits for all_reduce among ranks 0, 2: gradient of
    all_reduce       group: ranks 0 and 2 ─────────────┘      operand 'x' of operator 'y' (linear), backward of .."

A thread that waits in a collective has released the interpreter lock, so another thread can look at it. `ROWS` says
what is read from the frames of which functions, from the innermost frame outwards; for each `Part` the first match
counts. Functions are matched by name, so looking imports nothing: a rank may hang before torch is imported.

On an accelerator the host runs ahead of the device: the diagnosis says where the host waits for the device, which may
be after the collective that hangs.
"""

import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

Locals = Mapping[str, Any]
Part = Literal["action", "of", "turn"]
"""What the rank waits for, for which tensor, and where in the step."""

_MARK = re.compile(r"# ops\[(\d+)\]$")  # in a lowered program (`runtime.executor.lowering.emit`)
_C10D = "torch.distributed.distributed_c10d"
_TORCH = f"{os.sep}torch{os.sep}"
_PYTHON = os.path.dirname(os.__file__) + os.sep


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What is read from the frame of a function: its local variables, and their text; None where that is nothing."""

    part: Part
    reads: tuple[str, ...]
    say: Callable[..., str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitDiagnosis:
    """Where a rank is: whether it waits for others there, and the text."""

    waits: bool
    text: str


def _operator(instruction: Any) -> str:
    op = instruction.bound.operator
    return f"operator '{op.name}' ({op.op})"


def _operand(steps: Any, reader: Any) -> str | None:
    """The operand of an instruction that these steps redistribute."""
    if reader is None:
        return None
    names = [f"'{operand.name}'" for operand in reader.operands if operand.transfer == steps]
    return f"operand {' or '.join(dict.fromkeys(names))} of {_operator(reader)}"


def _gradient(ctx: Any) -> str | None:
    operand = _operand(ctx.steps, ctx.reader)
    return None if operand is None else f"gradient of {operand}"


def _way(way: Any) -> str | None:
    return _operand(way._steps, way.reader)


def _way_back(ctx: Any) -> str | None:
    operand = _way(ctx.way)
    return None if operand is None else f"gradient of {operand}"


def _bundle(self: Any) -> str:
    """Weights that are gathered together."""
    names = self.bundle.names
    return f"'{names[0]}' and {len(names) - 1} other weight{'s' if len(names) > 2 else ''} of its block"


def _turn(turn: Any, self: Any) -> str:
    kind = {"weight_gradient": "weight gradients"}.get(turn.kind, turn.kind)
    first = turn.micro_batch * self.interleave
    parts = f"{first}" if self.interleave == 1 else f"{first} to {first + self.interleave - 1}"
    stages = f" in stage {self.chunks[turn.chunk].cut.stage}" if self.everyone is not None else ""
    return f"{kind} of micro-batch {parts}{f', slice {turn.slice}' if turn.slice else ''}{stages}"


def _landing(self: Any) -> str:
    step = self.under_way
    return f"{step.kind}{_among(self._groups[step.axis])}"


def _ring(ring: Any) -> str:
    return f"the next block of ring attention{_among(ring.group)}"


def _constant(words: str) -> Callable[[], str]:
    return lambda: words


ROWS: Mapping[tuple[str, str], Row] = {
    ("runtime.executor.executor", "Executor._general"): Row(part="of", reads=("instruction",), say=_operator),
    ("runtime.executor.executor", "Executor._made"): Row(part="of", reads=(), say=_constant("the loss")),
    ("runtime.executor.instruction", "compute"): Row(part="of", reads=("instruction",), say=_operator),
    ("runtime.comm.redistribute", "Transfer.__call__"): Row(part="of", reads=("self", "reader"), say=_operand),
    ("runtime.comm.redistribute", "_Redistribute.backward"): Row(part="of", reads=("ctx",), say=_gradient),
    ("runtime.comm.redistribute", "_FromStub.backward"): Row(part="of", reads=("ctx",), say=_gradient),
    ("runtime.executor.interleaving", "_Departure.backward"): Row(part="of", reads=("ctx",), say=_way_back),
    ("runtime.executor.interleaving", "_Arrival.forward"): Row(part="of", reads=("way",), say=_way),
    ("runtime.offload.regather", "gather_again.<locals>.unpack"): Row(
        part="of", reads=(), say=_constant("a weight that is regathered")
    ),
    ("runtime.executor.block_gathers", "Gathered.bring"): Row(part="of", reads=("self",), say=_bundle),
    ("runtime.executor.prefetch", "Prefetch.returned"): Row(
        part="of", reads=("way",), say=lambda way: f"gradients of {_bundle(way)}"
    ),
    ("runtime.executor.prefetch", "Prefetch.take"): Row(
        part="of", reads=("way",), say=lambda way: f"gradients of {_bundle(way)}"
    ),
    ("runtime.ops.attention.ring_attention", "_forward"): Row(part="action", reads=("ring",), say=_ring),
    ("runtime.ops.attention.ring_attention", "_backward"): Row(part="action", reads=("ring",), say=_ring),
    ("runtime.comm.async_collectives", "Flight.land"): Row(part="action", reads=("self",), say=_landing),
    ("runtime.step.receiving", "Line._landed"): Row(
        part="of", reads=("coming",), say=lambda coming: f"'{coming.crossing.name}'"
    ),
    ("runtime.step.receiving", "Line.take"): Row(
        part="action", reads=("self",), say=lambda line: f"recv from rank {line.rank}"
    ),
    ("runtime.step.pipeline", "Pipeline._wait"): Row(part="action", reads=(), say=_constant("the end of its sends")),
    ("runtime.step.pipeline", "Pipeline._mean"): Row(
        part="turn", reads=(), say=_constant("the mean loss for all stages")
    ),
    ("runtime.step.pipeline", "Pipeline.run"): Row(part="turn", reads=("turn", "self"), say=_turn),
    ("runtime.update.reduction", "Reduction.finish"): Row(part="of", reads=(), say=_constant("the gradient reduction")),
    ("runtime.update.norms", "global_norm"): Row(part="of", reads=(), say=_constant("the norm of all gradients")),
    ("runtime.step.guard", "LossGuard._agreed"): Row(
        part="of", reads=(), say=_constant("whether all ranks accept the loss and the gradients")
    ),
    ("runtime.update.optimizer", "_Publication.end"): Row(part="of", reads=(), say=_constant("the updated weights")),
    ("runtime.update.optimizer", "_Publication.visited"): Row(
        part="of", reads=(), say=_constant("the updated weights")
    ),
    ("runtime.update.optimizer", "ShardedOptimizer.step"): Row(part="turn", reads=(), say=_constant("the optimizer")),
}


def wait_diagnosis() -> WaitDiagnosis:
    """Where this process's main thread is, and the autograd thread of a device with it."""
    frames = sys._current_frames()
    main, own = threading.main_thread().ident, threading.get_ident()
    stacks = [_stack(frame) for thread, frame in frames.items() if thread not in (main, own)]
    stacks = [_stack(frames[main]) if main in frames else [], *stacks]
    parts: dict[Part, str] = {}
    for frame in (frame for stack in stacks for frame in stack):
        for part, words in _said(frame):
            parts.setdefault(part, words)
    collective = next((name for stack in stacks for name in [_collective(stack)] if name), None)
    action = collective or parts.get("action")
    rest = ", ".join(parts[part] for part in ("of", "turn") if part in parts)
    if action is not None:
        return WaitDiagnosis(waits=True, text=f"waits for {action}{f': {rest}' if rest else ''}")
    return WaitDiagnosis(waits=False, text=f"is {_place(stacks[0])}{f': {rest}' if rest else ''}")


def _stack(frame: FrameType | None) -> list[FrameType]:
    """Frames, the innermost first."""
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def _said(frame: FrameType) -> Iterator[tuple[Part, str]]:
    module, code = str(frame.f_globals.get("__name__")), frame.f_code
    row = ROWS.get((module, code.co_qualname))
    if row is not None:
        known = frame.f_locals
        if all(name in known for name in row.reads):  # else the function has just begun
            words = row.say(*(known[name] for name in row.reads))
            if words:
                yield row.part, words
    elif code.co_filename.startswith("<program "):
        mark = _MARK.search(frame.f_globals["lines"][frame.f_lineno - 1])
        if mark is not None:
            yield "of", _operator(frame.f_locals["body"].instructions[int(mark[1])])
    elif module.startswith("runtime.") and code.co_name == "backward":
        yield "of", f"gradients of {module.rpartition('.')[2].replace('_', ' ')}"


def _collective(stack: Sequence[FrameType]) -> str | None:
    """The torch.distributed call that a thread is in, and its ranks."""
    calls = [frame for frame in stack if frame.f_globals.get("__name__") == _C10D]
    if not calls:
        return None
    known, name = calls[-1].f_locals, calls[-1].f_code.co_name
    if name == "recv" and known.get("src") is not None:
        return f"recv from rank {known['src']}"
    return f"{name}{_among(known.get('group'))}"


def _among(group: Any) -> str:
    """The ranks of a process group; all ranks where there is none."""
    import torch.distributed as dist

    ranks = dist.get_process_group_ranks(group) if dist.is_initialized() else []
    return f" among ranks {', '.join(map(str, ranks))}" if ranks else ""


def _place(stack: Sequence[FrameType]) -> str:
    """The innermost function of a stack that is neither PyTorch's nor Python's."""
    own = [frame for frame in stack if not is_library(frame.f_code.co_filename)]
    found = (own or list(stack))[:1]
    return " ".join(f"in {f.f_code.co_name} (at {f.f_code.co_filename}:{f.f_lineno})" for f in found) or "nowhere"


def is_library(name: str) -> bool:
    """Whether a file is of PyTorch or of Python itself."""
    return _TORCH in name or (name.startswith(_PYTHON) and "site-packages" not in name)

"""What autograd keeps of a call for its backward pass: asked of autograd itself, on a small call.

One backward graph is made for each differentiable operand alone, with hooks that see every tensor that is saved. A
saved tensor that lies in the memory of an operand or a result counts as that operand or result. Any other is counted by
its bytes for each point of the operand or result of the same shape, or of the largest one where none has that shape.
Tensors that a backward pass keeps without telling autograd (attributes of a Python `autograd.Function`) cannot be seen.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from planner.graph.operator_graph import DTYPE_BYTES, WrittenRule
from planner.sharding.discover.scratch import scratch_of
from planner.sharding.discover.trial import Case, run
from planner.sharding.rules.written import build_written


@dataclass(frozen=True, kw_only=True)
class _Kept:
    operands: frozenset[int]
    results: frozenset[int]
    others: tuple[torch.Tensor, ...]


def with_saved(written: WrittenRule, case: Case) -> WrittenRule:
    """The rule of a case with what autograd keeps, and the memory that its backward pass needs beside that."""
    graded = [i for i, gradient in enumerate(case.operand_gradients) if gradient is not None]
    if not graded:
        return written
    each = {i: _kept(case, [i]) for i in graded}
    together = _kept(case, graded)
    operands = sorted(frozenset.union(together.operands, *(kept.operands for kept in each.values())))
    saves = []
    for i in operands:
        needed_by = tuple(j for j in graded if i in each[j].operands)
        saves.append((i, needed_by or tuple(graded)))  # kept for all gradients together only: any may need it
    results = together.results.union(*(kept.results for kept in each.values()))
    return replace(
        written,
        saves=tuple(saves),
        saved_results=tuple(sorted(results)),
        saved_extra=_counted(written, case, [(tensor, 1) for tensor in together.others]),
        scratch=_counted(written, case, scratch_of(case, graded)),
    )


def _kept(case: Case, graded: Sequence[int]) -> _Kept:
    leaves = [t.detach().clone().requires_grad_(i in graded) for i, t in enumerate(case.operands)]
    seen: dict[tuple[int, int], torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.setdefault((_memory(tensor), tensor.numel()), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        made = run(case.call, leaves)
    of_operands = {_memory(leaf): i for i, leaf in enumerate(leaves)}
    of_results = {_memory(result): i for i, result in enumerate(made) if _memory(result) not in of_operands}
    memories = [_memory(tensor) for tensor in seen.values()]
    others = {
        m: t for m, t in zip(memories, seen.values(), strict=True) if m not in of_operands and m not in of_results
    }
    return _Kept(
        operands=frozenset(of_operands[m] for m in memories if m in of_operands),
        results=frozenset(of_results[m] for m in memories if m in of_results),
        others=tuple(others.values()),
    )


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _counted(
    written: WrittenRule, case: Case, others: Sequence[tuple[torch.Tensor, int]]
) -> tuple[tuple[float, str], ...]:
    """Bytes for each point of some factors, as the true call has them: a double here is a float there."""
    rule = build_written(case.call, written)
    tensors = list(zip((*case.operands, *case.results), (*rule.operands, *rule.results), strict=True))
    largest = max(tensors, key=lambda pair: pair[0].numel())
    true = max((DTYPE_BYTES[t.dtype] for t in case.call.operands if t.floating), default=4)
    found: dict[str, float] = {}
    for kept, count in others:
        wide = case.setting.doubles and (kept.is_floating_point() or kept.is_complex())
        nbytes = kept.numel() * kept.element_size() * (true / 8 if wide else 1.0)
        like, dims = next((pair for pair in tensors if pair[0].shape == kept.shape), largest)
        text = " ".join(rule.factors[f].name for dim in dims for f in dim)
        found[text] = found.get(text, 0.0) + count * nbytes / like.numel()
    return tuple((round(count, 6), text) for text, count in found.items() if count > 0)

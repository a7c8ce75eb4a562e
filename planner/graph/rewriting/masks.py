"""Attention masks kept by their meaning: `planner.masked_attention` in place of a mask of queries x keys.

    arange ─ q - k >= 0 ───┐                                    causal alone          is_causal, no mask
    arange ─ q - k < w ────┴ and ── [S, S] ──> attention        with a window         back = w - 1, ahead = 0
    arange // c ─ equal ────┤                                   with chunks           chunk = c
    documents ─ equal ──────┘                                   with documents        documents, one number a token

Traced, a mask is a tensor that operators make. These operators may say only how far a query looks back and ahead, that
all queries see the first keys (prefix), that two tokens are in one chunk of positions (Llama 4) or of one document,
and which keys are padding. Then the mask is never made: it takes no memory of queries x keys, its kernel skips what is
hidden, and rings and slices can cut it, as they know which positions they have. Every other mask stays a tensor, and so
does padding alone, a row for each sample. Under all of these masks a query sees itself, unless it is padding. A query
that sees nothing has the result 0, as in PyTorch where booleans or infinities hide its keys. With finite numbers the
result is not 0, so a mask with finite numbers and padding stays a tensor.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from planner.graph.operator_graph import Argument, Operator, OperatorGraph, ValueRef
from planner.graph.rewriting.mask_formulas import (
    ALWAYS,
    HIDES,
    Apart,
    AtLeast,
    Atom,
    Choice,
    Condition,
    Equal,
    Formula,
    SameChunk,
    TooLongError,
    as_choice,
    condition_of,
    opposite,
)
from planner.graph.rewriting.mask_values import MaskReader
from planner.graph.rewriting.unread import without_unread

MASKED_ATTENTION = "planner.masked_attention"
"""Query, key, value, documents or None, seen keys or None, and sinks if there are any. By name: `back` and `ahead`
(None: any number), `prefix`, `chunk` for chunks, `scale`, `cap` for capped scores, `enable_gqa`."""

COMPOSED_ATTENTION = "planner.composed_attention.default"
"""Attention with sinks or a cap, as it is traced (`planner.models.composed_attention`)."""

_ATTENTION = "aten.scaled_dot_product_attention.default"
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_COMPOSED_NAMES = ("query", "key", "value", "sinks", "attn_mask", "is_causal", "scale", "cap")


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskKind:
    """Query i sees key j where i - `back` <= j <= i + `ahead` (None: any), or j < `prefix`. If given, they must also be
    in one chunk of `chunk` positions, have the same number in `documents`, and that of j in `seen` must not be 0."""

    back: int | None = None
    ahead: int | None = None
    prefix: int = 0
    chunk: int | None = None
    documents: str | None = None
    seen: str | None = None


def with_mask_kinds(graph: OperatorGraph) -> OperatorGraph:
    """`graph` without the masks whose kind is known."""
    readers: dict[tuple[int, int], MaskReader] = {}
    operators: list[Operator] = []
    masks: set[str] = set()
    for op in graph.operators:
        names = {_ATTENTION: _NAMES, COMPOSED_ATTENTION: _COMPOSED_NAMES}.get(op.op, ())
        arguments = dict(zip(names, op.arguments, strict=False)) | dict(op.keywords) if names else {}
        mask, kind = arguments.get("attn_mask"), None
        if op.op == COMPOSED_ATTENTION and mask is None:
            kind = MaskKind(ahead=0 if arguments.get("is_causal", False) else None)
        elif (
            isinstance(mask, ValueRef) and not arguments.get("dropout_p", 0.0) and not arguments.get("is_causal", False)
        ):
            kind = _kind(graph, op, mask.name, readers)
        if kind is None:
            operators.append(op)
        else:
            masks |= {mask.name} if isinstance(mask, ValueRef) else set()
            heads = {graph.types[name].shape[1] for name in op.operands[:2]}
            operators.append(_kept(op, kind, arguments, grouped=len(heads) > 1))
    changed = replace(graph, operators=tuple(operators))
    return without_unread(changed, masks) if masks else changed


def _kept(op: Operator, kind: MaskKind, arguments: dict[str, Argument], *, grouped: bool) -> Operator:
    """Attention without its mask. Without sinks and cap it is PyTorch's own operator, which is told if heads share
    keys."""
    given = tuple(arguments[name] for name in _NAMES[:3])
    further = tuple((name, arguments[name]) for name in _NAMES[6:] if name in arguments)
    sinks = (arguments["sinks"],) if arguments.get("sinks") is not None else ()
    cap = (("cap", arguments["cap"]),) if arguments.get("cap") is not None else ()
    if kind in (MaskKind(), MaskKind(ahead=0)) and not sinks and not cap:
        shared = (("enable_gqa", True),) if grouped and "enable_gqa" not in arguments else ()
        given = (*given, None, 0.0, kind.ahead == 0)
        return replace(op, op=_ATTENTION, arguments=given, keywords=(*further, *shared))
    numbers = tuple(None if name is None else ValueRef(name) for name in (kind.documents, kind.seen))
    chunk = () if kind.chunk is None else (("chunk", kind.chunk),)
    says = (("back", kind.back), ("ahead", kind.ahead), ("prefix", kind.prefix), *chunk)
    return replace(op, op=MASKED_ATTENTION, arguments=(*given, *numbers, *sinks), keywords=(*says, *further, *cap))


def _kind(graph: OperatorGraph, op: Operator, mask: str, readers: dict[tuple[int, int], MaskReader]) -> MaskKind | None:
    """The kind of a mask; None where it has no known kind."""
    query, key = (graph.types[name].shape for name in op.operands[:2])
    if len(query) != 4 or query[2] != key[2] or query[2] < 2:
        return None
    batch = (query[0], query[2])
    reader = readers.setdefault(batch, MaskReader(graph, batch))
    said, boolean = reader.formula(mask), graph.types[mask].dtype == "bool"
    shown = _shown(said, boolean)
    scores = _Scores(reader, len(graph.types[mask].shape), query[2], query[0])
    kind = None if shown is None else _named(shown, scores)
    alone = kind is not None and kind.seen is not None and kind == MaskKind(seen=kind.seen)
    finite = not boolean and isinstance(said, Choice) and min(said.yes, said.no) != -math.inf
    return None if alone or (finite and kind is not None and kind.seen is not None) else kind


def _shown(mask: Formula | None, boolean: bool) -> Condition | None:
    """Where a mask shows a key: where it is true, or where it adds 0 and hides all else."""
    choice = as_choice(mask)
    try:
        if boolean:
            return condition_of(mask)
        if choice is None or {choice.yes, choice.no} == {0}:
            return None if choice is None else ALWAYS
        if choice.yes == 0 and choice.no <= HIDES:
            return choice.condition
        return opposite(choice.condition) if choice.no == 0 and choice.yes <= HIDES else None
    except TooLongError:
        return None


@dataclass(frozen=True, slots=True)
class _Scores:
    """Positions and samples of the scores that a mask of `rank` dims is made for."""

    reader: MaskReader
    rank: int
    length: int
    samples: int

    @property
    def query(self) -> int:
        """The dim of a mask for queries."""
        return self.rank - 2

    @property
    def key(self) -> int:
        return self.rank - 1

    def is_samples(self, dim: int | None) -> bool:
        """Whether a dim of a mask is that of samples; with one sample no dim is needed."""
        return dim == self.rank - 4 if dim is not None else self.samples == 1


def _named(condition: Condition, scores: _Scores) -> MaskKind | None:
    """A condition as a kind."""
    if not 1 <= len(condition) <= 2:
        return None
    kinds = [_conjunction(every, scores) for every in condition]
    if any(kind is None for kind in kinds):
        return None
    first, *others = sorted((kind for kind in kinds if kind is not None), key=lambda kind: kind.prefix)
    if not others:
        return first if not first.prefix else None
    (second,) = others
    alone = second == MaskKind(prefix=second.prefix, documents=first.documents, seen=first.seen)
    return replace(first, prefix=second.prefix) if alone and not first.prefix and first.chunk is None else None


def _conjunction(atoms: frozenset[Atom], scores: _Scores) -> MaskKind | None:
    """Conditions that all hold. A prefix stands alone, with the documents of the window that it is an alternative
    to."""
    said: dict[str, Any] = {}
    positions = {scores.reader.counted_breaks(atom.name) for atom in atoms if isinstance(atom, Equal) and atom.holds}
    for atom in atoms:
        name, value = _said(_of_indices(atom, positions, scores), scores)
        if name is None or name in said:
            return None
        said[name] = value
    found = MaskKind(**said)
    between = found.back is not None or found.ahead is not None or found.chunk is not None
    return None if found.prefix and (between or found.prefix >= scores.length) else found


def _of_indices(atom: Atom, positions: set[str | None], scores: _Scores) -> Atom:
    """A condition on positions, which grow by one for each index within a document, as a condition on indices."""
    if not isinstance(atom, Apart) or atom.name not in positions:
        return atom
    if not all(scores.is_samples(sample) for sample, _ in atom.places):
        return atom
    steps = [0] * scores.rank
    steps[atom.first[1]] += 1
    steps[atom.second[1]] -= 1
    return AtLeast(tuple(steps), atom.number)


def _said(atom: Atom, scores: _Scores) -> tuple[str | None, int | str]:
    """What one condition says about a kind: a field and its value; None for an unknown condition."""
    query, key = scores.query, scores.key
    if isinstance(atom, AtLeast):
        others = [step for dim, step in enumerate(atom.steps) if dim not in (query, key)]
        steps, number = (atom.steps[query], atom.steps[key]), int(atom.number)
        if any(others) or number < 0:
            return None, 0
        if steps == (0, -1):
            return "prefix", number + 1
        return {(1, -1): "ahead", (-1, 1): "back"}.get(steps), number
    if isinstance(atom, Apart):
        return None, 0
    if isinstance(atom, SameChunk):
        return ("chunk" if atom.holds and atom.dims == {query, key} else None), atom.size
    wanted = {query, key} if isinstance(atom, Equal) else {key}
    whole = all(scores.is_samples(sample) for sample, _ in atom.places)
    known = atom.holds and whole and {at for _, at in atom.places} == wanted
    return ("documents" if isinstance(atom, Equal) else "seen") if known else None, atom.name

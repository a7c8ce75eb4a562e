"""A sharding rule as plain text: the form in which an operator and a plan file carry a rule that was found by trial.

    d0 r0, d1 r0 -> d0 d1            r0 is in no result: a reduction
    d0 (d1 4) x2 -> d0 d1 y2         d1 counts pieces of 4 elements; x2 and y2 are blocked

Names stand for loops, a number for the elements of a piece that stays whole, 1 for a dim without a loop. Extents are
not written: they are those of the call that the rule is built for, so that one text holds for every batch.
"""

import json
from dataclasses import dataclass

from planner.graph.call import Call, Typed
from planner.graph.operator_graph import TensorType, TorchConstant

__all__ = ["Token", "call_text", "parse_sides"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One dim as it is written: a factor, or None, and the elements of each of its pieces."""

    factor: str | None
    piece: int = 1


def parse_sides(text: str) -> tuple[tuple[tuple[Token, ...], ...], tuple[tuple[Token, ...], ...]]:
    """The dims of the operands and of the results. Raises ValueError, saying what cannot be read."""
    left, arrow, right = text.partition("->")
    if not arrow or "->" in right:
        raise ValueError(f"'{text}' has not one '->' between operands and results")
    return _side(left), _side(right)


def _side(text: str) -> tuple[tuple[Token, ...], ...]:
    return tuple(_dims(tensor) for tensor in text.split(",")) if text.strip() != "none" else ()


def _dims(text: str) -> tuple[Token, ...]:
    words = iter(text.split())
    found = []
    for word in words:
        if word.startswith("("):
            piece = next(words, "")
            if not piece.endswith(")") or not _is_number(piece[:-1]):
                raise ValueError(f"'{word} {piece}' is not (factor number)")
            found.append(Token(factor=_name(word[1:]), piece=int(piece[:-1])))
        else:
            found.append(Token(factor=None if word == "1" else _name(word)))
    return tuple(found)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0


def _name(text: str) -> str:
    if not (text.isascii() and text.isalnum() and text[0].isalpha()):
        raise ValueError(f"'{text}' is no name of a factor")
    return text


def call_text(call: Call) -> str:
    """A call in one line: the operator, the types of its tensors, its other arguments, and the types of its results.

    Two calls with one text have one rule. The device that a model lives on while it is traced is not part of it.
    """
    given = [_text(argument) for argument in call.arguments]
    given += [f"{name}={_text(value)}" for name, value in call.keywords]
    return f"{call.op}({', '.join(given)}) -> {', '.join(map(_text, call.results))}"


def _text(value: Typed) -> str:
    if isinstance(value, TensorType):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    if isinstance(value, TorchConstant):
        return "any device" if value.kind == "device" else f"{value.kind}:{value.name}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_text, value))}]"
    return json.dumps(value) if isinstance(value, str) else repr(value)

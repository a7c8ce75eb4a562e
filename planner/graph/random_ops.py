"""Operators that draw random numbers: which argument is their probability, and when they draw at all.

A plan must not change what is drawn. So only operators whose numbers can be drawn by the place of an element are
known here: those that drop elements. Any other operator that draws is refused when the model is traced, because
then the line that calls it is known.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner.graph.operator_graph import Operator, OperatorGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomOps:
    """Position and name of the probability with which a call drops elements, and of the argument that switches dropping
    on; None for the latter where there is no such argument. A switch that is not given, or is None, is on."""

    probability: tuple[int, str]
    switch: tuple[int, str] | None = None

    def of(self, arguments: Sequence[object], keywords: Mapping[str, object]) -> float:
        """Probability with which this call drops an element: 0 where it is switched off."""
        if self.switch is not None and _argument(self.switch, arguments, keywords) is False:
            return 0.0
        found = _argument(self.probability, arguments, keywords)
        return float(found) if isinstance(found, int | float) else 0.0


def _argument(place: tuple[int, str], arguments: Sequence[object], keywords: Mapping[str, object]) -> object:
    position, name = place
    return arguments[position] if position < len(arguments) else keywords.get(name)


CHANCES: Mapping[str, RandomOps] = {
    "aten.dropout.default": RandomOps(probability=(1, "p"), switch=(2, "train")),
    "aten.feature_dropout.default": RandomOps(probability=(1, "p"), switch=(2, "train")),
    "aten.native_dropout.default": RandomOps(probability=(1, "p"), switch=(2, "train")),
    "aten.scaled_dot_product_attention.default": RandomOps(probability=(4, "dropout_p")),
}
"""Operators that drop elements, by name."""

_ATTENTION = "aten.scaled_dot_product_attention.default"
_DROPS = ("drops probabilities",)


def drops_probabilities(graph: "OperatorGraph") -> bool:
    """Whether any attention drops probabilities; found once for a graph."""
    if _DROPS not in graph.derived:
        graph.derived[_DROPS] = any(_chances_of_attention(graph.operators))
    return bool(graph.derived[_DROPS])


def _chances_of_attention(operators: "Iterable[Operator]") -> list[float]:
    """The probability with which each operator of attention drops a probability."""
    return [CHANCES[_ATTENTION].of(one.arguments, dict(one.keywords)) for one in operators if one.op == _ATTENTION]


def dropping_attention(operators: "Iterable[Operator]", *, fused: bool = False, priced: bool = True) -> str | None:
    """What a user must know where attention drops probabilities, `fused` in one kernel or not. None where none does,
    and where such a kernel is `priced`."""
    chances = _chances_of_attention(operators)
    dropping = [chance for chance in chances if chance]
    if not dropping or (fused and priced):
        return None
    said = f"{len(dropping)} of {len(chances)} attention operators drop {max(dropping):.0%} of their probabilities:"
    if fused:
        return f"{said} no figure is known of what that takes on these devices, so it costs nothing here"
    return f"{said} their scores are in memory, and windows are masks. Without attention dropout they are fused"

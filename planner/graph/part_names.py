"""Patterns of parameters: the name of a weight means its parts, too.

`*.c_attn.weight` means `h.0.c_attn.weight`, and `h.0.c_attn.weight[0]` where the graph has this weight in parts
(`planner.graph.rewriting.fused_weights`). So a decision of the user does not depend on which of the two a plan is for.
"""

from planner.graph.rewriting.fused_weights import PART
from planner.matching import matches


def parameter_matches(name: str, pattern: str) -> bool:
    """Whether a pattern means a parameter, by its name or that of the weight of which it is a part."""
    return matches(name, pattern) or (name.endswith("]") and matches(PART.sub("", name), pattern))

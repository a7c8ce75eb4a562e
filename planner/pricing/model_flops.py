"""The FLOPs of a model, for its utilisation (MFU)."""

from planner.sharding.rule import Rule


def whole_flops(rule: Rule, graded: tuple[bool, ...]) -> float:
    """Forward and backward FLOPs of the whole operator, not of one device's part.

    Work that an implementation repeats, such as recomputation, does not count. Utilisation by this count is that of
    Chowdhery et al. 2022 (PaLM, appendix B), except that the masked half of causal attention is not counted.
    """
    return rule.flops * (1 + rule.backward_work((i for i, needed in enumerate(graded) if needed), repeated=False))

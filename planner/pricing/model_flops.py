"""The work of a model, by which its utilisation is counted."""

from planner.sharding.rule import Rule


def whole_flops(rule: Rule, graded: tuple[bool, ...]) -> float:
    """Forward and backward work of the whole operator, not of one device's part of it.

    What an implementation does twice, as recomputation, is no work of the model: utilisation by this count is that of
    Chowdhery et al. 2022 (PaLM, appendix B), but for the masked half of causal attention, which is not counted.
    """
    return rule.flops * (1 + rule.backward_work((i for i, needed in enumerate(graded) if needed), repeated=False))
